"""Counter-based sampling: reproducible streams, exact log-probs, the right distribution."""

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.rollout.sampler import sample, stream_key, uniforms


def _rows(logits: list[float], count: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    return (torch.tensor([logits]).repeat(count, 1), np.full(count, 7, np.uint64), np.arange(count))


def test_uniforms_are_splitmix64() -> None:
    # The first outputs of the published splitmix64 with seed 1234567.
    raw = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    assert got.tolist() == [(x >> 11) * 2.0**-53 for x in raw]


def test_stream_keys_differ_in_every_part() -> None:
    keys = {
        stream_key(seed, task, sibling)
        for seed in (0, 1)
        for task in ("a", "a1")
        for sibling in (0, 1, 11)
    }
    assert len(keys) == 12
    assert stream_key(3, "echo/train/5", 2) == 6195212634810374758


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.142932), (1.0, -0.407606)])
def test_logprobs_are_of_the_tempered_distribution(temperature: float, expected: float) -> None:
    """C05: the side of the rollout."""
    logits, keys, positions = _rows([2.0, 1.0, 0.0], 64)
    tokens, logprobs = sample(logits, temperature, keys, positions)
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs[tokens == 0], expected, atol=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    logits, keys, positions = _rows([np.log(0.5), np.log(0.3), -np.inf, np.log(0.2)], 40_000)
    tokens, _ = sample(logits, 1.0, keys, positions)
    share = np.bincount(tokens, minlength=4) / 40_000
    np.testing.assert_allclose(share, [0.5, 0.3, 0.0, 0.2], atol=0.01)
    assert share[2] == 0.0


def test_greedy_takes_the_largest_and_reports_temperature_one() -> None:
    logits, keys, positions = _rows([1.0, 3.0, 0.0], 5)
    tokens, logprobs = sample(logits, 0.0, keys, positions)
    assert tokens.tolist() == [1] * 5
    np.testing.assert_allclose(logprobs, 3 - np.log(np.exp([1.0, 3.0, 0.0]).sum()), atol=1e-6)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(17, 100, generator=generator)
    keys = np.array([stream_key(0, "t", i) for i in range(17)], np.uint64)
    positions = np.arange(17) * 3
    heat = np.where(np.arange(17) % 3 == 0, 0.0, 0.7)
    tokens, logprobs = sample(logits, heat, keys, positions)
    order = np.random.default_rng(1).permutation(17)
    for i in order:
        one = sample(logits[i : i + 1], float(heat[i]), keys[i : i + 1], positions[i : i + 1])
        assert one[0][0] == tokens[i] and one[1][0] == logprobs[i]


def test_logits_that_are_not_finite_stop_the_run() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    with pytest.raises(RunFailed, match="logits of row 1 are not finite"):
        sample(logits, 1.0, np.zeros(3, np.uint64), np.zeros(3, np.int64))


@pytest.mark.parametrize("heat", [1e-3, 1e-40, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_nearly_greedy(heat: float) -> None:
    logits = torch.tensor([[3.0, 50.0, -7.0], [0.5, 0.25, 0.0]])
    keys, positions = np.array([1, 2], np.uint64), np.array([5, 6])
    tokens, logprobs = sample(logits, heat, keys, positions)
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]
