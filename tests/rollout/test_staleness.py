"""Which tokens are too old to learn from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from farhorizon.envs.types import StopReason
from farhorizon.rollout.staleness import fresh, stale_tokens
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


def masks(groups: list[Group]) -> dict[str, list[list[int]]]:
    """Of each group, for each trajectory left, which sampled tokens are trained."""
    return {
        g.task_id: [t.loss_mask[2:].astype(int).tolist() for t in g.trajectories] for g in groups
    }


def test_old_spans_leave_the_loss_and_what_follows_stays() -> None:
    """Counted from each span, not from the start of a trajectory, nor from the oldest sibling."""
    long = group("a", [0] * 2 + [9] * 200, [10])
    kept = fresh([long], version=10, max_staleness=4)
    assert masks(kept) == {"a": [[0, 0] + [1] * 200, [1]]}
    assert stale_tokens([long], kept) == 2
    assert [t.reward for t in kept[0].trajectories] == [1.0, 1.0]
    assert masks([long])["a"][0] == [1] * 202  # what was given stays as it was


def test_nothing_fresh_leaves_the_group_and_an_empty_group_leaves_too() -> None:
    groups = [group("a", [3, 4], [4]), group("b", [4], [2, 2]), group("c", [2], [1, 2])]
    kept = fresh(groups, version=4, max_staleness=1)
    assert masks(kept) == {"a": [[1, 1], [1]], "b": [[1]]} and stale_tokens(groups, kept) == 5
    assert [t.sibling for t in kept[1].trajectories] == [0]


def test_synchronous_training_takes_the_current_version_only() -> None:
    kept = fresh([group("a", [3]), group("b", [4])], version=4, max_staleness=0)
    assert masks(kept) == {"b": [[1]]}


def test_at_the_bound_a_token_is_fresh() -> None:
    kept = fresh([group("a", [1, 2, 3])], version=4, max_staleness=2)
    assert masks(kept) == {"a": [[0, 1, 1]]}


def test_without_samples_nothing_is_old() -> None:
    empty = group("a", [])
    kept = fresh([empty], version=9, max_staleness=0)
    assert masks(kept) == {"a": [[]]} and stale_tokens([empty], kept) == 0


def test_a_failed_episode_is_never_trained_however_fresh() -> None:
    failed = Group("a", (replace(group("a", [4]).trajectories[0], reward=None),))
    kept = fresh([failed], version=4, max_staleness=0)
    assert masks(kept) == {"a": [[0]]}
