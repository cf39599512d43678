"""Runs compared: figures by hand, and a short benchmark on real parts that goes on again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farhorizon.configs.load import load_config
from farhorizon.configs.schema import TrainConfig
from farhorizon.launch import bench_learning, cli
from farhorizon.launch.learning_report import (
    Overlap,
    Result,
    learning_table,
    overlap_of,
    overlap_table,
    pooled,
)
from farhorizon.launch.together import check_together
from farhorizon.rl.algorithms import ALGORITHMS

FAKES = str(Path(__file__).parents[1] / "fakes.py")


def step(number: int, rollout: float, learn: float, sync: float, success: float = 0.5) -> dict:
    return {
        "step": number,
        "seconds/rollout": rollout,
        "seconds/learn": learn,
        "seconds/sync": sync,
        "train/success": success,
        "rollout/episodes": 10,
        "rollout/errors": 2,
    }


def judged(row: dict[str, Any], success: float) -> dict[str, Any]:
    own = {"success": success, "ci_low": 0.0, "ci_high": 1.0, "episodes": 4}
    return {**row, **{f"eval/{name}": value for name, value in own.items()}}


def run(name: str, seed: int, *steps: dict[str, Any], after: float = 0.75) -> Result:
    return Result(name, seed, [judged({"step": 0}, 0.25), *steps[:-1], judged(steps[-1], after)])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_compared_may_be_trained(name: str, checkpoint: Path) -> None:
    given = [f"policy={checkpoint}", *bench_learning.settings_of(name)]
    config = load_config(TrainConfig, "quickstart", given)
    check_together(config)
    assert (config.algorithm.correction != "none") == (name in ("rloo", "reinforce"))


def test_overlap_by_hand() -> None:
    """4 s and 3 s one after the other, 5 s together: the bound is 7/4, 80 % of it was reached."""
    assert Overlap(4.0, 3.0, 7.5, 5.0).bound == 1.75
    assert Overlap(4.0, 3.0, 7.5, 5.0).reached == pytest.approx(0.8)
    assert Overlap(4.0, 3.0, 7.5, 4.0).reached == 1.0


def test_the_first_step_and_those_without_a_rollout_beside_them_are_left_out() -> None:
    sync = run("sync", 0, step(1, 90, 90, 90), step(2, 4, 3, 0.5), step(3, 4, 3, 0.5))
    other = run("async", 0, step(1, 90, 9, 9), step(2, 1, 3, 1), step(3, 0, 0.1, 0))
    assert overlap_of(sync, other, 1) == Overlap(4.0, 3.0, 7.5, 5.0)
    table = overlap_table([sync, other, run("sync", 1, step(1, 1, 1, 1))], 1)
    assert table.count("\n") == 2 and "| 1.75 | 80% |" in table


def test_training_episodes_of_all_seeds_are_pooled_without_failed_ones() -> None:
    one = run("grpo", 0, step(1, 1, 1, 1, 0.5), step(2, 1, 1, 1, 1.0))
    two = run("grpo", 1, step(1, 1, 1, 1, 0.25))
    assert pooled([one]) == [(1, 4, 8), (2, 8, 8)]
    assert pooled([one, two]) == [(1, 6, 16)]  # step 2 has not been done by both


def test_runs_that_are_not_finished_are_in_no_table() -> None:
    whole = run("grpo", 0, step(1, 1, 2, 3))
    torn = Result("ppo", 0, [judged({"step": 0}, 0.25), step(1, 1, 1, 1)])
    other = run("grpo", 1, step(1, 1, 1, 2), after=0.5)
    table = learning_table([whole, other, torn]).splitlines()
    assert table[2] == "| start | 25.0% | 25.0% | 25.0% [7.1%, 59.1%] |  |  |"
    assert table[3:] == ["| grpo | 75.0% | 50.0% | 62.5% [30.6%, 86.3%] | 1 | 5 |"]


@pytest.mark.usefixtures("ray_local")
def test_every_run_once_and_a_second_time_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        *("env.id=even-v0", "env.kwargs={}", f"env.plugins=[{FAKES}]", "context=32"),
        *("groups_per_step=4", "group_size=4", "eval_episodes=8", "learner.ranks=1"),
        *("rollout.actors=1", "rollout.max_turn_tokens=2"),
    ]
    words = [
        *("bench", "learning", f"start={checkpoint}", f"output={tmp_path}", "seeds=[0]"),
        *("names=[grpo,k25]", "steps=1", "train=[" + ",".join(f'"{s}"' for s in small) + "]"),
    ]
    assert cli.main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert [(r["name"], r["seed"], r["step"]) for r in rows] == [
        *(("grpo", 0, 0), ("grpo", 0, 1), ("k25", 0, 0), ("k25", 0, 1)),
    ]
    assert rows[0]["seconds"] == 0 < rows[1]["seconds"] and rows[1]["episodes"] == 8
    assert (tmp_path / "learning.png").exists()
    assert [r.name for r in bench_learning.collect(tmp_path)] == ["grpo", "k25"]
    capsys.readouterr()
    assert cli.main(words) == 0
    assert capsys.readouterr().out.count("0 steps to do") == 2


def test_an_algorithm_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "learning", "names=[grpo,gppo]"]) == 2
    assert "names: no algorithm gppo; known: ppo, grpo" in capsys.readouterr().err
