"""What `gluon_grad` is made of: copies, running sums, and the products over value channels."""

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

from .triton_prep import BOUND_SLACK

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def log2_decay(logit, rate, bias, bound, GATE: gl.constexpr):
    """As `triton_prep.gate_log2`, channels first; and the slope of the sigmoid, as in
    `triton_sigmoid.sigmoid_slope`."""
    if GATE:
        closing = gl.exp2(gl.minimum(rate * (logit + bias[:, None]) * -LOG2E, 126.0))
        opened = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [1.0 + closing],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        step, slope = bound * LOG2E * opened, closing * opened * opened
    else:
        given = (logit <= 0) & (logit >= bound * BOUND_SLACK)
        step, slope = gl.where(given, logit * LOG2E, float("nan")), logit
    return step, slope


@gluon.jit
def store_residual(pointer, tiles, beta, length, stride, C: gl.constexpr, V: gl.constexpr):
    """Write beta Z, the gradient of v, from tiles 1 and 3 of ``tiles [4, C, V / 2]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, V // 2, layout=gl.SliceLayout(0, layout))
    strength = gl.load(beta + row)[:, None]
    place = row.to(gl.int64)[:, None] * stride + column[None, :]
    for half in gl.static_range(2):
        residual = tiles.index(2 * half + 1).load(layout).to(gl.float32) * strength
        gl.store(
            pointer + place + half * (V // 2),
            residual.to(pointer.dtype.element_ty),
            mask=(row < length)[:, None],
        )


@gluon.jit
def copy_tiles(
    bars,
    coordinates,
    value_descs,
    value_tiles,
    key_descs,
    key_tiles,
    C: gl.constexpr,
    V: gl.constexpr,
):
    """Start all copies of a chunk: the value tiles on the first barrier, the others on the second.

    dO over Z, O over V: half of the columns of one after half of those of the other, which is how
    shared memory holds the [2 C, V] matrix.
    """
    start, line, first, do_column, out_column, v_column, q_column, k_column, g_column = coordinates
    do_desc, z_desc, out_desc, v_desc, u_desc = value_descs
    left_tiles, right_tiles, u = value_tiles
    bar = bars.index(0)
    mbarrier.expect(bar, 5 * C * V * 2)
    tma.async_copy_global_to_shared(u_desc, [line, 0], bar, u)
    for half in gl.static_range(2):
        at = half * (V // 2)
        over, under = left_tiles.index(2 * half), left_tiles.index(2 * half + 1)
        tma.async_copy_global_to_shared(do_desc, [start, do_column + at], bar, over)
        tma.async_copy_global_to_shared(z_desc, [line, at], bar, under)
        over, under = right_tiles.index(2 * half), right_tiles.index(2 * half + 1)
        tma.async_copy_global_to_shared(out_desc, [start, out_column + at], bar, over)
        tma.async_copy_global_to_shared(v_desc, [start, v_column + at], bar, under)
    g_desc, k_desc, q_desc, h_desc, dh_desc = key_descs
    g, k, q, state, d_state = key_tiles
    bar = bars.index(1)
    mbarrier.expect(bar, 3 * q_desc.block_type.nbytes + 2 * h_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(g_desc, [start, g_column], bar, g)
    tma.async_copy_global_to_shared(k_desc, [start, k_column], bar, k)
    tma.async_copy_global_to_shared(q_desc, [start, q_column], bar, q)
    tma.async_copy_global_to_shared(h_desc, [line // C * V, first], bar, state)
    tma.async_copy_global_to_shared(dh_desc, [line // C * V, first], bar, d_state)


@gluon.jit
def thirds(x):
    """Three bf16 that add up to ``x``; two values at a time, which the compiler misses."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b; .reg .f32 c, d, e, f;
        cvt.rn.bf16x2.f32 $0, $4, $3;
        shl.b32 a, $0, 16; and.b32 b, $0, 0xffff0000; mov.b32 c, a; mov.b32 d, b;
        sub.f32 e, $3, c; sub.f32 f, $4, d;
        cvt.rn.bf16x2.f32 $1, f, e;
        shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; mov.b32 c, a; mov.b32 d, b;
        sub.f32 e, e, c; sub.f32 f, f, d;
        cvt.rn.bf16x2.f32 $2, f, e;
        }""",
        "=&r,=&r,=r,f,f",
        [x],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def rounded(x):
    """``x`` in bf16, and that in fp32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        cvt.rn.bf16x2.f32 $0, $4, $3;
        shl.b32 a, $0, 16; and.b32 b, $0, 0xffff0000;
        mov.b32 $1, a; mov.b32 $2, b;
        }""",
        "=&r,=f,=f,f,f",
        [x],
        dtype=(gl.bfloat16, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def parted(x):
    """Two bf16 that add up to ``x`` within 2^-17; two values at a time, as in `thirds`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b; .reg .f32 c, d;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 a, $0, 16; and.b32 b, $0, 0xffff0000; mov.b32 c, a; mov.b32 d, b;
        sub.f32 c, $2, c; sub.f32 d, $3, d;
        cvt.rn.bf16x2.f32 $1, d, c;
        }""",
        "=&r,=r,f,f",
        [x],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def running_sum(x, ones, layout: gl.constexpr):
    """``x [P, C]`` times a matrix of zeros and ones in shared memory, exact up to fp32 sums."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    high, middle, low = thirds(x)
    zero = gl.zeros(x.shape, gl.float32, layout)
    total = warpgroup_mma(gl.convert_layout(low, left), ones, zero, is_async=True)
    total = warpgroup_mma(gl.convert_layout(middle, left), ones, total, is_async=True)
    total = warpgroup_mma(gl.convert_layout(high, left), ones, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def halves(x, layout: gl.constexpr):
    """The two ``[P, C]`` halves of the columns of ``x [P, 2 C]``; registers only change names."""
    pairs = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1))
    first, second = gl.split(pairs)
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def beside(first, second, layout: gl.constexpr):
    """``[P, 2 C]`` from two ``[P, C]``, the inverse of `halves`."""
    pairs = gl.join(first, second).permute((0, 2, 1))
    return gl.convert_layout(pairs.reshape([first.shape[0], 2 * first.shape[1]]), layout)


