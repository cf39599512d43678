"""The mixture over depth in plain torch: a block of tokens at a time.

With d = w n (query times norm weight), r_i = rsqrt(mean(v_i^2) + eps), s_i = r_i <v_i, d>,
p = softmax(s), y = sum_i p_i v_i and the gradient g of y:
    ds_i = p_i <g, v_i - y>    dv_i = p_i g + ds_i r_i (d - s_i r_i v_i / D)
    dd = sum ds_i r_i v_i      dw = dd n    dn = dd w
where <g, y> = sum_i p_i <g, v_i>. Kept are the sources and r, s and p of each token.
"""

from __future__ import annotations

from typing import Any

import torch

from ..blocks import blocks
from ..once import once_differentiable
from ..precision import as_given, widest


class MixRows(torch.autograd.Function):
    """Of ``sources``, each ``[T, D]``, for ``query`` and ``norm [D]``."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, norm: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> torch.Tensor:
        kind = widest(*sources, query, norm)
        direction = query.to(kind) * norm.to(kind)
        out = torch.empty_like(sources[0])
        kept = direction.new_empty(3, len(sources), len(out))  # r, s, p
        for some in blocks(len(out), len(sources) * out.shape[1]):
            stacked = torch.stack([source[some].to(kind) for source in sources])
            inverse = stacked.square().mean(-1).add_(eps).rsqrt_()
            scores = (stacked @ direction).mul_(inverse)
            weights = scores.softmax(0)
            out[some] = stacked.mul_(weights[..., None]).sum(0)
            torch.stack((inverse, scores, weights), out=kept[:, :, some])
        ctx.save_for_backward(query, norm, kept, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, norm, kept, *sources = ctx.saved_tensors
        kind = kept.dtype
        direction = query.to(kind) * norm.to(kind)
        pulled = torch.zeros_like(direction)
        d_sources = [torch.empty_like(source) for source in sources]
        with as_given(upstream[0]):
            for some in blocks(*sources[0].shape):
                inverse, scores, weights = kept[:, :, some]
                grad = upstream[0][some].to(kind)
                wide = [source[some].to(kind) for source in sources]
                buffer = torch.empty_like(grad)
                along = torch.stack([torch.mul(grad, v, out=buffer).sum(-1) for v in wide])
                along -= (along * weights).sum(0)
                scaled = along.mul_(weights).mul_(inverse)  # ds r
                back = (scores * scaled).mul_(inverse).div_(-grad.shape[1])
                for i, v in enumerate(wide):
                    pulled += scaled[i] @ v
                    same = d_sources[i].dtype == grad.dtype
                    target = d_sources[i][some] if same else buffer
                    torch.mul(grad, weights[i, :, None], out=target)
                    target.addcmul_(scaled[i, :, None], direction).addcmul_(v, back[i, :, None])
                    if not same:
                        d_sources[i][some] = target
        d_query, d_norm = pulled * norm.to(kind), pulled * query.to(kind)
        return d_query.to(query.dtype), d_norm.to(norm.dtype), None, *d_sources
