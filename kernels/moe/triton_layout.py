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
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, BLOCK, PIECE):
        j = start + tl.arange(0, PIECE)
        other = tl.load(experts + first + j, mask=j < left, other=-2).to(tl.int32)
        # a thread has routes of its own along the last axis and adds up without its neighbours
        same = other[:, None] == own[None, :]
        before += tl.sum((same & (j[:, None] < i[None, :])).to(tl.int32), 0)
        count += tl.sum(same.to(tl.int32), 0)
    tl.store(rank + first + i, before, mask=i < left)
    place = own.to(tl.int64) * blocks + tl.program_id(0)
    tl.store(table + place, count, mask=(i < left) & (before == 0))


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


@triton.jit(do_not_specialize=["routes", "tiles"])
def few_kernel(
    experts, sizes, starts, place, source, token, tile_expert, routes, tiles, E: tl.constexpr,
    EP: tl.constexpr, K: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """All that the other kernels find, of at most ``MOST`` routes; grid (E).

    Every program counts all routes, so that none waits for another, and writes the rows of its
    expert and a share of those behind the last.
    """
    mine = tl.program_id(0)
    route = tl.arange(0, MOST)
    inside = route < routes
    expert = tl.load(experts + route, mask=inside, other=0).to(tl.int32)
    size = tl.histogram(expert, EP, mask=inside)
    i = tl.arange(0, EP)
    room = (size + (TILE - 1)) // TILE * TILE
    start = tl.sum(tl.where(i < mine, room, 0), 0)
    end = start + tl.sum(tl.where(i == mine, room, 0), 0)
    total = tl.sum(room, 0)
    tl.store(sizes + i, size, mask=i == mine)
    tl.store(starts + mine, start)
    tl.store(starts + E, total)
    own = inside & (expert == mine)
    row = start + tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(place + route, row, mask=own)
    tl.store(source + row, route, mask=own)
    tl.store(token + row, route // K, mask=own)
    full = route < (end - start) // TILE
    tl.store(tile_expert + start // TILE + route, mine + 0 * route, mask=full)
    line = tl.arange(0, TILE)
    empty = start + tl.sum(own.to(tl.int32), 0) + line
    tl.store(source + empty, -1 + 0 * line, mask=empty < end)
    tl.store(token + empty, -1 + 0 * line, mask=empty < end)
    for tile in range(total // TILE + mine, tiles, E):
        tl.store(source + tile * TILE + line, -1 + 0 * line)
        tl.store(token + tile * TILE + line, -1 + 0 * line)
        tl.store(tile_expert + tile, E)
