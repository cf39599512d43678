"""Rows in blocks that stay in the cache of one core, for operations that memory would bound."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_ELEMENTS = 1 << 16  # 256 KiB in fp32: a few of them fit beside each other


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over ``rows`` rows of ``width`` elements, about `BLOCK_ELEMENTS` each."""
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
