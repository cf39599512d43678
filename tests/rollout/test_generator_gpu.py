"""The generator on the GPU: captured steps beside one pass over each sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farhorizon.launch.parity import random_policy
from farhorizon.launch.plan import read_policy
from farhorizon.launch.step_measure import small_config
from farhorizon.policy import Policy
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.sampler import stream_key
from farhorizon.rollout.states import Slots
from farhorizon.rollout.types import Completion, SamplingParams

pytestmark = pytest.mark.gpu
CONFIG = small_config(read_policy("1b")[0])
PARAMS = SamplingParams(temperature=0.9, max_tokens=30, stop_token_ids=(7, 8, 9))
# Nats between bf16 steps and a bf16 forward: a rounding of logits of some units, and a route.
MEAN, WORST = 0.02, 0.3


def converse(policy: Policy) -> dict[tuple[int, int], tuple[list[int], Completion]]:
    """Two turns of twelve sequences: what was known before each completion, and that."""
    generator = NativeGenerator(policy, record_routes=True)
    assert isinstance(generator._states, Slots)
    random = np.random.default_rng(0)
    keys: dict[int, int] = {}
    known: dict[int, list[int]] = {}
    found: dict[tuple[int, int], tuple[list[int], Completion]] = {}
    for number, length in enumerate((1, 40, 300)):
        own = [stream_key(0, str(number), i) for i in range(4)]
        prompt = random.integers(10, 500, length).astype(np.int32)
        for key, session in zip(own, generator.open(prompt, own, PARAMS), strict=True):
            keys[session], known[session] = key, prompt.tolist()
    while generator.busy:
        for session, completion in generator.step():
            turn = int((keys[session], 0) in found)
            found[keys[session], turn] = known[session], completion
            known[session] = [*known[session], *completion.token_ids.tolist(), 11, 12, 13]
            if turn:
                generator.close(session)
            else:
                generator.extend(session, np.array([11, 12, 13]), PARAMS)
    return found


def test_completions_are_those_of_the_policy_and_repeat() -> None:
    policy = random_policy(CONFIG, 0, "cuda")
    found, again = converse(policy), converse(policy)
    gaps: list[np.ndarray] = []
    for at, (before, completion) in found.items():
        assert completion.token_ids.tolist() == again[at][1].token_ids.tolist()
        np.testing.assert_array_equal(completion.logprobs, again[at][1].logprobs)
        ids = torch.tensor([*before, *completion.token_ids.tolist()], device="cuda")
        with torch.inference_mode():
            logits = policy(ids[None]).logits[0].float() / PARAMS.temperature
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(before) - 1 :, 0]
        gaps.append(np.abs(expected.cpu().numpy() - completion.logprobs))
        assert completion.routes is not None and completion.routes.dtype == np.uint8
    every = np.concatenate(gaps)
    assert every.mean() < MEAN and every.max() < WORST


def steps_in(generator: NativeGenerator) -> object:
    assert isinstance(generator._states, Slots)
    return generator._states._steps


def greedy(generator: NativeGenerator) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (session,) = generator.open(np.arange(20, 80), [1], params)
    done = []
    while generator.busy:
        done += generator.step()
    generator.close(session)
    return done[0][1].token_ids.tolist()


def test_graphs_see_weights_that_change_and_those_that_move() -> None:
    policy, other = (random_policy(CONFIG, seed, "cuda") for seed in (0, 1))
    generator = NativeGenerator(policy)
    old = greedy(generator)
    steps = steps_in(generator)
    with generator.exclusive(), torch.no_grad():
        for name, tensor in policy.state_dict().items():
            tensor.copy_(other.state_dict()[name])
        generator.version += 1
    new = greedy(generator)
    assert steps_in(generator) is steps
    assert new == greedy(NativeGenerator(other)) != old
    policy.lm_head.weight.data = policy.lm_head.weight.data.clone()
    generator.version += 1
    assert greedy(generator) == new
    assert steps_in(generator) is not steps
