"""What both grouped products for Hopper are made of: stages in shared memory, sums, stores.

One tile of a product is 128 rows high. One partition copies tiles of both factors into the stages,
two others multiply, 64 rows each: while one writes its sums, the other has the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HALF = gl.constexpr(64)  # rows of a tile that one of the two multiplies
STEP = gl.constexpr(64)  # terms of every sum in one stage
WIDE = gl.constexpr(128)  # columns that are stored at once


@gluon.jit
def open_stages(left_shape: gl.constexpr, right_shape: gl.constexpr, work: gl.constexpr,
                STAGES: gl.constexpr, GATHERED: gl.constexpr):  # fmt: skip
    """Stages of a left tile in two halves and a right tile, each with two barriers: ``ready``,
    which takes one arrival and with ``GATHERED`` one of each copying thread, and ``free``, which
    takes both readers."""
    left_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(left_shape, work)
    right_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(right_shape, work)
    left = gl.allocate_shared_memory(work, [2 * STAGES, left_shape[0], left_shape[1]], left_layout)
    right = gl.allocate_shared_memory(work, [STAGES, right_shape[0], right_shape[1]], right_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129 if GATHERED else 1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    return left, right, ready, free


@gluon.jit
def add_products(left, right, ready, free, count, steps, PART: gl.constexpr, STAGES: gl.constexpr,
                 BN: gl.constexpr, LEFT_TURNED: gl.constexpr, RIGHT_TURNED: gl.constexpr,
                 GATHERED: gl.constexpr):  # fmt: skip
    """The sums ``[64, BN]`` over ``steps`` stages of half ``PART`` of the rows, and the number of
    stages that were read until now."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    total = gl.zeros([HALF, BN], gl.float32, layout)
    for _ in range(steps):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        if GATHERED:
            fence_async_shared()
        a, b = left.index(2 * stage + PART), right.index(stage)
        if LEFT_TURNED:
            a = a.permute((1, 0))
        if RIGHT_TURNED:
            b = b.permute((1, 0))
        total = warpgroup_mma(a, b, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
    return total, count


@gluon.jit
def pass_over(ready, free, count, steps, STAGES: gl.constexpr):
    """Give back ``steps`` stages that only the other half reads; the new ``count``."""
    for _ in range(steps):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        mbarrier.arrive(free.index(stage), count=1)
        count += 1
    return count


@gluon.jit
def halves(x):
    """The halves ``[64, 128]`` of the columns of ``x [64, 256]``; registers only change names."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    first, second = gl.split(x.reshape([HALF, 2, WIDE]).permute((0, 2, 1)))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def write(desc, row, column, x, tiles, first: gl.constexpr, number: gl.constexpr,
          ROOM: gl.constexpr):  # fmt: skip
    """Store ``x [64, 128]`` through the tile that comes after the last one of ``ROOM``, which begin
    at tile ``first``."""
    tile = tiles.index(first + number % ROOM)
    tma.store_wait(ROOM - 1)
    tile.store(x.to(tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], tile)
