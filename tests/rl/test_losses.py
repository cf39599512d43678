"""What the losses share beyond their formulas, on numbers one can check by hand."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farhorizon.rl import losses
from farhorizon.rl.losses import (
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    k15,
    k25,
    nll,
    ppo_clip,
    reinforce,
    reinforce_pp,
    rloo,
    sapo,
    value_loss,
)
from farhorizon.rl.types import LossOutput

ALL = [ppo_clip, grpo, dr_grpo, dapo, reinforce_pp, gspo, cispo, sapo, k25, k15, reinforce, rloo]


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
    """C20."""
    assert _grpo(-1.0, 10.0, dual_clip=3.0) == pytest.approx((3.0, 0.0, 1.0), abs=1e-4)
    assert _grpo(-1.0, 10.0) == pytest.approx((10.0, 10.0, 0.0), abs=1e-4)
    assert _grpo(-1.0, 2.0, dual_clip=3.0) == pytest.approx((2.0, 2.0, 0.0), abs=1e-4)
    for kwargs in ({}, {"dual_clip": 3.0}):
        assert _grpo(1.0, 10.0, **kwargs) == pytest.approx((-1.2, 0.0, 1.0), abs=1e-4)


def test_a_huge_ratio_stays_finite() -> None:
    loss, gradient, _ = _grpo(-1.0, math.exp(60.0))
    assert math.isfinite(loss) and gradient == 0.0


def test_likelihood_of_the_tokens_under_the_mask() -> None:
    logprobs = torch.tensor([math.nan, -1.0, math.inf, -3.0, -math.inf], requires_grad=True)
    nan = torch.full((5,), math.nan)
    out = nll(
        logprobs,
        nan,
        nan,
        torch.tensor([False, True, False, True, True]),
        sequence_ids=torch.zeros(5, dtype=torch.int64),
        denominator=2,
        weights=torch.tensor([math.nan, 1.0, math.nan, 0.5, 0.0]),
    )
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert out.loss.item() == 1.25 and gradient.tolist() == [0.0, -0.5, 0.0, -0.25, 0.0]


@pytest.mark.parametrize("short", ["behavior_logprobs", "advantages", "mask", "sequence_ids"])
@pytest.mark.parametrize("loss", [grpo, gspo, cispo, sapo, k25, k15, reinforce, nll])
def test_an_array_of_one_is_not_spread_over_the_tokens(
    loss: Callable[..., LossOutput], short: str
) -> None:
    given = {
        "behavior_logprobs": torch.zeros(3),
        "advantages": torch.ones(3),
        "mask": torch.ones(3, dtype=torch.bool),
        "sequence_ids": torch.zeros(3, dtype=torch.int64),
    }
    assert math.isfinite(loss(torch.zeros(3), **given, denominator=3).loss.item())
    given[short] = given[short][:1]
    with pytest.raises(AssertionError):
        loss(torch.zeros(3), **given, denominator=3)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_value_of_one_is_not_spread_over_the_tokens(short: int) -> None:
    given = [torch.zeros(3), torch.zeros(3), torch.ones(3)]
    mask = torch.ones(3, dtype=torch.bool)
    assert value_loss(given[0], given[1], given[2], mask, denominator=3).loss.item() == 0.5
    given[short] = given[short][:1]
    with pytest.raises(AssertionError):
        value_loss(given[0], given[1], given[2], mask, denominator=3)


def test_values_outside_of_the_mask_do_not_count() -> None:
    """Squares 4 and, moved by at most 0.2, (0.2 - 3)^2; halved, by 2 tokens."""
    values = torch.tensor([math.nan, 2.0, 5.0, 1.0], requires_grad=True)
    mask = torch.tensor([False, True, False, True])
    old, returns = torch.tensor([0.0, 2.0, math.inf, 0.0]), torch.tensor([1.0, 0.0, 1.0, 3.0])
    out = value_loss(values, old, returns, mask, denominator=2)
    (gradient,) = torch.autograd.grad(out.loss, values)
    assert out.loss.item() == pytest.approx((4 + 2.8**2) / 4)
    assert gradient.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert float(out.metrics["value_error"]) == pytest.approx((4 + 4) / 4)
    assert float(out.metrics["value_clip_fraction"]) == 0.5
    assert not any(metric.requires_grad for metric in out.metrics.values())


def test_likelihood_without_weights_leaves_out_what_is_masked() -> None:
    logprobs = torch.tensor([math.nan, -1.0, -math.inf, -3.0], requires_grad=True)
    mask = torch.tensor([False, True, False, True])
    ids = torch.zeros(4, dtype=torch.int64)
    out = nll(logprobs, logprobs, logprobs, mask, sequence_ids=ids, denominator=2)
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert out.loss.item() == 2.0 and gradient.tolist() == [0.0, -0.5, 0.0, -0.5]


@pytest.mark.parametrize("loss", [grpo, gspo, cispo, sapo, k25, k15, reinforce, nll])
def test_a_loss_has_the_type_of_its_log_probs(loss: Callable[..., LossOutput]) -> None:
    given = torch.full((3,), -1.0)
    mask, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    out = loss(given, given, given, mask, sequence_ids=ids, denominator=3)
    assert out.loss.dtype == torch.float32


@pytest.mark.parametrize("loss", [grpo, cispo, k25])
def test_a_token_of_weight_zero_is_not_counted_as_clipped(loss: Callable[..., LossOutput]) -> None:
    behavior = torch.full((2,), -9.0)
    out = loss(
        behavior + 3.0,  # a ratio of 20
        behavior,
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        sequence_ids=torch.zeros(2, dtype=torch.int64),
        denominator=2,
        weights=torch.tensor([1.0, 0.0]),
    )
    assert float(out.metrics["clip_fraction"]) == 0.5 == float(out.metrics["clip_fraction_high"])


@pytest.mark.parametrize("loss", [grpo, gspo, cispo, k25])
def test_clipping_is_told_by_side(loss: Callable[..., LossOutput]) -> None:
    """Five sequences of a token: two below the range, one above, one inside, one masked."""
    ratios = torch.tensor([0.1, 0.2, 1.5, 1.0, 9.0], requires_grad=True)
    out = loss(
        ratios.log(),
        torch.zeros(5),
        torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0]),
        torch.arange(5) < 4,
        sequence_ids=torch.arange(5),
        denominator=4,
        clip_low=0.5,
        clip_high=0.2,
    )
    assert not any(x.requires_grad for x in (*out.metrics.values(), *out.maxima.values()))
    sides = {side: float(out.metrics[f"clip_fraction{side}"]) for side in ("", "_low", "_high")}
    assert sides == {"": 0.75, "_low": 0.5, "_high": 0.25}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "reinforce_pp", "rloo"])
def test_a_named_objective_says_where_it_is_from(name: str) -> None:
    own = getattr(losses, name)
    assert own.__name__ == name and own.__module__ == losses.__name__
    assert own.__doc__ not in (None, ppo_clip.__doc__, reinforce.__doc__)
    assert re.search(r"arXiv:[0-9]{4}[.][0-9]{5}", own.__doc__)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "reinforce_pp", "rloo"])
def test_a_named_objective_passes_on_all_that_it_is_given(name: str) -> None:
    behavior = torch.full((4,), -2.0)
    logprobs = behavior + torch.tensor([0.5, -0.5, 1.5, 0.1])
    given: Any = {
        "behavior_logprobs": behavior,
        "advantages": torch.tensor([1.0, -1.0, -1.0, 1.0]),
        "mask": torch.tensor([True, True, True, False]),
        "sequence_ids": torch.tensor([0, 0, 1, 1]),
        "denominator": 7,
        "weights": torch.tensor([0.5, 1.0, 2.0, 3.0]),
    }
    ends: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}
    ends = ends if name != "rloo" else {}
    base: Callable[..., LossOutput] = reinforce if name == "rloo" else ppo_clip
    got, want = (f(logprobs, **given, **ends).loss.item() for f in (getattr(losses, name), base))
    assert got == want != base(logprobs, **{**given, "weights": None}, **ends).loss.item()


@pytest.mark.parametrize("loss", [*ALL, nll])
def test_without_tokens_every_loss_is_zero(loss: Callable[..., LossOutput]) -> None:
    none = torch.zeros(0, requires_grad=True)
    no, ids = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    out = loss(none, none.detach(), none.detach(), no, sequence_ids=ids, denominator=1)
    (gradient,) = torch.autograd.grad(out.loss, none)
    assert out.loss.item() == 0.0 and gradient.shape == (0,)
    assert all(float(value) == 0.0 for value in [*out.metrics.values(), *out.maxima.values()])


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("which", ["policy", "behavior", "both"])
@pytest.mark.parametrize("loss", [*ALL, nll])
def test_a_token_that_a_policy_never_gives_is_out_and_counted(
    loss: Callable[..., LossOutput], which: str, advantage: float
) -> None:
    """The others have the gradient that they have without it, in its sequence and beside it."""
    behavior = torch.tensor([-1.0, -2.0, -1.5, -0.5])
    logprobs = behavior + torch.tensor([0.3, -0.1, 0.05, 0.2])
    ids, yes = torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool)
    advantages = torch.full((4,), advantage)
    never = torch.tensor([True, False, False, False])
    got = []
    for bad in (True, False):
        mine = torch.where(never & bad & (which != "behavior"), -math.inf, logprobs)
        theirs = torch.where(never & bad & (which != "policy"), -math.inf, behavior)
        mine.requires_grad_()
        mask = yes if bad else ~never
        out = loss(mine, theirs, advantages, mask, sequence_ids=ids, denominator=4)
        (gradient,) = torch.autograd.grad(out.loss, mine)
        got.append((out, gradient))
    (out, gradient), (without, want) = got
    if loss is nll and which == "behavior":
        assert out.loss.item() == pytest.approx(-logprobs.sum().item() / 4)  # not in it
        return
    assert out.loss.item() == without.loss.item() and torch.equal(gradient, want)
    assert gradient.isfinite().all() and gradient[0] == 0.0
    told = [*out.metrics.values(), *out.maxima.values()]
    assert all(value.isfinite() for value in told)
    counted = float(out.metrics["infinite_logprobs"])
    assert counted == 0.25 and float(without.metrics["infinite_logprobs"]) == 0.0


@pytest.mark.parametrize("tau", [0.01, 0.5])
@pytest.mark.parametrize("loss", [k25, k15])
def test_a_pull_has_a_bound(loss: Callable[..., LossOutput], tau: float) -> None:
    """Value and slope of one token that is far off are those at 20 nats."""
    seen = []
    for apart in (20.0, 21.0, 1e4, 1e30):
        for sign in (1.0, -1.0):
            logprobs = torch.tensor([min(sign * apart, 0.0)], requires_grad=True)
            behavior = torch.tensor([-max(sign * apart, 0.0)])
            own = (torch.zeros(1), torch.tensor([True]))
            out = loss(
                *(logprobs, behavior, *own),
                sequence_ids=torch.tensor([0]),
                denominator=1,
                tau=tau,
            )
            (slope,) = torch.autograd.grad(out.loss, logprobs)
            seen.append((out.loss.item(), sign * slope.item()))
    value, slope = (400 * tau, 40 * tau) if loss is k25 else (200 * tau, 20 * tau)
    assert seen == [pytest.approx((value, slope))] * 8


def test_distances_have_bounds_and_largest_values() -> None:
    logprobs = torch.tensor([-1e30, -1.0, -0.5])
    behavior = torch.tensor([-1.0, -2.0, -0.5])
    yes, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    out = ppo_clip(logprobs, behavior, torch.ones(3), yes, sequence_ids=ids, denominator=3)
    told = {name: float(value) for name, value in (*out.metrics.items(), *out.maxima.items())}
    assert told["log_ratio_abs"] == pytest.approx(21 / 3)
    assert told["kl"] == pytest.approx((19 + math.e - 2) / 3, rel=1e-6)
    assert told["ratio_max"] == pytest.approx(math.e)
    assert (told["log_ratio_max"], told["kl_max"]) == (20.0, pytest.approx(19.0))


def test_sapo_by_itself_has_the_temperatures_that_the_documents_name() -> None:
    logprobs, behavior = torch.tensor([-1.0, -1.0]), torch.tensor([-1.3, -0.8])
    whole: Any = {"sequence_ids": torch.zeros(2, dtype=torch.int64), "denominator": 1}
    for advantage in (1.0, -1.0):
        given = (logprobs, behavior, torch.full((2,), advantage), torch.ones(2).bool())
        own, named = sapo(*given, **whole), sapo(*given, **whole, tau_pos=1.0, tau_neg=1.05)
        assert own.loss.item() == named.loss.item() != 0.0


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        *((named, 0.2, 0.2) for named in (ppo_clip, grpo, dr_grpo, reinforce_pp)),
        (dapo, 0.2, 0.28),
        (gspo, 3e-4, 4e-4),
        (k25, 0.5, 1.0),
    ],
)
def test_ranges_by_themselves_are_those_that_the_documents_name(
    loss: Callable[..., LossOutput], low: float, high: float
) -> None:
    usual = inspect.signature(loss).parameters
    assert [usual[f"clip_{side}"].default for side in ("low", "high")] == [low, high]
