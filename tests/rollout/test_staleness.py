"""Which groups are too old to learn from."""

from __future__ import annotations

import numpy as np

from farhorizon.envs.types import StopReason
from farhorizon.rollout.staleness import fresh, oldest_version
from farhorizon.rollout.types import Group, Segment, Trajectory


def group(name: str, *versions: list[int]) -> Group:
    def play(sibling: int, made_by: list[int]) -> Trajectory:
        count = len(made_by)
        given = Segment(
            np.zeros(2, np.int32), False, np.zeros(0, np.float32), np.zeros(0, np.int32)
        )
        sampled = Segment(
            np.zeros(count, np.int32),
            True,
            np.zeros(count, np.float32),
            np.array(made_by, np.int32),
        )
        return Trajectory(
            name, sibling, (given, sampled), (1.0,), 1.0, True, StopReason.TERMINATED, 1
        )

    return Group(name, tuple(play(i, v) for i, v in enumerate(versions)))


def test_groups_older_than_allowed_are_dropped() -> None:
    groups = [group("a", [3, 4], [4]), group("b", [4], [2, 4]), group("c", [4])]
    assert [g.task_id for g in fresh(groups, version=4, max_staleness=1)] == ["a", "c"]


def test_synchronous_training_takes_the_current_version_only() -> None:
    groups = [group("a", [3]), group("b", [4])]
    assert [g.task_id for g in fresh(groups, version=4, max_staleness=0)] == ["b"]


def test_a_group_without_samples_has_no_age() -> None:
    empty = group("a", [])
    assert oldest_version(empty) is None
    assert fresh([empty], version=9, max_staleness=0) == [empty]
