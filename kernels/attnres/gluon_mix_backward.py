"""The way back through the mixture over depth for Hopper, in Gluon, as `gluon_mix` the way there.

Rows of the sources stay in shared memory between the three passes over them: for the mixture, for
the products with its gradient, and for their own gradients. They are read from memory once.
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
    settled,
    shared_by_all,
    tile_layout,
    total_of,
    widen,
)


@gluon.jit
def start_step(
    sources,
    d_out,
    carried,
    stats,
    held,
    d_held,
    extra,
    kept,
    row,
    carried_row,
    rows,
    column,
    place,
    spot,
    stat_place,
    I: gl.constexpr,
    NEXT: gl.constexpr,
    CARRIED: gl.constexpr,
    M: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy source ``I`` of a row, with the first of them what else its row needs, and the gradient
    of source ``NEXT``, perhaps of another row, if one is carried."""
    inside = column < D
    mask = inside & (row < rows)
    start = row.to(gl.int64) * D
    if I == 0:
        async_copy.async_copy_global_to_shared(
            d_held.index(place), d_out + start + column, mask=mask
        )
        S: gl.constexpr = kept.shape[1]
        number = gl.arange(0, S, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        async_copy.async_copy_global_to_shared(
            kept.index(stat_place),
            stats + row.to(gl.int64) * (2 * M + 1) + number,
            mask=(number < 2 * M + 1) & (row < rows),
        )
    async_copy.async_copy_global_to_shared(
        held[I].index(place), sources[I] + start + column, mask=mask
    )
    if CARRIED[NEXT]:
        async_copy.async_copy_global_to_shared(
            extra.index(spot),
            carried[NEXT] + carried_row.to(gl.int64) * D + column,
            mask=inside & (carried_row < rows),
        )
    async_copy.commit_group()


@gluon.jit
def number_at(numbers, i: gl.constexpr, WARPS: gl.constexpr):
    """One of numbers in shared memory, for all threads."""
    each = numbers._reinterpret(gl.float32, [numbers.shape[0], 1], as_it_comes(1))
    return gl.sum(each.index(i).load(shared_by_all(1, WARPS)), 0)


@gluon.jit
def softmax_of(numbers, M: gl.constexpr, WARPS: gl.constexpr):
    """The softmax of stored scores."""
    scores = ()
    top = float("-inf")
    for i in gl.static_range(M):
        scores = scores + (number_at(numbers, i, WARPS),)
        top = gl.maximum(top, scores[i])
    powers = ()
    total = 0.0
    for i in gl.static_range(M):
        powers = powers + (gl.exp(scores[i] - top),)
        total += powers[i]
    weights = ()
    for i in gl.static_range(M):
        weights = weights + (powers[i] / total,)
    return weights


@gluon.jit(do_not_specialize=["rows"])
def mix_backward_hopper_kernel(
    sources,
    d_out,
    carried,
    results,
    query,
    norm,
    next_norm,
    stats,
    d_directions,
    d_norms,
    rows,
    CARRIED: gl.constexpr,
    M: gl.constexpr,
    D: gl.constexpr,
    SETS: gl.constexpr,
    RING: gl.constexpr,
    KEPT: gl.constexpr,
    WARPS: gl.constexpr,
    COLS: gl.constexpr,
    NORM: gl.constexpr,
):
    """As `mix_backward_kernel`, with grid (programs). In shared memory are ``SETS`` rows of all
    sources and ``RING`` of gradients that are carried; ``KEPT`` numbers hold the 2 M + 1 of a row.

    The row moves on in steps, one for each source: a step ends when the gradient of its source is
    written, and starts the copy of the same source of the next row to its place.
    """
    work: gl.constexpr = d_out.dtype.element_ty
    tile: gl.constexpr = tile_layout(WARPS)
    column = columns_of(WARPS, COLS)
    inside = column < D
    held = room_for_rows(work, M, SETS, WARPS, COLS)
    d_held = gl.allocate_shared_memory(work, [SETS, WARPS, COLS], as_it_comes(2))
    extra = gl.allocate_shared_memory(work, [RING, WARPS, COLS], as_it_comes(2))
    kept = gl.allocate_shared_memory(gl.float32, [SETS + 1, KEPT], as_it_comes(1))
    sums = room_for_sums(M + 1, WARPS)
    norm_sum = gl.allocate_shared_memory(gl.float32, [WARPS], as_it_comes(1))
    first = gl.program_id(0)
    step = gl.num_programs(0)
    AHEAD: gl.constexpr = SETS * M - RING  # steps until the first that copies what is carried
    NONE: gl.constexpr = (False,) * M
    for t in gl.static_range(SETS * M):
        start_step(
            *(sources, d_out, carried, stats, held, d_held, extra, kept),
            *(first + (t // M) * step, first + ((t - AHEAD) // M) * step, rows, column),
            *(t // M, (t - AHEAD) % RING, t // M, t % M, (t - AHEAD) % M),
            *(CARRIED if t >= AHEAD else NONE, M, D, WARPS),
        )
    direction = load_weight(query, column, D) * load_weight(norm, column, D)
    d_direction = gl.zeros([WARPS, COLS], gl.float32, tile)
    d_norm = gl.zeros([WARPS, COLS], gl.float32, tile)
    place = 0
    spot = 0
    stat_place = 0
    for row in range(first, rows, step):
        async_copy.wait_group(SETS * M - 1)
        numbers = kept.index(stat_place)
        weights = softmax_of(numbers, M, WARPS)
        mixed = gl.zeros([WARPS, COLS], gl.float32, tile)
        for i in gl.static_range(M):
            if i > 0:
                async_copy.wait_group(SETS * M - 1 - i)
            mixed += weights[i] * widen(held[i].index(place).load(tile))
        d_mixed = widen(d_held.index(place).load(tile))
        if NORM:
            inverse = number_at(numbers, 2 * M, WARPS)
            d_norm = settled(d_norm + d_mixed * mixed * inverse)
            d_mixed *= load_weight(next_norm, column, D) * inverse
            norm_sum.store(gl.sum(d_mixed * mixed, 1))
            pull = total_of(norm_sum, WARPS) * inverse * inverse / D
            d_mixed -= mixed * pull
        parts = (gl.sum(d_mixed * mixed, 1),)
        for i in gl.static_range(M):
            parts = parts + (gl.sum(d_mixed * widen(held[i].index(place).load(tile)), 1),)
        keep_parts(parts, sums)
        along = total_of(sums[0], WARPS)
        after = gl.where(stat_place == 0, SETS, stat_place - 1)
        for i in gl.static_range(M):
            inverse = number_at(numbers, M + i, WARPS)
            pull = weights[i] * (total_of(sums[i + 1], WARPS) - along) * inverse
            if M == 1:
                pull = 0.0
            back = pull * inverse * number_at(numbers, i, WARPS) * (-1.0 / D)
            v = widen(held[i].index(place).load(tile))
            d_direction = settled(d_direction + pull * v)
            d_source = weights[i] * d_mixed + pull * direction + back * v
            if CARRIED[i]:
                async_copy.wait_group(RING - 1)
                d_source += widen(extra.index(spot).load(tile))
            result = results[i] + row.to(gl.int64) * D
            gl.store(result + column, d_source.to(work), mask=inside)
            start_step(
                *(sources, d_out, carried, stats, held, d_held, extra, kept),
                *(row + SETS * step, row + ((i + RING) // M) * step, rows, column),
                *(place, spot, after, i, (i + RING) % M, CARRIED, M, D, WARPS),
            )
            spot = gl.where(spot == RING - 1, 0, spot + 1)
        place = gl.where(place == SETS - 1, 0, place + 1)
        stat_place = gl.where(stat_place == SETS, 0, stat_place + 1)
    share = gl.program_id(0).to(gl.int64) * D
    gl.store(d_directions + share + column, d_direction, mask=inside)
    if NORM:
        gl.store(d_norms + share + column, d_norm, mask=inside)
