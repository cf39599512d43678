"""Groups between rollout and learner."""

from __future__ import annotations

import numpy as np
import pytest

from farhorizon.envs.types import StopReason
from farhorizon.rollout.buffer import GroupBuffer, oldest_version
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


def test_groups_older_than_allowed_are_dropped_and_counted() -> None:
    buffer = GroupBuffer(max_staleness=1)
    buffer.add([group("a", [3, 4], [4]), group("b", [4], [2, 4]), group("c", [4])])
    assert [g.task_id for g in buffer.take(2, version=4)] == ["a", "c"]
    assert buffer.dropped == 1 and len(buffer) == 0


def test_synchronous_training_takes_the_current_version_only() -> None:
    buffer = GroupBuffer(max_staleness=0)
    buffer.add([group("a", [3]), group("b", [4])])
    assert [g.task_id for g in buffer.take(5, version=4)] == ["b"]


def test_what_is_not_taken_stays_in_order() -> None:
    buffer = GroupBuffer(max_staleness=0)
    buffer.add([group(name, [0]) for name in "abc"])
    assert [g.task_id for g in buffer.take(1, 0)] == ["a"]
    assert [g.task_id for g in buffer.take(5, 0)] == ["b", "c"]


def test_a_group_that_comes_twice_is_refused() -> None:
    buffer = GroupBuffer(max_staleness=0)
    buffer.add([group("a", [0])])
    with pytest.raises(ValueError, match="group a was added twice"):
        buffer.add([group("a", [0])])


def test_a_group_without_samples_has_no_age() -> None:
    assert oldest_version(group("a", [])) is None
    buffer = GroupBuffer(max_staleness=0)
    buffer.add([group("a", [])])
    assert len(buffer.take(1, version=9)) == 1
