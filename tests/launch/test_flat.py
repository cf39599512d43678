"""The cause that is named for a run whose held-out success did not rise."""

from __future__ import annotations

from typing import Any

import pytest

from farhorizon.launch.flat import flat_line, why_flat


def rows(count: int = 30, **changes: Any) -> list[dict[str, Any]]:
    """Steps of a sound run, after a row of an evaluation; keys with ``__`` for ``/``."""
    sound = {
        **{"train/update_skipped": 0, "train/success": 0.3, "train/groups": 8},
        **{"train/groups_without_variance": 2, "train/tokens_stale": 0, "learn/groups": 8},
        **{"rollout/errors": 0, "rollout/episodes": 64, "learn/skipped_steps": 0.0},
        **{"learn/staleness_max": 0, "learn/log_ratio_first": 1e-6, "learn/entropy": 1.0},
        **{"learn/clip_fraction": 0.1, "learn/clip_fraction_low": 0.0},
        **{"learn/clip_fraction_high": 0.1, "learn/trajectories": 64},
        **{"learn/groups_left_out": 2, "learn/optimizer_steps": 4, "rollout/sampled_tokens": 800},
    }
    own = {key.replace("__", "/"): value for key, value in changes.items()}
    return [{"step": 0, "eval/success": 0.3}, *({"step": i, **sound, **own} for i in range(count))]


EQUAL = "150 of 240 groups had equal rewards, most of them failed: warm up longer"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rollout__errors": 20}, "600 of 1920 episodes failed"),
        ({"train__cut": 40}, "1200 of 1920 episodes did not fit the context: raise context"),
        ({"learn__skipped_steps": 3.0}, "the gradient was not finite in 90 of 120 optimizer steps"),
        ({"learn__skipped_steps": 1.0}, "no number of 30 updates stands out"),
        ({"train__groups_without_variance": 5, "learn__groups_left_out": 5}, EQUAL),
        (
            {
                "train__groups_without_variance": 5,
                "learn__groups_left_out": 5,
                "train__success": 0.9,
            },
            "most of them solved: make the task harder",
        ),
        (
            {
                "train__groups_without_variance": 8,
                "learn__groups_left_out": 8,
                "learn__trajectories": 8,
            },
            "no number of 30 updates stands out",
        ),
        ({"train__groups_without_variance": 5, "learn__groups_left_out": 0}, EQUAL),
        # those that failed are left out too
        ({"learn__groups_left_out": 5}, "no number of 30 updates stands out"),
        ({"learn__routes_known": 0.2}, "only 20% of the tokens had routes of the rollout"),
        ({"learn__routes_known": 0.8}, "no number of 30 updates stands out"),
        ({"learn__reference_kl": 1.5}, "the policy went 1.5 nats per token away from its refer"),
        ({"learn__reference_kl": -1e-7}, "lower algorithm.kl, or raise learner.lr"),
        ({"learn__reference_kl": 0.02}, "no number of 30 updates stands out"),
        ({"train__tokens_stale": 500}, "15000 of 24000 sampled tokens were too old"),
        ({"train__tokens_stale": 400}, "no number of 30 updates stands out"),
        ({"learn__log_ratio_first": 0.2}, "rollout and learner differ by 0.2 nats per token"),
        ({"learn__correction_removed": 0.7}, "algorithm.correction removed 70% of the tokens"),
        (
            {"learn__clip_fraction": 0.6, "learn__clip_fraction_high": 0.6},
            "60% of the tokens were clipped (0% below, 60% above the range)",
        ),
        ({"learn__reward_shaping": -0.75}, "length took 0.75 off the mean reward"),
        ({}, "no number of 30 updates stands out"),
        ({"learn__log_ratio_first": 0.2, "learn__staleness_max": 2}, "no number of 30 updates"),
        ({"train__update_skipped": 1}, "none of 30 steps had anything to learn from"),
    ],
)
def test_the_cause_is_named(changes: dict[str, Any], cause: str) -> None:
    told = why_flat(rows(**changes))
    assert cause in told and "\n" not in told


