"""Objectives, one pure function each, over per-token arrays of one length [T].

Every function takes ``(logprobs, behavior_logprobs, advantages, mask, *, sequence_ids,
denominator)`` and its own keywords. Only tokens under ``mask`` count, and what stands outside of
it may be anything, NaN included. The loss is a sum divided by ``denominator``, the number of
trained tokens of the whole optimizer step: micro-batches and ranks add up to the token mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import LossOutput

# exp(20) = 5e8: far beyond any clip range, and still finite when squared in fp32.
MAX_LOG_RATIO = 20.0


def grpo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """Clipped surrogate ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``.

    ``dual_clip`` c > 1 bounds the loss of a negative advantage by ``c * |A|``, where a ratio far
    above 1 would otherwise let it grow without limit. Differences from the GRPO paper: token
    mean over the global batch instead of a mean per sequence, no KL term.

    Metrics: ``clip_fraction`` (tokens whose gradient the clip removed), ``ratio``,
    ``log_ratio_abs`` and ``log_ratio_max`` (distance of learner and sampler log-probs), ``kl``
    (of the sampler from the learner, the estimator ratio - 1 - log ratio).
    """
    _check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    log_ratio = _masked(logprobs, mask) - _masked(behavior_logprobs, mask)
    # Not clamp: that would turn a NaN into a gradient of 0, and the fault would go unseen.
    log_ratio = torch.minimum(log_ratio, log_ratio.new_tensor(MAX_LOG_RATIO))
    ratio = log_ratio.exp()
    advantages = _masked(advantages, mask)
    free = ratio * advantages
    surrogate = torch.minimum(free, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        floor = dual_clip * advantages
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    clipped = (surrogate != free) & mask
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    return LossOutput(
        loss=-surrogate.sum() / denominator,
        metrics={
            "clip_fraction": clipped.sum() / denominator,
            "ratio": _masked(ratio, mask).sum() / denominator,
            "log_ratio_abs": log_ratio.abs().sum() / denominator,
            "kl": (ratio - 1 - log_ratio).sum() / denominator,
        },
        maxima={"log_ratio_max": log_ratio.abs().max()},
    )


def nll(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
) -> LossOutput:
    """Negative log-likelihood in nats per trained token; behaviour and advantages are unused."""
    _check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    return LossOutput(loss=-_masked(logprobs, mask).sum() / denominator, metrics={})


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values under the mask, 0 elsewhere, with a gradient of exactly 0 there."""
    return torch.where(mask, values, torch.zeros_like(values))


def _check(first: Tensor, *others: Tensor) -> None:
    assert first.ndim == 1 and all(x.shape == first.shape for x in others)
