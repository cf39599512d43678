"""Runs on real parts: what is learned from beside whole rewards, be it turns, budgets, teachers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import (
    AlgorithmConfig,
    EnvConfig,
    LearnerConfig,
    RolloutConfig,
    TeacherConfig,
    TrainConfig,
)
from farhorizon.launch.train import train
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint

FAKES = str(Path(__file__).parents[1] / "fakes.py")
pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> TrainConfig:
    """Two steps of eight groups of four, in two turns of at most two tokens."""
    return TrainConfig(
        policy=str(checkpoint),
        output=str(tmp_path / "run"),
        context=48,
        steps=2,
        seed=3,
        groups_per_step=8,
        group_size=4,
        env=EnvConfig(id="turns-v0", plugins=(FAKES,)),
        eval_episodes=0,
        save_every=1,
        rollout=RolloutConfig(max_turn_tokens=2),
        learner=LearnerConfig(lr=1e-3),
    )


@pytest.fixture(scope="module")
def teacher(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy with another head: what it says is spread otherwise, and more narrowly."""
    loaded = load_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        loaded.policy.lm_head.weight.normal_(0, 0.3, generator=generator)
    folder = tmp_path_factory.mktemp("teachers") / "other"
    config, stage = loaded.policy.config, loaded.stage
    return save_checkpoint(folder, loaded.policy, config, loaded.tokenizer, stage)


def rows(config: TrainConfig) -> list[dict[str, float]]:
    text = (Path(config.output) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def played(config: TrainConfig, step: int) -> list[dict[str, object]]:
    file = Path(config.output) / "rollouts" / f"step-{step}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_learns_from_the_rewards_of_turns(base: TrainConfig, tmp_path: Path) -> None:
    """With the same tokens as one that learns from their sum, it makes something else of them."""
    unlimited = replace(base.env, kwargs={"budget": None})
    config = replace(base, steps=1, env=unlimited)
    by_turn = replace(config, algorithm=AlgorithmConfig(credit="turn"))
    whole = replace(config, output=str(tmp_path / "whole"))
    assert train(by_turn) == train(whole) == 0
    (own,), (other,) = rows(by_turn), rows(whole)
    assert own["train/version"] == 1 and math.isfinite(own["learn/loss"])
    assert own["train/reward"] == other["train/reward"]
    assert own["learn/advantage_std"] != other["learn/advantage_std"]
    assert own["learn/grad_norm"] != other["learn/grad_norm"]


def test_budgets_follow_the_kind_of_a_task_and_are_counted(
    base: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Budgets 3 * 0.5 and 3 * 2 tokens, where an episode takes 2 to 4."""
    efforts = {"low": 0.5, "max": 2.0, "hihg": 4.0}
    config = replace(base, algorithm=AlgorithmConfig(efforts=efforts, credit="step"))
    assert train(config) == 0
    for row in rows(config):
        low = sum(line["kind"] == "low" for line in played(config, int(row["step"])))
        assert 0 < low < 32 and row["learn/over_budget"] == low
        assert row["learn/reward_shaping"] < 0 < row["train/reward"]
        assert row["train/version"] == row["step"]
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "so far is of" in text]
    assert line.endswith("is of the kind of algorithm.efforts.hihg (kinds so far: low, max)")


def test_teachers_alone_pull_the_policy_to_them(base: TrainConfig, teacher: Path) -> None:
    """Rewards have no say: groups of one do, and none is left out."""
    config = replace(
        base,
        steps=16,
        group_size=1,
        groups_per_step=64,
        teachers=(TeacherConfig(policy=str(teacher)),),
        algorithm=AlgorithmConfig(distill=1.0, reward_weight=0.0),
        learner=LearnerConfig(lr=3e-2),
    )
    assert train(config) == 0
    by_step = rows(config)
    assert all(row["learn/groups_left_out"] == 0 for row in by_step)
    assert all(row["learn/teacher_tokens"] == 1.0 for row in by_step)
    away = [row["learn/teacher_kl"] for row in by_step]  # of 256 samples each: noisy
    assert sum(away[8:]) / 8 < 0.95 * sum(away[:4]) / 4


def test_teachers_by_kind_and_weight_are_the_same_on_two_ranks(
    base: TrainConfig, teacher: Path, tmp_path: Path
) -> None:
    named = (
        TeacherConfig(policy=base.policy, kinds=("low",), weight=3.0),
        TeacherConfig(policy=str(teacher), kinds=("low",)),
    )
    algorithm = AlgorithmConfig(name="k25", distill=0.5, distill_bound=2.0)
    config = replace(base, steps=1, teachers=named, algorithm=algorithm)
    two = replace(config, output=str(tmp_path / "two"), learner=LearnerConfig(lr=1e-3, ranks=2))
    assert train(config) == train(two) == 0
    (one,), (other,) = rows(config), rows(two)
    for name in ("loss", "teacher_tokens", "teacher_kl", "teacher_bounded", "grad_norm"):
        assert one[f"learn/{name}"] == pytest.approx(other[f"learn/{name}"], rel=1e-4, abs=1e-5)
    assert 0 < one["learn/teacher_tokens"] < 1 and one["learn/teacher_kl"] > 0


def test_teachers_that_do_not_fit_are_one_line(
    base: TrainConfig, tmp_path: Path, foreign: Path
) -> None:
    named = (TeacherConfig(policy=base.policy),)
    with pytest.raises(UserError, match=r"^teachers\.0\.policy=.*needs algorithm\.distill above 0"):
        train(replace(base, teachers=named))
    asked = replace(base, algorithm=AlgorithmConfig(distill=1.0))
    with pytest.raises(UserError, match=r"^algorithm\.distill=1 needs teachers; name them"):
        train(asked)
    gone = (*named, TeacherConfig(policy=str(tmp_path / "gone")))
    with pytest.raises(UserError, match=r"^teachers\.1\.policy .*gone: no such folder"):
        train(replace(asked, teachers=gone))
    with pytest.raises(UserError, match=r"^teachers\.0\.policy .*: has another tokenizer than"):
        train(replace(asked, teachers=(TeacherConfig(policy=str(foreign)),)))
    heavy = (TeacherConfig(policy=base.policy, weight=0.0),)
    with pytest.raises(UserError, match=r"^teachers\.0\.weight=0\.0 must be above 0"):
        train(replace(asked, teachers=heavy))
