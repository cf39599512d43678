"""Quantile Balancing: the next routing bias from a pooled histogram (K3 report 2.3.3, app. C-D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .route import route

COARSE_BINS = 1000
# Around the bias of an expert bins are numbers of equal sign, exponent and first bits of mantissa.
WINDOW, OCTAVES, MANTISSA_BITS = 2.0**-6, 11, 3
SIDE_BINS = OCTAVES << MANTISSA_BITS
NUM_BINS = COARSE_BINS + 2 * SIDE_BINS
SHIFT = 23 - MANTISSA_BITS
FIRST = (127 - 6 - OCTAVES) << MANTISSA_BITS  # the bits of 2^-17, the least that has an own bin
UNITS = 1 << 40  # in 1, of the sum that centres biases


class QuantileHistogram:
    """Counts required biases ``cutoff - score`` per expert and solves for their k/E quantile.

    Equal bins span [min(bias) - 1, max(bias) + 1], which holds every required bias since scores lie
    in (0, 1). Those nearer to the expert's own bias than 2^-6 are in finer bins instead, as wide as
    an eighth of their distance down to 2^-17: where a bias moves little, so does the error. The
    answer is exact to the width of its bin. ``counts`` [E, NUM_BINS] int32, the equal bins first,
    and ``tokens`` [1] int64 may be summed in place over data-parallel ranks before `solve`.
    ValueError for a k out of range.
    """

    def __init__(self, bias: torch.Tensor, k: int) -> None:
        if not 1 <= k <= len(bias):
            raise ValueError(f"k must lie in [1, {len(bias)}], got {k}")
        self.k = k
        self.bias = bias.detach().float().clone()
        self.low = bias.min().float() - 1.0
        span = bias.max().float() + 1.0 - self.low
        # By a tensor: a GPU divides by a number as it multiplies by its reciprocal.
        self.width, self.scale = span / torch.full_like(span, COARSE_BINS), COARSE_BINS / span
        self.counts = torch.zeros(len(bias), NUM_BINS, dtype=torch.int32, device=bias.device)
        self.tokens = torch.zeros(1, dtype=torch.int64, device=bias.device)

    def add(
        self,
        scores: torch.Tensor,
        valid: torch.Tensor | None = None,
        cutoff: torch.Tensor | None = None,
    ) -> None:
        """Count the tokens of ``scores [T, E]`` where ``valid [T]``; ``cutoff [T]`` is `route`'s,
        computed here if the caller does not have it. On a GPU the CPU does not wait for it.
        ValueError names a shape that does not fit."""
        scores = scores.detach()
        self._check(scores, valid, cutoff)
        if self.k < len(self.bias) and cutoff is None:
            cutoff = route(scores, self.bias, self.k)[2]
        if scores.is_cuda and scores.dtype != torch.float64:
            from .fused import count

            count(self, scores.float().contiguous(), cutoff, valid, logits=False)
            return
        if valid is not None:
            valid = valid.bool()
            scores, cutoff = scores[valid], None if cutoff is None else cutoff[valid]
        self.tokens += len(scores)
        if self.k == len(self.bias) or cutoff is None:
            return  # every expert takes every token: nothing to balance
        # The difference first: one expert of each token is at the cutoff, where rounding must not
        # choose a bin.
        required = (cutoff[:, None] - scores).float()
        # One that is not finite (the step will be skipped) has a bin as well.
        coarse = ((required - self.low) * self.scale).nan_to_num(0.0).clamp_(0, COARSE_BINS - 1)
        away = required - self.bias
        step = ((away.abs().view(torch.int32) >> SHIFT) - FIRST).clamp_(min=0)
        fine = COARSE_BINS + SIDE_BINS + torch.where(away < 0, -1 - step, step)
        bins = torch.where(away.abs() < WINDOW, fine, coarse.int()).long()
        flat = bins + torch.arange(scores.shape[1], device=bins.device) * NUM_BINS
        counts = torch.bincount(flat.flatten(), minlength=self.counts.numel())
        self.counts += counts.view_as(self.counts).to(torch.int32)

    def _check(
        self, scores: torch.Tensor, valid: torch.Tensor | None, cutoff: torch.Tensor | None
    ) -> None:
        if scores.dim() != 2 or scores.shape[1] != len(self.bias):
            raise ValueError(f"scores must be [T, {len(self.bias)}], got {list(scores.shape)}")
        for name, x in (("valid", valid), ("cutoff", cutoff)):
            if x is not None and x.shape != scores.shape[:1]:
                raise ValueError(f"{name} must be [{len(scores)}], got {list(x.shape)}")

    def merge(self, other: QuantileHistogram) -> None:
        """Pool the counts of another shard of the same step."""
        if self.k != other.k or not torch.equal(self.bias, other.bias):
            raise ValueError("histograms of different biases or k cannot be merged")
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
    coarse, fine = (
        part.cumsum(2).double()  # of whole numbers, which torch adds in any order
        for part in torch.stack([one.counts for one in histograms]).split(
            (COARSE_BINS, 2 * SIDE_BINS), 2
        )
    )
    low, width = (
        torch.stack([getattr(one, name) for one in histograms]).double()[:, None, None]
        for name in ("low", "width")
    )
    rank = torch.stack([one.tokens for one in histograms]).double() * k
    # It need not be whole when divided, by a tensor as above.
    rank = (rank / torch.full_like(rank, bias.shape[1]))[..., None]
    wide = bias.double()[..., None]
    # The equal bin in which the window begins holds what is below it, and nothing else.
    border = ((wide - WINDOW - low) / width).long().clamp_(0, COARSE_BINS - 1)
    below, within = coarse.gather(2, border), fine[..., -1:]
    index, part = _place(coarse, torch.where(rank > below, rank - within, rank))
    outside = low + (index + part) * width
    outside = torch.where(rank > below, outside.clamp(min=wide + WINDOW), outside)
    outside = torch.where(rank > below, outside, outside.clamp(max=wide - WINDOW))
    edges = _edges(coarse)
    index, part = _place(fine, rank - below)
    inside = wide + edges[index] + part * (edges[index + 1] - edges[index])
    found = torch.where((rank > below) & (rank <= below + within), inside, outside)
    return centred(found[..., 0])


def _place(total: torch.Tensor, rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bin that holds a rank ``[N, E, 1]``, where ``total [N, E, bins]`` are counts up to each
    bin, and which part of it lies below."""
    rank = rank.expand(*total.shape[:2], 1).contiguous()
    index = torch.searchsorted(total, rank).clamp_(max=total.shape[2] - 1)
    before = torch.where(index > 0, total.gather(2, (index - 1).clamp(min=0)), 0.0)
    inside = total.gather(2, index) - before
    return index, ((rank - before) / inside.clamp(min=1)).clamp_(0, 1)


def _edges(like: torch.Tensor) -> torch.Tensor:
    """Where the bins of the window begin and end, less the bias; fp64, one more than bins."""
    bits = torch.arange(FIRST, FIRST + SIDE_BINS + 1, dtype=torch.int32, device=like.device)
    above = (bits << SHIFT).view(torch.float32).double()[1:]
    return torch.cat((-above.flip(0), above.new_zeros(1), above))


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