@gluon.jit
def store_turned(pointer, x, tile, row, limit, stride, column, layout: gl.constexpr):
    """Write ``x [P, C]`` as rows of tokens, through the shared ``tile [C, P]``."""
    tile.permute((1, 0)).store(x.to(gl.bfloat16))
    values = tile.load(layout)
    place = row.to(gl.int64)[:, None] * stride + column[None, :]
    gl.store(pointer + place, values.to(pointer.dtype.element_ty), mask=(row < limit)[:, None])


@gluon.jit
def binary_size(x):
    """The power of two at or below ``x``, within 2^+-100; 2^-100 for 0."""
    bits = x.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, (127 - 100) << 23), (127 + 100) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def value_stage(
    left_stack,
    right_stack,
    u,
    pairs,
    scalars,
    beta,
    length,
    scale,
    C: gl.constexpr,
    NORM: gl.constexpr,
):
    """Both [C, C] gradients on top of each other into ``pairs``, over a power of two, the diagonals
    and row products into ``scalars``; returns the diagonal of Z U^T and the power."""
    work: gl.constexpr = u.dtype
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * C, 16])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    across: gl.constexpr = gl.SliceLayout(0, thin)
    token = gl.arange(0, C, layout=across)
    stacked = gl.arange(0, 2 * C, layout=gl.SliceLayout(1, thin))
    inner = stacked % C
    stack_strength = gl.load(beta + inner)
    zero = gl.zeros([2 * C, C], gl.float32, thin)
    both = warpgroup_mma(left_stack, u.permute((1, 0)), zero, is_async=True)
    if NORM:
        wide_zero = gl.zeros([2 * C, 2 * C], gl.float32, square)
        along = warpgroup_mma(left_stack, right_stack.permute((1, 0)), wide_zero, is_async=True)
        both, along = warpgroup_mma_wait(0, deps=[both, along])
        one = gl.arange(0, 2 * C, layout=gl.SliceLayout(1, square))
        other = gl.arange(0, 2 * C, layout=gl.SliceLayout(0, square))
        along = gl.sum(gl.where(one[:, None] == other[None, :], along, 0.0), 1)
        along_tile = gl.allocate_shared_memory(gl.float32, [2 * C], plain)
        along_tile.store(gl.convert_layout(along, gl.SliceLayout(1, thin)))
    else:
        both = warpgroup_mma_wait(0, deps=[both])
    own_tile = gl.allocate_shared_memory(gl.float32, [2 * C], plain)
    own_tile.store(gl.sum(gl.where(inner[:, None] == token[None, :], both, 0.0), 1))
    factor = gl.where(stacked < C, scale, -stack_strength)
    below = (inner[:, None] > token[None, :]) & (inner < length)[:, None]
    both = gl.where(below, both * factor[:, None], 0.0)
    size = binary_size(gl.max(gl.max(gl.abs(both), 1), 0))
    pairs.store((both * (1.0 / size)).to(work))
    fence_async_shared()
    self_write = own_tile.slice(C, C).load(across)
    scalars.index(3).store(gl.where(token < length, own_tile.slice(0, C).load(across) * scale, 0.0))
    if NORM:
        scalars.index(4).store(along_tile.slice(0, C).load(across))
        along = along_tile.slice(C, C).load(across)
        scalars.index(5).store(2.0 * self_write - scalars.index(0).load(across) * along)
    return self_write, size
