"""Block attention residuals: a softmax mixture over depth (arXiv:2603.15031, K3 report 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..precision import as_given, widen
from .naive import naive_mix, naive_mix_norm

__all__ = ["mix", "mix_norm", "naive_mix", "naive_mix_norm"]


def mix(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Softmax mixture of ``sources``, each ``[..., D]``, by normalised similarity to one query.

    ``score_i = sum_c n_c w_c v_ic rsqrt(mean(v_i^2) + eps)``; ``query`` is w (``[D]`` or
    ``[1, D]``), ``norm_weight`` n ``[D]``. Scores, softmax and values are fp32 (fp64 for fp64),
    under autocast too; the result has the first source's dtype. A zero query gives the plain
    average. Differentiable in all tensors.

    On a GPU it runs in Triton kernels, which are only once differentiable and give a ValueError
    that names a shape that does not fit; but for fp64, which runs in plain torch, as on a CPU.
    """
    if _takes_kernels(sources):
        from .fused import mix_fused

        return mix_fused(sources, None, query, norm_weight, None, eps)[0]
    with as_given(sources[0]):
        return _Mix.apply(query, norm_weight, eps, *sources)


def mix_norm(
    blocks: Sequence[torch.Tensor],
    partial: torch.Tensor,
    update: torch.Tensor | None,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """A whole site: ``update`` added to the partial sum, `mix` of ``blocks`` and that sum, and the
    RMSNorm of the mixture by ``next_weight [D]``, of the same ``eps``.

    ``blocks``, ``partial`` and ``update`` (None: nothing to add) are ``[..., D]``, the rest is as
    for `mix`. Returns the blocks, the new partial sum and the normed mixture, in the dtype of the
    first source; on a GPU from one kernel, in which the mixture is not rounded before its norm.

    Later sites are to take the returned blocks: their gradients then add up in one buffer for each
    block, in place. A hook on such a block that keeps the gradient it is given has to clone it.
    """
    sources = [*blocks, partial]
    if _takes_kernels(sources):
        from .fused import mix_fused

        normed, partial, *passed = mix_fused(sources, update, query, norm_weight, next_weight, eps)
        return tuple(passed), partial, normed
    if update is not None:
        partial = partial + update
    mixed = mix([*blocks, partial], query, norm_weight, eps)
    wide = widen(mixed)
    normed = F.rms_norm(wide, wide.shape[-1:], next_weight.to(wide.dtype), eps)
    return tuple(blocks), partial, normed.to(mixed.dtype)


def _takes_kernels(sources: Sequence[torch.Tensor]) -> bool:
    return sources[0].is_cuda and all(s.dtype != torch.float64 for s in sources)


class _Mix(torch.autograd.Function):
    """Recomputes the mixture in backward, so that nothing but its inputs is kept."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, norm: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, norm, *sources)
        ctx.eps = eps
        out = _mixture(query, norm, eps, sources)[3]
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with as_given(upstream[0]):
            return _gradients(ctx, upstream[0])


def _gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, norm, *sources = ctx.saved_tensors
    direction, inverse, weights, out = _mixture(query, norm, ctx.eps, sources)
    grad = widen(upstream)
    along_out = (grad * out).sum(-1)
    d_direction = torch.zeros_like(direction)
    d_sources = []
    for source, rs, p in zip(sources, inverse, weights, strict=True):
        v = widen(source)
        d_score = p * ((grad * v).sum(-1) - along_out)  # [...]
        scaled = d_score * rs
        score = (v @ direction) * rs
        d_direction = d_direction + scaled.flatten() @ v.flatten(0, -2)
        pull = scaled[..., None] * direction - (scaled * score * rs / v.shape[-1])[..., None] * v
        d_sources.append((p[..., None] * grad + pull).to(source.dtype))
    wide_query, wide_norm = widen(query).flatten(), widen(norm)
    d_query = (d_direction * wide_norm).view(query.shape).to(query.dtype)
    d_norm = (d_direction * wide_query).to(norm.dtype)
    return d_query, d_norm, None, *d_sources


def _mixture(
    query: torch.Tensor, norm: torch.Tensor, eps: float, sources: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    direction = (widen(query) * widen(norm)).flatten()
    wide = [widen(s) for s in sources]
    inverse = [torch.rsqrt(v.square().mean(-1) + eps) for v in wide]
    weights = torch.softmax(
        torch.stack([(v @ direction) * rs for v, rs in zip(wide, inverse, strict=True)]), 0
    )
    out = weights[0][..., None] * wide[0]
    for v, p in zip(wide[1:], weights[1:], strict=True):
        out = torch.addcmul(out, v, p[..., None])
    return direction, inverse, weights, out
