"""Quantile Balancing: the next routing bias from a pooled histogram (K3 report 2.3.3, app. C-D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .route import route

NUM_BINS = 1000
UNITS = 1 << 40  # in 1, of the sum that centres biases


class QuantileHistogram:
    """Counts required biases ``cutoff - score`` per expert and solves for their k/E quantile.

    The bins span [min(bias) - 1, max(bias) + 1], which holds every required bias since scores lie
    in (0, 1); the answer is exact to one bin width. ``counts`` [E, NUM_BINS] int32 and ``tokens``
    [1] int64 may be summed in place over data-parallel ranks before `solve`.
    """

    def __init__(self, bias: torch.Tensor, k: int) -> None:
        self.k = k
        self.bias = bias.detach().float().clone()
        self.low = bias.min().float() - 1.0
        span = bias.max().float() + 1.0 - self.low
        # By a tensor: a GPU divides by a number as it multiplies by its reciprocal.
        self.width, self.scale = span / torch.full_like(span, NUM_BINS), NUM_BINS / span
        self.counts = torch.zeros(len(bias), NUM_BINS, dtype=torch.int32, device=bias.device)
        self.tokens = torch.zeros(1, dtype=torch.int64, device=bias.device)

    def add(
        self,
        scores: torch.Tensor,
        valid: torch.Tensor | None = None,
        cutoff: torch.Tensor | None = None,
    ) -> None:
        """Count the tokens of ``scores [T, E]`` where ``valid [T]``; ``cutoff [T]`` is `route`'s,
        computed here if the caller does not have it. On a GPU the CPU does not wait for it."""
        scores = scores.detach()
        if self.k < len(self.bias) and cutoff is None:
            cutoff = route(scores, self.bias, self.k)[2]
        if scores.is_cuda and scores.dtype != torch.float64:
            from .fused import count

            count(self, scores.float().contiguous(), cutoff, valid, logits=False)
            return
        if valid is not None:
            scores, cutoff = scores[valid], None if cutoff is None else cutoff[valid]
        self.tokens += len(scores)
        if self.k == len(self.bias) or cutoff is None:
            return  # every expert takes every token: nothing to balance
        # The difference first: one expert of each token is at the cutoff, where rounding must not
        # choose a bin.
        bins = (cutoff[:, None] - scores - self.low) * self.scale
        # One that is not finite (the step will be skipped) has a bin as well.
        bins = bins.nan_to_num(0.0).clamp_(0, NUM_BINS - 1).long()
        flat = bins + torch.arange(scores.shape[1], device=bins.device) * NUM_BINS
        counts = torch.bincount(flat.flatten(), minlength=self.counts.numel())
        self.counts += counts.view_as(self.counts).to(torch.int32)

    def merge(self, other: QuantileHistogram) -> None:
        """Pool the counts of another shard of the same step."""
        if not torch.equal(self.low, other.low) or not torch.equal(self.width, other.width):
            raise ValueError("histograms of different biases cannot be merged")
        self.counts += other.counts
        self.tokens += other.tokens

    def solve(self) -> torch.Tensor:
        """The next bias ``[E]`` fp32, mean zero: per expert the value below which a share k/E of
        the required biases lies; to the bit the same on every device. ValueError if nothing was
        counted."""
        if int(self.tokens) == 0:
            raise ValueError("no token was counted")
        return balanced([self])[0]


def balanced(histograms: Sequence[QuantileHistogram]) -> torch.Tensor:
    """What `QuantileHistogram.solve` returns for each of several of one size, ``[N, E]``, without a
    look at whether anything was counted: the CPU does not wait for a GPU."""
    k, bias = histograms[0].k, torch.stack([one.bias for one in histograms])
    if k == bias.shape[1]:
        return centred(bias)
    counts = torch.stack([one.counts for one in histograms]).double()
    low, width = (
        torch.stack([getattr(one, name) for one in histograms]).double()[:, None]
        for name in ("low", "width")
    )
    rank = torch.stack([one.tokens for one in histograms]).double() * k
    # It need not be whole when divided, by a tensor as above.
    rank = (rank / torch.full_like(rank, bias.shape[1]))[..., None]
    total = counts.cumsum(2)
    index = torch.searchsorted(total, rank.expand(*bias.shape, 1).contiguous())
    index = index.clamp_(max=NUM_BINS - 1)
    inside = counts.gather(2, index)
    before = total.gather(2, index) - inside
    part = ((rank - before) / inside.clamp(min=1)).clamp_(0, 1)
    return centred(low + (index + part)[..., 0] * width)


def centred(bias: torch.Tensor) -> torch.Tensor:
    """``bias [..., E]`` less its mean, fp32. Whole multiples of 2^-40 are added up, which is exact
    up to a sum of 2^23 and so depends on no order and device; the CPU does not wait for a GPU."""
    wide = bias.double()
    total = (wide * UNITS).round().long().sum(-1, keepdim=True).double()
    return (wide - total / torch.full_like(total, UNITS * wide.shape[-1])).float()


class Counts(NamedTuple):
    """What `router` counts of a forward, in place: the routes that were taken in ``load [E]``
    int64, what they require in ``histogram``; only of the tokens where ``valid`` bool [T] is set.
    """

    load: torch.Tensor
    histogram: QuantileHistogram | None = None
    valid: torch.Tensor | None = None
