"""What is added to an objective or to rewards: distance to a reference policy, and entropy.

All arrays are per token, [T]; sums are divided by ``denominator``, the number of trained tokens
of the whole optimizer step. The reference is a policy that stays as it is. Where a log-prob is
infinite there is no distance (`ratio.possible`): such a token adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .aggregation import held, mean
from .ratio import bounded, check, difference, masked, possible
from .types import LossOutput

Estimator = Literal["k1", "k2", "k3"]
MAX_WEIGHT = 2.0  # of a token that another policy sampled, in the gradient of the KL


@dataclass(frozen=True, slots=True)
class Pull:
    """How training is kept near a reference: ``coefficient`` times the KL, added to the loss or
    taken off the reward of each token."""

    coefficient: float
    where: Literal["loss", "reward"]
    estimator: Estimator
    gradient: Literal["right", "own"]


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, estimator: Estimator
) -> Tensor:
    """KL(policy || reference) from one sample per token, 0 outside of the mask; differentiable.

    Schulman 2020, "Approximating KL divergence", with d = log(policy / reference):
    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. k1 and k3 have the right mean, k2 and k3 are never
    negative. The gradient of an estimate is not an estimate of the gradient: see `kl_loss`.
    """
    check(logprobs, reference_logprobs, mask)
    mask = possible(logprobs, reference_logprobs, mask)
    log_ratio = difference(logprobs, reference_logprobs.detach(), mask)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    apart = bounded(-log_ratio)
    return apart.exp() - 1 - apart


def kl_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    denominator: int,
    estimator: Estimator = "k3",
    gradient: Literal["right", "own"] = "right",
    weights: Tensor | None = None,
) -> LossOutput:
    """KL(policy || reference) for the loss, to be multiplied by its coefficient.

    ``gradient="right"`` is ``log(policy / reference) * grad logprob``, the gradient of the KL
    itself on samples of the policy, whatever estimator gives the value; it is that of k2
    (arXiv:2506.09477). ``"own"`` is that of the estimator, as GRPO, arXiv:2402.03300 equation 4,
    has it for k3: that of k1 is 0 on average and does nothing, that of k3 is the gradient of
    KL(reference || policy). For samples of another policy give the importance ratio as
    ``weights`` [T], without gradient. ``reference_infinite`` is the share of tokens that either
    policy never gives.
    """
    kept = held(mask, weights)
    value = kl_estimate(logprobs, reference_logprobs, kept, estimator=estimator)
    if gradient == "right":
        slope = kl_estimate(logprobs, reference_logprobs, kept, estimator="k2")
        value = value.detach() + (slope - slope.detach())
    all_of_it = kl_estimate(logprobs.detach(), reference_logprobs, mask, estimator=estimator)
    lost = mask & ~possible(logprobs, reference_logprobs, mask)
    return LossOutput(
        loss=mean(value, weights, mask, denominator),
        metrics={
            "reference_kl": all_of_it.sum() / denominator,
            "reference_infinite": lost.sum() / denominator,
        },
    )


def kl_reward(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    coefficient: float,
    estimator: Estimator = "k1",
) -> Tensor:
    """What to add to the reward of each token, ``-coefficient * KL``, without gradient [T].

    arXiv:2203.02155 equation 2, per token. Policy gradients turn a reward k1 into the gradient of
    the KL; k2 and k3 in the reward are biased.
    """
    estimate = kl_estimate(logprobs, reference_logprobs, mask, estimator=estimator)
    return -coefficient * estimate.detach()


def to_go(rewards: Tensor, sequence_ids: Tensor) -> Tensor:
    """For every token the sum of ``rewards`` from it to the end of its sequence [T].

    Sequences lie end to end, each whole; ValueError if one does not.
    """
    check(rewards, sequence_ids)
    names, counts = torch.unique_consecutive(sequence_ids, return_counts=True)
    if len(names.unique()) < len(names):
        raise ValueError("sequence_ids: tokens of one sequence lie apart; sort them by sequence")
    lengths = counts.tolist()
    # Not the difference of sums over all: a NaN would reach every sequence before it.
    # On the CPU, where running sums have one order.
    parts = [part.flip(0).cumsum(0).flip(0) for part in rewards.double().cpu().split(lengths)]
    return torch.cat([rewards[:0].cpu(), *parts]).to(rewards)


def sampled_weights(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Ratios of the policy to the one that sampled, at most `MAX_WEIGHT`, without gradient [T]; 0
    for a token that either never gives."""
    known = possible(logprobs, behavior_logprobs, mask)
    ratio = bounded(difference(logprobs.detach(), behavior_logprobs, known)).exp()
    return torch.where(mask & ~known, 0.0, ratio.clamp(max=MAX_WEIGHT))


def entropy_bonus(entropy: Tensor, mask: Tensor, *, denominator: int) -> LossOutput:
    """Minus the mean entropy, to be multiplied by its coefficient: arXiv:1707.06347 equation 9."""
    check(entropy, mask)
    return LossOutput(loss=-masked(entropy, mask).sum() / denominator, metrics={})
