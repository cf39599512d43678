"""Block attention residuals: a softmax mixture over depth (arXiv:2603.15031, K3 report 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..blocks import BLOCK_ELEMENTS
from ..precision import as_given, widen
from .rows import MixRows

__all__ = ["mix", "naive_mix"]


def naive_mix(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`mix` written from its formula, differentiated by autograd: the specification."""
    stacked = torch.stack([widen(s) for s in sources])  # [m, ..., D]
    direction = (widen(query) * widen(norm_weight)).flatten()
    inverse = torch.rsqrt(stacked.square().mean(-1) + eps)
    weights = torch.softmax((stacked @ direction) * inverse, 0)
    return (weights[..., None] * stacked).sum(0).to(sources[0].dtype)


def mix(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Softmax mixture of ``sources``, each ``[..., D]``, by normalised similarity to one query.

    ``score_i = sum_c n_c w_c v_ic rsqrt(mean(v_i^2) + eps)``; ``query`` is w (``[D]`` or
    ``[1, D]``), ``norm_weight`` n ``[D]``. Scores, softmax and values are fp32 (fp64 for fp64),
    under autocast too; the result has the sources' dtype. A zero query gives the plain average.
    """
    count = sources[0].numel() * len(sources)
    if not torch.is_grad_enabled() and count <= BLOCK_ELEMENTS and not sources[0].is_cuda:
        with as_given(sources[0]):
            return naive_mix(sources, query, norm_weight, eps)  # fewest calls
    width = sources[0].shape[-1]
    rows = [source.reshape(-1, width) for source in sources]
    with as_given(sources[0]):
        out = MixRows.apply(query.flatten(), norm_weight, eps, *rows)
    return out.view(sources[0].shape)
