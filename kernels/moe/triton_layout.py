"""Rows in the order of their experts, in Triton: a stable counting sort in integers.

A route is one of the ``T k`` choices of the tokens. The rows of an expert are its routes in their
own order, then rows that hold nothing, up to a whole number of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["routes", "blocks"])
def rank_kernel(experts, rank, table, routes, blocks, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """Number of earlier routes of the same expert within a block, ``rank [routes]``, and of all of
    them, ``table [E, blocks]``, which is 0 before; grid (blocks)."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    left = routes - first
    own = tl.load(experts + first + i, mask=i < left, other=-1).to(tl.int32)
    before = tl.zeros([BLOCK], tl.int32)
    behind = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, BLOCK, PIECE):
        j = start + tl.arange(0, PIECE)
        other = tl.load(experts + first + j, mask=j < left, other=-2).to(tl.int32)
        same = own[:, None] == other[None, :]
        before += tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), 1)
        behind += tl.sum((same & (j[None, :] > i[:, None])).to(tl.int32), 1)
    tl.store(rank + first + i, before, mask=i < left)
    place = own.to(tl.int64) * blocks + tl.program_id(0)
    tl.store(table + place, before + 1, mask=(i < left) & (behind == 0))


@triton.jit(do_not_specialize=["blocks"])
def sum_kernel(table, sizes, blocks, BLOCK: tl.constexpr):
    """``table`` becomes the sum over earlier blocks, ``sizes [E]`` that over all; grid (E)."""
    line = table + tl.program_id(0).to(tl.int64) * blocks
    total = tl.zeros([], tl.int32)
    for start in range(0, blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found = tl.load(line + i, mask=i < blocks, other=0)
        tl.store(line + i, tl.cumsum(found, 0) - found + total, mask=i < blocks)
        total += tl.sum(found, 0)
    tl.store(sizes + tl.program_id(0), total)


@triton.jit
def start_kernel(sizes, starts, E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr):
    """``starts [E + 1]`` of the experts' rows, multiples of ``TILE``; one program."""
    i = tl.arange(0, EP)
    room = (tl.load(sizes + i, mask=i < E, other=0) + (TILE - 1)) // TILE * TILE
    ends = tl.cumsum(room, 0)
    tl.store(starts + i, ends - room, mask=i < E)
    tl.store(starts + E + 0 * i, ends, mask=i == E - 1)


@triton.jit(do_not_specialize=["routes", "blocks"])
def place_kernel(
    experts, rank, table, starts, place, source, token, routes, blocks, K: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """The row ``place [routes]`` of every route, and of every row its route ``source`` and
    ``token``, which are -1 before; grid (blocks)."""
    route = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = route < routes
    expert = tl.load(experts + route, mask=inside, other=0)
    row = tl.load(starts + expert, mask=inside, other=0)
    row += tl.load(table + expert * blocks + tl.program_id(0), mask=inside, other=0)
    row += tl.load(rank + route, mask=inside, other=0)
    tl.store(place + route, row, mask=inside)
    tl.store(source + row, route.to(tl.int32), mask=inside)
    tl.store(token + row, (route // K).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def tile_kernel(
    starts, tile_expert, tiles, E: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """The expert of every tile of rows, ``E`` behind the last; grid (tiles / BLOCK)."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.full([BLOCK], E, tl.int32)
    # the last expert that starts at or before the tile, unless all end there
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(starts + middle + 1, mask=low < high, other=0) <= tile * TILE
        searching = low < high
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    tl.store(tile_expert + tile, low, mask=tile < tiles)
