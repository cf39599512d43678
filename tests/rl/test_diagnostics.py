"""Ranges of positions, spread of advantages and norms of parts, on numbers checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rl.diagnostics import metrics, tally
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
    return MicroBatch(zeros.astype(np.int64), borders, mask, zeros, zeros, ids)


def test_positions_count_from_the_start_of_their_own_sequence() -> None:
    trained = [255, 256, 299, 300 + 1, 300 + 256]  # of 300 tokens, then of 1000
    batch = packed([300, 1000], trained)
    behavior = torch.zeros(5)
    ratios = torch.tensor([1.0, 2.0, 4.0, 3.0, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, 3.0, 1.0])
    ones = torch.ones(5, dtype=torch.bool)
    sums = tally(batch, np.array(trained), ratios.log(), behavior, advantages, ones)
    found = metrics(sums.tolist())

    def kl(ratio: float) -> float:
        return ratio - 1 - math.log(ratio)

    assert set(found) == {
        *("ratio_from_0", "kl_from_0", "ratio_from_256", "kl_from_256"),
        *("advantage_mean", "advantage_std"),
    }
    assert found["ratio_from_0"] == pytest.approx(2.0)  # of 1 and 3
    assert found["ratio_from_256"] == pytest.approx(6.5 / 3)
    assert found["kl_from_0"] == pytest.approx((kl(1.0) + kl(3.0)) / 2)
    assert found["kl_from_256"] == pytest.approx((kl(2.0) + kl(4.0) + kl(0.5)) / 3)
    assert found["advantage_mean"] == pytest.approx(1.0)
    assert found["advantage_std"] == pytest.approx(math.sqrt(8 / 5))
    halves = [
        tally(batch, np.array(trained)[s], ratios.log()[s], behavior[s], advantages[s], ones[s])
        for s in (slice(0, 2), slice(2, 5))
    ]
    assert metrics((halves[0] + halves[1]).tolist()) == pytest.approx(found)


def test_what_is_not_trained_counts_nowhere() -> None:
    nan = torch.tensor([math.nan])
    none = torch.zeros(1, dtype=torch.bool)
    sums = tally(packed([2], []), np.array([1]), nan, nan, nan, none)
    assert metrics(sums.tolist()) == {}


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