def test_what_taught_nothing_comes_before_what_taught_wrongly() -> None:
    equal = {"train__groups_without_variance": 7, "learn__clip_fraction": 0.9}
    assert "equal rewards" in why_flat(rows(**equal, learn__groups_left_out=7))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"learn__reward_shaping": -1.0}, "length took 1.00 off the mean reward"),  # all over it
        ({"train__tokens_stale": 600}, "18000 of 24000 sampled tokens were too old"),  # alone left
    ],
)
def test_what_made_rewards_equal_comes_before_that_they_are(
    changes: dict[str, Any], cause: str
) -> None:
    equal = {"train__groups_without_variance": 8, "learn__groups_left_out": 8}
    assert cause in why_flat(rows(**equal, **changes, train__update_skipped=1))


@pytest.mark.parametrize("critic", [False, True])
def test_groups_of_equal_rewards_that_were_learned_from_are_no_sure_cause(critic: bool) -> None:
    """The pull of k25, entropy, a KL; a critic learns from each reward whatever its siblings'."""
    own = {"learn__value_error": 0.1} if critic else {}
    equal = {"train__groups_without_variance": 5, "learn__groups_left_out": 0, **own}
    assert "90% of the tokens were clipped" in why_flat(rows(**equal, learn__clip_fraction=0.9))
    assert ("equal rewards" in why_flat(rows(**equal))) != critic


def test_what_changed_over_the_run_is_named() -> None:
    falling = rows()
    falling[-1]["learn/entropy"] = 0.05
    assert "entropy fell from 1 to 0.05 nats" in why_flat(falling)
    rising = rows()
    for row in rising[-10:]:
        row["train/success"] = 0.5
    assert "training success rose from 0.30 to 0.50" in why_flat(rising)


@pytest.mark.parametrize(
    ("name", "first", "last", "cause"),
    [
        ("expert_load_max", 1.2, 2.4, "the busiest expert went from 1.2 to 2.4 times the mean"),
        ("expert_load_max", 1.2, 1.4, None),
        ("value_error", 0.1, 0.3, "the critic's error grew from 0.1 to 0.3: lower learner.lr"),
        ("value_error", 0.3, 0.1, None),
    ],
)
def test_what_grew_over_the_run_is_named(
    name: str, first: float, last: float, cause: str | None
) -> None:
    growing = rows()
    for number, row in enumerate(growing):
        row[f"learn/{name}"] = first if number <= 15 else last
    assert (cause or "no number of 30 updates stands out") in why_flat(growing)


def of_training(*success: float | None) -> list[dict[str, Any]]:
    return [{**row, "train/success": own} for row, own in zip(rows(8)[1:], success, strict=True)]


def test_without_two_evaluations_success_of_training_says_whether_a_run_rose() -> None:
    rose, fell = [0.1, 0.2, 0.2, 0.5] * 2, [0.5, 0.4, 0.3, 0.2] * 2
    rose[-2:], fell[-2:] = [0.4, 0.4], [0.1, 0.1]
    for before, after in ((None, None), (0.3, None), (None, 0.3)):
        assert flat_line(of_training(*rose), before, after) is None
        assert flat_line(of_training(*fell), before, after) is not None
    assert flat_line(of_training(*[None] * 8), None, None) is not None  # all of it failed
    assert flat_line(of_training(*fell), 0.2, 0.3) is None  # what was held out says more
    assert flat_line(of_training(*rose), 0.3, 0.3) is not None
    assert flat_line(of_training(*fell)[:1], None, None) is None  # one step has no direction


def test_missing_numbers_name_nothing() -> None:
    """Rows in which all failed have no rewards, and JSON has no nan."""
    bare = [{"step": 1, "train/update_skipped": 1, "train/success": None, "learn/entropy": None}]
    assert why_flat(bare * 2).startswith("none of 2 steps had anything to learn from")
    assert why_flat([]) == "only 0 updates so far: raise steps"
