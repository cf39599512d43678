"""State passes of chunked KDA for Hopper, in Gluon; algebra and plain twin are in `triton_scan`.

One warp copies the matrices of coming chunks into shared memory, four warps multiply. The state
stays in registers as the left operand of every product.
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


@gluon.jit
def open_stages(descs, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Shared memory for ``STAGES`` chunks of the tiles of ``descs``, each with two barriers:
    ``ready``, and ``free``, which takes all ``READERS``."""
    kt_desc, qt_desc, kh_desc, inv_desc, att_desc, decay_desc, beta_desc, v_desc = descs
    work: gl.constexpr = kt_desc.dtype
    C: gl.constexpr = kt_desc.block_type.shape[0]
    K: gl.constexpr = kt_desc.block_type.shape[1]
    BV: gl.constexpr = v_desc.block_type.shape[1]
    kt = gl.allocate_shared_memory(work, [STAGES, C, K], kt_desc.layout)
    qt = gl.allocate_shared_memory(work, [STAGES, C, K], qt_desc.layout)
    kh = gl.allocate_shared_memory(work, [STAGES, C, K], kh_desc.layout)
    inv = gl.allocate_shared_memory(work, [STAGES, C, C], inv_desc.layout)
    att = gl.allocate_shared_memory(work, [STAGES, C, C], att_desc.layout)
    decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], decay_desc.layout)
    beta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C], beta_desc.layout)
    v = gl.allocate_shared_memory(work, [STAGES, C, BV], v_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=READERS)
    fence_async_shared()
    return (kt, qt, kh, inv, att, decay, beta, v), ready, free


@gluon.jit
def copy_chunks(
    descs,
    buffers,
    ready,
    free,
    first,
    token,
    column,
    count,
    STAGES: gl.constexpr,
    BACKWARD: gl.constexpr,
    DRIVEN: gl.constexpr,
    OUT: gl.constexpr,
):
    """Fill the stages in turn with the tiles of each chunk; ``BACKWARD``: last chunk first. The
    values only where ``DRIVEN``, what only outputs need where ``OUT``."""
    kt_desc, qt_desc, kh_desc, inv_desc, att_desc, decay_desc, beta_desc, v_desc = descs
    kt, qt, kh, inv, att, decay, beta, v = buffers
    C: gl.constexpr = kt_desc.block_type.shape[0]
    TILES: gl.constexpr = (
        (3 if OUT else 2) * kt_desc.block_type.nbytes
        + (2 if OUT else 1) * inv_desc.block_type.nbytes
        + decay_desc.block_type.nbytes
        + beta_desc.block_type.nbytes
        + (v_desc.block_type.nbytes if DRIVEN else 0)
    )
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, TILES)
        chunk = i
        if BACKWARD:
            chunk = count - 1 - i
        row = (first + chunk) * C
        tma.async_copy_global_to_shared(kt_desc, [row, 0], bar, kt.index(stage))
        if DRIVEN:
            place = [token + chunk * C, column]
            tma.async_copy_global_to_shared(v_desc, place, bar, v.index(stage))
        tma.async_copy_global_to_shared(beta_desc, [first + chunk, 0], bar, beta.index(stage))
        tma.async_copy_global_to_shared(inv_desc, [row, 0], bar, inv.index(stage))
        tma.async_copy_global_to_shared(decay_desc, [first + chunk, 0], bar, decay.index(stage))
        if OUT:
            tma.async_copy_global_to_shared(qt_desc, [row, 0], bar, qt.index(stage))
            tma.async_copy_global_to_shared(att_desc, [row, 0], bar, att.index(stage))
        tma.async_copy_global_to_shared(kh_desc, [row, 0], bar, kh.index(stage))


