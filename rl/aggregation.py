"""How the losses of tokens make one number, over tokens, over sequences, or over a constant, and
what is said beside it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .ratio import check, distance, masked, sequence_sums
from .types import LossOutput

Aggregation = Literal["token", "sequence", "constant"]


def token_weights(
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    aggregation: Aggregation,
    tokens: int,
    sequences: int,
    length: int,
) -> Tensor | None:
    """Weights [T] under which a sum over tokens, divided by ``tokens``, is the mean asked for.

    ``tokens`` and ``sequences`` are those of the whole optimizer step that are trained, so that
    the split into micro-batches and ranks does not matter. ``"token"``: all tokens weigh the same
    (None), DAPO, arXiv:2503.14476 equation 12. ``"sequence"``: a mean over sequences of the mean
    over each one's tokens, GRPO, arXiv:2402.03300 equation 3. ``"constant"``: a mean over
    sequences of their sums divided by the constant ``length``, Dr. GRPO, arXiv:2503.20783
    section 3.2.
    """
    check(mask, sequence_ids)
    if aggregation == "token":
        return None
    _, counts = sequence_sums(mask.double(), mask, sequence_ids)
    if aggregation == "sequence":
        return tokens / sequences / counts.clamp(min=1)
    return counts.new_full(counts.shape, tokens / sequences / length)


def held(mask: Tensor, weights: Tensor | None) -> Tensor:
    """The mask without tokens of weight 0, which have no part in a loss.

    They must be masked before what is not linear in them: a slope that is not finite times 0 is
    NaN. A weight of NaN stays.
    """
    return mask if weights is None else mask & (weights != 0)


def mean(values: Tensor, weights: Tensor | None, mask: Tensor, denominator: int) -> Tensor:
    """The weighed sum of ``values`` (0 outside of the mask), divided by ``denominator``.

    ``weights`` None are 1. They give no gradient; one of 0 removes whatever value its token has,
    and `held` what its gradient would be.
    """
    if weights is not None:
        check(values, weights, mask)
        weights = masked(weights.detach(), mask).to(values.dtype)
        values = torch.where(weights == 0, 0.0, values * weights)
    return values.sum() / denominator


def as_loss(
    surrogate: Tensor,
    weights: Tensor | None,
    given: Tensor,
    mask: Tensor,
    denominator: int,
    log_ratio: Tensor,
    clipped: Tensor | None,
    ratio: Tensor | None = None,
) -> LossOutput:
    """The loss of a surrogate that is to grow, 0 outside of the mask, with the usual metrics;
    ``mask`` is what was ``given`` without impossible tokens, ``clipped`` tokens are those outside
    of a range around ratio 1."""
    metrics, maxima = distance(log_ratio, mask, denominator)
    metrics["infinite_logprobs"] = (given & ~mask).sum() / denominator
    if clipped is not None:
        assert ratio is not None
        high = clipped & (ratio > 1)
        fractions = {"": clipped, "_low": clipped & ~high, "_high": high}
        own = {f"clip_fraction{side}": x.sum() / denominator for side, x in fractions.items()}
        metrics = {**own, **metrics}
    return LossOutput(-mean(surrogate, weights, mask, denominator), metrics, maxima)
