"""Intervals by hand, curve and closing lines."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from farhorizon.envs.types import StopReason
from farhorizon.launch.report import (
    CurvePoint,
    Evaluation,
    closing_lines,
    context_line,
    curve_points,
    draw_curve,
    evaluate_line,
    resume_line,
    unchanged_line,
    wilson,
)
from farhorizon.rollout.types import Group, Trajectory


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [  # textbook values of the score interval at z = 1.96
        (80, 100, 0.7112, 0.8666),
        (1, 4, 0.0456, 0.6994),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson(successes: int, episodes: int, low: float, high: float) -> None:
    assert wilson(successes, episodes) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("successes", "episodes"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_impossible_counts(successes: int, episodes: int) -> None:
    with pytest.raises(ValueError, match="successes of"):
        wilson(successes, episodes)


def evaluation(success: float, low: float, high: float) -> Evaluation:
    return Evaluation(
        success=success,
        ci_low=low,
        ci_high=high,
        episodes=200,
        errors=0,
        turns_mean=3.0,
        tokens_mean=40.0,
        seed=0,
        checkpoint="c",
    )


def test_command_lines_survive_a_shell() -> None:
    run = Path("a run's")
    assert shlex.split(resume_line(run, 4)) == [
        *("farhorizon", "train", "a run's/config.yaml", "steps=4")
    ]
    assert shlex.split(evaluate_line(run, [])) == ["farhorizon", "eval", "a run's"]


def test_closing_lines_say_whether_intervals_are_apart() -> None:
    before = CurvePoint(0, 0.3, 0.25, 0.35)
    lines = closing_lines(before, evaluation(0.8, 0.74, 0.85), Path("r"), Path("r/c"), 20)
    assert len(lines) == 4
    assert "0.300 [0.250, 0.350] -> 0.800 [0.740, 0.850] of 200 after 20 steps" in lines[0]
    assert lines[0].endswith("(95 % intervals apart)")
    assert lines[2].endswith("farhorizon eval r")
    assert lines[3].endswith("farhorizon train r/config.yaml steps=40")
    lines = closing_lines(before, evaluation(0.36, 0.3, 0.43), Path("r"), Path("r/c"), 20)
    assert lines[0].endswith("(95 % intervals overlapping)")


def test_the_line_that_evaluates_names_the_code_that_eval_asks_for() -> None:
    plugins = ("/a/my_envs.py", "other")
    lines = closing_lines(None, None, Path("r"), Path("r/c"), 20, plugins)
    assert lines[2] == "evaluate    farhorizon eval r 'env.plugins=[/a/my_envs.py,other]'"


def test_curve_comes_from_the_metric_rows(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/success": 0.2, "eval/ci_low": 0.1, "eval/ci_high": 0.3},
        {"step": 1, "train/success": 0.25},
        {
            "step": 2,
            "train/success": 0.5,
            "eval/success": 0.9,
            "eval/ci_low": 0.8,
            "eval/ci_high": 0.95,
        },
    ]
    heldout, training = curve_points(rows)
    assert [point.step for point in heldout] == [0, 2]
    assert training == [(1, 0.25), (2, 0.5)]
    path = tmp_path / "curve.png"
    draw_curve(path, heldout, training, "t")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.parametrize(
    ("cut", "line"), [(2, None), (3, "3 of 4 episodes did not fit: raise context (now 100)")]
)
def test_episodes_that_do_not_fit_are_told_when_they_are_most(cut: int, line: str | None) -> None:
    stops = [StopReason.CONTEXT_LIMIT] * cut + [StopReason.TERMINATED] * (4 - cut)
    played = [Trajectory("t", i, (), (), 0.0, False, stop, 1) for i, stop in enumerate(stops)]
    groups = [Group("t", tuple(played[:2])), Group("t", tuple(played[2:]))]
    assert context_line(groups, 100) == line


@pytest.mark.parametrize(
    ("flat", "success", "line"),
    [
        (2, 0.0, None),
        (3, 0.0, "warm up longer or make the task easier"),
        (3, 1.0, "make the task harder"),
    ],
)
def test_steps_that_changed_nothing_are_told_when_they_are_most(
    flat: int, success: float, line: str | None
) -> None:
    rows = [
        {
            "step": step,
            "train/update_skipped": int(step <= flat),
            "learn/groups_left_out": 2.0,
            "train/success": success,
            "learn/groups": 2.0 if step <= flat else 4.0,
        }
        for step in range(1, 5)
    ]
    short = [{**row, "train/cut": 3, "rollout/episodes": 4} for row in rows]
    assert line is None or str(unchanged_line(short)).endswith("; raise context")
    told = "1 of 4 steps changed the policy (groups without reward variance); "
    assert unchanged_line([{"step": 0, "eval/success": 0.0}, *rows]) == (line and told + line)
    stale = [{**row, "learn/groups": 0.0, "learn/groups_left_out": 0.0} for row in rows]
    assert unchanged_line(stale) is None
    critic = [
        {**r, "learn/groups_left_out": 0.0, "learn/groups_without_variance": 2.0} for r in rows
    ]
    assert unchanged_line(critic) is None  # what was skipped had something to teach
