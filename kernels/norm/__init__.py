"""RMSNorm, and RMSNorm of a head times a sigmoid gate."""

from __future__ import annotations

import torch

from ..blocks import takes_blocks
from ..device import takes_kernels
from .naive import naive_gated_norm, naive_rms_norm
from .rows import NormRows

__all__ = ["gated_norm", "naive_gated_norm", "naive_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x rsqrt(mean(x^2) + eps) weight`` over the last dimension, in fp32 or wider.

    ``x [..., V]``, ``weight [V]``, else ValueError; the result has x's dtype. Differentiable in
    both.

    On a GPU a 16-bit ``x`` runs in Triton kernels, on a CPU a large wide one block by block, both
    only once differentiable; everything else runs in plain torch.
    """
    _check_weight(x, weight)
    if takes_kernels(x):
        from .fused import norm_fused

        return norm_fused(x, None, weight, eps)
    if takes_blocks(x, weight):
        return NormRows.apply(_rows(x), None, weight, eps).view(x.shape)
    return naive_rms_norm(x, weight, eps)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``x rsqrt(mean(x^2) + eps) weight sigmoid(gate)`` over the last dimension, in fp32 or wider.

    ``x`` and ``gate [..., V]``, ``weight [V]``, ``eps`` above 0; the result has x's dtype.
    Differentiable in all three. ValueError names a shape that does not fit.

    On a GPU a 16-bit ``x`` runs in Triton kernels, on a CPU a large wide one block by block, both
    only once differentiable; everything else runs in plain torch.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate must be {list(x.shape)} as x, got {list(gate.shape)}")
    _check_weight(x, weight)
    if takes_kernels(x):
        from .fused import norm_fused

        return norm_fused(x, gate, weight, eps)
    if takes_blocks(x, gate, weight):
        return NormRows.apply(_rows(x), _rows(gate), weight, eps).view(x.shape)
    return naive_gated_norm(x, gate, weight, eps)


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be {list(x.shape[-1:])}, got {list(weight.shape)}")


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
