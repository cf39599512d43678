"""Sequences that keep their places, and steps that go on by themselves, beside a packed state."""

from __future__ import annotations

import gc
import weakref
from dataclasses import astuple

import numpy as np
import pytest
import torch

from farhorizon.configs.schema import InFlight
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rollout import generator as module
from farhorizon.rollout import states
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.sampler import stream_key
from farhorizon.rollout.types import Completion, SamplingParams

SAMPLED = SamplingParams(temperature=0.8, max_tokens=9, stop_token_ids=(3,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, stop_token_ids=(5, 6))


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    found = Policy(PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=4))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "res_proj" in name:
                parameter.normal_(0, 0.5)
    return found


def build(
    policy: Policy,
    slots: bool,
    monkeypatch: pytest.MonkeyPatch,
    in_flight: InFlight = "keep",
) -> NativeGenerator:
    """A generator with little memory at first, so that it has to grow."""
    monkeypatch.setattr(module, "takes_steps", lambda policy: slots)
    monkeypatch.setattr(states, "LEAST_SLOTS", 2)
    monkeypatch.setattr(states, "LEAST_TOKENS", 16)
    return NativeGenerator(policy, prefill_tokens=40, record_routes=True, in_flight=in_flight)


def steps_in(generator: NativeGenerator) -> object:
    assert isinstance(generator._states, states.Slots)
    return generator._states._steps


def converse(generator: NativeGenerator) -> dict[tuple[int, int], Completion]:
    """Three turns of thirteen sequences, with replies of many lengths, none among them; what is
    sampled at each turn."""
    random = np.random.default_rng(0)
    keys: dict[int, int] = {}
    turns: dict[int, int] = {}
    found: dict[tuple[int, int], Completion] = {}
    for number, length in enumerate((1, 9, 40, 17, 3)):
        own = [stream_key(0, str(number), i) for i in range(3 if number != 1 else 1)]
        prompt = random.integers(4, 24, length).astype(np.int32)
        params = SAMPLED if number % 2 else GREEDY
        for key, session in zip(own, generator.open(prompt, own, params), strict=True):
            keys[session], turns[session] = key, 0
    while generator.busy:
        for session, completion in generator.step():
            key, turn = keys[session], turns[session]
            found[key, turn] = completion
            turns[session] += 1
            if turn == 2:
                generator.close(session)
                continue
            length = (turn + 1) * 7 % 13 if key % 3 else 0
            reply = np.random.default_rng([key, turn]).integers(4, 24, length)
            generator.extend(session, reply, SAMPLED)
    assert generator.step() == []
    return found


def test_slots_give_what_a_packed_state_gives(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = build(policy, False, monkeypatch)
    slots = build(policy, True, monkeypatch)
    assert isinstance(slots._states, states.Slots) and isinstance(packed._states, states.Packed)
    meant, found = converse(packed), converse(slots)
    assert len(found) == 39 and found.keys() == meant.keys()
    for at, completion in meant.items():
        other = found[at]
        assert other.token_ids.tolist() == completion.token_ids.tolist()
        assert other.finish == completion.finish
        np.testing.assert_allclose(other.logprobs, completion.logprobs, atol=2e-5)
        assert completion.routes is not None and other.routes is not None
        assert other.routes.dtype == completion.routes.dtype
        np.testing.assert_array_equal(other.routes, completion.routes)
    assert astuple(slots.counters) == astuple(packed.counters)
    assert slots._flight is None and len(slots._states.places) == 0
    assert slots._state is not None
    assert sorted(slots._states._free) == list(range(slots._state.num_sequences))


def test_a_step_in_the_air_belongs_to_the_weights_that_made_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the one that is read has begun already when the weights change."""
    other = Policy(policy.config)
    other.load_state_dict(policy.state_dict())
    generator = build(other, True, monkeypatch)
    generator.open(np.arange(4, 12), [5], SamplingParams(max_tokens=6))
    for _ in range(2):
        generator.step()
    before = steps_in(generator)
    with generator.exclusive(), torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.mul_(1.05)
        generator.version += 1
    done = [c for _ in range(4) for c in generator.step()]
    assert done[0][1].versions.tolist() == [0, 0, 0, 1, 1, 1]
    assert generator.counters.stale_tokens == 3
    assert steps_in(generator) is before  # weights that stay where they are


def test_a_step_in_the_air_is_dropped_when_completions_begin_anew(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = np.arange(4, 12), SamplingParams(max_tokens=6)
    found: list[list[int]] = []
    for moment in (None, 2):
        generator = build(policy, True, monkeypatch, in_flight="abort")
        (session,) = generator.open(prompt, [5], params)
        done: list[tuple[int, Completion]] = []
        for step in range(9):
            if step == moment:
                with generator.updating(1):
                    pass
            done += generator.step()
        assert [one for one, _ in done] == [session] and not generator.busy
        found.append(done[0][1].token_ids.tolist())
        assert done[0][1].versions.tolist() == [0 if moment is None else 1] * 6
        assert generator.counters.discarded_tokens == (moment or 0)
    assert found[0] == found[1]


def test_steps_are_made_anew_for_weights_that_were_moved(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Policy(policy.config)
    other.load_state_dict(policy.state_dict())
    generator = build(other, True, monkeypatch)
    prompt, params = np.arange(4, 12), SamplingParams(max_tokens=6)
    tokens: list[list[int]] = []
    used: list[object] = []
    for _ in range(3):
        (session,) = generator.open(prompt, [5], params)
        done = [c for _ in range(6) for c in generator.step()]
        generator.close(session)
        tokens.append(done[0][1].token_ids.tolist())
        used.append(steps_in(generator))
        if len(used) == 2:
            other.lm_head.weight.data = other.lm_head.weight.clone()
        generator.version += 1
    assert tokens[0] == tokens[1] == tokens[2]
    assert used[0] is used[1] and used[1] is not used[2]


def test_what_steps_held_is_given_back_when_memory_grows(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: a collection of garbage may be far away, and a state is large."""
    generator = build(policy, True, monkeypatch)
    prompt = np.arange(4, 12)
    generator.open(prompt, [5], SamplingParams(max_tokens=3))
    while generator.busy:
        generator.step()
    assert generator._state is not None
    held = [weakref.ref(x) for x in (steps_in(generator), generator._state)]
    gc.disable()
    try:
        generator.open(prompt, [6, 7, 8], SamplingParams(max_tokens=3))
        while generator.busy:
            generator.step()
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
