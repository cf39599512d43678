"""Gradients of the experts' weights for Hopper, in Gluon: sums over the rows of each expert."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .gluon_tiles import HALF, STEP, WIDE, add_products, halves, open_stages, write

COLUMNS = gl.constexpr(256)  # of a tile


@gluon.jit
def place_of(tile, starts, sizes, M, N):
    """Expert, row and column of a tile, the first of the expert's rows, and steps over all."""
    across = gl.cdiv(N, COLUMNS)
    each = M // (2 * HALF) * across
    expert = tile // each
    row, column = tile % each // across * (2 * HALF), tile % across * COLUMNS
    return expert, row, column, gl.load(starts + expert), gl.cdiv(gl.load(sizes + expert), STEP)


@gluon.jit
def copy_steps(
    left_desc,
    right_desc,
    x,
    x_stride,
    token,
    left,
    right,
    ready,
    free,
    starts,
    sizes,
    total,
    M,
    N,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
):
    """Fill the stages in turn with the rows of every tile of this program."""
    work: gl.constexpr = left.dtype
    # shared memory holds a tile as squares beside each other
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, HALF], work)
    squares = right._reinterpret(work, [COLUMNS // HALF * STAGES, STEP, HALF], square)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, STEP, layout=gl.SliceLayout(1, layout))
    place = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    BYTES: gl.constexpr = (COLUMNS if LEFT else 2 * HALF) * STEP * 2
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        _, row, column, first, steps = place_of(tile, starts, sizes, M, N)
        taken = gl.full([STEP], -1, gl.int32, gl.SliceLayout(1, layout))
        if steps > 0:
            taken = gl.load(token + first + line)
        for step in range(steps):
            stage = count % STAGES
            bar = ready.index(stage)
            source = x + gl.maximum(taken, 0).to(gl.int64)[:, None] * x_stride
            source += (row if LEFT else column) + place[None, :]
            real = (taken >= 0)[:, None]
            if step + 1 < steps:
                taken = gl.load(token + first + (step + 1) * STEP + line)
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            at = first + step * STEP
            if LEFT:
                for part in gl.static_range(2):
                    mask = real & (place >= 0)[None, :]
                    async_copy.async_copy_global_to_shared(
                        left.index(2 * stage + part), source + part * HALF, mask
                    )
                tma.async_copy_global_to_shared(right_desc, [at, column], bar, right.index(stage))
            else:
                tma.async_copy_global_to_shared(left_desc, [at, row], bar, left.index(2 * stage))
                tma.async_copy_global_to_shared(
                    left_desc, [at, row + HALF], bar, left.index(2 * stage + 1)
                )
                for part in gl.static_range(COLUMNS // HALF):
                    mask = real & (column + part * HALF + place < N)[None, :]
                    async_copy.async_copy_global_to_shared(
                        squares.index(COLUMNS // HALF * stage + part), source + part * HALF, mask
                    )
            async_copy.mbarrier_arrive(bar, increment_count=False)
            count += 1


@gluon.jit
def multiply_steps(
    left,
    right,
    ready,
    free,
    tiles,
    out_desc,
    starts,
    sizes,
    total,
    experts,
    M,
    N,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
):
    """Half ``PART`` of the rows of every tile of this program."""
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, column, _, steps = place_of(tile, starts, sizes, M, N)
        found, count = add_products(
            left, right, ready, free, count, steps, PART, STAGES, COLUMNS, True, False, True
        )
        one, other = halves(found)
        # of several parts below each other in the products, each is a matrix of its own
        at = row // (M // PARTS) * experts + expert
        at = at * (M // PARTS) + row % (M // PARTS) + PART * HALF
        write(out_desc, at, column, one, tiles, PART * ROOM, 0, ROOM)
        write(out_desc, at, column + WIDE, other, tiles, PART * ROOM, 1, ROOM)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts"])
def weights_hopper_kernel(
    left_desc,
    right_desc,
    x,
    x_stride,
    token,
    out_desc,
    starts,
    sizes,
    experts,
    M,
    N,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
    LEFT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """``left^T right`` over the rows of each expert, ``[M, N]``; of the ``PARTS`` of its rows each
    is a matrix ``[E, M / PARTS, N]`` of its own. Rows of the factor on the right, or with ``LEFT``
    of the other, are ``token`` of ``x``."""
    work: gl.constexpr = out_desc.dtype
    left, right, ready, free = open_stages([STEP, HALF], [STEP, COLUMNS], work, STAGES, True)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDE], work)
    tiles = gl.allocate_shared_memory(work, [2 * ROOM, HALF, WIDE], tile_layout)
    fence_async_shared()
    total = experts * (M // (2 * HALF) * gl.cdiv(N, COLUMNS))
    gl.warp_specialize(
        [
            (multiply_steps, (
                left, right, ready, free, tiles, out_desc, starts, sizes, total, experts, M, N,
                PARTS, 0, STAGES, ROOM,
            )),
            (multiply_steps, (
                left, right, ready, free, tiles, out_desc, starts, sizes, total, experts, M, N,
                PARTS, 1, STAGES, ROOM,
            )),
            (copy_steps, (
                left_desc, right_desc, x, x_stride, token, left, right, ready, free, starts, sizes,
                total, M, N, STAGES, LEFT,
            )),
        ],
        [4, 4],
        [REGISTERS, 56],
    )  # fmt: skip
