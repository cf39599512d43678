"""Runs whose rollout actors are killed go on as if they were not."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest

from farhorizon.configs.schema import (
    EnvConfig,
    LearnerConfig,
    RolloutConfig,
    SyncConfig,
    TrainConfig,
)
from farhorizon.launch.checkpoints import newest
from farhorizon.launch.train import train
from farhorizon.policy.checkpoint import load_checkpoint

FAKES = str(Path(__file__).parents[1] / "fakes.py")
pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> TrainConfig:
    """Of all checkpoints only the newest is kept: the one that a run began with is gone."""
    return TrainConfig(
        policy=str(checkpoint),
        output=str(tmp_path / "run"),
        context=32,
        steps=4,
        seed=3,
        groups_per_step=4,
        group_size=8,
        env=EnvConfig(id="even-v0", plugins=(FAKES,)),
        eval_episodes=0,
        save_every=1,
        keep=1,
        rollout=RolloutConfig(max_turn_tokens=2),
        learner=LearnerConfig(lr=1e-3),
    )


@contextmanager
def killing(config: TrainConfig, after: int) -> Iterator[None]:
    """Kill a rollout actor of this process as soon as ``after`` steps are done."""
    metrics, ended = Path(config.output) / "metrics.jsonl", threading.Event()

    def kill() -> None:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= after):
            if ended.wait(0.01):
                return
        for child in psutil.Process().children(recursive=True):
            if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::RolloutActor"):
                time.sleep(0.1)
                os.kill(child.pid, signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rows(config: TrainConfig) -> list[dict[str, float]]:
    text = (Path(config.output) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(config: TrainConfig) -> dict[str, list[float]]:
    found = newest(Path(config.output))
    assert found is not None
    state = load_checkpoint(found.folder).policy.state_dict()
    return {name: tensor.flatten().tolist() for name, tensor in state.items()}


def played(config: TrainConfig, step: int) -> list[tuple[str, int]]:
    text = (Path(config.output) / "rollouts" / f"step-{step}.jsonl").read_text()
    return [(one["task"], one["sibling"]) for one in map(json.loads, text.splitlines())]


def test_a_run_whose_only_actor_is_killed_ends_as_one_in_one_go(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = replace(config, output=str(tmp_path / "whole"))
    assert train(whole) == 0
    capsys.readouterr()
    for steps in (1, 4):  # from a checkpoint that is removed when the next one is there
        with killing(config, after=2):
            assert train(replace(config, steps=steps)) == 0
    told = capsys.readouterr().out
    assert told.count("starts again, 1 of 2 restarts") == 1
    assert [row["train/actors_restarted"] for row in rows(whole)] == [0] * 4
    assert rows(config)[-1]["train/actors_restarted"] == 1
    for name in ("train/reward", "train/tokens", "train/version"):
        assert [row[name] for row in rows(config)] == [row[name] for row in rows(whole)], name
    for step in range(1, 5):
        assert played(config, step) == played(whole, step)
    assert weights(config) == weights(whole)


@pytest.mark.parametrize("transport", ["objects", "collective"])
def test_a_run_with_a_batch_in_flight_loses_no_task(
    config: TrainConfig, transport: Literal["objects", "collective"]
) -> None:
    config = replace(
        config,
        max_staleness=1,
        rollout=replace(config.rollout, actors=2),
        sync=SyncConfig(transport=transport),
    )
    with killing(config, after=2):
        assert train(config) == 0
    assert rows(config)[-1]["train/actors_restarted"] == 1
    assert [row["rollout/episodes"] for row in rows(config)] == [32] * 4
    all_played = [one for step in range(1, 5) for one in played(config, step)]
    assert len(set(all_played)) == len(all_played) == 4 * 32
    assert [row["train/version"] for row in rows(config)] == [1, 2, 3, 4]
