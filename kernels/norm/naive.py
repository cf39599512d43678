"""RMSNorm and the gated head norm in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..precision import widen


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`farhorizon.kernels.norm.rms_norm`, any float type, on any device."""
    wide = widen(x)
    return F.rms_norm(wide, x.shape[-1:], weight.to(wide.dtype), eps).to(x.dtype)


def naive_gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`farhorizon.kernels.norm.gated_norm`, any float type, on any device."""
    wide = widen(x)
    normed = F.rms_norm(wide, x.shape[-1:], weight.to(wide.dtype), eps)
    return (normed * torch.sigmoid(widen(gate))).to(x.dtype)
