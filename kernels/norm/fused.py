"""RMSNorm on the GPU, gated or not: autograd around its two kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..device import launch, on_device_of
from ..once import once_differentiable
from .triton_norm import norm_backward_kernel, norm_kernel

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 4096, 2048  # of a block of rows
BACKWARD_BLOCKS = 16  # whose share of the weight's gradient is one partial sum
STAGES = 3  # blocks on their way into shared memory, and the one at work, where they fit
SHARED = 200 << 10  # bytes of it that they may take
WARPS, WARP_ELEMENTS, MOST_WARPS = 4, 2048, 16  # more than the first for rows that are as wide


class Norm(torch.autograd.Function):
    """``x`` and ``gate`` (or None) ``[R, V]`` contiguous, ``weight [V]``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        out = torch.empty_like(x)
        rows, width = x.shape
        block, padded = block_rows(width, FORWARD_ELEMENTS)
        grid = -(-rows // block)
        if grid:
            with on_device_of(x):
                launch(norm_kernel)[(grid,)](
                    *(x, gate, weight, out, rows, eps),
                    V=width,
                    BV=padded,
                    BR=block,
                    GATED=gate is not None,
                    FAST=x.is_cuda,
                    num_warps=warps_for(padded),
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        rows, width = x.shape
        block, padded = block_rows(width, BACKWARD_ELEMENTS)
        grid = -(-rows // (block * BACKWARD_BLOCKS))
        dx = torch.empty_like(x)
        d_gate = None if gate is None else torch.empty_like(gate)
        partial = x.new_empty(grid, width, dtype=torch.float32)
        if grid:
            with on_device_of(x):
                launch(norm_backward_kernel)[(grid,)](
                    *(x, gate, weight, d_out.contiguous(), dx, d_gate, partial, rows, ctx.eps),
                    V=width,
                    BV=padded,
                    BR=block,
                    BLOCKS=BACKWARD_BLOCKS,
                    STAGES=stages_for(block * padded, 2 if gate is None else 3),
                    GATED=gate is not None,
                    FAST=x.is_cuda,
                    num_warps=warps_for(padded),
                )
        return dx, d_gate, partial.sum(0).to(weight.dtype), None


def block_rows(width: int, elements: int) -> tuple[int, int]:
    """Rows of a block of about ``elements``, and the power of two that ``width`` is padded to."""
    padded = 1 << (width - 1).bit_length()
    return max(1, elements // padded), padded


def stages_for(elements: int, tensors: int) -> int:
    """`STAGES`, or as many as leave blocks of so many 16-bit elements of each tensor their room."""
    return min(STAGES, 1 + SHARED // (2 * elements * tensors))


def warps_for(padded: int) -> int:
    return min(MOST_WARPS, max(WARPS, padded // WARP_ELEMENTS))


def norm_fused(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`gated_norm` on the GPU with fp32 sums, and without a gate `rms_norm`."""
    width = x.shape[-1]
    rows = [None if t is None else t.contiguous().view(-1, width) for t in (x, gate)]
    return Norm.apply(*rows, weight.contiguous(), eps).view(x.shape)
