"""The short convolution on the CPU, differentiable: one stretch of a sequence at a time.

With p_t = sum_i k_i x_(t-i) and y = p sigmoid(p):
    dp = dy silu'(p)    dx_t = sum_i k_i dp_(t+i)    dk_i = sum_t dp_t x_(t-i)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..blocks import blocks, takes_blocks
from ..once import once_differentiable

LEAST_ELEMENTS = 1 << 13  # of an average sequence: each has calls of its own


def takes_rows(x: torch.Tensor, kernel: torch.Tensor, count: int) -> bool:
    """Whether a CPU works on ``count`` sequences that are long enough."""
    return takes_blocks(x, kernel) and x.numel() >= count * LEAST_ELEMENTS


class ConvRows(torch.autograd.Function):
    """``x [T, C]``, ``taps [W, C]`` (the first for the token itself), sequences at ``bounds``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, taps: torch.Tensor, bounds: tuple[int, ...]
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        for stretch in _stretches(bounds, x.shape[1]):
            rows = out[stretch[1] : stretch[2]]
            F.silu(_convolved(x, taps, stretch, rows), inplace=True)
        ctx.save_for_backward(x, taps)
        ctx.bounds = bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        dx, d_taps = torch.empty_like(x), torch.zeros_like(taps)
        for stretch in _stretches(ctx.bounds, x.shape[1]):
            first, start, end = stretch
            pull = _convolved(x, taps, stretch, torch.empty_like(x[start:end]))
            pull = torch.ops.aten.silu_backward(upstream[0][start:end], pull)
            torch.mul(pull, taps[0], out=dx[start:end])
            d_taps[0] += (pull * x[start:end]).sum(0)
            for i in range(1, len(taps)):
                low = max(first, start - i)  # of a row i behind it, in the stretch before or here
                if low >= end - i:
                    break
                some = pull[low + i - start :]
                dx[low : end - i].addcmul_(some, taps[i])
                d_taps[i] += (some * x[low : end - i]).sum(0)
        return dx, d_taps, None


def _convolved(
    x: torch.Tensor, taps: torch.Tensor, stretch: tuple[int, int, int], out: torch.Tensor
) -> torch.Tensor:
    """Rows of a stretch before SiLU, into ``out``."""
    first, start, end = stretch
    torch.mul(x[start:end], taps[0], out=out)
    for i in range(1, len(taps)):
        low = max(first, start - i)
        if low >= end - i:
            break
        out[low + i - start :].addcmul_(x[low : end - i], taps[i])
    return out


def _stretches(bounds: tuple[int, ...], width: int) -> Iterator[tuple[int, int, int]]:
    """First row of the sequence, first row and end of each stretch, in order."""
    for first, end in itertools.pairwise(bounds):
        for some in blocks(end - first, width):
            yield first, first + some.start, first + some.stop
