"""Off-policy corrections on ratios one can check by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from farhorizon.rl.corrections import (
    CORRECTIONS,
    Correction,
    decoupled,
    icepop,
    sequence_mask,
    sequence_reject,
    sequence_truncate,
    token_mask,
    token_truncate,
)
from farhorizon.rl.losses import cispo, gspo, ppo_clip, reinforce


def correct(
    function: Any, ratios: Sequence[float], sequences: Sequence[int], **ends: float
) -> Correction:
    """Of tokens with these ratios of proximal to behaviour policy; one more, masked, is NaN."""
    behavior = torch.tensor([-2.0] * len(ratios) + [math.nan], dtype=torch.float64)
    proximal = behavior + torch.tensor([*ratios, 1.0], dtype=torch.float64).log()
    mask = torch.tensor([True] * len(ratios) + [False])
    ids = torch.tensor([*sequences, sequences[-1]])
    got = function(
        proximal.requires_grad_(),
        behavior,
        mask,
        sequence_ids=ids,
        denominator=len(ratios),
        **ends,
    )
    assert not got.weights.requires_grad and got.weights[-1] == 0.0
    return got


RATIOS, SEQUENCES = [0.4, 1.0, 2.5, 6.0, 1.5, 1.2], [0, 0, 0, 1, 2, 2]
# The products of the three sequences are 1.0, 6.0, 1.8, their geometric means 1.0, 6.0, 1.342.


@pytest.mark.parametrize(
    ("function", "ends", "weights", "removed"),
    [
        (token_truncate, {}, [0.4, 1.0, 2.0, 2.0, 1.5, 1.2], 2),
        (token_truncate, {"low": 0.5, "high": 3.0}, [0.5, 1.0, 2.5, 3.0, 1.5, 1.2], 2),
        (token_mask, {}, [0.4, 1.0, 0.0, 0.0, 1.5, 1.2], 2),
        (token_mask, {"low": 1.1, "high": 3.0}, [0.0, 0.0, 2.5, 0.0, 1.5, 1.2], 3),
        (icepop, {}, [0.0, 1.0, 2.5, 0.0, 1.5, 1.2], 2),
        (sequence_truncate, {}, [1.0, 1.0, 1.0, 2.0, 1.8, 1.8], 1),
        (sequence_truncate, {"low": 1.5, "high": 1.7}, [1.5, 1.5, 1.5, 1.7, 1.7, 1.7], 6),
        (sequence_mask, {}, [1.0, 1.0, 1.0, 0.0, 1.8, 1.8], 1),
        (sequence_mask, {"low": 1.1, "high": 7.0}, [0.0, 0.0, 0.0, 6.0, 1.8, 1.8], 3),
        (sequence_reject, {}, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3),
        (sequence_reject, {"low": 0.5, "high": 1.4}, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0], 1),
        (sequence_reject, {"low": 1.3, "high": 1.4}, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], 4),
    ],
)
def test_weights_and_what_was_removed(
    function: Any, ends: dict[str, float], weights: list[float], removed: int
) -> None:
    got = correct(function, RATIOS, SEQUENCES, **ends)
    assert got.weights[:-1].tolist() == pytest.approx(weights, rel=1e-12)
    assert float(got.metrics["correction_removed"]) == pytest.approx(removed / 6)
    assert float(got.metrics["correction_weight"]) == pytest.approx(sum(weights) / 6)


def test_ranges_are_those_that_the_documents_name() -> None:
    ranges = {}
    for name, function in CORRECTIONS.items():
        own = inspect.signature(function).parameters
        ranges[name] = (own["low"].default, own["high"].default)
    assert ranges == {
        "token_truncate": (0.0, 2.0),
        "token_mask": (0.0, 2.0),
        "icepop": (0.5, 5.0),
        "sequence_truncate": (0.0, 2.0),
        "sequence_mask": (0.0, 3.0),
        "sequence_reject": (0.99, 1.01),
    }


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_the_policys_own_samples_nothing_is_removed(name: str) -> None:
    got = correct(CORRECTIONS[name], [1.0] * 5, [0, 0, 1, 2, 2])
    assert got.weights.tolist() == [1.0] * 5 + [0.0]
    assert float(got.metrics["correction_removed"]) == 0.0


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("ends", [{"low": 1.0}, {"high": 1.0}])
def test_a_ratio_at_the_end_of_the_range_is_within(name: str, ends: dict[str, float]) -> None:
    got = correct(CORRECTIONS[name], [1.0, 1.0], [0, 0], **ends)
    assert got.weights.tolist() == [1.0, 1.0, 0.0] and float(got.metrics["correction_removed"]) == 0


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("apart", [-math.inf, -1e4, 1e4, math.inf])
def test_extreme_ratios_give_finite_weights(name: str, apart: float) -> None:
    proximal = torch.tensor([min(apart, -1.0), -1.0])
    behavior = torch.tensor([-max(apart, 1.0), -1.0])
    yes = torch.tensor([True, True])
    ids = torch.tensor([0, 1])
    got = CORRECTIONS[name](proximal, behavior, yes, sequence_ids=ids, denominator=2)
    assert got.weights.isfinite().all() and got.weights[1] == 1.0
    if apart > 0:
        assert float(got.metrics["correction_removed"]) == 0.5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_nan_is_not_removed_but_shown(name: str) -> None:
    one = torch.tensor([-1.0, -1.0])
    bad = torch.tensor([math.nan, -1.0])
    yes = torch.tensor([True, True])
    ids = torch.tensor([0, 1])
    got = CORRECTIONS[name](one, bad, yes, sequence_ids=ids, denominator=2)
    assert got.weights[0].isnan() and got.weights[1] == 1.0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_all_masked_removes_nothing(name: str) -> None:
    nan = torch.tensor([math.nan] * 3)
    no = torch.zeros(3, dtype=torch.bool)
    got = CORRECTIONS[name](nan, nan, no, sequence_ids=torch.tensor([0, 0, 1]), denominator=1)
    assert got.weights.tolist() == [0.0] * 3
    assert [float(value) for value in got.metrics.values()] == [0.0, 0.0]


def test_length_does_not_reject_a_sequence() -> None:
    """A product of many ratios just above 1 is far above 1; their geometric mean is not."""
    many = [1.005] * 1000
    assert correct(sequence_mask, many, [0] * 1000).weights[0] == 0.0
    assert correct(sequence_reject, many, [0] * 1000).weights[0] == 1.0


def three(seed: int = 0, tokens: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, tokens, generator=random, dtype=torch.float64)
    behavior = draw() * 0.3 - 2
    proximal = behavior + 0.5 * draw()
    policy = proximal + 0.2 * draw()
    return policy, proximal, behavior, draw(), torch.arange(tokens) // 4


@pytest.mark.parametrize("high", [1.2, 1e3])
def test_decoupled_ppo_as_written_out(high: float) -> None:
    """sum of clip(prox / behave) * min(r A, clip(r) A) with r = policy / prox, by autograd."""
    policy, proximal, behavior, advantages, ids = three()
    logprobs = policy.clone().requires_grad_()
    got = decoupled(
        ppo_clip,
        partial(token_truncate, high=high),
        logprobs,
        proximal,
        behavior,
        advantages,
        torch.ones(12, dtype=torch.bool),
        sequence_ids=ids,
        denominator=10,
    )
    (gradient,) = torch.autograd.grad(got.loss, logprobs)
    again = policy.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(12):
        ratio = torch.exp(again[t] - proximal[t])
        weight = min(math.exp(float(proximal[t] - behavior[t])), high)
        lower = torch.min(ratio * advantages[t], ratio.clamp(0.8, 1.2) * advantages[t])
        total = total - weight * lower / 10
    (want,) = torch.autograd.grad(total, again)
    assert got.loss.item() == pytest.approx(total.item(), rel=1e-12)
    assert torch.allclose(gradient, want, rtol=1e-12)
    apart = policy - behavior
    assert float(got.maxima["log_ratio_max"]) == pytest.approx(float(apart.abs().max()))
    assert float(got.metrics["log_ratio_abs"]) == pytest.approx(float(apart.abs().sum() / 10))


@pytest.mark.parametrize("loss", [ppo_clip, cispo, reinforce])
def test_before_the_first_step_the_gradient_is_that_of_importance_sampling(loss: Any) -> None:
    policy, _, behavior, advantages, ids = three(1)
    logprobs = policy.clone().requires_grad_()
    got = decoupled(
        loss,
        partial(token_truncate, high=1.3),
        logprobs,
        logprobs,
        behavior,
        advantages,
        torch.ones(12, dtype=torch.bool),
        sequence_ids=ids,
        denominator=12,
    )
    (gradient,) = torch.autograd.grad(got.loss, logprobs)
    weights = (policy - behavior).exp().clamp(max=1.3)
    assert torch.allclose(gradient, -weights * advantages / 12, rtol=1e-12)


def test_weights_of_an_aggregation_multiply_those_of_the_correction() -> None:
    policy, proximal, behavior, advantages, ids = three(2)
    logprobs = policy.clone().requires_grad_()
    extra = torch.linspace(0.5, 2, 12, dtype=torch.float64)
    yes = torch.ones(12, dtype=torch.bool)
    kwargs: Any = {"sequence_ids": ids, "denominator": 12}
    got = decoupled(
        gspo, icepop, logprobs, proximal, behavior, advantages, yes, weights=extra, **kwargs
    )
    own = icepop(proximal, behavior, yes, **kwargs).weights
    want = gspo(logprobs, proximal, advantages, yes, weights=own * extra, **kwargs)
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-12)
    assert got.metrics["clip_fraction"] == want.metrics["clip_fraction"]


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("which", ["proximal", "behavior", "both"])
def test_a_token_that_a_policy_never_gives_is_removed_and_no_other(name: str, which: str) -> None:
    never, usual = torch.full((4,), -math.inf), torch.tensor([-2.0, -2.0, -1.0, -2.0])
    never[1:3] = usual[1:3]
    proximal = usual if which == "behavior" else never
    behavior = usual if which == "proximal" else never
    yes = torch.tensor([True, True, True, False])  # the last is not trained, and no part of a count
    whole: Any = {"sequence_ids": torch.zeros(4, dtype=torch.int64), "denominator": 3}
    got = CORRECTIONS[name](proximal, behavior, yes, **whole)
    assert got.weights.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert float(got.metrics["correction_removed"]) == pytest.approx(1 / 3)
    for loss in (ppo_clip, gspo, cispo, reinforce):
        logprobs = usual.clone().requires_grad_()
        given = (logprobs, proximal, behavior, torch.ones(4), yes)
        out = decoupled(loss, CORRECTIONS[name], *given, **whole)
        (gradient,) = torch.autograd.grad(out.loss, logprobs)
        assert out.loss.isfinite() and gradient.isfinite().all() and gradient[0] == 0.0
        assert gradient[1:3].all() and gradient[3] == 0.0
        told = [*out.metrics.values(), *out.maxima.values()]
        assert all(value.isfinite() for value in told)
        assert float(out.metrics["infinite_logprobs"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_without_tokens_there_is_nothing_to_correct(name: str) -> None:
    none, no = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.bool)
    whole: Any = {"sequence_ids": torch.zeros(0, dtype=torch.int64), "denominator": 1}
    out = decoupled(ppo_clip, CORRECTIONS[name], none, none, none, none, no, **whole)
    assert out.loss.item() == 0.0
    assert all(float(v) == 0.0 for v in [*out.metrics.values(), *out.maxima.values()])