@gluon.jit
def run_chunks(
    buffers,
    ready,
    free,
    out,
    initial,
    final,
    u_out,
    h_desc,
    h_row,
    length,
    count,
    stride,
    column,
    edge,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    SAVE: gl.constexpr,
    DRIVEN: gl.constexpr,
    OUT: gl.constexpr,
    WHOLE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The chain over one sequence's chunks for ``BV`` value columns."""
    kt, qt, kh, inv, att, decay, beta, v = buffers
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide_left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    thin_left: gl.constexpr = gl.DotOperandLayout(0, thin, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BV, BV // 8], [4, 1], [1, 0])
    work: gl.constexpr = kt.dtype
    swap: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], work)
    if OUT:
        turned = gl.allocate_shared_memory(work, [C, BV], swap)
    if SAVE:
        u_turned = gl.allocate_shared_memory(work, [C, BV], swap)
        h_tile = gl.allocate_shared_memory(work, [BV, K], h_desc.layout)
    token = gl.arange(0, C, layout=gl.SliceLayout(0, thin))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    value = gl.arange(0, BV, layout=gl.SliceLayout(1, wide))
    if DRIVEN:
        place = edge + channel[None, :].to(gl.int64) * V + (column + value)[:, None]
    else:
        place = edge + (column + value)[:, None].to(gl.int64) * K + channel[None, :]
    if INITIAL:
        used = length > 0 if WHOLE else None
        state = gl.load(initial + place, mask=used).to(gl.float32)
    elif not DRIVEN:
        state = gl.where(channel[None, :] == (column + value)[:, None], 1.0, 0.0)
    else:
        state = gl.zeros([BV, K], gl.float32, wide)
    out_row = gl.arange(0, C, layout=gl.SliceLayout(1, rows))
    out_column = column + gl.arange(0, BV, layout=gl.SliceLayout(0, rows))
    none = gl.zeros([BV, C], gl.float32, thin)
    for i in range(count):
        stage = i % STAGES
        left = gl.convert_layout(state.to(work), wide_left)
        thin_state = gl.convert_layout(left, gl.DotOperandLayout(0, thin, 2))
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        seen = warpgroup_mma(
            thin_state, kt.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
        )
        v_turned = none
        if DRIVEN:
            v_turned = v.index(stage).permute((1, 0)).load(thin).to(gl.float32)
        if OUT:
            o = warpgroup_mma(
                thin_state, qt.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
            )
            seen = warpgroup_mma_wait(1, deps=[seen])
        else:
            seen = warpgroup_mma_wait(0, deps=[seen])
        x = (v_turned - seen) * beta.index(stage).load(thin)
        x = gl.where((i * C + token < length)[None, :], x, 0.0)
        u = warpgroup_mma(
            gl.convert_layout(x.to(work), thin_left),
            inv.index(stage).permute((1, 0)),
            x,
            is_async=True,
        )
        if SAVE:
            tma.store_wait(0)
            h_tile.store(state.to(work))
            fence_async_shared()
            tma.async_copy_shared_to_global(h_desc, [h_row + i * V, 0], h_tile)
        state = state * decay.index(stage).load(wide)
        if OUT:
            u, o = warpgroup_mma_wait(0, deps=[u, o])
        else:
            u = warpgroup_mma_wait(0, deps=[u])
        written = u.to(work)
        u_left = gl.convert_layout(written, thin_left)
        if OUT:
            o = warpgroup_mma(u_left, att.index(stage).permute((1, 0)), o, is_async=True)
        u_wide = gl.convert_layout(u_left, wide_left)
        state = warpgroup_mma(u_wide, kh.index(stage), state, is_async=True)
        if SAVE:
            u_turned.permute((1, 0)).store(written)
            u_place = (i * C + out_row).to(gl.int64)[:, None] * V + out_column[None, :]
            gl.store(u_out + u_place, u_turned.load(rows))
        if OUT:
            o = warpgroup_mma_wait(1, deps=[o])
            turned.permute((1, 0)).store(o.to(work))
            o_place = (i * C + out_row).to(gl.int64)[:, None] * stride + out_column[None, :]
            gl.store(
                out + o_place,
                turned.load(rows).to(out.dtype.element_ty),
                mask=(i * C + out_row < length)[:, None],
            )
        state = warpgroup_mma_wait(0, deps=[state])
        mbarrier.arrive(free.index(stage), count=1)
    if FINAL:
        ended = (length > 0) & (length % C == 0) if WHOLE else None
        gl.store(final + place, state, mask=ended)
    if SAVE:
        tma.store_wait(0)


@gluon.jit
def scan_hopper_kernel(
    kt_desc,
    qt_desc,
    kh_desc,
    inv_desc,
    att_desc,
    decay_desc,
    beta_desc,
    v_desc,
    h_desc,
    out,
    initial,
    final,
    u_out,
    sequence_table,
    chunks,
    heads,
    v_h,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    SAVE: gl.constexpr,
    DRIVEN: gl.constexpr,
    OUT: gl.constexpr,
    WHOLE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `triton_scan.scan_kernel`, grid (N H V / BV)."""
    # The blocks of a head run next to each other: one finds in the cache what the other has read.
    column = gl.program_id(0) % (V // BV) * BV
    head = gl.program_id(0) // (V // BV) % heads
    sequence = gl.program_id(0) // (V // BV * heads)
    number = gl.load(sequence_table + 4 * sequence).to(gl.int64)
    first = gl.load(sequence_table + 4 * sequence + 1)
    start = gl.load(sequence_table + 4 * sequence + 2)
    length = gl.load(sequence_table + 4 * sequence + 3)
    count = gl.cdiv(length, C)
    # An empty last sequence has no chunk; what is read for it is not used, but must be there.
    space = head.to(gl.int64) * chunks + gl.minimum(first, chunks - 1)
    descs = (kt_desc, qt_desc, kh_desc, inv_desc, att_desc, decay_desc, beta_desc, v_desc)
    buffers, ready, free = open_stages(descs, STAGES, 1)
    edge = (number * heads + head) * K * V
    if OUT:
        out += (start.to(gl.int64) * heads + head) * V
    if SAVE:
        u_out += space * C * V
    gl.warp_specialize(
        [
            (
                run_chunks,
                (
                    buffers,
                    ready,
                    free,
                    out,
                    initial,
                    final,
                    u_out,
                    h_desc,
                    (head * chunks + first) * V + column,
                    length,
                    count,
                    heads * V,
                    column,
                    edge,
                    K,
                    V,
                    BV,
                    C,
                    INITIAL,
                    FINAL,
                    SAVE,
                    DRIVEN,
                    OUT,
                    WHOLE,
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
                    head * v_h + column,
                    count,
                    STAGES,
                    False,
                    DRIVEN,
                    OUT,
                ),
            ),
        ],
        [1],
        [24],
    )
