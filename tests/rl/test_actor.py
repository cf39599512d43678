"""The learner behind Ray actors, as a run uses it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig, SyncConfig
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.links import StoredBucket
from farhorizon.policy.records import StageRecord
from farhorizon.policy.weights import digest
from farhorizon.rl import batch
from farhorizon.rl.actor import LearnerGroup
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.learner import Learner
from farhorizon.rl.types import UpdateResult
from farhorizon.rollout.sync import PolicyWeights, WeightReceiver
from farhorizon.rollout.types import Group

from .test_batch import given, group, sampled, trajectory


def learners(checkpoint: Path, **changes: Any) -> LearnerGroup:
    config = LearnerConfig(lr=1e-3, micro_batch_tokens=32, **changes)
    return LearnerGroup(str(checkpoint), config, AlgorithmConfig(), SyncConfig(), 0, 1.0)


@pytest.fixture(scope="module", params=[1, 2])
def learner(
    request: pytest.FixtureRequest, ray_local: None, tiny_checkpoint: Path
) -> Iterator[LearnerGroup]:
    """One learner of one rank, then one of two."""
    made = learners(tiny_checkpoint, ranks=request.param, zero_stage=0 if request.param == 1 else 2)
    pids = _process_ids(made)
    yield made
    made.close()
    made.close()
    _wait_until_gone(pids)


def _process_ids(made: LearnerGroup) -> list[int]:
    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in made.actors])


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.1)


def groups(step: int) -> list[Group]:
    random = np.random.default_rng(step)
    made = []
    for task in ("a", "b", "c"):
        members = [
            trajectory(
                task,
                sibling,
                float(sibling % 2),
                given(random.integers(0, 200, 5).tolist()),
                sampled(random.integers(0, 200, 3 + sibling).tolist(), -5.0, version=step),
            )
            for sibling in range(4)
        ]
        made.append(Group(task, tuple(members)))
    return made


@pytest.fixture(scope="module")
def alone(only_rank: None, tiny_checkpoint: Path) -> list[UpdateResult]:
    """What the two updates of one learner give in this process, without Ray."""
    config = LearnerConfig(lr=1e-3, micro_batch_tokens=32)
    learner = Learner(load_checkpoint(tiny_checkpoint).policy, config, 1.0)
    algorithm = make_algorithm(AlgorithmConfig())
    results = []
    for step in range(2):
        kept, _ = batch.samples_of_groups(groups(step), algorithm.advantages)
        share = batch.shares([s for samples in kept for s in samples], 1, 32)[0]
        results.append(learner.update([share], algorithm.loss))
    return results


def test_updates_publishes_saves_and_resumes(
    learner: LearnerGroup, alone: list[UpdateResult], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    first = learner.update(groups(0))
    assert not first.skipped and first.version == learner.version == 1
    assert first.metrics["groups"] == 3 and first.metrics["trained_tokens"] == 54
    assert first.metrics["staleness_max"] == 0

    announced = learner.ask("announce")
    publication = learner.published(learner.start_publishing())
    assert announced == publication.announced
    rollout = load_checkpoint(tiny_checkpoint).policy
    receiver = WeightReceiver(PolicyWeights(rollout))
    receiver.begin(announced)
    for bucket in publication.buckets:
        stored: StoredBucket = ray.get(bucket)
        receiver.load(stored.open(0))
    receiver.verify(publication)
    assert receiver.commit().number == 1

    learner.save_policy(tmp_path / "policy", StageRecord(512, (512,), 0, ""))
    written = load_checkpoint(tmp_path / "policy").policy.state_dict()
    for name, tensor in rollout.state_dict().items():
        assert digest(written[name]) == digest(tensor), name

    learner.save(tmp_path / "state")
    after = learner.update(groups(1))
    assert after.version == 2
    learner.load(tmp_path / "state")
    assert learner.version == 1
    again = learner.update(groups(1))
    assert again == after

    for got, want in zip((first, after), alone, strict=True):  # one rank or two
        for name in ("loss", "grad_norm", "entropy"):
            assert got.metrics[name] == pytest.approx(want.metrics[name], rel=1e-4, abs=1e-5), name


def test_text_is_learned_and_evaluated(learner: LearnerGroup) -> None:
    text = [np.arange(40) % 7 + 20, np.arange(9) % 7 + 20]
    before = learner.evaluate_nll(text)
    assert learner.evaluate_nll(text) == before
    learner.set_lr(1e-2)
    results = [learner.update_nll(text) for _ in range(3)]
    result = results[-1]
    assert result.metrics["lr"] == 1e-2 and result.metrics["trained_tokens"] == 47
    assert learner.evaluate_nll(text) < before
    with pytest.raises(UserError, match="no sequence of a batch has a second token"):
        learner.update_nll([np.array([3])])


def test_a_batch_without_variance_is_skipped_and_says_so(learner: LearnerGroup) -> None:
    version = learner.version
    result = learner.update([group("a", [1.0, 1.0]), group("b", [None, None])])
    assert result.skipped and result.version == learner.version == version
    assert result.metrics["groups_without_variance"] == 1
    assert result.metrics["groups_left_out"] == 2
    assert result.metrics["episodes_without_reward"] == 2


def test_replay_of_a_rollout_without_routes_ends_the_run(
    ray_local: None, tiny_checkpoint: Path
) -> None:
    made = learners(tiny_checkpoint, replay="rollout")
    try:
        with pytest.raises(RunFailed, match=r"^learner\.replay=rollout: the rollout recorded no"):
            made.update(groups(0))
    finally:
        made.close()


def test_mistakes_come_back_as_the_user_made_them(
    ray_local: None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    made = learners(tmp_path / "missing", ranks=2)
    with pytest.raises(UserError, match="no such checkpoint folder"):
        made.ready()
    assert made.actors == []
    made = learners(tiny_checkpoint, ranks=1, max_skipped_steps=1)
    try:
        with pytest.raises(UserError, match=r"learner\.json: not a complete learner state"):
            made.load(tmp_path)
        assert made.actors == []
    finally:
        made.close()


def test_a_fault_of_our_own_keeps_the_ranks_traceback(
    ray_local: None, tiny_checkpoint: Path
) -> None:
    made = learners(tiny_checkpoint, ranks=1)
    try:
        made.ready()
        wrong = made.actors[0].__ray_call__.remote(lambda _: 1 / 0)
        text = r"(?s)ray::LearnerActor.*line \d+, in <lambda>"
        with pytest.raises(ZeroDivisionError, match=text):
            made._results([wrong])
    finally:
        made.close()


def test_an_infinite_gradient_is_named_and_stops_the_run(
    ray_local: None, tiny_checkpoint: Path
) -> None:
    made = learners(tiny_checkpoint, ranks=1, max_skipped_steps=2)
    try:
        broken = [
            Group(t.task_id, tuple(_with_logprob(m, np.nan) for m in t.trajectories))
            for t in groups(0)
        ]
        result = made.update(broken)
        assert result.skipped and result.version == 0 and result.bad_tensor is not None
        with pytest.raises(RunFailed, match="2 optimizer steps in a row"):
            made.update(broken)
    finally:
        made.close()


def test_weights_that_give_no_probabilities_are_not_published(
    ray_local: None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Nor can they be saved any more: the ranks have ended."""
    made = learners(tiny_checkpoint, ranks=2)
    try:
        made.set_lr(1e30)
        assert not made.update(groups(0)).skipped
        with pytest.raises(RunFailed, match=r"log-probs of version 1 are not finite; lower learn"):
            made.published(made.start_publishing())
        assert made.actors == []
    finally:
        made.close()


