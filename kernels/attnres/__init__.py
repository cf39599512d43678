"""Block attention residuals: a softmax mixture over depth (arXiv:2603.15031, K3 report 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..blocks import is_small
from ..norm import rms_norm
from ..precision import as_given
from .naive import naive_mix, naive_mix_norm
from .rows import MixRows

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

    ValueError names a shape that does not fit, and where there is no source. On a GPU it runs in
    Triton kernels, but for fp64, which runs in plain torch. Only once differentiable, but for few
    elements on a CPU.
    """
    _check(sources, None, query, norm_weight, None)
    if _takes_kernels(sources):
        from .fused import mix_fused

        return mix_fused(sources, None, query, norm_weight, None, eps)[0]
    if is_small(sources[0]):
        with as_given(sources[0]):
            return naive_mix(sources, query, norm_weight, eps)
    width = sources[0].shape[-1]
    rows = [source.reshape(-1, width) for source in sources]
    with as_given(sources[0]):
        out = MixRows.apply(query.flatten(), norm_weight, eps, *rows)
    return out.view(sources[0].shape)


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

    Later sites are to take the returned blocks: on a GPU their gradients then add up in one buffer
    for each block, in place, but where a hook has kept one or `torch.autograd.grad` asks for it.
    """
    sources = [*blocks, partial]
    _check(sources, update, query, norm_weight, next_weight)
    if _takes_kernels(sources):
        from .fused import mix_fused

        normed, partial, *passed = mix_fused(sources, update, query, norm_weight, next_weight, eps)
        return tuple(passed), partial, normed
    if update is not None:
        partial = partial + update
    mixed = mix([*blocks, partial], query, norm_weight, eps)
    return tuple(blocks), partial, rms_norm(mixed, next_weight, eps)


def _takes_kernels(sources: Sequence[torch.Tensor]) -> bool:
    return sources[0].is_cuda and all(s.dtype != torch.float64 for s in sources)


def _check(
    sources: Sequence[torch.Tensor],
    update: torch.Tensor | None,
    query: torch.Tensor,
    norm: torch.Tensor,
    next_norm: torch.Tensor | None,
) -> None:
    if not sources:
        raise ValueError("sources must be at least one")
    shape = sources[0].shape
    for i, x in enumerate((*sources, update)):
        if x is not None and x.shape != shape:
            name = f"sources[{i}]" if i < len(sources) else "update"
            raise ValueError(f"{name} must be {list(shape)} as the first, got {list(x.shape)}")
    line = shape[-1:]
    for name, x in (("query", query), ("norm_weight", norm), ("next_weight", next_norm)):
        if x is not None and x.shape != line and (name, x.shape) != ("query", (1, *line)):
            raise ValueError(
                f"{name} must hold {shape[-1]} numbers in one row, got {list(x.shape)}"
            )
