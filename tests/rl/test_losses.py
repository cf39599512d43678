"""Losses on numbers one can check by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from farhorizon.rl.losses import grpo, nll


def _grpo(advantage: float, ratio: float, **kwargs: Any) -> tuple[float, float, float]:
    """Loss, gradient with respect to the log-prob, and clip fraction of a single token."""
    logprobs = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    out = grpo(
        logprobs,
        torch.tensor([-1.0]),
        torch.tensor([advantage]),
        torch.tensor([True]),
        sequence_ids=torch.tensor([0]),
        denominator=1,
        **kwargs,
    )
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    return out.loss.item(), gradient.item(), float(out.metrics["clip_fraction"])


def test_dual_clip_bounds_only_negative_advantages() -> None:
    assert _grpo(-1.0, 10.0, dual_clip=3.0) == pytest.approx((3.0, 0.0, 1.0), abs=1e-4)
    assert _grpo(-1.0, 10.0) == pytest.approx((10.0, 10.0, 0.0), abs=1e-4)
    assert _grpo(-1.0, 2.0, dual_clip=3.0) == pytest.approx((2.0, 2.0, 0.0), abs=1e-4)
    for kwargs in ({}, {"dual_clip": 3.0}):
        assert _grpo(1.0, 10.0, **kwargs) == pytest.approx((-1.2, 0.0, 1.0), abs=1e-4)


def test_clip_is_asymmetric() -> None:
    clip = {"clip_low": 0.1, "clip_high": 0.3}
    assert _grpo(1.0, 1.25, **clip)[0] == pytest.approx(-1.25, abs=1e-5)
    assert _grpo(1.0, 1.5, **clip)[:2] == pytest.approx((-1.3, 0.0), abs=1e-5)
    assert _grpo(-1.0, 0.85, **clip)[:2] == pytest.approx((0.9, 0.0), abs=1e-5)
    assert _grpo(-1.0, 0.95, **clip)[:2] == pytest.approx((0.95, 0.95), abs=1e-5)


def test_token_mean_over_the_global_denominator() -> None:
    # A: 2 tokens of loss 1; B: 6 tokens of loss 0; one sequence per micro-batch
    def loss(tokens: int, value: float) -> float:
        same = torch.full((tokens,), -0.5)
        return grpo(
            same,
            same,
            torch.full((tokens,), -value),
            torch.ones(tokens, dtype=torch.bool),
            sequence_ids=torch.zeros(tokens, dtype=torch.int64),
            denominator=8,
        ).loss.item()

    assert loss(2, 1.0) + loss(6, 0.0) == 0.25


def test_nothing_outside_the_mask_counts() -> None:
    nan, mask = math.nan, torch.tensor([False, True, False])
    logprobs = torch.tensor([nan, -1.0, math.inf], requires_grad=True)
    for function in (grpo, nll):
        out = function(
            logprobs,
            torch.tensor([nan, -1.0, 0.0]),
            torch.tensor([1.0, 2.0, nan]),
            mask,
            sequence_ids=torch.zeros(3, dtype=torch.int64),
            denominator=2,
        )
        (gradient,) = torch.autograd.grad(out.loss, logprobs)
        want = -1.0 if function is grpo else 0.5
        assert out.loss.item() == want
        assert gradient.tolist() == [0.0, -1.0 if function is grpo else -0.5, 0.0]
        assert all(math.isfinite(float(value)) for value in out.metrics.values())


def test_a_huge_ratio_stays_finite() -> None:
    loss, gradient, _ = _grpo(-1.0, math.exp(60.0))
    assert math.isfinite(loss) and gradient == 0.0


@pytest.mark.parametrize("which", ["logprobs", "behavior", "advantages"])
def test_nan_under_the_mask_reaches_the_gradient(which: str) -> None:
    bad, good = torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0])
    logprobs = (bad if which == "logprobs" else good).clone().requires_grad_()
    out = grpo(
        logprobs,
        bad if which == "behavior" else good,
        bad if which == "advantages" else good,
        torch.tensor([True, True]),
        sequence_ids=torch.tensor([0, 0]),
        denominator=2,
    )
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert math.isnan(out.loss.item()) and math.isnan(gradient[0].item())


def test_on_policy_pass_clips_nothing() -> None:
    logprobs = torch.randn(64)
    out = grpo(
        logprobs,
        logprobs.clone(),
        torch.randn(64),
        torch.ones(64, dtype=torch.bool),
        sequence_ids=torch.zeros(64, dtype=torch.int64),
        denominator=64,
    )
    assert float(out.metrics["clip_fraction"]) == 0.0
    assert float(out.metrics["ratio"]) == 1.0
