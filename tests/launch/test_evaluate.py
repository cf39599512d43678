"""Evaluation figures by hand: errors stay in the denominator (C25)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from farhorizon.configs.errors import UserError
from farhorizon.envs.types import StopReason
from farhorizon.launch.evaluate import evaluate, summarise
from farhorizon.launch.interrupt import RunFailed
from farhorizon.rollout.types import Group, Segment, Trajectory

EMPTY = np.zeros(0, np.float32), np.zeros(0, np.int32)


def group(index: int, reward: float | None, stop: StopReason, tokens: int = 10) -> Group:
    segment = Segment(np.zeros(tokens, np.int32), False, *EMPTY)
    error = "Boom: broken\ntrace" if reward is None else None
    trajectory = Trajectory(f"t{index}", 0, (segment,), (), reward, reward == 1.0, stop, 2, error)
    return Group(f"t{index}", (trajectory,))


def test_errors_stay_in_the_denominator() -> None:
    outcomes = [(1.0, StopReason.TERMINATED)] * 80 + [(0.0, StopReason.TURN_LIMIT)] * 10
    groups = [group(i, *outcome) for i, outcome in enumerate(outcomes)]
    groups += [group(90 + i, None, StopReason.ERROR, tokens=99) for i in range(10)]
    result = summarise(groups, 100, 3, "c")
    assert result.success == 0.8
    assert (result.ci_low, result.ci_high) == pytest.approx((0.7112, 0.8666), abs=1e-4)
    assert (result.episodes, result.errors, result.seed, result.checkpoint) == (100, 10, 3, "c")
    assert (result.turns_mean, result.tokens_mean) == (2.0, 10.0)
    assert list(asdict(result)) == [
        "success",
        "ci_low",
        "ci_high",
        "episodes",
        "errors",
        "turns_mean",
        "tokens_mean",
        "seed",
        "checkpoint",
    ]


def test_lost_episodes_count_as_errors() -> None:
    result = summarise([group(0, 1.0, StopReason.TERMINATED)], 2, 0, "c")
    assert (result.success, result.errors) == (0.5, 1)


def test_no_figure_when_everything_failed() -> None:
    with pytest.raises(RunFailed, match=r"all 2 episodes failed; first error: Boom: broken$"):
        summarise([group(i, None, StopReason.ERROR) for i in range(2)], 2, 0, "c")


def test_code_named_by_a_stored_run_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    sentinel, plugin = tmp_path / "sentinel", tmp_path / "evil.py"
    plugin.write_text(f"open({str(sentinel)!r}, 'w')\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"policy: x\ncontext: 64\nenv: {{id: 'evil:Env', plugins: [{plugin}]}}\n"
    )
    for name in checkpoint.iterdir():
        (run / name.name).write_bytes(name.read_bytes())
    with pytest.raises(UserError, match=r"names code of its own; to run it, add env\.plugins="):
        evaluate(str(run), [])
    assert not sentinel.exists()


def test_plain_checkpoint_needs_an_environment(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"belongs to no run: name the environment, env\.id="):
        evaluate(str(checkpoint), [])
    with pytest.raises(UserError, match="context=65 is longer"):
        evaluate(str(checkpoint), ["env.id=echo-v0", "context=65"])
