"""Last pass of the chunked KDA backward for Hopper, in Gluon; `triton_grad` has the algebra and the
plain twin.

All tiles of a chunk are copied at once. dO and Z lie on top of each other, and so do O and V: one
product with U gives both [C, C] gradients, one product of the two stacks both row products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_grad_parts import (
    beside,
    copy_tiles,
    halves,
    log2_decay,
    parted,
    rounded,
    running_sum,
    store_residual,
    store_turned,
    value_stage,
)

GROUP = gl.constexpr(16)  # chunks of a head that run next to each other


@gluon.jit
def key_stage(
    tiles,
    left_stack,
    u,
    pairs,
    scalars,
    parameters,
    targets,
    space,
    base,
    length,
    first,
    head,
    heads,
    scale,
    bound,
    part_index,
    size,
    K: gl.constexpr,
    C: gl.constexpr,
    ANCHOR: gl.constexpr,
    NORM: gl.constexpr,
    GATE: gl.constexpr,
):
    """Gradients of q, k and the gate for the channels of ``tiles``."""
    g, k, q, state, d_state = tiles
    a_log, dt_bias = parameters
    dq, dk, dg, d_rate, d_bias = targets
    PIECE: gl.constexpr = state.shape[1]
    work: gl.constexpr = u.dtype
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    line_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pair: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], work)
    across: gl.constexpr = gl.SliceLayout(0, thin)
    strength_tile, q_scale_tile, k_scale_tile = scalars.index(0), scalars.index(1), scalars.index(2)
    read_tile, q_along_tile, k_along_tile = scalars.index(3), scalars.index(4), scalars.index(5)
    inside = (gl.arange(0, C, layout=across) < length)[None, :]
    channel = gl.arange(0, PIECE, layout=gl.SliceLayout(1, thin))
    row = gl.arange(0, C, layout=gl.SliceLayout(1, line_layout))
    column = first + gl.arange(0, PIECE, layout=gl.SliceLayout(0, line_layout))
    ones_column = gl.arange(0, C, layout=gl.SliceLayout(0, line_layout))
    onward = gl.allocate_shared_memory(work, [C, C], pair)
    onward.store(gl.where(row[:, None] <= ones_column[None, :], 1.0, 0.0).to(work))
    fence_async_shared()
    rate = 0.0
    bias = gl.zeros([PIECE], gl.float32, gl.SliceLayout(1, thin))
    if GATE:
        rate = gl.exp(gl.load(a_log + head).to(gl.float32))
        bias = gl.load(dt_bias + head * K + first + channel).to(gl.float32)
    turned_state = state.permute((1, 0))
    turned_d_state = d_state.permute((1, 0))
    kept_zero = gl.zeros([PIECE, PIECE], gl.float32, square)
    kept = warpgroup_mma(turned_state, d_state, kept_zero, is_async=True)
    logit = g.permute((1, 0)).load(thin).to(gl.float32)
    step, slope = log2_decay(logit, rate, bias, bound, GATE)
    step = gl.where(inside, step, 0.0)
    kept = warpgroup_mma_wait(0, deps=[kept])
    kept_row = gl.arange(0, PIECE, layout=gl.SliceLayout(1, square))
    kept_column = gl.arange(0, PIECE, layout=gl.SliceLayout(0, square))
    kept = gl.sum(gl.where(kept_row[:, None] == kept_column[None, :], kept, 0.0), 1)
    last = gl.convert_layout(kept, gl.SliceLayout(1, thin))
    total = gl.sum(step, 1)
    grown = running_sum(step, onward, thin)
    rise = gl.exp2(grown + ANCHOR)
    fall = gl.exp2(-ANCHOR - grown)
    unanchor: gl.constexpr = 2.0 ** (-ANCHOR)
    zero = gl.zeros([PIECE, C], gl.float32, thin)
    wide_zero = gl.zeros([PIECE, 2 * C], gl.float32, square)
    parts = warpgroup_mma(turned_state, left_stack.permute((1, 0)), wide_zero, is_async=True)
    k_unit = gl.where(inside, k.permute((1, 0)).load(thin).to(gl.float32), 0.0)
    k_unit *= k_scale_tile.load(across)[None, :]
    k_fall, k_fall_low = parted(k_unit * fall)
    turned_pairs = pairs.permute((1, 0))
    nears = warpgroup_mma(
        gl.convert_layout(k_fall_low, left), turned_pairs, wide_zero, is_async=True
    )
    nears = warpgroup_mma(gl.convert_layout(k_fall, left), turned_pairs, nears, is_async=True)
    q_unit = gl.where(inside, q.permute((1, 0)).load(thin).to(gl.float32), 0.0)
    q_unit *= q_scale_tile.load(across)[None, :]
    q_rise, q_risen = rounded(q_unit * rise)
    k_rise, k_risen = rounded(k_unit * rise)
    parts, nears = warpgroup_mma_wait(0, deps=[parts, nears])
    part, gradient = halves(parts, thin)
    near, k_near = halves(nears, thin)
    part = gl.where(inside, part * (rise * (unanchor * scale)), 0.0)
    # The products of near parts are of order 1, their factors far from it: scaled last.
    d_grown = q_unit * part + (q_risen * near + k_risen * k_near) * size
    part += rise * near * size + read_tile.load(across)[None, :] * k_unit
    if NORM:
        part -= q_unit * q_along_tile.load(across)[None, :]
    part *= q_scale_tile.load(across)[None, :]
    store_turned(dq + base, part, q, row, length, heads * K, column, line_layout)

    gradient *= rise * (strength_tile.load(across) * -unanchor)[None, :]
    d_grown += k_unit * gradient
    gradient += rise * k_near * size
    part = warpgroup_mma(turned_d_state, u.permute((1, 0)), zero, is_async=True)
    near = warpgroup_mma(beside(q_rise, k_rise, left), pairs, zero, is_async=True)
    part, near = warpgroup_mma_wait(0, deps=[part, near])
    part *= fall * gl.exp2(total + ANCHOR)[:, None]
    last = last * gl.exp2(total) + gl.sum(k_unit * part, 1)
    k_fallen = k_fall.to(gl.float32) + k_fall_low.to(gl.float32)
    d_grown -= k_unit * part + k_fallen * near * size
    gradient += part + fall * near * size + read_tile.load(across)[None, :] * q_unit
    if NORM:
        gradient -= k_unit * k_along_tile.load(across)[None, :]
    gradient *= k_scale_tile.load(across)[None, :]
    store_turned(dk + base, gradient, k, row, length, heads * K, column, line_layout)

    d_grown = gl.where(inside, d_grown, 0.0)
    d_step = running_sum(d_grown, onward.permute((1, 0)), thin) + last[:, None]
    if GATE:
        d_wide = gl.where(inside, d_step * bound * slope, 0.0)
        moved = gl.where(inside, d_wide * rate * (logit + bias[:, None]), 0.0)
        gl.store(d_rate + part_index, gl.sum(gl.sum(moved, 1), 0))
        d_step = d_wide * rate
        gl.store(d_bias + space * K + first + channel, gl.sum(d_step, 1))
    store_turned(dg + base, d_step, g, row, length, heads * K, column, line_layout)


@gluon.jit
def grad_hopper_kernel(
    q_desc,
    k_desc,
    g_desc,
    v_desc,
    out_desc,
    do_desc,
    u_desc,
    z_desc,
    h_desc,
    dh_desc,
    a_log,
    dt_bias,
    chunk_table,
    beta,
    q_norm,
    k_norm,
    dq,
    dk,
    dv,
    dg,
    d_beta,
    d_rate,
    d_bias,
    scale,
    bound,
    chunks,
    heads,
    q_h,
    k_h,
    g_h,
    v_h,
    do_h,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    PIECE: gl.constexpr,
    ANCHOR: gl.constexpr,
    NORM: gl.constexpr,
    GATE: gl.constexpr,
    SIGMOID: gl.constexpr,
):
    """As `triton_grad.grad_kernel`, grid (chunks H K / PIECE); ``C`` 32, ``PIECE`` 64, 4 warps."""
    work: gl.constexpr = gl.bfloat16
    # The pieces of a chunk run next to each other: the second finds its tiles in the cache. Then
    # come `GROUP` chunks of a head, as workspaces lie, then its other heads, as tokens lie.
    piece = gl.program_id(0) % (K // PIECE)
    run = gl.program_id(0) // (K // PIECE)
    before = run // (GROUP * heads) * GROUP
    members = gl.minimum(chunks - before, GROUP)
    chunk = before + run % (GROUP * heads) % members
    head = run % (GROUP * heads) // members
    start = gl.load(chunk_table + 2 * chunk)
    length = gl.load(chunk_table + 2 * chunk + 1)
    space = head.to(gl.int64) * chunks + chunk
    line = (head * chunks + chunk) * C
    first = piece * PIECE

    left_tiles = gl.allocate_shared_memory(work, [4, C, V // 2], do_desc.layout)
    right_tiles = gl.allocate_shared_memory(work, [4, C, V // 2], do_desc.layout)
    left_stack = left_tiles._reinterpret(work, [2 * C, V], u_desc.layout)
    right_stack = right_tiles._reinterpret(work, [2 * C, V], u_desc.layout)
    u = gl.allocate_shared_memory(work, [C, V], u_desc.layout)
    q = gl.allocate_shared_memory(work, [C, PIECE], q_desc.layout)
    k = gl.allocate_shared_memory(work, [C, PIECE], k_desc.layout)
    g = gl.allocate_shared_memory(work, [C, PIECE], g_desc.layout)
    state = gl.allocate_shared_memory(work, [V, PIECE], h_desc.layout)
    d_state = gl.allocate_shared_memory(work, [V, PIECE], h_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    gl.thread_barrier()
    copy_tiles(
        bars,
        (
            start,
            line,
            first,
            head * do_h,
            head * V,
            head * v_h,
            head * q_h + first,
            head * k_h + first,
            head * g_h + first,
        ),
        (do_desc, z_desc, out_desc, v_desc, u_desc),
        (left_tiles, right_tiles, u),
        (g_desc, k_desc, q_desc, h_desc, dh_desc),
        (g, k, q, state, d_state),
        C,
        V,
    )

    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    across: gl.constexpr = gl.SliceLayout(0, thin)
    token = gl.arange(0, C, layout=across)
    # What each token carries waits in shared memory until it is used: registers are short. In
    # turn: beta, the scales of q and k, dA_ii, q.dq, k.dk.
    scalars = gl.allocate_shared_memory(gl.float32, [6, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scalars.index(0).store(gl.load(beta + space * C + token))
    scalars.index(1).store(gl.load(q_norm + space * C + token))
    scalars.index(2).store(gl.load(k_norm + space * C + token))
    pairs = gl.allocate_shared_memory(
        work, [2 * C, C], gl.NVMMASharedLayout.get_default_for([C, C], work)
    )
    mbarrier.wait(bars.index(0), 0)
    self_write, size = value_stage(
        left_stack, right_stack, u, pairs, scalars, beta + space * C, length, scale, C, NORM
    )
    if piece == 0:
        place = (start.to(gl.int64) * heads + head) * V
        store_residual(dv + place, left_tiles, beta + space * C, length, heads * V, C, V)
        if SIGMOID:
            d_strength = self_write * (1.0 - scalars.index(0).load(across))
        else:
            d_strength = self_write / scalars.index(0).load(across)
        place = (start + token).to(gl.int64) * heads + head
        gl.store(d_beta + place, d_strength.to(d_beta.dtype.element_ty), mask=token < length)
    mbarrier.wait(bars.index(1), 0)
    key_stage(
        (g, k, q, state, d_state),
        left_stack,
        u,
        pairs,
        scalars,
        (a_log, dt_bias),
        (dq, dk, dg, d_rate, d_bias),
        space,
        (start.to(gl.int64) * heads + head) * K,
        length,
        first,
        head,
        heads,
        scale,
        bound,
        space * (K // PIECE) + piece,
        size,
        K,
        C,
        ANCHOR,
        NORM,
        GATE,
    )
    # The memory of O and V must not be taken for what is written while they are still read.
    right_tiles._keep_alive()