def test_a_rank_that_dies_ends_all_in_one_line(ray_local: None, tiny_checkpoint: Path) -> None:
    made = learners(tiny_checkpoint, ranks=2)
    try:
        made.ready()
        pids = _process_ids(made)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"^a rank of the learner ended while it worked: "):
            made.update(groups(0))
        assert made.actors == []
        _wait_until_gone(pids)
    finally:
        made.close()


@pytest.mark.parametrize("dies", [True, False])
def test_an_error_of_a_rank_is_told_as_a_peers_end_only_where_one_ended(
    ray_local: None, tiny_checkpoint: Path, dies: bool
) -> None:
    """Whatever its text: rank 0 fails first, rank 1 is killed a moment later or waits."""
    text = "unhandled system error" if dies else "Connection reset by peer"

    def loss(*_: Any, **__: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            raise ConnectionResetError(text)
        time.sleep(0.5 if dies else 60)
        os.kill(os.getpid(), signal.SIGKILL)

    made = learners(tiny_checkpoint, ranks=2)
    made.algorithm = replace(made.algorithm, loss=loss)
    expected = RunFailed if dies else ConnectionResetError
    try:
        with pytest.raises(expected, match="^a rank of the learner ended" if dies else text):
            made.update(groups(0))
        assert made.actors == []
    finally:
        made.close()


def _with_logprob(member: Any, value: float) -> Any:
    prompt, reply = member.segments
    return trajectory(
        member.task_id,
        member.sibling,
        member.reward,
        given(prompt.token_ids.tolist()),
        sampled(reply.token_ids.tolist(), float(value)),
    )
