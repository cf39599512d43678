"""KL to a reference, entropy and the critic's loss, on numbers one can check by hand."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from farhorizon.rl.losses import value_loss
from farhorizon.rl.penalties import (
    Estimator,
    entropy_bonus,
    kl_estimate,
    kl_loss,
    kl_reward,
    sampled_weights,
    to_go,
)

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
APART = [-1.5, -0.2, 0.0, 0.3, 2.0]  # log(policy / reference)
HAND = {
    "k1": [(d, 1.0) for d in APART],
    "k2": [(d * d / 2, d) for d in APART],
    "k3": [(math.exp(-d) - 1 + d, 1 - math.exp(-d)) for d in APART],
}


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy, reference and mask, with a masked NaN in front."""
    reference = torch.linspace(-3, -1, 5, dtype=torch.float64)
    policy = reference + torch.tensor(APART, dtype=torch.float64)
    nan = torch.tensor([math.nan], dtype=torch.float64)
    mask = torch.tensor([False] + [True] * 5)
    return torch.cat([nan, policy]), torch.cat([nan, reference]), mask


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["own", "right"])
def test_values_and_gradients_by_hand(estimator: Estimator, gradient: Any) -> None:
    policy, reference, mask = tokens()
    policy.requires_grad_()
    out = kl_loss(policy, reference, mask, denominator=4, estimator=estimator, gradient=gradient)
    (slopes,) = torch.autograd.grad(out.loss, policy)
    values = sum(value for value, _ in HAND[estimator]) / 4
    assert out.loss.item() == pytest.approx(values, rel=1e-12)
    assert float(out.metrics["reference_kl"]) == pytest.approx(values, rel=1e-12)
    kind = estimator if gradient == "own" else "k2"
    want = [0.0, *(slope / 4 for _, slope in HAND[kind])]
    assert slopes.tolist() == pytest.approx(want, rel=1e-12)


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, generator=random, dtype=torch.float64)
    return logits[0], logits[1].log_softmax(-1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_expected_gradient_in_the_loss_is_that_of_the_kl(estimator: Estimator) -> None:
    """Every token once, weighed by its probability: the expectation without sampling."""
    logits, reference = distributions()
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (want,) = torch.autograd.grad(kl, logits, retain_graph=True)
    yes = torch.ones(5, dtype=torch.bool)

    def gradient(kind: Any) -> torch.Tensor:
        out = kl_loss(
            logprobs,
            reference,
            yes,
            denominator=1,
            estimator=estimator,
            gradient=kind,
            weights=logprobs.exp(),
        )
        return torch.autograd.grad(out.loss, logits, retain_graph=True)[0]

    assert torch.allclose(gradient("right"), want, rtol=1e-10)
    if estimator == "k1":
        assert torch.allclose(gradient("own"), torch.zeros(5, dtype=torch.float64), atol=1e-15)
    if estimator == "k3":
        forward = (reference.exp() * (reference - logits.log_softmax(-1))).sum()
        (other,) = torch.autograd.grad(forward, logits)
        assert torch.allclose(gradient("own"), other, rtol=1e-10)
    if estimator != "k2":
        weighed = (
            logprobs.detach().exp() * kl_estimate(logprobs, reference, yes, estimator=estimator)
        ).sum()
        assert weighed.item() == pytest.approx(kl.item(), rel=1e-10)  # an unbiased value


def test_k1_in_the_reward_gives_the_gradient_of_the_kl() -> None:
    logits, reference = distributions()
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    (want,) = torch.autograd.grad(
        0.3 * (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )
    yes = torch.ones(5, dtype=torch.bool)
    rewards = kl_reward(logprobs, reference, yes, coefficient=0.3)
    assert not rewards.requires_grad
    surrogate = -(logprobs.detach().exp() * rewards * logprobs).sum()
    (got,) = torch.autograd.grad(surrogate, logits)
    assert torch.allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_in_the_reward_by_hand(estimator: Estimator) -> None:
    policy, reference, mask = tokens()
    got = kl_reward(policy, reference, mask, coefficient=0.5, estimator=estimator)
    want = [0.0, *(-0.5 * value for value, _ in HAND[estimator])]
    assert got.tolist() == pytest.approx(want, rel=1e-12)


def test_a_reference_that_finds_a_token_far_likelier_stays_finite() -> None:
    policy = torch.tensor([-1e4], requires_grad=True)
    out = kl_loss(policy, torch.tensor([-1.0]), torch.tensor([True]), denominator=1)
    (gradient,) = torch.autograd.grad(out.loss, policy)
    assert out.loss.isfinite() and gradient.item() == pytest.approx(1 - 1e4)


@pytest.mark.parametrize("apart", [-19.0, -21.0, -100.0, -1e9])
def test_k3_is_a_distance_and_pulls_nowhere_else_however_far(apart: float) -> None:
    """Where the reference finds the token far likelier: never below 0, never pushed further."""
    policy = torch.tensor([apart], requires_grad=True)
    yes = torch.tensor([True])
    out = kl_loss(policy, torch.tensor([0.0]), yes, denominator=1, gradient="own")
    (slope,) = torch.autograd.grad(out.loss, policy)
    assert 1e8 < out.loss.item() < math.inf and -math.inf < slope.item() <= 0
    assert (slope.item() < 0) == (apart > -20)


@pytest.mark.parametrize("gradient", ["own", "right"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_token_of_weight_zero_pulls_nowhere(estimator: Estimator, gradient: Any) -> None:
    policy = torch.tensor([-math.inf, -1.5], requires_grad=True)
    reference, yes = torch.tensor([-1.0, -1.0]), torch.tensor([True, True])
    out = kl_loss(
        *(policy, reference, yes),
        denominator=1,
        estimator=estimator,
        gradient=gradient,
        weights=torch.tensor([0.0, 1.0]),
    )
    (slopes,) = torch.autograd.grad(out.loss, policy)
    assert out.loss.isfinite() and slopes[0] == 0.0 and slopes[1].isfinite() and slopes[1] != 0


def test_entropy_bonus_by_hand() -> None:
    entropy = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    out = entropy_bonus(entropy, mask, denominator=8)
    (gradient,) = torch.autograd.grad(out.loss, entropy)
    assert out.loss.item() == -0.5 and gradient.tolist() == [-0.125, 0.0, -0.125]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # has not moved
        (1.5, 1.0, 3.0, 1.62, 0.0),  # too far towards the target: (1.2 - 3)^2 / 2
        (0.5, 1.0, 3.0, 3.125, -2.5),  # away from it: its own error is the larger
        (1.1, 1.0, 1.1, 0.0, 0.0),
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, slope: float
) -> None:
    nan = math.nan
    values = torch.tensor([nan, value], dtype=torch.float64, requires_grad=True)
    out = value_loss(
        values,
        torch.tensor([nan, old], dtype=torch.float64),
        torch.tensor([nan, target], dtype=torch.float64),
        torch.tensor([False, True]),
        denominator=4,
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    assert out.loss.item() == pytest.approx(loss / 4)
    assert gradient.tolist() == pytest.approx([0.0, slope / 4])
    assert float(out.metrics["value_clip_fraction"]) == (0.25 if slope == 0.0 < loss else 0.0)
    assert float(out.metrics["value_error"]) == pytest.approx((value - target) ** 2 / 8)
    assert not any(metric.requires_grad for metric in out.metrics.values())


def test_value_loss_without_clip_is_half_the_square() -> None:
    values = torch.tensor([1.5], requires_grad=True)
    out = value_loss(
        values, values * 0, torch.tensor([3.0]), torch.tensor([True]), denominator=1, clip=None
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    assert out.loss.item() == pytest.approx(1.125) and gradient.item() == pytest.approx(-1.5)


def test_what_is_to_come_ends_with_its_sequence() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, math.nan])
    got = to_go(rewards, torch.tensor([7, 7, 3, 9, 9, 9, 8]))
    assert got[:6].tolist() == [3.0, 2.0, 4.0, 56.0, 48.0, 32.0] and got.dtype == torch.float32
    assert got[6].isnan() and to_go(rewards[:0], torch.arange(0)).tolist() == []


def test_weights_of_samples_are_ratios_to_a_bound() -> None:
    policy = torch.tensor([0.5, 1.5, 9.0, 1.0, math.nan]).log().requires_grad_()
    behavior = torch.tensor([1.0, 1.0, 1.0, 1e-9, 1.0]).log()
    mask = torch.tensor([True, True, True, True, False])
    got = sampled_weights(policy, behavior, mask)
    assert got[:4].tolist() == pytest.approx([0.5, 1.5, 2.0, 2.0]) and not got.requires_grad


@pytest.mark.parametrize("ids", [[1, 2, 1], [5, 5, 3, 5], [0, 1, 0, 1]])
def test_tokens_of_a_sequence_that_lie_apart_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="sequence_ids: tokens of one sequence lie apart"):
        to_go(torch.ones(len(ids)), torch.tensor(ids))


@pytest.mark.parametrize("gradient", ["own", "right"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("which", ["policy", "reference", "both"])
def test_a_token_that_a_policy_never_gives_adds_no_distance(
    which: str, estimator: Estimator, gradient: Any
) -> None:
    never = torch.tensor([-math.inf, -1.5, -1.5, -math.inf])
    usual, yes = torch.full((4,), -1.0), torch.tensor([True, True, True, False])
    policy = (usual * 2 if which == "reference" else never).clone().requires_grad_()
    reference = usual if which == "policy" else never
    out = kl_loss(*(policy, reference, yes), denominator=4, estimator=estimator, gradient=gradient)
    assert not any(value.requires_grad for value in out.metrics.values())
    (slopes,) = torch.autograd.grad(out.loss, policy)
    assert out.loss.isfinite() and slopes.isfinite().all() and slopes[0] == 0.0
    assert float(out.metrics["reference_infinite"]) == 0.25
    assert out.metrics["reference_kl"].isfinite()
    given = kl_reward(policy, reference, yes, coefficient=0.5, estimator=estimator)
    assert given.isfinite().all() and given[0] == 0.0
    assert sampled_weights(policy, reference, yes)[0] == 0.0


def test_without_tokens_there_is_no_distance_and_no_entropy() -> None:
    none = torch.zeros(0, requires_grad=True)
    no = torch.zeros(0, dtype=torch.bool)
    assert kl_loss(none, none, no, denominator=1).loss.item() == 0.0
    assert entropy_bonus(none, no, denominator=1).loss.item() == 0.0
    assert value_loss(none, none, none, no, denominator=1).loss.item() == 0.0
