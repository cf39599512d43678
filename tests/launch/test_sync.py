"""Weights between real learners and rollout actors, over each transport of CPUs, and their ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.configs.schema import (
    AlgorithmConfig,
    EnvConfig,
    LearnerConfig,
    RolloutConfig,
    SyncConfig,
)
from farhorizon.envs.types import Task
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.links import Place
from farhorizon.policy.weights import Publication, WeightManifest
from farhorizon.rl.actor import LearnerGroup
from farhorizon.rl.publish import Publisher
from farhorizon.rollout.pool import RolloutPool
from farhorizon.rollout.sync import PolicyWeights

from .. import fakes

ENV = EnvConfig(
    id="scripted-v0",
    kwargs={"prompt": " go", "replies": [" red", " green blue", " black"]},
    plugins=(fakes.__file__,),
)
ROLLOUT = RolloutConfig(actors=2, concurrency=5, max_turn_tokens=6, env_retries=0, restarts=0)
TASKS = [Task(f"t{i}", i, (), {"delay": 0.6}) for i in range(4)]
TRANSPORTS = ("objects", "collective")


@pytest.fixture
def pool(ray_local: None, tiny_checkpoint: Path) -> Iterator[RolloutPool]:
    made = RolloutPool(str(tiny_checkpoint), ENV, ROLLOUT, context=128, seed=3)
    yield made
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_actors_follow_a_learner_of_two_ranks_while_they_play(
    pool: RolloutPool, tiny_checkpoint: Path, transport: Any
) -> None:
    """Shards of ZeRO 3, gathered and sent while actors sample with the weights of before."""
    config = LearnerConfig(ranks=2, zero_stage=3, lr=1e-2, micro_batch_tokens=64)
    sync = SyncConfig(transport=transport, bucket_mb=0)  # a tensor to a bucket
    learner = LearnerGroup(str(tiny_checkpoint), config, AlgorithmConfig(), sync, 3, 1.0)
    try:
        pool.sync(learner)
        assert pool.version is not None and pool.version.number == 0
        first = pool.version.digest
        learner.update_nll([np.arange(40) % 7 + 20])
        refs = pool.submit(TASKS, 2)
        time.sleep(0.3)
        pool.sync(learner)
        assert pool.version.number == 1 and pool.version.digest != first
        groups, _ = pool.collect(refs)
        versions = [t.versions[t.loss_mask] for g in groups for t in g.trajectories]
        assert set(np.concatenate(versions).tolist()) == {0, 1}
        manifest = learner.ask("announce").manifest
        assert pool.times["bytes"] == manifest.nbytes and pool.times["bytes_per_second"] > 0
        digests = [actor.__ray_call__.remote(_digest) for actor in pool.actors]
        assert ray.get(digests) == [pool.version.digest] * 2
    finally:
        learner.close()


def _digest(actor: Any) -> str:
    """Of what an actor serves."""
    from farhorizon.policy.weights import digests, policy_digest

    state = actor._generator.policy.state_dict()
    manifest = WeightManifest.of(state)
    return policy_digest(manifest, digests([state[name] for name in manifest.names]))


class DeadlyEngine:
    """That of a learner of one rank which kills a process in the middle of gathering."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self, policy: Any, victim: int) -> None:
        self.policy, self._victim = policy, victim
        self.manifest = WeightManifest.of(policy.state_dict())

    def gathered_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = self.policy.state_dict()
        for number, name in enumerate(self.manifest.names):
            if number == 20:
                os.kill(self._victim, signal.SIGKILL)
            yield name, state[name]


class DeadlyLearner:
    """What is asked of a learner to publish."""

    version, threshold_version, temperature = 7, 0, 1.0

    def __init__(self, folder: str, victim: int) -> None:
        policy = load_checkpoint(folder).policy
        self.engine = DeadlyEngine(policy, victim or os.getpid())
        self._weights = PolicyWeights(policy)

    def score(self, ids: np.ndarray) -> np.ndarray:
        return self._weights.score(ids, self.temperature)


class DeadlyRank:
    """A rank of a learner, for what a sync asks of it; ``victim`` 0 is itself."""

    def __init__(self, folder: str, victim: int) -> None:
        learner: Any = DeadlyLearner(folder, victim)
        self.publisher = Publisher(learner, 0, 288, ray.put)

    def place(self) -> Place:
        return Place(ray.util.get_node_ip_address(), "")

    def connect(self, transport: Any, host: str, readers: int) -> Any:
        return self.publisher.connect(transport, host, readers)

    def announce(self) -> Any:
        return self.publisher.announce()

    def publish(self, config: SyncConfig) -> Publication | None:
        return self.publisher.publish(config)

    def release(self) -> None:
        self.publisher.release()

    def close(self) -> None:
        pass


class DeadlyGroup(LearnerGroup):
    """A group of one such rank."""

    def __init__(self, folder: Path, transport: Any, victim: int) -> None:
        self.sync_config = SyncConfig(transport=transport, bucket_mb=0)
        actor: Any = ray.remote(num_cpus=0.01)(DeadlyRank)
        self.actors = [actor.remote(str(folder), victim)]
        self._starting, self._folder = [], None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_actor_that_is_killed_between_buckets_ends_a_sync_in_one_line(
    pool: RolloutPool, tiny_checkpoint: Path, transport: Any
) -> None:
    """The learner is still there to be saved, the other actor serves what it had."""
    learner = DeadlyGroup(tiny_checkpoint, transport, pool.process_ids[0])
    try:
        with pytest.raises(RunFailed, match=r"^a rollout actor ended while it worked: it") as error:
            pool.sync(learner)
        assert "\n" not in str(error.value)
        assert learner.ask("announce").number == 7 and pool.version is None
        assert ray.get(pool.actors[1].__ray_call__.remote(lambda a: a._generator.version)) == 0
    finally:
        learner.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_learner_that_is_killed_between_buckets_ends_a_sync_in_one_line(
    pool: RolloutPool, tiny_checkpoint: Path, transport: Any
) -> None:
    learner = DeadlyGroup(tiny_checkpoint, transport, 0)
    try:
        with pytest.raises(RunFailed, match=r"^a rank of the learner ended while it wo") as error:
            pool.sync(learner)
        assert "\n" not in str(error.value)
        assert learner.actors == [] and pool.version is None
    finally:
        learner.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_that_cannot_be_published_end_a_sync_with_their_reason(
    pool: RolloutPool, tiny_checkpoint: Path, transport: Any
) -> None:
    config = LearnerConfig(ranks=2, lr=1e-3, micro_batch_tokens=64)
    sync = SyncConfig(transport=transport)
    learner = LearnerGroup(str(tiny_checkpoint), config, AlgorithmConfig(), sync, 3, 1.0)
    try:
        pool.sync(learner)
        learner.set_lr(1e30)
        learner.update_nll([np.arange(40) % 7 + 20])
        with pytest.raises(RunFailed, match=r"^learner: the log-probs of version 1 are not finit"):
            pool.sync(learner)
        assert pool.version is not None and pool.version.number == 0
    finally:
        learner.close()
