"""Drawing tokens on the GPU: the launch of the kernel."""

from __future__ import annotations

import torch

from ..device import launch, on_device_of
from .triton_draw import draw_kernel

COLUMNS, WARPS = 4096, 16

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
                *(logits, temperature, point, out, logits.stride(0)),
                V=width,
                BV=block,
                BLOCKS=1 << (blocks - 1).bit_length(),
                num_warps=WARPS,
            )
    return out
