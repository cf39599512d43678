"""Ranges of positions, spread of advantages and norms of parts, on numbers checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rl.diagnostics import EDGES, StepMetrics, Tally, over_steps, stacked, tally
from farhorizon.rl.gradients import parts_of
from farhorizon.rl.types import MicroBatch


def packed(lengths: list[int], trained: list[int]) -> MicroBatch:
    """Sequences of the given lengths of which the given positions are trained."""
    total = sum(lengths)
    zeros = np.zeros(total, np.float32)
    mask = np.zeros(total, np.bool_)
    mask[trained] = True
    ids = np.repeat(np.arange(len(lengths)), lengths)
    borders = np.cumsum([0, *lengths]).astype(np.int32)
    kinds = ("",) * len(lengths)
    return MicroBatch(zeros.astype(np.int64), borders, mask, zeros, zeros, ids, kinds)


def test_positions_count_from_the_start_of_their_own_sequence() -> None:
    trained = [255, 256, 299, 300 + 1, 300 + 256]  # of 300 tokens, then of 1000
    batch = packed([300, 1000], trained)
    behavior = torch.zeros(5)
    ratios = torch.tensor([1.0, 2.0, 4.0, 3.0, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, 3.0, 1.0])
    ones = torch.ones(5, dtype=torch.bool)
    whole = tally(batch, np.array(trained), ratios.log(), behavior, advantages, ones)
    found = whole.metrics()

    def kl(ratio: float) -> float:
        return ratio - 1 - math.log(ratio)

    assert set(found) == {
        *("ratio_from_0", "kl_from_0", "ratio_from_256", "kl_from_256"),
        *("ratio_from_0_max", "kl_from_0_max", "ratio_from_256_max", "kl_from_256_max"),
        *("advantage_mean", "advantage_std"),
    }
    assert found["ratio_from_0"] == pytest.approx(2.0)  # of 1 and 3
    assert found["ratio_from_256"] == pytest.approx(6.5 / 3)
    assert found["kl_from_0"] == pytest.approx((kl(1.0) + kl(3.0)) / 2)
    assert found["kl_from_256"] == pytest.approx((kl(2.0) + kl(4.0) + kl(0.5)) / 3)
    assert found["ratio_from_0_max"] == pytest.approx(3.0)
    assert found["ratio_from_256_max"] == pytest.approx(4.0)
    assert found["kl_from_0_max"] == pytest.approx(kl(3.0))
    assert found["kl_from_256_max"] == pytest.approx(kl(4.0))
    assert found["advantage_mean"] == pytest.approx(1.0)
    assert found["advantage_std"] == pytest.approx(math.sqrt(8 / 5))
    halves = [
        tally(batch, np.array(trained)[s], ratios.log()[s], behavior[s], advantages[s], ones[s])
        for s in (slice(0, 2), slice(2, 5))
    ]
    assert halves[0].joined(halves[1]).metrics() == pytest.approx(found)
    assert Tally.empty().joined(whole).metrics() == found


def test_what_is_not_trained_counts_nowhere() -> None:
    nan = torch.tensor([math.nan])
    none = torch.zeros(1, dtype=torch.bool)
    assert tally(packed([2], []), np.array([1]), nan, nan, nan, none).metrics() == {}
    no = torch.zeros(0)
    empty = tally(packed([2], []), np.zeros(0, np.int64), no, no, no, no > 0)
    assert empty.metrics() == {}


@pytest.mark.parametrize("far", [-math.inf, -1e30, -1e4])
def test_one_token_far_off_leaves_a_range_finite(far: float) -> None:
    """Beside a token at ratio 1; where a log-prob is infinite there is no ratio to tell."""
    logprobs, behavior = torch.tensor([far, -1.0]), torch.tensor([-1.0, -1.0])
    both = torch.ones(2, dtype=torch.bool)
    for given in ((logprobs, behavior), (behavior, logprobs)):
        found = tally(packed([3], [1, 2]), np.array([1, 2]), *given, both.float(), both).metrics()
        assert all(math.isfinite(value) for value in found.values())
        assert (found["kl_from_0_max"] == 0.0) == math.isinf(far)
    both_ways = tally(packed([3], [1, 2]), np.array([1, 2]), logprobs, logprobs, behavior, both)
    assert both_ways.metrics()["ratio_from_0"] == 1.0


def test_several_steps_count_by_their_tokens() -> None:
    """One token at KL 1 and 99 at KL 0, in two steps: 0.01; the spread of advantages is that of
    all tokens, not the mean of the spreads."""

    def step(count: int, kl: float, advantage: float, skipped: float = 0.0) -> StepMetrics:
        ones = torch.ones(count, dtype=torch.float64)
        ranges = torch.zeros(3, len(EDGES), dtype=torch.float64)
        ranges[:, 0] = torch.tensor([count, count * 1.0, count * kl])
        highest = torch.zeros(2, len(EDGES), dtype=torch.float64)
        highest[:, 0] = torch.tensor([1.0, kl])
        of_all = (ones.sum(), ones.sum() * advantage, ones.sum() * advantage**2)
        others = {"lr": kl, "grad_norm": kl, "kl_max": kl, "skipped_steps": skipped}
        own = Tally(ranges, highest, torch.stack(of_all))
        return StepMetrics(count, {"kl": kl, "loss": -kl}, others, own)

    found = over_steps([step(1, 1.0, 1.0), step(99, 0.0, 0.0)])
    for name in ("kl", "kl_from_0"):
        assert found[name] == pytest.approx(0.01), name
    assert found["loss"] == pytest.approx(-0.01)
    assert found["kl_max"] == found["kl_from_0_max"] == 1.0
    assert found["advantage_mean"] == pytest.approx(0.01)
    assert found["advantage_std"] == pytest.approx(math.sqrt(0.01 * 0.99))
    assert found["lr"] == found["grad_norm"] == 0.5
    alone = over_steps([StepMetrics(3, {"loss": 2.0}, {"skipped_steps": 0.0}, None)])
    assert alone == {"loss": 2.0, "skipped_steps": 0.0}


def test_metrics_of_micro_batches_are_matched_by_name() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    names, values = stacked([{"a": one, "b": two}, {"b": one, "a": two}])
    assert names == ["a", "b"] and values.tolist() == [[1.0, 2.0], [2.0, 1.0]]
    with pytest.raises(ValueError, match="metrics: not every micro-batch has b, c"):
        stacked([{"a": one, "b": two}, {"a": one, "c": two}])


def test_every_parameter_has_its_part() -> None:
    policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=4))
    parts = parts_of(policy)
    assert set(parts) == {name for name, _ in policy.named_parameters()}
    layer = "model.layers"
    want = {
        f"{layer}.0.self_attn.A_log": "kda",
        f"{layer}.3.self_attn.kv_b_proj.weight": "mla",
        f"{layer}.1.block_sparse_moe.gate.weight": "router",
        f"{layer}.1.block_sparse_moe.experts.w1": "experts",
        f"{layer}.1.block_sparse_moe.shared_experts.up_proj.weight": "experts",
        f"{layer}.2.self_attention_res_proj.weight": "attn_res",
        f"{layer}.2.mlp_res_norm.weight": "attn_res",
        "model.output_attn_res_proj.weight": "attn_res",
        f"{layer}.0.mlp.gate_proj.weight": "rest",
        "model.embed_tokens.weight": "rest",
        "lm_head.weight": "rest",
    }
    assert {name: parts[name] for name in want} == want
