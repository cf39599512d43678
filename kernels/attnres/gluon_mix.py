"""Mixture over depth for Hopper, in Gluon: the algebra and the plain twin are in `triton_mix`.

As many programs run as fit at once, each on every n-th row, with rows of the sources in shared
memory: copies of coming rows start as soon as there is room, whatever is being added up. A row lies
in a tile ``[WARPS, COLS]``, so that a sum over it is one within each warp, and then one over a few
numbers in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .gluon_parts import (
    as_it_comes,
    columns_of,
    keep_parts,
    load_weight,
    room_for_rows,
    room_for_sums,
    tile_layout,
    total_of,
    widen,
)


@gluon.constexpr_function
def source_of(item: int, count: int, update: bool) -> int:
    """The items of a row are an update, if there is one, the last source, and the others."""
    return (item - int(update) + count - 1) % count


@gluon.constexpr_function
def begin_of(group: int, size: int, update: bool) -> int:
    return max(group * size, int(update))


@gluon.constexpr_function
def end_of(group: int, size: int, count: int, update: bool) -> int:
    return min(group * size + size, count + int(update))


@gluon.jit
def start_group(
    sources,
    update,
    ring,
    spot,
    row,
    rows,
    column,
    FIRST: gl.constexpr,
    M: gl.constexpr,
    D: gl.constexpr,
    UPDATE: gl.constexpr,
):
    """Copy items ``FIRST`` and on of a row, one to each ring: the update if there is one, the last
    source, then the others."""
    mask = (column < D) & (row < rows)
    start = row.to(gl.int64) * D
    G: gl.constexpr = len(ring)
    if FIRST < UPDATE:
        async_copy.async_copy_global_to_shared(ring[0].index(spot), update + start + column, mask)
    for k in gl.static_range(begin_of(FIRST // G, G, UPDATE), end_of(FIRST // G, G, M, UPDATE)):
        async_copy.async_copy_global_to_shared(
            ring[k % G].index(spot), sources[source_of(k, M, UPDATE)] + start + column, mask
        )
    async_copy.commit_group()


@gluon.jit
def item_of(ring, spot, j: gl.constexpr, SUM: gl.constexpr, WARPS: gl.constexpr):
    """One item of a group in fp32; with ``SUM`` the one before is added, and the sum rounded."""
    tile: gl.constexpr = tile_layout(WARPS)
    wide = widen(ring[j].index(spot).load(tile))
    if SUM:
        wide += widen(ring[j - 1].index(spot).load(tile))
        wide = widen(wide.to(ring[j].dtype))
    return wide


@gluon.jit(do_not_specialize=["rows"])
def mix_hopper_kernel(
    sources,
    update,
    summed,
    query,
    norm,
    next_norm,
    out,
    stats,
    rows,
    eps,
    M: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    RING: gl.constexpr,
    WARPS: gl.constexpr,
    COLS: gl.constexpr,
    UPDATE: gl.constexpr,
    NORM: gl.constexpr,
    SAVE: gl.constexpr,
):
    """As `mix_kernel`, with grid (programs); ``RING`` groups of items are in shared memory, which
    with an update has at least two items in a group. ``stats`` are written if ``SAVE``."""
    GROUPS: gl.constexpr = (M + UPDATE + GROUP - 1) // GROUP
    work: gl.constexpr = out.dtype.element_ty
    tile: gl.constexpr = tile_layout(WARPS)
    column = columns_of(WARPS, COLS)
    inside = column < D
    ring = room_for_rows(work, GROUP, RING, WARPS, COLS)
    sums = room_for_sums(2 * GROUP, WARPS)
    norm_sum = gl.allocate_shared_memory(gl.float32, [WARPS], as_it_comes(1))
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for k in gl.static_range(RING):
        row = first + (k // GROUPS) * step
        start_group(sources, update, ring, k, row, rows, column, k % GROUPS * GROUP, M, D, UPDATE)
    direction = load_weight(query, column, D) * load_weight(norm, column, D)
    spot = 0
    for row in range(first, rows, step):
        place = row.to(gl.int64) * D
        stat = stats + row.to(gl.int64) * (2 * M + 1)
        top = float("-inf")
        total = 0.0
        mixed = gl.zeros([WARPS, COLS], gl.float32, tile)
        for g in gl.static_range(GROUPS):
            async_copy.wait_group(RING - 1)
            parts = ()
            for k in gl.static_range(begin_of(g, GROUP, UPDATE), end_of(g, GROUP, M, UPDATE)):
                v = item_of(ring, spot, k % GROUP, UPDATE and k == 1, WARPS)
                parts = parts + (gl.sum(v * direction, 1), gl.sum(v * v, 1))
                if UPDATE and k == 1:
                    gl.store(summed + place + column, v.to(work), mask=inside)
            keep_parts(parts, sums)
            scores = ()
            highest = top
            for k in gl.static_range(begin_of(g, GROUP, UPDATE), end_of(g, GROUP, M, UPDATE)):
                square = total_of(sums[2 * (k - begin_of(g, GROUP, UPDATE)) + 1], WARPS)
                inverse = gl.rsqrt(square / D + eps)
                score = total_of(sums[2 * (k - begin_of(g, GROUP, UPDATE))], WARPS) * inverse
                highest = gl.maximum(highest, score)
                scores = scores + (score,)
                if SAVE:
                    gl.store(stat + source_of(k, M, UPDATE), score)
                    gl.store(stat + M + source_of(k, M, UPDATE), inverse)
            shrink = gl.exp(top - highest)  # 0 in the first group
            top = highest
            total *= shrink
            mixed *= shrink
            for k in gl.static_range(begin_of(g, GROUP, UPDATE), end_of(g, GROUP, M, UPDATE)):
                power = gl.exp(scores[k - begin_of(g, GROUP, UPDATE)] - highest)
                total += power
                mixed += power * item_of(ring, spot, k % GROUP, UPDATE and k == 1, WARPS)
            after = row + ((g + RING) // GROUPS) * step
            start_group(
                *(sources, update, ring, spot, after, rows, column),
                *((g + RING) % GROUPS * GROUP, M, D, UPDATE),
            )
            spot = gl.where(spot == RING - 1, 0, spot + 1)
        mixed /= total
        if NORM:
            scale = load_weight(next_norm, column, D)
            norm_sum.store(gl.sum(mixed * mixed, 1))
            inverse = gl.rsqrt(total_of(norm_sum, WARPS) / D + eps)
            if SAVE:
                gl.store(stat + 2 * M, inverse)
            mixed *= inverse * scale
        gl.store(out + place + column, mixed.to(work), mask=inside)
