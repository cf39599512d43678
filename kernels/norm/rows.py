"""RMSNorm, gated or not, on the CPU: a block of rows at a time, nothing kept but inputs and scales.

With r = rsqrt(mean(x^2) + eps), n = x r, s = sigmoid(gate) (1 without a gate) and y = n w s:
    dn = dy w s    dx = r (dn - n mean(dn n))    dgate = dy n w s (1 - s)    dw = sum dy n s
"""

from __future__ import annotations

from typing import Any

import torch

from ..blocks import blocks
from ..once import once_differentiable


class NormRows(torch.autograd.Function):
    """``x [R, V]``, ``gate`` of the same shape or None, ``weight [V]``, one float type."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out, scales = torch.empty_like(x), x.new_empty(len(x), 1)
        for some in blocks(*x.shape):
            rows, y = x[some], out[some]
            torch.mean(torch.mul(rows, rows, out=y), -1, keepdim=True, out=scales[some])
            torch.mul(rows, scales[some].add_(eps).rsqrt_(), out=y).mul_(weight)
            if gate is not None:
                y.mul_(torch.sigmoid(gate[some]))
        ctx.save_for_backward(x, gate, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scales = ctx.saved_tensors
        (d_out,) = upstream
        dx, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        d_gate = None if gate is None else torch.empty_like(gate)
        for some in blocks(*x.shape):
            rows, pull, scale = x[some], d_out[some], scales[some]
            if gate is not None and d_gate is not None:
                opened = torch.sigmoid(gate[some])
                closing = torch.mul(pull, rows, out=d_gate[some]).mul_(scale).mul_(weight)
                pull = pull * opened
                closing.mul_(opened).mul_(opened.neg_().add_(1))
            product = pull * rows
            d_weight += torch.mv(product.T, scale[:, 0])
            along = torch.mv(product, weight)[:, None].mul_(scale.pow(3)).div_(-x.shape[1])
            torch.mul(pull, weight, out=dx[some]).mul_(scale).addcmul_(rows, along)
        return dx, d_gate, d_weight, None
