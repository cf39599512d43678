"""Actors that sleep while the learner learns, on a real local Ray."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from farhorizon.configs.schema import RolloutConfig, VllmConfig
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.weights import PolicyVersion
from farhorizon.rollout import pool as pools
from farhorizon.rollout.actor import RolloutActor
from farhorizon.rollout.pool import RolloutPool

from .. import fakes
from ..syncing import Learner
from .test_actor import ENV, TASKS, here, ids

SLEEPING = RolloutConfig(actors=2, max_turn_tokens=6, vllm=VllmConfig(sleep=True))


class Drowsy(RolloutActor):
    """Remembers the weights that it had when it went to sleep: others wake it."""

    slept: PolicyVersion | None = None

    @ray.method(concurrency_group="sync")
    def sleep(self) -> None:
        self.slept = self._receiver.version

    def asleep(self) -> bool:
        return self.slept is not None and self.slept is self._receiver.version


def asleep(pool: RolloutPool) -> list[bool]:
    return ray.get([actor.asleep.remote() for actor in pool.actors])


def test_all_actors_sleep_when_the_run_says_so(
    ray_local: None, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that died in its sleep, or before it, starts again awake, and so sleeps again."""
    monkeypatch.setattr(pools, "RolloutActor", Drowsy)
    policy = load_checkpoint(tiny_checkpoint).policy
    learner = Learner(fakes.publish(policy, 0))
    pool = RolloutPool(str(tiny_checkpoint), ENV, SLEEPING, 128, seed=3)
    try:
        pool.sync(learner)
        assert asleep(pool) == [False, False]
        pool.sleep()
        assert asleep(pool) == [True, True]
        os.kill(pool.process_ids[1], signal.SIGKILL)
        learner.publication = fakes.publish(policy, 1)
        pool.sync(learner)
        assert pool.restarted == 1 and asleep(pool) == [False, False]
        os.kill(pool.process_ids[0], signal.SIGKILL)
        pool.sleep()
        assert pool.restarted == 2 and asleep(pool) == [True, True]
        groups, _ = pool.collect(pool.submit(TASKS, 3))
        assert ids(groups) == ids(here(tiny_checkpoint, 5))
    finally:
        pool.close()


def test_others_never_sleep(
    ray_local: None, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "RolloutActor", Drowsy)
    wakeful = replace(SLEEPING, actors=1, vllm=VllmConfig())
    policy = load_checkpoint(tiny_checkpoint).policy
    pool = RolloutPool(str(tiny_checkpoint), ENV, wakeful, 128, seed=3)
    try:
        pool.sync(Learner(fakes.publish(policy, 0)))
        pool.sleep()
        assert asleep(pool) == [False]
    finally:
        pool.close()
