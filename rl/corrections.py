"""Off-policy corrections: weights for tokens that another policy sampled.

The behaviour policy sampled (its log-probs come with the rollout: older weights, or the same in
another engine's arithmetic); the proximal policy is the learner before the update. Every function
takes ``(proximal_logprobs, behavior_logprobs, mask, *, sequence_ids, denominator, low, high)``,
all arrays per token [T], and gives weights without gradient and what it removed. Ratios are
proximal / behaviour and weigh a loss whose own ratio is policy / proximal (`decoupled`). A token
that either policy never gives (`ratio.possible`) has no ratio: it counts as removed, and is no part
of that of its sequence. A ratio that is NaN stays NaN: a fault is not a token to be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .ratio import (
    bounded,
    check,
    difference,
    distance,
    masked,
    possible,
    sequence_means,
    sequence_sums,
)
from .types import LossOutput


@dataclass(frozen=True, slots=True)
class Correction:
    """``weights`` [T], 0 outside of the mask, and metrics as in `LossOutput`.

    ``correction_removed`` is the share of trained tokens whose ratio was outside of the range,
    truncated or masked; ``correction_weight`` the mean weight.
    """

    weights: Tensor
    metrics: Mapping[str, Tensor]


CorrectionFunction = Callable[..., Correction]


def token_truncate(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Truncated importance sampling of tokens: ``clip(ratio, low, high)``.

    V-trace, arXiv:1802.01561 equation 1, and TIS of Yao et al. 2025 for the mismatch of engines.
    """
    own, known = _difference(proximal_logprobs, behavior_logprobs, mask, sequence_ids)
    return _truncated(_ratio(own), mask, known, denominator, low, high)


def token_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Masked importance sampling of tokens: the ratio where it is in range, else 0."""
    own, known = _difference(proximal_logprobs, behavior_logprobs, mask, sequence_ids)
    return _windowed(_ratio(own), mask, known, denominator, low, high)


def icepop(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    low: float = 0.5,
    high: float = 5.0,
) -> Correction:
    """The window of IcePop (Ring-1T, arXiv:2510.18855): `token_mask` with two ends."""
    own, known = _difference(proximal_logprobs, behavior_logprobs, mask, sequence_ids)
    return _windowed(_ratio(own), mask, known, denominator, low, high)


def sequence_truncate(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Truncated importance sampling of sequences: the product of ratios, clipped, on each token."""
    own, known = _difference(proximal_logprobs, behavior_logprobs, mask, sequence_ids)
    whole = sequence_sums(own, known, sequence_ids)[0].to(own.dtype)
    return _truncated(_ratio(whole), mask, known, denominator, low, high)


def sequence_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    low: float = 0.0,
    high: float = 3.0,
) -> Correction:
    """Masked importance sampling of sequences: the product of ratios where in range, else 0.

    The default of TRL 1.16, with its cap.
    """
    own, known = _difference(proximal_logprobs, behavior_logprobs, mask, sequence_ids)
    whole = sequence_sums(own, known, sequence_ids)[0].to(own.dtype)
    return _windowed(_ratio(whole), mask, known, denominator, low, high)


def sequence_reject(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    low: float = 0.99,
    high: float = 1.01,
) -> Correction:
    """Rejection of sequences: weight 1 where the geometric mean of ratios is in range, else 0.

    The mean over tokens, unlike the product, does not grow with length.
    """
    own, known = _difference(proximal_logprobs, behavior_logprobs, mask, sequence_ids)
    ratio = _ratio(sequence_means(own, known, sequence_ids))
    kept = torch.where(ratio.isnan(), ratio, 1.0)
    return _windowed(ratio, mask, known, denominator, low, high, inside=kept)


CORRECTIONS: dict[str, CorrectionFunction] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "icepop": icepop,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "sequence_reject": sequence_reject,
}
MASKS_OF_TOKENS = ("token_mask", "icepop")  # take tokens out of sequences


def decoupled(
    loss: Callable[..., LossOutput],
    correction: CorrectionFunction,
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
) -> LossOutput:
    """A loss that is kept near the proximal policy, on samples of the behaviour policy.

    Decoupled PPO, arXiv:2110.00641 section 3, and that of AReaL, arXiv:2505.24298: tokens weigh
    ``correction(proximal / behaviour)``, the loss's own ratio is policy / proximal. Its metrics
    of distance are those of policy and behaviour, as without a correction; ``clip_fraction`` is
    that of policy and proximal. ``weights`` multiply those of the correction.
    """
    proximal_logprobs = proximal_logprobs.detach()
    whole = {"sequence_ids": sequence_ids, "denominator": denominator}
    made = correction(proximal_logprobs, behavior_logprobs, mask, **whole)
    both = made.weights if weights is None else made.weights * weights
    known = possible(logprobs, behavior_logprobs, mask) & ~proximal_logprobs.isinf()
    out = loss(logprobs, proximal_logprobs, advantages, known, weights=both, **whole)
    metrics, maxima = distance(difference(logprobs, behavior_logprobs, known), known, denominator)
    metrics["infinite_logprobs"] = (mask & ~known).sum() / denominator
    return LossOutput(out.loss, {**out.metrics, **metrics, **made.metrics}, maxima)


def _difference(
    proximal: Tensor, behavior: Tensor, mask: Tensor, sequence_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-ratios, and the tokens that have one."""
    check(proximal, behavior, mask, sequence_ids)
    known = possible(proximal, behavior, mask)
    return difference(proximal.detach(), behavior.detach(), known), known


def _ratio(log_ratio: Tensor) -> Tensor:
    return bounded(log_ratio).exp()


def _truncated(
    ratio: Tensor, mask: Tensor, known: Tensor, denominator: int, low: float, high: float
) -> Correction:
    outside = _outside(ratio, low, high)
    return _correction(ratio.clamp(low, high), outside, mask, known, denominator)


def _windowed(
    ratio: Tensor,
    mask: Tensor,
    known: Tensor,
    denominator: int,
    low: float,
    high: float,
    inside: Tensor | None = None,
) -> Correction:
    outside = _outside(ratio, low, high)
    kept = torch.where(outside, 0.0, ratio if inside is None else inside)
    return _correction(kept, outside, mask, known, denominator)


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio < low) | (ratio > high)


def _correction(
    weights: Tensor, outside: Tensor, mask: Tensor, known: Tensor, denominator: int
) -> Correction:
    weights = masked(weights, known)
    metrics = {
        "correction_removed": ((outside | ~known) & mask).sum() / denominator,
        "correction_weight": weights.sum() / denominator,
    }
    return Correction(weights, metrics)
