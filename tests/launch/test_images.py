"""Whole runs of a policy that has a vision tower: with images, and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import EnvConfig, LearnerConfig, RolloutConfig, TrainConfig
from farhorizon.launch.checkpoints import newest
from farhorizon.launch.cli import main
from farhorizon.launch.train import train

FAKES = str(Path(__file__).parents[1] / "fakes.py")

pytestmark = pytest.mark.usefixtures("ray_local")


def config(checkpoint: Path, env: str, output: Path) -> TrainConfig:
    return TrainConfig(
        policy=str(checkpoint),
        env=EnvConfig(id=env, plugins=(FAKES,)),
        output=str(output),
        context=256,
        steps=2,
        groups_per_step=2,
        group_size=4,
        eval_every=0,
        eval_episodes=0,
        save_every=1,
        rollout=RolloutConfig(actors=1, threads=1, max_turn_tokens=4, concurrency=8),
        learner=LearnerConfig(lr=1e-2, warmup_steps=0, threads=1),
    )


def tower(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {n: t for n, t in tensors.items() if n.startswith(("vision_tower.", "mm_projector."))}


def test_a_run_with_images_trains_the_tower(seeing_checkpoint: Path, tmp_path: Path) -> None:
    run = config(seeing_checkpoint, "pictures-v0", tmp_path / "run")
    assert train(run) == 0
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "learn/log_ratio_max" in row]
    assert len(steps) == 2 and all(row["learn/grad_norm"] > 0 for row in steps)
    for row in steps:  # one pass over on-policy data: rollout and learner agree
        assert row["learn/log_ratio_max"] < 1e-4
    saved = newest(tmp_path / "run")
    assert saved is not None
    before, after = tower(seeing_checkpoint), tower(saved.folder)
    assert before.keys() == after.keys() and len(before) == 18
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert main(["eval", str(tmp_path / "run"), "episodes=4", f"env.plugins=[{FAKES}]"]) == 0


def test_a_run_on_text_carries_the_tower_along(seeing_checkpoint: Path, tmp_path: Path) -> None:
    run = config(seeing_checkpoint, "even-v0", tmp_path / "run")
    assert train(run) == 0
    saved = newest(tmp_path / "run")
    assert saved is not None
    before, after = tower(seeing_checkpoint), tower(saved.folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_policy_without_sight_is_refused_before_the_run(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    run = config(tiny_checkpoint, "pictures-v0", tmp_path / "run")
    with pytest.raises(UserError, match=r"pictures-v0: shows images, but .* has no vision_config"):
        train(replace(run, context=128))
    assert not (tmp_path / "run").exists()
