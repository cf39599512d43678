"""The cause that is named for a run whose held-out success did not rise."""

from __future__ import annotations

from typing import Any

import pytest

from farhorizon.launch.flat import why_flat


def rows(count: int = 30, **changes: Any) -> list[dict[str, Any]]:
    """Steps of a sound run, after a row of an evaluation; keys with ``__`` for ``/``."""
    sound = {
        **{"train/update_skipped": 0, "train/success": 0.3, "train/groups": 8},
        **{"train/groups_without_variance": 2, "train/groups_stale": 0, "learn/groups": 8},
        **{"rollout/errors": 0, "rollout/episodes": 64, "learn/skipped_steps": 0.0},
        **{"learn/staleness_max": 0, "learn/log_ratio_first": 1e-6, "learn/entropy": 1.0},
        **{"learn/clip_fraction": 0.1, "learn/clip_fraction_low": 0.0},
        **{"learn/clip_fraction_high": 0.1, "learn/trajectories": 64},
    }
    own = {key.replace("__", "/"): value for key, value in changes.items()}
    return [{"step": 0, "eval/success": 0.3}, *({"step": i, **sound, **own} for i in range(count))]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rollout__errors": 20}, "600 of 1920 episodes failed"),
        ({"train__cut": 40}, "1200 of 1920 episodes did not fit the context: raise context"),
        ({"learn__skipped_steps": 1.0}, "the gradient was not finite in 30 of 30 steps"),
        (
            {"train__groups_without_variance": 5},
            "150 of 240 groups had equal rewards, most of them failed: warm up longer",
        ),
        (
            {"train__groups_without_variance": 5, "train__success": 0.9},
            "most of them solved: make the task harder",
        ),
        (
            {"train__groups_without_variance": 8, "learn__trajectories": 8},
            "no number of 30 updates stands out",
        ),
        ({"train__groups_stale": 5}, "150 of 240 groups were too old"),
        ({"learn__log_ratio_first": 0.2}, "rollout and learner differ by 0.2 nats per token"),
        ({"learn__correction_removed": 0.7}, "algorithm.correction removed 70% of the tokens"),
        (
            {"learn__clip_fraction": 0.6, "learn__clip_fraction_high": 0.6},
            "60% of the tokens were clipped (0% below, 60% above the range)",
        ),
        ({"learn__reward_shaping": -0.75}, "length took 0.75 off the mean reward"),
        ({}, "no number of 30 updates stands out"),
        ({"learn__log_ratio_first": 0.2, "learn__staleness_max": 2}, "no number of 30 updates"),
        ({"train__update_skipped": 1}, "only 0 updates so far: raise steps"),
    ],
)
def test_the_cause_is_named(changes: dict[str, Any], cause: str) -> None:
    told = why_flat(rows(**changes))
    assert cause in told and "\n" not in told


def test_what_taught_nothing_comes_before_what_taught_wrongly() -> None:
    told = why_flat(rows(train__groups_without_variance=7, learn__clip_fraction=0.9))
    assert "equal rewards" in told


def test_what_changed_over_the_run_is_named() -> None:
    falling = rows()
    falling[-1]["learn/entropy"] = 0.05
    assert "entropy fell from 1 to 0.05 nats" in why_flat(falling)
    rising = rows()
    for row in rising[-10:]:
        row["train/success"] = 0.5
    assert "training success rose from 0.30 to 0.50" in why_flat(rising)


def test_missing_numbers_name_nothing() -> None:
    """Rows in which all failed have no rewards, and JSON has no nan."""
    bare = [{"step": 1, "train/update_skipped": 1, "train/success": None, "learn/entropy": None}]
    assert why_flat(bare * 2) == why_flat([]) == "only 0 updates so far: raise steps"
