"""The float type that reductions, gates and states are computed in."""

from __future__ import annotations

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32, or as it is when it is fp64."""
    return x if x.dtype == torch.float64 else x.float()
