"""The mixture over depth in plain torch: a block of tokens at a time, nothing kept but its inputs.

With d = w n (query times norm weight), r_i = rsqrt(mean(v_i^2) + eps), s_i = r_i <v_i, d>,
p = softmax(s), y = sum_i p_i v_i and the gradient g of y:
    ds_i = p_i <g, v_i - y>    dv_i = p_i g + ds_i r_i (d - s_i r_i v_i / D)
    dd = sum ds_i r_i v_i      dw = dd n    dn = dd w
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..blocks import blocks
from ..precision import as_given, widen


class MixRows(torch.autograd.Function):
    """Of ``sources``, each ``[T, D]``, for ``query`` and ``norm [D]``."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, norm: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, norm, *sources)
        ctx.eps = eps
        direction = widen(query) * widen(norm)
        out = torch.empty_like(sources[0])
        for some in blocks(*out.shape):
            wide = [widen(source[some]) for source in sources]
            out[some] = _mixture(wide, direction, eps)[2]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, norm, *sources = ctx.saved_tensors
        direction = widen(query) * widen(norm)
        pulled = torch.zeros_like(direction)
        d_sources = [torch.empty_like(source) for source in sources]
        with as_given(upstream[0]):
            for some in blocks(*sources[0].shape):
                wide = [widen(source[some]) for source in sources]
                grad = widen(upstream[0][some])
                targets = [d_source[some] for d_source in d_sources]
                pulled += _pull(wide, direction, ctx.eps, grad, targets)
        d_query, d_norm = pulled * widen(norm), pulled * widen(query)
        return d_query.to(query.dtype), d_norm.to(norm.dtype), None, *d_sources


def _mixture(
    wide: Sequence[torch.Tensor], direction: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``r`` and ``p [m, T]`` and the mixture of a block."""
    out = torch.empty_like(wide[0])
    squares = torch.stack([torch.mul(v, v, out=out).mean(-1) for v in wide])
    inverse = squares.add_(eps).rsqrt_()
    weights = torch.stack([v @ direction for v in wide]).mul_(inverse).softmax(0)
    torch.mul(wide[0], weights[0][:, None], out=out)
    for v, p in zip(wide[1:], weights[1:], strict=True):
        out.addcmul_(v, p[:, None])
    return inverse, weights, out


def _pull(
    wide: Sequence[torch.Tensor],
    direction: torch.Tensor,
    eps: float,
    grad: torch.Tensor,
    targets: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Gradients of the sources of a block, into ``targets``; returns that of the direction."""
    inverse, weights, out = _mixture(wide, direction, eps)
    along = torch.stack([torch.mul(grad, v, out=out).sum(-1) for v in wide])
    along -= (along * weights).sum(0)  # <g, y> = sum_i p_i <g, v_i>
    scaled = along.mul_(weights).mul_(inverse)  # ds r
    pulled = torch.zeros_like(direction)
    for i, v in enumerate(wide):
        pulled += scaled[i] @ v
        back = (v @ direction).mul_(inverse[i]).mul_(inverse[i]).mul_(scaled[i]).div_(-v.shape[1])
        torch.mul(grad, weights[i][:, None], out=out)
        out.addcmul_(scaled[i][:, None], direction).addcmul_(v, back[:, None])
        targets[i].copy_(out)
    return pulled
