"""Rows in blocks that stay in the cache of one core, for operations that memory would bound."""

from __future__ import annotations

from collections.abc import Iterator

import torch

FEW_ELEMENTS = 1 << 13  # measured in decode steps of a small policy, where blocks cost more
BLOCK_ELEMENTS = 1 << 16  # 256 KiB in fp32: a few of them fit beside each other


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over ``rows`` rows of ``width`` elements, about `BLOCK_ELEMENTS` each."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def is_small(x: torch.Tensor) -> bool:
    """Whether calls cost more than memory for ``x``, as in a decode step."""
    return x.numel() <= FEW_ELEMENTS


def takes_blocks(*tensors: torch.Tensor) -> bool:
    """Whether a CPU works on ``tensors`` in one wide type, and on so many elements that blocks pay.

    Whether autograd follows does not matter: forwards that only count are those of training to
    the bit.
    """
    first = tensors[0].dtype
    wide = first in (torch.float32, torch.float64) and not is_small(tensors[0])
    return wide and all(t.dtype == first and t.device.type == "cpu" for t in tensors)
