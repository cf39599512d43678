"""Rows in blocks that stay in the cache of one core, for operations that memory would bound."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_ELEMENTS = 1 << 16  # 256 KiB in fp32: a few of them fit beside each other


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over ``rows`` rows of ``width`` elements, about `BLOCK_ELEMENTS` each."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def trains_on_cpu(*tensors: torch.Tensor) -> bool:
    """Whether autograd follows an operation on ``tensors`` that a CPU computes in one wide type:
    where it does not, plain calls keep nothing either."""
    first = tensors[0]
    wide = first.dtype in (torch.float32, torch.float64)
    same = all(t.dtype == first.dtype and t.device.type == "cpu" for t in tensors)
    return wide and same and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
