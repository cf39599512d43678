"""SiTU-GLU on the GPU: the launch of its kernel."""

from __future__ import annotations

import torch

from ..device import launch, on_device_of
from .triton_situ import situ_kernel

COLUMNS = 1024  # of a program: a power of two


def situ_forward(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float
) -> torch.Tensor:
    """`farhorizon.kernels.moe.situ_glu` without gradients."""
    width = gate.shape[-1]
    a, b = (rows_of(x, width) for x in (gate, up))
    out = gate.new_empty(gate.shape)
    block = min(COLUMNS, 1 << (width - 1).bit_length())
    grid = len(a) * -(-width // block)
    if grid:
        with on_device_of(gate):
            launch(situ_kernel)[(grid,)](
                *(a, b, out, beta, linear_beta, len(a), a.stride(0), b.stride(0)),
                I=width,
                BI=block,
                FAST=gate.is_cuda,
            )
    return out


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """``x [..., I]`` as rows of adjacent numbers, where it lies if it is so already."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, width).contiguous()
