"""What every launch of a kernel needs of its device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch


def takes_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels for 16-bit data on a GPU run on ``x``, and not their twins in torch."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has the instructions that the Gluon kernels use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make that the one of ``x``."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` of the CPU on ``device``, without waiting for what a GPU still has to do.

    While a CUDA graph is captured the copy waits, which torch refuses then: the graph would read
    the CPU's memory at each replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def launch(kernel: Any) -> Any:
    """The kernel as what takes a grid: its own signature does not show warps and constants."""
    return kernel
