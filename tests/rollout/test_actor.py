"""Rollout actors on a real local Ray."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import EnvConfig, InFlight, RolloutConfig
from farhorizon.envs.types import Message, StopReason, Task
from farhorizon.policy import Policy
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.tokenizer import ChatFormat
from farhorizon.policy.value import VALUE_PREFIX, ValueHead, write_value_head
from farhorizon.rollout.episode import run_groups
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.pool import RolloutPool, check_errors
from farhorizon.rollout.sync import SyncError
from farhorizon.rollout.types import Group, RolloutStats

from .. import fakes
from ..syncing import Learner

REPLIES = [" red", " green blue", " black", " red red"]
ENV = EnvConfig(
    id="scripted-v0", kwargs={"prompt": " go", "replies": REPLIES}, plugins=(fakes.__file__,)
)
ROLLOUT = RolloutConfig(
    actors=2, concurrency=5, max_turn_tokens=6, env_retries=0, max_error_fraction=0.9
)
TIMES = {
    "send",
    "receive",
    "verify",
    "keep",
    "swap",
    "prove",
    "canary",
    "bytes",
    "bytes_per_second",
}
TASKS = [Task(f"t{i}", i) for i in range(5)]


@pytest.fixture(scope="module")
def pool(
    ray_local: None, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutPool]:
    """Its checkpoint has a value head, of which rollouts know nothing."""
    folder = tmp_path_factory.mktemp("valued") / "policy"
    shutil.copytree(tiny_checkpoint, folder)
    write_value_head(folder, ValueHead(32).state_dict(prefix=VALUE_PREFIX), 32)
    pool = RolloutPool(str(folder), ENV, ROLLOUT, context=128, seed=3)
    yield pool
    pool.close()


def here(checkpoint: Path, concurrency: int) -> list[Group]:
    """The same rollout without Ray."""
    loaded = load_checkpoint(checkpoint)
    groups, _ = run_groups(
        NativeGenerator(loaded.policy, seed=3),
        TASKS,
        3,
        lambda: fakes.ScriptedEnv(" go", REPLIES),
        ChatFormat(loaded.tokenizer),
        replace(ROLLOUT, concurrency=concurrency),
        128,
    )
    return groups


def change(policy: Policy) -> None:
    with torch.no_grad():
        for tensor in policy.state_dict().values():
            tensor.mul_(1.05)


def on(policy: Policy, checkpoint: Path) -> list[Group]:
    """What these weights alone play."""
    chat = ChatFormat(load_checkpoint(checkpoint).tokenizer)
    groups, _ = run_groups(
        NativeGenerator(policy, seed=3),
        TASKS,
        3,
        lambda: fakes.ScriptedEnv(" go", REPLIES),
        chat,
        ROLLOUT,
        128,
    )
    return groups


def ids(groups: list[Group]) -> dict[tuple[str, int], list[int]]:
    return {(t.task_id, t.sibling): t.token_ids.tolist() for g in groups for t in g.trajectories}


def test_actors_and_batching_never_change_a_sample(
    pool: RolloutPool, tiny_checkpoint: Path
) -> None:
    groups, stats = pool.collect(pool.submit(TASKS, 3))
    assert [g.task_id for g in groups] == [t.id for t in TASKS]
    assert stats.episodes == 15 and stats.turns == 75 and stats.errors == 0
    for concurrency in (1, 64):
        assert ids(here(tiny_checkpoint, concurrency)) == ids(groups)
    again, _ = pool.collect(pool.submit(TASKS[::-1], 3))
    assert [g.task_id for g in again] == ["t4", "t3", "t2", "t1", "t0"]
    assert ids(again) == ids(groups)
    assert len({tuple(t) for t in ids(groups).values()}) == 15


def test_rollout_logprobs_are_those_of_one_forward(
    pool: RolloutPool, tiny_checkpoint: Path
) -> None:
    groups, _ = pool.collect(pool.submit(TASKS[:2], 1))
    policy = load_checkpoint(tiny_checkpoint).policy
    for group in groups:
        one = group.trajectories[0]
        tokens = torch.as_tensor(one.token_ids, dtype=torch.long)
        with torch.no_grad():
            out = policy(tokens[None], rows=torch.arange(len(tokens) - 1), targets=tokens[1:])
        gap = np.abs(out.logprobs.numpy() - one.logprobs[1:])[one.loss_mask[1:]]
        assert len(gap) > 5 and gap.max() < 1e-4


def test_greedy_is_an_argument_of_one_submission(pool: RolloutPool, tiny_checkpoint: Path) -> None:
    """C05: what is sampled after an evaluation is as it was without one."""
    greedy, _ = pool.collect(pool.submit(TASKS[:1], 3, greedy=True))
    sampled, _ = pool.collect(pool.submit(TASKS[:1], 3))
    assert ids(sampled) == ids(here(tiny_checkpoint, 5)[:1])
    first = [t.segments[1].token_ids.tolist() for t in greedy[0].trajectories]
    assert first[0] == first[1] == first[2]
    assert len({tuple(t.segments[1].token_ids.tolist()) for t in sampled[0].trajectories}) == 3


def test_awkward_faults_come_home_as_text_and_the_actor_lives_on(pool: RolloutPool) -> None:
    """C12."""
    awkward = {
        "keyword": "NeedsKeyword: code 7",
        "lock": "HoldsLock: holding a lock",
        "unprintable": "Unprintable: <message unavailable",
    }
    tasks = [Task(f"bad-{error}", 0, (), {"fail_at": 2, "error": error}) for error in awkward]
    groups, stats = pool.collect(pool.submit([*tasks, TASKS[0], TASKS[1]], 1))
    for group, text in zip(groups, awkward.values(), strict=False):
        bad = group.trajectories[0]
        assert bad.stop is StopReason.ERROR and bad.turns == 1
        assert bad.error is not None and bad.error.startswith(text) and "Traceback" in bad.error
    assert stats.errors == 3 and groups[3].trajectories[0].reward == 1.0
    assert pool.process_ids == _ping(pool)
    assert pool.collect(pool.submit(TASKS[:1], 1))[1].errors == 0


def _ping(pool: RolloutPool) -> list[int]:
    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in pool.actors])


def test_a_users_mistake_keeps_its_type_and_its_line(pool: RolloutPool) -> None:
    tasks = [Task("text", 0, (), {"reward": "1.0"})]
    with pytest.raises(UserError, match=r"^environment ScriptedEnv: the reward must be a number"):
        pool.collect(pool.submit(tasks, 1))


def test_a_fault_of_our_own_keeps_the_actors_traceback(pool: RolloutPool) -> None:
    with pytest.raises(AttributeError, match=r"(?s)ray::RolloutActor\.run.*rollout/episode\.py"):
        pool.collect(pool.submit([None], 1))  # type: ignore[list-item]
    assert pool.collect(pool.submit(TASKS[:1], 1))[1].errors == 0


def test_weights_change_under_running_episodes(pool: RolloutPool, tiny_checkpoint: Path) -> None:
    before, _ = pool.collect(pool.submit(TASKS, 3))
    policy = load_checkpoint(tiny_checkpoint).policy
    broken = fakes.publish(policy, 1)
    broken.buckets[1].payload[3] ^= 1
    with pytest.raises(SyncError, match=r"version 1 refused: model\..*: its bytes are not those"):
        pool.sync(Learner(broken))
    same, _ = pool.collect(pool.submit(TASKS, 3))
    assert ids(same) == ids(before) and pool.version is None

    change(policy)
    refs = pool.submit(slow(0.1), 3)
    time.sleep(0.35)
    pool.sync(Learner(fakes.publish(policy, 2)))
    groups, _ = pool.collect(refs)
    spans = [set(t.versions[t.loss_mask].tolist()) for g in groups for t in g.trajectories]
    assert {0, 2} in spans and {2} in spans
    assert pool.version is not None and pool.version.number == 2
    assert set(pool.times) == TIMES and all(value > 0 for value in pool.times.values())

    after, _ = pool.collect(pool.submit(TASKS, 3))
    assert ids(after) == ids(on(policy, tiny_checkpoint)) != ids(before)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_running_completions_do_as_the_run_says(
    ray_local: None, tiny_checkpoint: Path, in_flight: InFlight
) -> None:
    """No completion has tokens of two versions, of those that new weights came upon either."""
    policy = load_checkpoint(tiny_checkpoint).policy
    rollout = replace(ROLLOUT, actors=1, max_turn_tokens=300)
    own = (str(tiny_checkpoint), ENV, rollout, 2000, 3)
    pool = RolloutPool(*own, in_flight=in_flight)
    try:
        pool.sync(Learner(fakes.publish(policy, 0)))
        parts = pool.submit(TASKS[:2], 1)
        time.sleep(0.7)
        change(policy)
        syncing = threading.Thread(target=pool.sync, args=(Learner(fakes.publish(policy, 1)),))
        syncing.start()
        if in_flight == "wait":  # which takes as long as what runs
            time.sleep(0.3)
            with pytest.raises(RunFailed, match=r"^weight sync refused: another is at work"):
                pool.sync(Learner(fakes.publish(policy, 2)))
        syncing.join()
        groups, stats = pool.collect(parts)
    finally:
        pool.close()
    played = [t for group in groups for t in group.trajectories]
    sampled = [s.versions.tolist() for t in played for s in t.segments if s.sampled]
    assert all(len(set(versions)) == 1 for versions in sampled)
    assert sampled[-1][0] == 1 and stats.stale_tokens == 0
    if in_flight == "abort":
        assert stats.discarded_tokens > 0
    else:
        assert stats.discarded_tokens == 0 and set(sampled[0]) == {0}


def test_a_pool_that_cannot_start_says_why(ray_local: None, tiny_checkpoint: Path) -> None:
    """C23: a misspelt environment or folder is one line, in every worker."""
    one = replace(ROLLOUT, actors=1)
    wrong = replace(ENV, id="fakes:ScriptedEnvv")
    with pytest.raises(UserError, match="did you mean 'ScriptedEnv'"):
        RolloutPool(str(tiny_checkpoint), wrong, one, context=128, seed=0)


def slow(seconds: float = 0.05) -> list[Task]:
    return [replace(task, metadata={"delay": seconds}) for task in TASKS]


@pytest.mark.parametrize("actors", [1, 2])
def test_an_actor_that_is_killed_starts_again_and_plays_what_it_played(
    ray_local: None, tiny_checkpoint: Path, actors: int
) -> None:
    said: list[str] = []
    rollout = replace(ROLLOUT, actors=actors)
    pool = RolloutPool(str(tiny_checkpoint), ENV, rollout, 128, seed=3, tell=said.append)
    try:
        parts = pool.submit(slow(), 3)
        time.sleep(0.2)
        first = pool.process_ids[0]
        os.kill(first, signal.SIGKILL)
        groups, stats = pool.collect(parts)
        assert [g.task_id for g in groups] == [t.id for t in TASKS]
        assert stats.episodes == 15 and stats.errors == 0
        assert ids(groups) == ids(here(tiny_checkpoint, 5))
        assert pool.restarted == 1 and first not in pool.process_ids == _ping(pool)
        (line,) = said
        assert line.startswith("a rollout actor ended while it worked: it was killed")
        assert line.endswith(f": actor 0 (process {first}) starts again, 1 of 2 restarts")
    finally:
        pool.close()


def test_an_actor_that_starts_again_has_the_weights_of_the_others(
    ray_local: None, tiny_checkpoint: Path
) -> None:
    """Of two submissions in flight the first has ended; the second begins anew, on what was
    published since it began. One that dies in a sync is brought to the new weights at once."""
    policy = load_checkpoint(tiny_checkpoint).policy
    learner = Learner(fakes.publish(policy, 0))
    pool = RolloutPool(str(tiny_checkpoint), ENV, replace(ROLLOUT, actors=2), 128, seed=3)
    try:
        pool.sync(learner)
        early, late = pool.submit(TASKS[:2], 3), pool.submit(slow(), 3)
        ray.wait([part.ref for part in early], num_returns=2)
        change(policy)
        learner.publication = fakes.publish(policy, 1)
        os.kill(pool.process_ids[1], signal.SIGKILL)
        pool.sync(learner)
        assert pool.restarted == 1 and pool.version == learner.publication.version
        groups, _ = pool.collect(early)
        assert ids(groups) == ids(here(tiny_checkpoint, 5)[:2])
        groups, _ = pool.collect(late)
        versions = [set(t.versions[t.loss_mask].tolist()) for g in groups for t in g.trajectories]
        own = {i: versions[3 * i : 3 * i + 3] for i in range(5)}
        assert own[1] == own[3] == [{1}] * 3  # those of the actor that died
        assert ids([groups[1], groups[3]]) == ids(on(policy, tiny_checkpoint)[1:4:2])
        os.kill(pool.process_ids[0], signal.SIGKILL)  # while it does nothing
        groups, _ = pool.collect(pool.submit(TASKS, 3))
        assert ids(groups) == ids(on(policy, tiny_checkpoint)) and pool.restarted == 2
    finally:
        pool.close()


def test_an_actor_never_plays_on_other_weights_than_it_should(
    ray_local: None, tiny_checkpoint: Path
) -> None:
    policy = load_checkpoint(tiny_checkpoint).policy
    pool = RolloutPool(str(tiny_checkpoint), ENV, replace(ROLLOUT, actors=1), 128, 3)
    learner = Learner(fakes.publish(policy, 0))
    try:
        pool.sync(learner)
        learner.publication = fakes.publish(policy, 1)
        os.kill(pool.process_ids[0], signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"weights of version 0 that it played with are not"):
            pool.collect(pool.submit(TASKS, 3))
    finally:
        pool.close()


def test_an_environment_that_ends_the_process_again_and_again_stops_the_run(
    ray_local: None, tiny_checkpoint: Path
) -> None:
    said: list[str] = []
    one = replace(ROLLOUT, actors=1, restarts=1)
    pool = RolloutPool(str(tiny_checkpoint), ENV, one, 128, seed=3, tell=said.append)
    try:
        tasks = [replace(TASKS[0], metadata={"fail_at": 2, "error": "killed"})]
        with pytest.raises(RunFailed, match=r"^a rollout actor .* rollout\.restarts=1 of a run"):
            pool.collect(pool.submit(tasks, 1))
        assert pool.restarted == len(said) == 1
    finally:
        pool.close()


def test_too_many_failed_episodes_stop_the_run() -> None:
    stats = RolloutStats(episodes=10, errors=3)
    groups, _ = run_groups(
        fakes.ScriptedGenerator([[2, 0]]),
        [Task("t", 0)],
        1,
        lambda: fakes.ScriptedEnv(fail_at=1),
        fakes.WordChat(["go"]),
        RolloutConfig(env_retries=0),
        64,
    )
    check_errors(groups, stats, 0.3)
    with pytest.raises(
        RunFailed,
        match=r"3 of 10 episodes failed, more than rollout\.max_error_"
        r"fraction=0\.2; the first with RuntimeError: the sand",
    ):
        check_errors(groups, stats, 0.2)


def test_chat_messages_are_what_the_policy_sees(tiny_checkpoint: Path) -> None:
    """Prompt + sampled ids are the rendered conversation, up to how the answer was cut."""
    loaded = load_checkpoint(tiny_checkpoint)
    chat = ChatFormat(loaded.tokenizer)
    groups = here(tiny_checkpoint, 64)
    for one in groups[0].trajectories:
        first = [*chat.render(Message("user", " go")), *chat.prompt()]
        assert one.segments[0].token_ids.tolist() == first
        reply = one.segments[2].token_ids.tolist()
        end = (
            []
            if one.segments[1].token_ids[-1] == chat.stop_token_ids[0]
            else [chat.stop_token_ids[0]]
        )
        assert reply == [*end, *chat.render(Message("tool", REPLIES[0])), *chat.prompt()]
