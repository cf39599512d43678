"""Objectives, one pure function each, over per-token arrays of one length [T].

Every function takes ``(logprobs, behavior_logprobs, advantages, mask, *, sequence_ids,
denominator, weights)`` and its own keywords. Only tokens under ``mask`` count, and what stands
outside of it may be anything, NaN included. The loss is a sum over tokens divided by
``denominator``, the number of trained tokens of the whole optimizer step: micro-batches and ranks
add up to the token mean. ``weights`` [T] without gradient multiply the loss of each token; other
means (`aggregation.token_weights`) and corrections (`corrections`) are given that way, and None
is 1; a token of weight 0 has no loss of its own, whatever it is. Sequences must be whole within a
call where a ratio is one of sequences. A token with a log-prob of -inf, to the policy or to the one
that sampled, is taken out as one of weight 0 is (`ratio.possible`), and ``infinite_logprobs`` is
the share of such tokens.

Metrics of all that compare two policies: ``ratio``, ``log_ratio_abs`` (distance of learner and
sampler log-probs), ``kl`` (of the sampler from the learner, the estimator ratio - 1 - log ratio),
and the largest ``ratio_max``, ``log_ratio_max``, ``kl_max``; of those that clip, ``clip_fraction``
(trained tokens outside of the range, but for those of weight 0), of which ``clip_fraction_low``
were below it and ``clip_fraction_high`` above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .aggregation import as_loss, held, mean
from .ratio import (
    bounded,
    check,
    difference,
    limited,
    masked,
    possible,
    sequence_means,
    sequence_sums,
)
from .types import LossOutput


def ppo_clip(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """Clipped surrogate ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``.

    PPO, arXiv:1707.06347 equation 7; GRPO, arXiv:2402.03300 equation 3; two ends as in DAPO,
    arXiv:2503.14476 equation 8. ``dual_clip`` c > 1 bounds the loss of a negative advantage by
    ``c * |A|`` (dual-clip PPO, arXiv:1912.09729), where a ratio far above 1 would otherwise let it
    grow without limit. ``clip_fraction`` counts tokens whose gradient was removed. Left out: the KL
    term of GRPO (`penalties.kl_loss`).
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    log_ratio = bounded(difference(logprobs, behavior_logprobs, mask))
    ratio = masked(log_ratio, held(mask, weights)).exp()
    advantages = masked(advantages, mask)
    free = ratio * advantages
    surrogate = torch.minimum(free, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        floor = dual_clip * advantages
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    clipped = surrogate != free
    return as_loss(surrogate, weights, given, mask, denominator, log_ratio, clipped, ratio)


def gspo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossOutput:
    """Clipped surrogate of the length-normalised ratio of whole sequences.

    GSPO, arXiv:2507.18071 equations 5 to 7, with the range of its section 5.1: the ratio is
    ``exp(mean over the sequence of log ratio)``, the same for all of its tokens. The paper's mean
    over sequences is ``aggregation="sequence"``; the plain sum weighs sequences by their length.
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    own = difference(logprobs, behavior_logprobs, mask)
    whole = bounded(sequence_means(own, mask, sequence_ids))
    ratio = masked(whole, held(mask, weights)).exp()
    advantages = masked(advantages, mask)
    free = ratio * advantages
    surrogate = torch.minimum(free, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = surrogate != free
    return as_loss(surrogate, weights, given, mask, denominator, bounded(own), clipped, ratio)


def cispo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossOutput:
    """REINFORCE weighed by the clipped ratio, ``-stop_gradient(clip(ratio)) * A * logprob``.

    CISPO, MiniMax-M1, arXiv:2506.13585 equations 4 and 5: a clipped token keeps its gradient. The
    paper sets no lower end (``clip_low=1``) and does not publish the upper one; 1 + 4 is the cap
    of ScaleRL that TRL's documents recommend.
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    log_ratio = bounded(difference(logprobs, behavior_logprobs, mask))
    ratio = log_ratio.detach().exp()
    factor = ratio.clamp(1 - clip_low, 1 + clip_high)
    kept = held(mask, weights)
    surrogate = factor * masked(advantages, mask) * masked(logprobs, kept)
    outside = (factor != ratio) & kept
    return as_loss(surrogate, weights, given, mask, denominator, log_ratio, outside, ratio)


def sapo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossOutput:
    """``-sigmoid(tau * (ratio - 1)) * 4 / tau * A``: a soft gate in place of the clip.

    SAPO, arXiv:2511.20347, and TRL 1.16: at ratio 1 the gradient is that of the ratio itself, and
    fades on both sides, faster with a larger tau; ``tau_pos`` is that of positive advantages,
    ``tau_neg`` that of all others.
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    log_ratio = bounded(difference(logprobs, behavior_logprobs, mask))
    advantages = masked(advantages, mask)
    ratio = masked(log_ratio, held(mask, weights)).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return as_loss(gate * advantages, weights, given, mask, denominator, log_ratio, None)


def k25(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 0.5,
    clip_high: float = 1.0,
    tau: float = 0.01,
) -> LossOutput:
    """``-(clip(ratio, 1 - clip_low, 1 + clip_high) * A - tau * (log ratio)^2)``.

    K2.5, arXiv:2602.02276 equation 1, which K3 uses too. Unlike in PPO the window ignores the sign
    of A: outside of it no token gets a policy gradient, but all feel the pull to the policy that
    sampled. Window and tau are not published; these are ours. Value and slope of the pull stop
    growing at 20 nats (`ratio.limited`), which the paper does not say.
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    log_ratio = bounded(difference(logprobs, behavior_logprobs, mask))
    own = difference(logprobs, behavior_logprobs, held(mask, weights))
    ratio = bounded(own).exp()
    window = ratio.clamp(1 - clip_low, 1 + clip_high)
    apart = limited(own)
    pull = apart.square() + 2 * apart * (own - own.detach())
    surrogate = window * masked(advantages, mask) - tau * pull
    outside = window != ratio
    return as_loss(surrogate, weights, given, mask, denominator, log_ratio, outside, ratio)


def k15(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    tau: float = 0.01,
) -> LossOutput:
    """Mirror descent: ``-(A * R - tau / 2 * R^2)`` with R the log-ratio of a whole sequence.

    K1.5, arXiv:2501.12599 equation 3, whose gradient it has; A log pi(y) is written A R, which
    differs by a constant. R is a sum over tokens. tau is ours. A sequence's loss is spread over
    its tokens, so the plain sum is the paper's mean over sequences divided by their mean length.
    Tokens of weight 0 are no part of R. The pull stops growing at an R of 20 nats
    (`ratio.limited`).
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    log_ratio = bounded(difference(logprobs, behavior_logprobs, mask))
    kept = held(mask, weights)
    own = difference(logprobs, behavior_logprobs, kept)
    whole, count = sequence_sums(own.detach(), kept, sequence_ids)
    apart = limited(whole)
    pull = (masked(apart.square() / count, kept) / 2).to(own.dtype)
    pull = pull + apart.to(own.dtype) * (own - own.detach())
    surrogate = masked(advantages, mask) * own - tau * pull
    return as_loss(surrogate, weights, given, mask, denominator, log_ratio, None)


def reinforce(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
) -> LossOutput:
    """``-A * logprob`` (Williams 1992): right for tokens that the same policy sampled.

    Samples of another policy need weights from `corrections`. RLOO, arXiv:2402.14740, is this
    with a leave-one-out baseline.
    """
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, behavior_logprobs, mask)
    log_ratio = bounded(difference(logprobs, behavior_logprobs, mask))
    surrogate = masked(advantages, mask) * masked(logprobs, held(mask, weights))
    return as_loss(surrogate, weights, given, mask, denominator, log_ratio, None)


def grpo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``, A within groups.

    GRPO, arXiv:2402.03300 equation 3, whose mean over sequences is ``aggregation="sequence"`` and
    whose KL term is `penalties.kl_loss`.
    """
    own = (logprobs, behavior_logprobs, advantages, mask)
    whole: Any = {"sequence_ids": sequence_ids, "denominator": denominator, "weights": weights}
    return ppo_clip(*own, **whole, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def dr_grpo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """The loss of `grpo` on ``A = reward - mean``: Dr. GRPO, arXiv:2503.20783 section 3.2.

    Its division by a constant in place of lengths is ``aggregation="constant"``.
    """
    own = (logprobs, behavior_logprobs, advantages, mask)
    whole: Any = {"sequence_ids": sequence_ids, "denominator": denominator, "weights": weights}
    return ppo_clip(*own, **whole, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def dapo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> LossOutput:
    """The loss of `grpo` with ``clip_high > clip_low``: DAPO, arXiv:2503.14476 equation 10.

    The range is that of its section 4.1; other rounds of sampling (equation 11) and punished
    length (13) are no part of a loss.
    """
    own = (logprobs, behavior_logprobs, advantages, mask)
    whole: Any = {"sequence_ids": sequence_ids, "denominator": denominator, "weights": weights}
    return ppo_clip(*own, **whole, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def reinforce_pp(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    """The loss of `ppo_clip` on ``A = (A' - mean) / std`` over the batch, arXiv:2501.03262."""
    own = (logprobs, behavior_logprobs, advantages, mask)
    whole: Any = {"sequence_ids": sequence_ids, "denominator": denominator, "weights": weights}
    return ppo_clip(*own, **whole, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def rloo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
) -> LossOutput:
    """``-A * logprob`` with ``A = reward - mean of the others``: RLOO, arXiv:2402.14740."""
    own = (logprobs, behavior_logprobs, advantages, mask)
    return reinforce(*own, sequence_ids=sequence_ids, denominator=denominator, weights=weights)


def nll(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_ids: Tensor,
    denominator: int,
    weights: Tensor | None = None,
) -> LossOutput:
    """Negative log-likelihood in nats per trained token; behaviour and advantages are unused."""
    check(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    given, mask = mask, possible(logprobs, logprobs, mask)
    kept = masked(logprobs, held(mask, weights))
    metrics = {"infinite_logprobs": (given & ~mask).sum() / denominator}
    return LossOutput(-mean(kept, weights, mask, denominator), metrics)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    denominator: int,
    clip: float | None = 0.2,
) -> LossOutput:
    """Squared error of a critic, halved; ``max`` with that of a value moved by at most ``clip``.

    arXiv:1707.06347 equation 9 (L^VF), clipped as in OpenAI's baselines: ``old_values`` are those
    that gave ``returns`` (advantage + old value). ``clip=None`` leaves the plain square, and
    ``value_error`` is that whatever the clip.
    """
    check(values, old_values, returns, mask)
    values, old_values, returns = (masked(x, mask) for x in (values, old_values, returns))
    free = error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(free, (near - returns).square())
    clipped = error != free
    return LossOutput(
        loss=0.5 * error.sum() / denominator,
        metrics={
            "value_error": 0.5 * free.detach().sum() / denominator,
            "value_clip_fraction": clipped.sum() / denominator,
        },
    )
