"""Causal depthwise short convolution and SiLU over packed sequences."""

from __future__ import annotations

import itertools

import torch

from ..device import takes_kernels
from .naive import naive_short_conv
from .rows import ConvRows, takes_rows

__all__ = ["naive_short_conv", "short_conv"]


def short_conv(
    x: torch.Tensor, kernel: torch.Tensor, bounds: tuple[int, ...], tail: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU of the causal convolution of each sequence and channel on its own.

    ``x [T, C]`` holds N sequences, which start and end at ``bounds`` and may be empty; ``kernel
    [C, W]``, its last column for the token itself; ``tail [N, W - 1, C]`` the inputs before ``x``
    (None: zeros). Returns ``[T, C]`` and the new tail, in x's dtype. Differentiable in ``x``,
    ``kernel`` and ``tail``. ValueError names a shape or ``bounds`` that does not fit.

    On a GPU 16-bit inputs run in Triton kernels with fp32 sums and the kernel's own precision, on a
    CPU long wide sequences without a tail block by block, both only once differentiable; everything
    else runs in plain torch, in x's dtype.
    """
    _check(x, kernel, bounds, tail)
    if takes_kernels(x):
        from .fused import short_conv_fused

        return short_conv_fused(x, kernel, bounds, tail)
    if tail is None and takes_rows(x, kernel, len(bounds) - 1):
        out = ConvRows.apply(x.contiguous(), kernel.T.flip(0).contiguous(), bounds)
        return out, _last_rows(x, bounds, kernel.shape[1] - 1)
    return naive_short_conv(x, kernel, bounds, tail)


def _last_rows(x: torch.Tensor, bounds: tuple[int, ...], history: int) -> torch.Tensor:
    """The last ``history`` rows of each sequence, zeros before its first one."""
    rows = torch.tensor(bounds[1:], device=x.device)[:, None] + torch.arange(
        -history, 0, device=x.device
    )
    missing = rows < torch.tensor(bounds[:-1], device=x.device)[:, None]
    return x[rows.clamp(min=0)].masked_fill(missing[..., None], 0)


def _check(
    x: torch.Tensor, kernel: torch.Tensor, bounds: tuple[int, ...], tail: torch.Tensor | None
) -> None:
    fits = x.dim() == kernel.dim() == 2 and kernel.shape[0] == x.shape[1] and kernel.shape[1] > 0
    if not fits:
        raise ValueError(
            "kernel must be [C, W] with W above 0 for x [T, C], "
            f"got {list(kernel.shape)} for {list(x.shape)}"
        )
    rising = all(a <= b for a, b in itertools.pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != x.shape[0] or not rising:
        raise ValueError(
            f"bounds must rise from 0 to the {x.shape[0]} tokens, got {list(bounds[:8])}"
        )
    wanted = (len(bounds) - 1, kernel.shape[1] - 1, x.shape[1])
    if tail is not None and tail.shape != wanted:
        raise ValueError(f"tail must be {list(wanted)}, got {list(tail.shape)}")
