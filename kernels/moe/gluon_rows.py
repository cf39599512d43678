"""Grouped products of rows for Hopper, in Gluon; `triton_experts` has the algebra and twins."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language import PropagateNan

from .gluon_tiles import (
    HALF,
    STEP,
    WIDE,
    add_products,
    halves,
    open_stages,
    pass_over,
    write,
)

LOG2E = gl.constexpr(1.4426950408889634)
KEEP_NAN = gl.constexpr(PropagateNan.ALL)
PLAIN, GLU, GRADIENT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def power(x, scale: gl.constexpr, most: gl.constexpr):
    """2^(x scale), at most 2^most; NaN stays NaN."""
    return gl.exp2(gl.minimum(x * scale, most, propagate_nan=KEEP_NAN))


@gluon.jit
def opening(x, a, BOUND: gl.constexpr):
    """As `triton_experts.opening`."""
    return gl.where(gl.abs(x) < BOUND / 256, x * (1.0 / BOUND) * (1.0 + a), 1.0 - a)


@gluon.jit
def activated(gate, up, BOUND: gl.constexpr, UP_BOUND: gl.constexpr):
    """As `triton_experts.activated`."""
    below = 1.0 + power(gate, -LOG2E, 60.0)
    if BOUND is None:
        return gate * up * reciprocal(below)
    else:
        a, b = power(gate, -2.0 * LOG2E / BOUND, 28.0), power(up, -2.0 * LOG2E / UP_BOUND, 28.0)
        share = reciprocal((1.0 + a) * (1.0 + b) * below)
        opened = opening(gate, a, BOUND) * opening(up, b, UP_BOUND)
        return opened * share * (BOUND * UP_BOUND)


@gluon.jit
def slopes(gate, up, BOUND: gl.constexpr, UP_BOUND: gl.constexpr):
    """As `triton_experts.slopes`."""
    below = 1.0 + power(gate, -LOG2E, 60.0)
    if BOUND is None:
        s = reciprocal(below)
        h = gate * s
        return h * up, up * (s + h * (1.0 - s)), h
    else:
        a, b = power(gate, -2.0 * LOG2E / BOUND, 28.0), power(up, -2.0 * LOG2E / UP_BOUND, 28.0)
        above, beside = 1.0 + a, 1.0 + b
        share = reciprocal(above * beside * below)
        s = above * beside * share
        t = opening(gate, a, BOUND) * (below * beside * share)
        u = opening(up, b, UP_BOUND) * (above * below * share)
        h = BOUND * t * s
        w = UP_BOUND * u
        return h * w, w * (s * (1.0 - t * t) + h * (1.0 - s)), h * (1.0 - u * u)


@gluon.jit
def copy_tiles(
    rows_desc,
    x,
    x_stride,
    token,
    descs,
    left,
    right,
    ready,
    free,
    tile_expert,
    used,
    N,
    K,
    STAGES: gl.constexpr,
    BN: gl.constexpr,
    MODE: gl.constexpr,
    TURNED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Fill the stages in turn with the factors of every tile of this program."""
    work: gl.constexpr = right.dtype
    GATHER: gl.constexpr = MODE != PLAIN
    across = gl.cdiv(N, WIDE if MODE == GLU else BN)
    whole = left._reinterpret(
        work,
        [STAGES, 2 * HALF, STEP],
        gl.NVMMASharedLayout.get_default_for([2 * HALF, STEP], work),
    )
    if MODE == GLU:
        parts = right._reinterpret(
            work,
            [2 * STAGES, WIDE, STEP],
            gl.NVMMASharedLayout.get_default_for([WIDE, STEP], work),
        )
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, HALF, layout=gl.SliceLayout(1, rows))
    term = gl.arange(0, STEP, layout=gl.SliceLayout(0, rows))
    count = 0
    for tile in range(gl.program_id(0), used * across, gl.num_programs(0)):
        row, column = tile // across * (2 * HALF), tile % across
        expert = gl.load(tile_expert + tile // across)
        if GATHER:
            upper = gl.load(token + row + line)
            lower = gl.load(token + row + HALF + line)
            first = x + gl.maximum(upper, 0).to(gl.int64)[:, None] * x_stride + term[None, :]
            second = x + gl.maximum(lower, 0).to(gl.int64)[:, None] * x_stride + term[None, :]
            first_mask = (upper >= 0)[:, None] & (term >= 0)[None, :]
            second_mask = (lower >= 0)[:, None] & (term >= 0)[None, :]
        for part in gl.static_range(PARTS):
            for at in range(0, K, STEP):
                stage = count % STAGES
                bar = ready.index(stage)
                mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, (BN + (0 if GATHER else 2 * HALF)) * STEP * 2)
                if MODE == GLU:
                    place = [expert * N + column * WIDE, at]
                    tma.async_copy_global_to_shared(descs[0], place, bar, parts.index(2 * stage))
                    over = parts.index(2 * stage + 1)
                    tma.async_copy_global_to_shared(descs[1], place, bar, over)
                elif TURNED:
                    place = [expert * N + column * BN, at]
                    tma.async_copy_global_to_shared(descs[part], place, bar, right.index(stage))
                else:
                    place = [expert * K + at, column * BN]
                    tma.async_copy_global_to_shared(descs[part], place, bar, right.index(stage))
                if GATHER:
                    async_copy.async_copy_global_to_shared(
                        left.index(2 * stage), first + at, first_mask
                    )
                    async_copy.async_copy_global_to_shared(
                        left.index(2 * stage + 1), second + at, second_mask
                    )
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                else:
                    place = [row, part * K + at]
                    tma.async_copy_global_to_shared(rows_desc, place, bar, whole.index(stage))
                count += 1


