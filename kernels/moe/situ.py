"""SiTU-GLU, the activation of all feed-forward layers (K3 report 2.3)."""

from __future__ import annotations

from typing import Any

import torch

from ..blocks import blocks, takes_blocks
from ..device import takes_kernels
from ..once import once_differentiable
from ..precision import widen


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0
) -> torch.Tensor:
    """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``, fp32 inside.

    ``gate`` and ``up`` have one shape ``[..., I]``, else ValueError. Bounded by ``beta *
    linear_beta`` for any input; the result has gate's dtype.

    On a GPU 16-bit inputs run in Triton kernels, on a CPU large wide ones block by block, both only
    once differentiable; everything else runs in plain torch.
    """
    if up.shape != gate.shape:
        raise ValueError(f"up must be {list(gate.shape)} as gate, got {list(up.shape)}")
    if takes_kernels(gate) and gate.dtype == up.dtype:
        from .fused_situ import situ_fused

        return situ_fused(gate, up, beta, linear_beta)
    if takes_blocks(gate, up):
        width = gate.shape[-1]
        rows = (gate.reshape(-1, width), up.reshape(-1, width))
        return SituRows.apply(*rows, beta, linear_beta).view(gate.shape)
    return naive_situ_glu(gate, up, beta, linear_beta)


def naive_situ_glu(
    gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0
) -> torch.Tensor:
    """`situ_glu` from its formula, differentiated by autograd: the specification."""
    a, b = widen(gate), widen(up)
    bent = beta * torch.tanh(a / beta) * torch.sigmoid(a)
    return (bent * (linear_beta * torch.tanh(b / linear_beta))).to(gate.dtype)


class SituRows(torch.autograd.Function):
    """`naive_situ_glu` on the CPU: a block of rows ``[R, I]`` at a time, only inputs are kept.

    With t = tanh(gate / beta), s = sigmoid(gate), h = beta t s, u = tanh(up / linear) and
    w = linear u:  dgate = dy w (s (1 - t^2) + h (1 - s))    dup = dy h (1 - u^2)
    """

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float
    ) -> torch.Tensor:
        out = torch.empty_like(gate)
        for some in blocks(*gate.shape):
            a, y = gate[some], out[some]
            torch.tanh(torch.div(a, beta, out=y), out=y).mul_(torch.sigmoid(a).mul_(beta))
            y.mul_(torch.div(up[some], linear_beta).tanh_().mul_(linear_beta))
        ctx.save_for_backward(gate, up)
        ctx.bounds = beta, linear_beta
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        for some in blocks(*gate.shape):
            a, dy = gate[some], upstream[0][some]
            t, s = torch.div(a, beta).tanh_(), torch.sigmoid(a)
            u = torch.div(up[some], linear_beta).tanh_()
            slope = torch.ops.aten.tanh_backward(s, t)
            h = t.mul_(beta)
            slope += torch.ops.aten.sigmoid_backward(h, s)
            h *= s
            torch.mul(dy, u, out=d_gate[some]).mul_(slope).mul_(linear_beta)
            d_up[some] = torch.ops.aten.tanh_backward(h.mul_(dy), u)
        return d_gate, d_up, None, None
