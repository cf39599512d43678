"""Backward state pass of chunked KDA for Hopper, in Gluon: `gluon_scan`, last chunk first."""

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

from .gluon_scan import copy_chunks, open_stages


@gluon.jit
def run_chunks_backward(
    buffers,
    ready,
    free,
    d_initial,
    d_final,
    z_out,
    dh_desc,
    h_row,
    length,
    count,
    column,
    edge,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    OUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The chain over one sequence's chunks, last first, for ``BV`` value columns."""
    kt, qt, kh, inv, att, decay, beta, do = buffers
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide_left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    thin_left: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BV, BV // 8], [4, 1], [1, 0])
    work: gl.constexpr = kt.dtype
    swap: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], work)
    if OUT:
        turned = gl.allocate_shared_memory(work, [C, BV], swap)
        tile = gl.allocate_shared_memory(work, [BV, K], dh_desc.layout)
    token = gl.arange(0, C, layout=gl.SliceLayout(0, thin))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    value = gl.arange(0, BV, layout=gl.SliceLayout(1, wide))
    place = edge + channel[None, :].to(gl.int64) * V + value[:, None]
    d_state = gl.load(d_final + place) if FINAL else gl.zeros([BV, K], gl.float32, wide)
    out_row = gl.arange(0, C, layout=gl.SliceLayout(1, rows))
    out_column = column + gl.arange(0, BV, layout=gl.SliceLayout(0, rows))
    none = gl.zeros([BV, C], gl.float32, thin)
    for i in range(count):
        stage = i % STAGES
        chunk = count - 1 - i
        leaving = d_state.to(work)
        left = gl.convert_layout(gl.convert_layout(leaving, wide_left), thin_left)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        du = warpgroup_mma(
            left, kh.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
        )
        do_turned = do.index(stage).permute((1, 0)).load(thin)
        inside = (chunk * C + token < length)[None, :]
        do_turned = gl.where(inside, do_turned, gl.zeros_like(do_turned))
        do_left = gl.convert_layout(do_turned, thin_left)
        du = warpgroup_mma(do_left, att.index(stage), du, is_async=True)
        if OUT:
            tma.store_wait(0)
            tile.store(leaving)
            fence_async_shared()
            tma.async_copy_shared_to_global(dh_desc, [h_row + chunk * V, 0], tile)
        d_state = d_state * decay.index(stage).load(wide)
        d_state = warpgroup_mma(
            gl.convert_layout(do_left, wide_left), qt.index(stage), d_state, is_async=True
        )
        du = warpgroup_mma_wait(1, deps=[du])
        z = warpgroup_mma(
            gl.convert_layout(du.to(work), thin_left), inv.index(stage), du, is_async=True
        )
        z, d_state = warpgroup_mma_wait(0, deps=[z, d_state])
        written = gl.convert_layout((z * -beta.index(stage).load(thin)).to(work), thin_left)
        d_state = warpgroup_mma(
            gl.convert_layout(written, wide_left), kt.index(stage), d_state, is_async=True
        )
        if OUT:
            turned.permute((1, 0)).store(z.to(work))
            z_place = (chunk * C + out_row).to(gl.int64)[:, None] * V + out_column[None, :]
            gl.store(z_out + z_place, turned.load(rows))
        d_state = warpgroup_mma_wait(0, deps=[d_state])
        mbarrier.arrive(free.index(stage), count=1)
    if INITIAL:
        gl.store(d_initial + place, d_state)
    if OUT:
        tma.store_wait(0)


@gluon.jit
def scan_backward_hopper_kernel(
    kt_desc,
    qt_desc,
    kh_desc,
    inv_desc,
    att_desc,
    decay_desc,
    beta_desc,
    do_desc,
    dh_desc,
    d_initial,
    d_final,
    z_out,
    sequence_table,
    chunks,
    heads,
    do_h,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    OUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `triton_scan.scan_backward_kernel`, grid (N H V / BV)."""
    # The blocks of a head run next to each other: one finds in the cache what the other has read.
    column = gl.program_id(0) % (V // BV) * BV
    head = gl.program_id(0) // (V // BV) % heads
    sequence = gl.program_id(0) // (V // BV * heads)
    number = gl.load(sequence_table + 4 * sequence).to(gl.int64)
    first = gl.load(sequence_table + 4 * sequence + 1)
    start = gl.load(sequence_table + 4 * sequence + 2)
    length = gl.load(sequence_table + 4 * sequence + 3)
    count = gl.cdiv(length, C)
    space = head.to(gl.int64) * chunks + gl.minimum(first, chunks - 1)
    descs = (kt_desc, qt_desc, kh_desc, inv_desc, att_desc, decay_desc, beta_desc, do_desc)
    buffers, ready, free = open_stages(descs, STAGES, 1)
    if OUT:
        z_out += space * C * V
    edge = (number * heads + head) * K * V + column
    gl.warp_specialize(
        [
            (
                run_chunks_backward,
                (
                    buffers,
                    ready,
                    free,
                    d_initial,
                    d_final,
                    z_out,
                    dh_desc,
                    (head * chunks + first) * V + column,
                    length,
                    count,
                    column,
                    edge,
                    K,
                    V,
                    BV,
                    C,
                    INITIAL,
                    FINAL,
                    OUT,
                    STAGES,
                ),
            ),
            (
                copy_chunks,
                (
                    descs,
                    buffers,
                    ready,
                    free,
                    head * chunks + first,
                    start,
                    head * do_h + column,
                    count,
                    STAGES,
                    True,
                    True,
                    True,
                ),
            ),
        ],
        [1],
        [24],
    )
