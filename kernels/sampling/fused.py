"""Drawing tokens on the GPU: the launch of the kernel."""

from __future__ import annotations

import torch

from ..device import launch, on_device_of
from .triton_draw import draw_kernel
from .triton_step import advance_kernel, point_kernel

COLUMNS, WARPS = 4096, 16
ROWS = 128  # sequences of a program that only counts

Tensor = torch.Tensor


def draw(logits: Tensor, temperature: Tensor, point: Tensor) -> Tensor:
    """`farhorizon.kernels.sampling.draw_tokens` on the GPU."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, width = logits.shape
    out = logits.new_empty(count, 2, dtype=torch.float64)
    block = min(COLUMNS, 1 << (width - 1).bit_length())
    blocks = -(-width // block)
    if count:
        with on_device_of(logits):
            launch(draw_kernel)[(count,)](
                *(logits, temperature.contiguous(), point.contiguous(), out, logits.stride(0)),
                V=width,
                BV=block,
                BLOCKS=1 << (blocks - 1).bit_length(),
                num_warps=WARPS,
            )
    return out


def points(keys: Tensor, position: Tensor) -> Tensor:
    """`farhorizon.kernels.sampling.stream_points` on the GPU."""
    out = torch.empty(len(keys), dtype=torch.float64, device=keys.device)
    if len(keys):
        with on_device_of(keys):
            launch(point_kernel)[(-(-len(keys) // ROWS),)](
                keys.contiguous(), position.contiguous(), out, len(keys), BLOCK=ROWS
            )
    return out


def advance(
    drawn: Tensor,
    stops: Tensor,
    ids: Tensor,
    places: Tensor,
    past: Tensor,
    position: Tensor,
    left: Tensor,
    stop: Tensor,
) -> None:
    """`farhorizon.kernels.sampling.advance_` on the GPU."""
    if len(drawn):
        with on_device_of(drawn):
            launch(advance_kernel)[(-(-len(drawn) // ROWS),)](
                *(drawn.contiguous(), stops.contiguous(), ids, places, past, position, left, stop),
                len(drawn),
                V=stops.shape[1],
                BLOCK=ROWS,
            )
