"""The short convolution on the GPU: where its tiles lie, and autograd around its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..device import launch, on_device_of, upload
from ..once import once_differentiable
from .triton_conv import conv_backward_kernel, conv_kernel, new_tail_kernel, tail_backward_kernel

# Every thread walks over the tokens of a tile with a window of some channels in registers, so that
# each input is read and unpacked once; the next tokens are on their way into shared memory.
TOKENS, BACK_TOKENS = 64, 128  # the way back leaves a partial sum for each tile
CHANNELS, WARPS = 512, 2
BACK_CHANNELS, BACK_WARPS = 256, 2
UNROLL, STAGES = 4, 3

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the tiles of packed sequences lie, on the device.

    ``tiles`` [count, 5]: first token, tokens, tokens of its sequence before it, and from its first
    on, sequence. ``programs`` [P + 1]: the first tile of each program that takes about one full
    tile. ``bounds`` [N + 1] are those of the sequences.
    """

    tiles: Tensor
    programs: Tensor
    bounds: Tensor


# A CUDA graph reads its tables as long as it lives, so these stay, once for equal sizes.
_captured: dict[tuple[tuple[int, ...], int, torch.device], Tiles] = {}


def tiles_of(bounds: tuple[int, ...], size: int, device: torch.device) -> Tiles:
    """Tiles of ``size`` tokens; none crosses the edge of a sequence."""
    key = (bounds, size, device)
    found = _captured.get(key) or _tiles(*key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[key] = found
    return found


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _tiles(bounds: tuple[int, ...], size: int, device: torch.device) -> Tiles:
    edges = torch.tensor(bounds, dtype=torch.int64)
    lengths = edges.diff()
    if int(lengths.min()) < 0:
        raise ValueError(f"bounds must not fall, got {list(bounds[:8])}")
    counts = (lengths + size - 1) // size
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    first = counts.cumsum(0) - counts
    offset = (torch.arange(len(sequence)) - first[sequence]) * size
    start, tokens = edges[sequence] + offset, (lengths[sequence] - offset).clamp(max=size)
    # a tile holds at most ``size`` tokens, so that no number of a program is left out
    share = torch.bincount(start // size)
    programs = torch.cat([share.new_zeros(1), share.cumsum(0)])
    table = torch.stack([start, tokens, offset, lengths[sequence] - offset, sequence], 1)
    return Tiles(*(upload(t.int(), device) for t in (table, programs, edges)))


class ShortConv(torch.autograd.Function):
    """``x [T, C]`` with adjacent channels, ``kernel [C, W]`` and ``tail`` contiguous."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, tail: Tensor | None, bounds: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, kernel, tail)
        ctx.bounds = bounds
        ctx.set_materialize_grads(False)
        tokens, channels = x.shape
        width = kernel.shape[1]
        table = tiles_of(bounds, TOKENS, x.device)
        out = x.new_empty(tokens, channels)
        new_tail = x.new_empty(len(bounds) - 1, width - 1, channels)
        given = x if tail is None else tail
        flags: dict[str, Any] = {"W": width, "TAIL": tail is not None}
        with on_device_of(x):
            if out.numel():
                grid = len(table.tiles) * blocks(channels, CHANNELS)
                launch(conv_kernel)[(grid,)](
                    *(x, kernel, given, out, table.tiles, channels, x.stride(0)),
                    **flags,
                    BC=CHANNELS,
                    UNROLL=UNROLL,
                    STAGES=STAGES,
                    FAST=x.is_cuda,
                    num_warps=WARPS,
                )
            if new_tail.numel():
                grid = len(new_tail) * blocks(channels, CHANNELS)
                launch(new_tail_kernel)[(grid,)](
                    *(x, given, new_tail, table.bounds, channels, x.stride(0)),
                    **flags,
                    BC=CHANNELS,
                    num_warps=WARPS,
                )
        return out, new_tail

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor | None, d_new_tail: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, kernel, tail = ctx.saved_tensors
        d_out = torch.zeros_like(x) if d_out is None else rows_of(d_out)
        if d_new_tail is not None:
            d_new_tail = d_new_tail.contiguous()
        with on_device_of(x):
            dx, d_kernel = walk_back(x, kernel, tail, d_out, d_new_tail, ctx.bounds)
            d_tail = None
            if tail is not None and ctx.needs_input_grad[2]:
                d_tail = tail_gradient(x, kernel, tail, d_out, d_new_tail, ctx.bounds)
        return dx, d_kernel, d_tail, None


def walk_back(
    x: Tensor,
    kernel: Tensor,
    tail: Tensor | None,
    d_out: Tensor,
    d_new_tail: Tensor | None,
    bounds: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``kernel``, the latter from partial sums that are added in order."""
    tokens, channels = x.shape
    width = kernel.shape[1]
    table = tiles_of(bounds, BACK_TOKENS, x.device)
    dx = x.new_empty(tokens, channels)
    count = len(table.programs) - 1
    partial = x.new_empty(count, width, channels, dtype=torch.float32)
    if dx.numel():
        launch(conv_backward_kernel)[(count * blocks(channels, BACK_CHANNELS),)](
            *(x, kernel, x if tail is None else tail, d_out),
            *(x if d_new_tail is None else d_new_tail, dx, partial),
            *(table.tiles, table.programs, channels, x.stride(0), d_out.stride(0)),
            W=width,
            BC=BACK_CHANNELS,
            UNROLL=UNROLL,
            STAGES=STAGES,
            TAIL=tail is not None,
            NEW_TAIL=d_new_tail is not None,
            FAST=x.is_cuda,
            num_warps=BACK_WARPS,
        )
    return dx, partial.sum(0).t().to(kernel.dtype)


def tail_gradient(
    x: Tensor,
    kernel: Tensor,
    tail: Tensor,
    d_out: Tensor,
    d_new_tail: Tensor | None,
    bounds: tuple[int, ...],
) -> Tensor:
    d_tail = torch.empty_like(tail)
    channels = x.shape[1]
    if d_tail.numel():
        table = tiles_of(bounds, BACK_TOKENS, x.device)
        launch(tail_backward_kernel)[(len(tail) * blocks(channels, CHANNELS),)](
            *(x, kernel, tail, d_out, x if d_new_tail is None else d_new_tail, d_tail),
            *(table.bounds, channels, x.stride(0), d_out.stride(0)),
            W=kernel.shape[1],
            BC=CHANNELS,
            NEW_TAIL=d_new_tail is not None,
            FAST=x.is_cuda,
            num_warps=WARPS,
        )
    return d_tail


def blocks(channels: int, size: int) -> int:
    return -(-channels // size)


def rows_of(x: Tensor) -> Tensor:
    """``x [T, C]`` itself where its channels lie side by side, else a contiguous copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def short_conv_fused(
    x: Tensor, kernel: Tensor, bounds: tuple[int, ...], tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`farhorizon.kernels.conv.short_conv` on the GPU, with fp32 sums."""
    if tail is not None:
        tail = tail.contiguous()
    return ShortConv.apply(rows_of(x), kernel.contiguous(), tail, bounds)
