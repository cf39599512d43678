"""Causal softmax attention over packed sequences, for training and prefill."""

from __future__ import annotations

import itertools

import torch

from ..device import takes_kernels
from .naive import naive_causal_attention

__all__ = ["causal_attention", "naive_causal_attention"]


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...], scale: float
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` of each sequence on its own, every token seeing itself and those
    before it.

    ``q, k [T, H, K]``, ``v [T, H, V]``, N sequences that start and end at ``bounds`` [N + 1] and
    are not empty -> ``[T, H, V]`` in v's dtype. Differentiable in all three. ValueError names a
    shape or ``bounds`` that does not fit.

    On a GPU 16-bit inputs run in the attention of torch, long sequences in cuDNN and short ones in
    flash attention: exact, summed in fp32, without waiting for the device, a sequence as it would
    be alone. Gradients are the same in every run only where torch is told to be deterministic.
    Everything else is the definition, in fp32 or wider, with all scores of a sequence at once.
    """
    _check(q, k, v, bounds)
    if takes_kernels(q):
        from .fused import causal_attention_fused

        return causal_attention_fused(q, k, v, bounds, scale)
    return naive_causal_attention(q, k, v, bounds, scale)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...]) -> None:
    if q.dim() != 3 or k.shape != q.shape:
        raise ValueError(f"k must be [T, H, K] as q, got {list(k.shape)} for {list(q.shape)}")
    if v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must be {list(q.shape[:2])} and V, got {list(v.shape)}")
    rising = all(a < b for a, b in itertools.pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(q) or not rising:
        raise ValueError(f"bounds must rise from 0 to the {len(q)} tokens, got {list(bounds[:8])}")
