"""What the kernels of the mixture over depth for Hopper share: layouts, sums, shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def tile_layout(warps: int) -> gl.BlockedLayout:
    return gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def shared_by_all(count: int, warps: int) -> gl.BlockedLayout:
    """Each thread has all ``count`` numbers."""
    return gl.BlockedLayout([count], [32], [warps], [0])


@gluon.constexpr_function
def as_it_comes(rank: int) -> gl.SwizzledSharedLayout:
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.jit
def columns_of(WARPS: gl.constexpr, COLS: gl.constexpr):
    tile: gl.constexpr = tile_layout(WARPS)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, tile))
    place = gl.arange(0, COLS, layout=gl.SliceLayout(0, tile))
    return warp[:, None] * COLS + place[None, :]


@gluon.jit
def load_weight(weight, column, D: gl.constexpr):
    return gl.load(weight + column, mask=column < D, other=0.0).to(gl.float32)


BF16_PAIR = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.jit
def widen(x):
    """``x`` in fp32; by one instruction for each number where the compiler takes up to two."""
    wide = x
    if x.dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(
            BF16_PAIR, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    return wide.to(gl.float32)


@gluon.jit
def settled(x):
    """As in `triton_parts`."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def room_for_sums(N: gl.constexpr, WARPS: gl.constexpr):
    """Each sum has room of its own, so that no store waits for another."""
    sums = ()
    for _ in gl.static_range(N):
        sums = sums + (gl.allocate_shared_memory(gl.float32, [WARPS], as_it_comes(1)),)
    return sums


@gluon.jit
def room_for_rows(dtype: gl.constexpr, N: gl.constexpr, DEEP: gl.constexpr, WARPS, COLS):
    rows = ()
    for _ in gl.static_range(N):
        rows = rows + (gl.allocate_shared_memory(dtype, [DEEP, WARPS, COLS], as_it_comes(2)),)
    return rows


@gluon.jit
def keep_parts(parts, sums):
    """Only when all are found, for a load does not move ahead of a store to shared memory."""
    for i in gl.static_range(len(parts)):
        sums[i].store(parts[i])


@gluon.jit
def total_of(room, WARPS: gl.constexpr):
    """The sum over the warps, in their order."""
    return gl.sum(room.load(shared_by_all(WARPS, WARPS)), 0)
