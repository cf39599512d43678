"""The mixture over depth in plain torch, differentiated by autograd: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..precision import widest


def naive_mix(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`farhorizon.kernels.attnres.mix` written from its formula."""
    return _mixture(sources, query, norm_weight, eps).to(sources[0].dtype)


def naive_mix_norm(
    blocks: Sequence[torch.Tensor],
    partial: torch.Tensor,
    update: torch.Tensor | None,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """`farhorizon.kernels.attnres.mix_norm` written from its formula."""
    if update is not None:
        partial = partial + update
    sources = [*blocks, partial]
    mixed = _mixture(sources, query, norm_weight, eps)
    normed = F.rms_norm(mixed, mixed.shape[-1:], next_weight.to(mixed.dtype), eps)
    return tuple(blocks), partial, normed.to(sources[0].dtype)


def _mixture(
    sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    kind = widest(*sources, query, norm_weight)
    stacked = torch.stack([s.to(kind) for s in sources])  # [m, ..., D]
    direction = (query.to(kind) * norm_weight.to(kind)).flatten()
    inverse = torch.rsqrt(stacked.square().mean(-1) + eps)
    weights = torch.softmax((stacked @ direction) * inverse, 0)
    return (weights[..., None] * stacked).sum(0)
