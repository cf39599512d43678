"""What every launch of a kernel needs of its device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def takes_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels for 16-bit data on a GPU run on ``x``, and not their twins in torch."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make that the one of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch(kernel: Any) -> Any:
    """The kernel as what takes a grid: its own signature does not show warps and constants."""
    return kernel