@gluon.jit
def multiply_tiles(
    left,
    right,
    ready,
    free,
    tiles,
    seen,
    out_desc,
    before_desc,
    grad_desc,
    source,
    weights,
    partial,
    used,
    N,
    K,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
    BN: gl.constexpr,
    MODE: gl.constexpr,
    TURNED: gl.constexpr,
    PARTS: gl.constexpr,
    SAVE: gl.constexpr,
    BOUND: gl.constexpr,
    UP_BOUND: gl.constexpr,
):
    """Half ``PART`` of the rows of every tile of this program."""
    across = gl.cdiv(N, WIDE if MODE == GLU else BN)
    steps = gl.cdiv(K, STEP) * PARTS
    count, read = 0, 0
    FIRST: gl.constexpr = PART * ROOM
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    last = used * across
    ahead = gl.load(source + gl.program_id(0) // across * (2 * HALF) + PART * HALF)
    for tile in range(gl.program_id(0), last, gl.num_programs(0)):
        row, column = tile // across * (2 * HALF) + PART * HALF, tile % across
        some = ahead >= 0  # an expert's rows come first: else the half is empty
        after = tile + gl.num_programs(0)
        place = source + after // across * (2 * HALF) + PART * HALF
        ahead = gl.load(place, mask=after < last, other=-1)
        if some:
            if MODE == GRADIENT:
                at = column * WIDE
                gate_tile, up_tile = tiles.index(FIRST), tiles.index(FIRST + 1)
                bar = seen.index(PART)
                tma.store_wait(0)
                mbarrier.expect(bar, 2 * HALF * WIDE * 2)
                tma.async_copy_global_to_shared(before_desc, [row, at], bar, gate_tile)
                tma.async_copy_global_to_shared(before_desc, [row, N + at], bar, up_tile)
            total, count = add_products(
                left,
                right,
                ready,
                free,
                count,
                steps,
                PART,
                STAGES,
                BN,
                False,
                TURNED,
                MODE != PLAIN,
            )
            if MODE == PLAIN:
                if BN == WIDE:
                    write(out_desc, row, column * BN, total, tiles, FIRST, 0, 1)
                else:
                    one, other = halves(total)
                    write(out_desc, row, column * BN, one, tiles, FIRST, 0, ROOM)
                    write(out_desc, row, column * BN + WIDE, other, tiles, FIRST, 1, ROOM)
            elif MODE == GLU:
                gate, up = halves(total)
                at = column * WIDE
                tma.store_wait(0)  # an odd number of tiles goes out
                if SAVE:
                    write(before_desc, row, at, gate, tiles, FIRST, 0, ROOM)
                    write(before_desc, row, N + at, up, tiles, FIRST, 1, ROOM)
                inner = activated(gate, up, BOUND, UP_BOUND)
                write(out_desc, row, at, inner, tiles, FIRST, 0, ROOM)
            else:
                mbarrier.wait(bar, read & 1)
                read += 1
                line = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
                route = gl.load(source + line)
                weight = gl.load(weights + gl.maximum(route, 0)).to(gl.float32)
                real = (route >= 0)[:, None]
                gate = gate_tile.load(layout).to(gl.float32)
                up = up_tile.load(layout).to(gl.float32)
                inner, d_gate, d_up = slopes(gate, up, BOUND, UP_BOUND)
                along = gl.sum(total * inner, 1)
                gl.store(partial + gl.maximum(route, 0) * across + column, along, mask=route >= 0)
                total = gl.where(real, total * weight[:, None], 0.0)
                inner_tile = tiles.index(FIRST + 2)
                gate_tile.store((total * d_gate).to(gate_tile.dtype))
                up_tile.store((total * d_up).to(gate_tile.dtype))
                inner = gl.where(real, inner * weight[:, None], 0.0)
                inner_tile.store(inner.to(gate_tile.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(grad_desc, [row, at], gate_tile)
                tma.async_copy_shared_to_global(grad_desc, [row, N + at], up_tile)
                tma.async_copy_shared_to_global(out_desc, [row, at], inner_tile)
        else:
            count = pass_over(ready, free, count, steps, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts"])
def rows_hopper_kernel(
    rows_desc,
    x,
    x_stride,
    token,
    first_desc,
    second_desc,
    out_desc,
    before_desc,
    grad_desc,
    source,
    weights,
    partial,
    tile_expert,
    starts,
    experts,
    N,
    K,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
    MODE: gl.constexpr,
    TURNED: gl.constexpr,
    PARTS: gl.constexpr,
    SAVE: gl.constexpr,
    BOUND: gl.constexpr,
    UP_BOUND: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Products of all tiles of rows with their experts' weights, in one of three modes."""
    work: gl.constexpr = first_desc.dtype
    right_shape: gl.constexpr = [BN, STEP] if TURNED else [STEP, BN]
    left, right, ready, free = open_stages([HALF, STEP], right_shape, work, STAGES, MODE != PLAIN)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDE], work)
    tiles = gl.allocate_shared_memory(work, [2 * ROOM, HALF, WIDE], tile_layout)
    seen = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(2):
        mbarrier.init(seen.index(part), count=1)
    fence_async_shared()
    used = gl.load(starts + experts) // (2 * HALF)
    gl.warp_specialize(
        [
            (multiply_tiles, (
                left, right, ready, free, tiles, seen, out_desc, before_desc, grad_desc, source,
                weights, partial, used, N, K, 0, STAGES, ROOM, BN, MODE, TURNED, PARTS, SAVE,
                BOUND, UP_BOUND,
            )),
            (multiply_tiles, (
                left, right, ready, free, tiles, seen, out_desc, before_desc, grad_desc, source,
                weights, partial, used, N, K, 1, STAGES, ROOM, BN, MODE, TURNED, PARTS, SAVE,
                BOUND, UP_BOUND,
            )),
            (copy_tiles, (
                rows_desc, x, x_stride, token, (first_desc, second_desc), left, right, ready, free,
                tile_expert, used, N, K, STAGES, BN, MODE, TURNED, PARTS,
            )),
        ],
        [4, 4],
        [REGISTERS, 56],
    )  # fmt: skip
