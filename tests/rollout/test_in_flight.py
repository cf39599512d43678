"""What running completions do when weights change: go on, end first, or begin anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.configs.schema import InFlight
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.types import Completion, SamplingParams

from .hash_engine import HashEngine, play

PROMPT, REPLY = np.arange(4, 16), np.arange(20, 14, -1)
SIX = SamplingParams(temperature=0.8, max_tokens=6)
Both = NativeGenerator | RequestGenerator


def make_policy(factor: float = 1.0) -> Policy:
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=2))
    with torch.no_grad():
        for tensor in policy.state_dict().values():
            tensor.mul_(factor)
    return policy


def build(engine: str, in_flight: InFlight, factor: float = 1.0) -> Both:
    if engine == "native":
        return NativeGenerator(make_policy(factor), in_flight=in_flight, record_routes=True)
    return RequestGenerator(HashEngine(), in_flight=in_flight)


@pytest.fixture(params=["native", "requests"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def update(generator: Both, number: int) -> Iterator[None]:
    """To weights 1.05 times those of before, where there are any."""
    with generator.updating(number), torch.no_grad():
        if isinstance(generator, NativeGenerator):
            for tensor in generator.policy.state_dict().values():
                tensor.mul_(1.05)
        yield


class Waiting:
    """A thread that brings an update as soon as it may."""

    def __init__(self, generator: Both, number: int) -> None:
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(generator, number))
        self._thread.start()
        while not generator._turns.holding and not self.done.is_set():
            time.sleep(1e-3)

    def _run(self, generator: Both, number: int) -> None:
        with update(generator, number):
            pass
        self.done.set()

    def join(self) -> None:
        self._thread.join(timeout=30)
        assert self.done.is_set()


def same(left: Completion, right: Completion) -> None:
    assert left.token_ids.tolist() == right.token_ids.tolist()
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-5)
    if left.routes is not None and right.routes is not None:
        np.testing.assert_array_equal(left.routes, right.routes)


def versions(completion: Completion) -> list[int]:
    return completion.versions.tolist()


def test_kept_completions_span_both_weights(engine: str) -> None:
    generator = build(engine, "keep")
    (session,) = generator.open(PROMPT, [5], SIX)
    for _ in range(2):
        generator.step()
    with update(generator, 7):
        pass
    assert versions(play(generator)[session]) == [0, 0, 7, 7, 7, 7]
    assert generator.counters.discarded_tokens == 0


def test_an_update_waits_for_what_runs_and_what_is_asked_waits_for_it(engine: str) -> None:
    generator, new = build(engine, "wait"), build(engine, "keep", 1.05)
    talking = generator.open(PROMPT[:5], [9], SamplingParams(temperature=0.8, max_tokens=2))[0]
    first = play(generator)[talking]
    sessions = generator.open(PROMPT, [5, 6], SIX)
    generator.step()
    generator.step()
    waiting = Waiting(generator, 7)
    with (
        pytest.raises(RunFailed, match=r"^weight sync refused: another update waits for what runs"),
        update(generator, 8),
    ):
        raise AssertionError
    late = generator.open(PROMPT[:7], [8, 4], SIX)
    generator.extend(talking, REPLY, SIX)
    assert not waiting.done.is_set()
    found = play(generator)
    waiting.join()
    assert generator.version == 7
    for session in sessions:
        assert versions(found[session]) == [0] * 6
    for session in (*late, talking):
        assert versions(found[session]) == [7] * 6
    alone = new.open(PROMPT[:7], [8, 4], SIX)
    meant = play(new)
    for mine, other in zip(late, alone, strict=True):
        same(found[mine], meant[other])
    known = np.concatenate((PROMPT[:5], first.token_ids, REPLY))
    (other,) = new.open(known, [9], SIX)
    assert found[talking].token_ids.tolist() == play(new)[other].token_ids.tolist()
    assert generator.counters.stale_tokens == generator.counters.discarded_tokens == 0


def test_an_update_does_not_wait_where_nothing_runs(engine: str) -> None:
    generator = build(engine, "wait")
    with update(generator, 1):
        pass
    (session,) = generator.open(PROMPT, [5], SIX)
    play(generator)
    with update(generator, 2):  # between two turns
        pass
    generator.extend(session, REPLY, SIX)
    generator.step()
    with update(generator, 2):  # to the weights that are there: nothing to wait for
        pass
    assert versions(play(generator)[session]) == [2] * 6


def test_a_rollout_that_ends_lets_the_update_in(engine: str) -> None:
    generator = build(engine, "wait")
    generator.open(PROMPT, [5], SIX)
    generator.step()
    waiting = Waiting(generator, 7)
    generator.open(PROMPT, [6], SIX)
    generator.clear()
    waiting.join()
    assert not generator.busy and generator.step() == []
    (session,) = generator.open(PROMPT, [5], SIX)
    assert versions(play(generator)[session]) == [7] * 6


def test_what_waited_for_a_refused_update_goes_on_with_the_old_weights(engine: str) -> None:
    generator = build(engine, "wait")
    sessions = generator.open(PROMPT, [5], SIX)
    generator.step()
    refused = threading.Event()

    def refuse() -> None:
        with pytest.raises(RunFailed, match="torn"), generator.updating(7):
            raise RunFailed("torn")
        refused.set()

    thread = threading.Thread(target=refuse)
    thread.start()
    while not generator._turns.holding:
        time.sleep(1e-3)
    sessions += generator.open(PROMPT, [6], SIX)
    found = play(generator)
    thread.join(timeout=30)
    assert refused.is_set() and generator.version == 0
    assert [versions(found[session]) for session in sessions] == [[0] * 6] * 2


def test_aborted_completions_are_those_of_the_new_weights_alone(engine: str) -> None:
    generator, new = build(engine, "abort"), build(engine, "keep", 1.05)
    talking = generator.open(PROMPT[:5], [9], SamplingParams(temperature=0.8, max_tokens=2))[0]
    first = play(generator)[talking]
    sessions = generator.open(PROMPT, [5, 6], SIX)
    generator.extend(talking, REPLY, SIX)
    for _ in range(3):
        generator.step()
    counters = generator.counters
    before = counters.sampled_tokens
    with pytest.raises(RunFailed, match="torn"), generator.updating(7):
        raise RunFailed("torn")
    assert counters.discarded_tokens == 0  # of an update that was refused
    with update(generator, 7):
        pass
    found = play(generator)
    assert counters.discarded_tokens > 0 and counters.stale_tokens == 0
    if engine == "native":
        assert counters.discarded_tokens == before - 2
        assert counters.renewed_tokens == 2 * 12 + 5 + 2 + 6
    for session in (*sessions, talking):
        assert versions(found[session]) == [7] * 6
    alone = new.open(PROMPT, [5, 6], SIX)
    meant = play(new)
    for mine, other in zip(sessions, alone, strict=True):
        same(found[mine], meant[other])
    known = np.concatenate((PROMPT[:5], first.token_ids, REPLY))
    (other,) = new.open(known, [9], SIX)
    assert found[talking].token_ids.tolist() == play(new)[other].token_ids.tolist()
    generator.extend(talking, REPLY, SIX)  # and the next turn begins behind it
    assert versions(play(generator)[talking]) == [7] * 6


def test_two_updates_at_once_are_refused(engine: str) -> None:
    generator = build(engine, "keep")
    with (
        update(generator, 1),
        pytest.raises(RunFailed, match=r"^weight sync refused: another update is at work"),
        update(generator, 2),
    ):
        raise AssertionError
    assert generator.version == 1
