"""SiTU-GLU on the GPU: autograd around its two kernels."""

from __future__ import annotations

from typing import Any

import torch

from ..device import launch, on_device_of
from ..once import once_differentiable
from .triton_situ import situ_backward_kernel, situ_kernel

BLOCK, WARPS = 1024, 4  # elements that a program takes, of as many rows as that holds


class Situ(torch.autograd.Function):
    """``gate`` and ``up [R, I]`` with adjacent columns, only these are kept."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, linear: float
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = beta, linear
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if out.numel():
            with on_device_of(gate):
                launch(situ_kernel)[grid(gate)](
                    *(gate, up, out, len(gate), gate.stride(0), up.stride(0), beta, linear),
                    **tile(gate),
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_out = rows_of(d_out)
        d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        if d_gate.numel():
            with on_device_of(gate):
                launch(situ_backward_kernel)[grid(gate)](
                    *(gate, up, d_out, d_gate, d_up, len(gate)),
                    *(gate.stride(0), up.stride(0), d_out.stride(0), *ctx.bounds),
                    **tile(gate),
                )
        return d_gate, d_up, None, None


def tile(x: torch.Tensor) -> dict[str, Any]:
    width = x.shape[1]
    block = min(BLOCK, 1 << (width - 1).bit_length())
    return {
        "I": width,
        "BR": BLOCK // block,
        "BLOCK": block,
        "FAST": x.is_cuda,
        "num_warps": WARPS,
    }


def grid(x: torch.Tensor) -> tuple[int, int]:
    sizes = tile(x)
    return -(-len(x) // sizes["BR"]), -(-x.shape[1] // sizes["BLOCK"])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x [R, I]`` itself where its columns lie side by side, else a contiguous copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def situ_fused(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float
) -> torch.Tensor:
    """`farhorizon.kernels.moe.situ_glu` on the GPU, in fp32 arithmetic."""
    width = gate.shape[-1]
    rows = [rows_of(x.reshape(-1, width)) for x in (gate, up)]
    return Situ.apply(*rows, beta, linear_beta).view(gate.shape)
