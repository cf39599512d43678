"""The float type that reductions, gates and states are computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32, or as it is when it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def widest(*tensors: torch.Tensor) -> torch.dtype:
    """fp64 if one of them has it, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def as_given(x: torch.Tensor) -> AbstractContextManager[object]:
    """Context in which autocast rounds nothing: products have the dtype of their arguments.

    `widen` alone does not do that: autocast rounds the arguments of every matrix product again.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which matrix products of ``x`` run: autocast's inside of it, else its own."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype
