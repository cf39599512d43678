"""bench decode: what it refuses, what it counts, and that its check sees what is wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from farhorizon.configs.benchmarks import DecodeBenchConfig
from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import override_config
from farhorizon.launch import decode_measure, decode_peers
from farhorizon.launch.bench_decode import bench_decode, line, peer_line
from farhorizon.launch.decode_measure import Timed, check_steps, floor_bytes
from farhorizon.launch.decode_peers import beside
from farhorizon.launch.parity import random_policy, score
from farhorizon.launch.plan import read_policy
from farhorizon.launch.step_measure import small_config
from farhorizon.policy import DecodeState, Policy
from farhorizon.rollout.vllm_probe import Decoded, DecodeEngine

SMALL = small_config(read_policy("1b")[0])


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(decode_measure, "CHECKED_LENGTHS", (5, 33, 1))
    return random_policy(SMALL, 0, "cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sequences=[]"], "sequences: name at least one number of them"),
        (["sequences=[0]"], "sequences=[0] must be at least 1"),
        (["context=0"], "context=0 must be at least 1"),
        (["eager=true"], "eager=true is how vllm runs: set peers=[vllm], or leave it out"),
        (["peers=[sglang]"], "peers: 'sglang' is none; known: vllm, or [] for none"),
        (
            ["peers=[vllm]", "context=200"],
            "context=200: beside a peer it must be above 214, or peers=[]",
        ),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_decode(override_config(DecodeBenchConfig(), overrides))
    assert str(caught.value) == message


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs a GPU"):
        bench_decode(DecodeBenchConfig())


def test_the_measuring_part_needs_no_settings() -> None:
    lacking = ["rich", "omegaconf", "ray", "deepspeed", "matplotlib"]
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking}))"
    code += "; import farhorizon.launch.bench_decode"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bytes_by_hand() -> None:
    """One more sequence: a latent of 576 numbers for each of 100 tokens in one layer, and in three
    layers a state of 2 heads of 128 x 128 fp32 and 3 inputs of 768 channels there and back. An
    expert is 3 x 128 x 128 numbers."""
    policy = random_policy(SMALL, 0, "cpu")
    own = 100 * 576 * 2 + 3 * 2 * (2 * 128 * 128 * 4 + 3 * 768 * 2)
    least = floor_bytes(policy, 8, 100, [8, 8, 8])
    assert floor_bytes(policy, 9, 100, [8, 8, 8]) - least == own
    assert least - floor_bytes(policy, 8, 100, [8, 3, 7]) == 6 * 3 * 128 * 128 * 2


@torch.inference_mode()
def test_only_experts_that_are_read_count() -> None:
    """Of three sequences in a bucket of four, two of which read the same token in the same state:
    at most four of eight experts, in any layer."""
    policy = random_policy(SMALL, 0, "cpu")
    state = DecodeState.empty(policy.config, 3, "cpu", policy.dtype)
    state.reserve(8)
    graph = decode_measure.steps_of(policy, state).captured(3)
    graph.give(decode_measure.inputs([5, 5, 9], range(3), [0] * 3, 0))
    found = decode_measure.experts_read(graph)
    assert len(found) == 3 and all(2 <= count <= 4 for count in found)


def test_steps_are_as_near_to_fp32_as_a_forward(policy: Policy) -> None:
    found = check_steps(policy, 0)
    assert 0 < found.steps < 0.01 and found.steps < 1.2 * found.forward


def test_a_wrong_step_is_found(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode_measure.inputs

    def others(ids, places, past, seed):
        return right([id ^ 1 for id in ids], places, past, seed)

    monkeypatch.setattr(decode_measure, "inputs", others)
    with pytest.raises(RunFailed, match="nothing is measured"):
        check_steps(policy, 0)


def test_the_line_of_a_figure() -> None:
    """8 GB at 4,000 GB/s are 2 ms, half of 4."""
    found = Timed(256, 4096, 4.0, 5.12, 8_000_000_000, 0)
    assert line(found, 4000.0) == (
        "  256 x 4096 tokens    4.000 ms a step, 50.0% of copy, with the host    5.120 ms, "
        "   50,000 tokens/s"
    )


class FakeEngine:
    """Prefills in 5 s, then takes 10 ms a step; its log-probs are those of ``policy``, moved."""

    def __init__(self, policy: Policy, prompt: np.ndarray, moved: float = 0.0) -> None:
        self.policy, self.prompt, self.moved = policy, prompt, moved

    def run(self, tokens: int, logprobs: bool) -> Decoded:
        ids = np.random.default_rng(1).integers(self.policy.config.vocab_size, size=tokens)
        found = None
        if logprobs:
            every = score(self.policy, torch.from_numpy(np.concatenate((self.prompt, ids))))
            found = every.logprobs[-tokens:].float().numpy() + np.float32(self.moved)
        return Decoded(5 + tokens * 0.01, ids, found)


def test_tokens_beside_a_peer_by_hand() -> None:
    """256 prompts of 4,096 tokens are 64 prefill steps of 16,384: 144 tokens, with 384 timed ones
    behind them the middle is at 336."""
    assert decode_peers.few_tokens(256, 4096) == 144
    assert decode_peers.prompt_length(256, 4096) == 4096 - 336
    with pytest.raises(UserError, match=r"context=200: beside a peer it must be above 208, or"):
        decode_peers.prompt_length(1, 200)


def test_prefill_is_subtracted(policy: Policy) -> None:
    prompts = decode_peers.draw_prompts(policy.config.vocab_size, 2, 9, 0)
    engine = FakeEngine(policy, prompts[0])
    steps = iter([2.0, 4.0, 4.0, 5.0, 5.0, 8.0])
    found = list(decode_peers.compare(engine, policy, prompts, 217, "eager", lambda: next(steps)))
    assert [one.logprobs for one in found] == [True, False]
    assert [one.milliseconds for one in found] == pytest.approx([10, 10])
    assert (found[0].ours, found[1].ours) == ((2.0, 4.0, 4.0), (5.0, 5.0, 8.0))
    assert found[0].error == 0 and found[1].error is None
    assert peer_line(found[0], 256) == (
        "vllm, eager, with log-probs: 10.000 ms a step (10.000, 10.000), 25,600 tokens/s, "
        "2.50 times ours, log-probs 0.0000 nat off"
    )


@pytest.mark.parametrize("moved", [0.03, float("nan")])
def test_a_peer_on_other_weights_is_not_measured(policy: Policy, moved: float) -> None:
    prompts = decode_peers.draw_prompts(policy.config.vocab_size, 1, 9, 0)
    engine = FakeEngine(policy, prompts[0], moved)
    with pytest.raises(RunFailed, match=r"vllm \(graphs\): log-probs .* nat off ours"):
        next(decode_peers.compare(engine, policy, prompts, 217, "graphs", lambda: 1.0))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_the_process_says_so() -> None:
    start = partial(DecodeEngine, "nowhere", [np.zeros(1, np.int64)], 1, True)
    with pytest.raises(UserError, match="vllm cannot be imported here"), beside(start):
        pass


def test_a_process_that_ends_is_one_line() -> None:
    with pytest.raises(RunFailed, match="its process ended"), beside(partial(os._exit, 3)):
        pass
