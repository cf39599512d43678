"""First pass of the chunked KDA forward for Hopper, in Gluon; `triton_prep` has the algebra and the
plain twin.

The rows of k lie over those of q in shared memory: one product of 64 rows gives L and the masked
reads. The rising factors take the place of the raw rows, and what is written leaves from there too.
They enter that product as they are written, in bf16, the falling ones in two parts. Two parts of
both would take an eighth off the error of the outputs and make the forward pass a twentieth longer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_grad_parts import LOG2E, parted
from .triton_prep import BOUND_SLACK


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def share(x):
    """1 / (1 + 2^x) with the hardware's reciprocal."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [1.0 + gl.exp2(x)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scale_in_place(tile, factor, layout: gl.constexpr):
    """Multiply a bf16 tile by a power of two."""
    pair = gl.full(tile.shape, factor, gl.float32, layout).to(gl.bfloat16)
    scaled = gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [tile.load(layout), pair],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
    tile.store(scaled)


@gluon.jit
def row_scales(stack, scale, C: gl.constexpr, layout: gl.constexpr):
    """What the rows of k, then of q, are multiplied by, without and with ``scale`` on q."""
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * C, 16])
    row = gl.arange(0, 2 * C, layout=layout)
    zero = gl.zeros([2 * C, 2 * C], gl.float32, square)
    products = warpgroup_mma(stack, stack.permute((1, 0)), zero, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    one = gl.arange(0, 2 * C, layout=gl.SliceLayout(1, square))
    other = gl.arange(0, 2 * C, layout=gl.SliceLayout(0, square))
    squares = gl.sum(gl.where(one[:, None] == other[None, :], products, 0.0), 1)
    norm = gl.convert_layout(gl.rsqrt(squares + 1e-6), layout)
    return norm, norm * gl.where(row < C, 1.0, scale)


@gluon.jit
def unit_lower_inverse(lower, C: gl.constexpr):
    """As `triton_prep.unit_lower_inverse`, of the strictly lower fp16 ``lower`` in shared memory.

    Products of whole matrices: with block-diagonal D, a block of D L D needs only that block of L.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    i = gl.arange(0, C, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, layout))[None, :]
    zero = gl.zeros([C, C], gl.float32, layout)
    factor = lower.load(right)
    inverse = gl.where(i == j, 1.0, 0.0)
    neighbours = lower.load(layout).to(gl.float32)
    inverse -= gl.where((i ^ j) == 1, neighbours, 0.0)
    for level in gl.static_range(1, 5):
        half = inverse.to(gl.float16)
        product = mma_v2(gl.convert_layout(half, left), factor, zero)
        product = gl.convert_layout(product.to(gl.float16), left)
        product = mma_v2(product, gl.convert_layout(half, right), zero)
        inverse -= gl.where((i ^ j) >> level == 1, product, 0.0)
    return gl.where(i > j, inverse, 0.0)


@gluon.jit
def copy_inputs(descs, raw, gate, bar, start, columns):
    """Start the copies of a chunk: half of the columns of k, of q, the other half of k, of q (a
    [2 C, K] matrix as the products want it), and both halves of g."""
    q_desc, k_desc, g_desc = descs
    q_column, k_column, g_column = columns
    HALF: gl.constexpr = q_desc.block_type.shape[1]
    mbarrier.expect(bar, 6 * q_desc.block_type.nbytes)
    for half in gl.static_range(2):
        at = half * HALF
        over, under = raw.index(2 * half), raw.index(2 * half + 1)
        tma.async_copy_global_to_shared(k_desc, [start, k_column + at], bar, over)
        tma.async_copy_global_to_shared(q_desc, [start, q_column + at], bar, under)
        logits = gate.index(half)
        tma.async_copy_global_to_shared(g_desc, [start, g_column + at], bar, logits)


@gluon.jit
def token_strength(beta, inside, SIGMOID: gl.constexpr):
    """Beta of the tokens at ``beta``, 0 past the sequence's end."""
    strength = gl.load(beta, mask=inside, other=0.0).to(gl.float32)
    if SIGMOID:
        strength = 1.0 / (1.0 + gl.exp2(strength * -LOG2E))
    else:  # the backward pass divides by it
        strength = gl.where(gl.abs(strength) < 1e-18, 1e-18, strength)
    return gl.where(inside, strength, 0.0)


@gluon.jit
def clear_rows(stack, length, C: gl.constexpr):
    """Zero the rows past the sequence's end, which belong to others."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = stack.load(layout)
    place = gl.arange(0, 2 * C, layout=gl.SliceLayout(1, layout)) % C
    stack.store(gl.where((place < length)[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def pair_products(
    raw,
    gate,
    fall_high,
    fall_low,
    scales,
    dt_bias,
    bias_place,
    decay_out,
    rate,
    bound,
    length,
    kh_desc,
    line,
    ANCHOR: gl.constexpr,
    GATE: gl.constexpr,
):
    """K 2^G (K 2^-G)^T over s Q 2^G (K 2^-G)^T, unmasked. Leaves the rising factors in ``raw``,
    scaled by 2^ANCHOR, and starts the copy of Kh."""
    work: gl.constexpr = gl.bfloat16
    C: gl.constexpr = raw.shape[1]
    HALF: gl.constexpr = raw.shape[2]
    each: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [4, 1], [1, 0])
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    stacked: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * C, HALF], work)
    left = raw._reinterpret(work, [2, 2 * C, HALF], stacked)
    inside = (gl.arange(0, C, layout=gl.SliceLayout(1, each)) < length)[:, None]
    k_scale = scales.slice(0, C).load(gl.SliceLayout(1, each))[:, None]
    q_scale = scales.slice(C, C).load(gl.SliceLayout(1, each))[:, None]
    for half in gl.static_range(2):
        channel = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, each))
        logits = gate.index(half)
        logit = logits.load(each).to(gl.float32)
        if GATE:  # shares of the bound are summed
            bias = gl.load(dt_bias + bias_place + channel).to(gl.float32) * rate
            step = share(logit * rate + bias[None, :])
            unit = bound * LOG2E
        else:
            given = (logit <= 0) & (logit >= bound * BOUND_SLACK)
            step = gl.where(given, logit, float("nan"))
            unit = LOG2E
        step = gl.where(inside, step, 0.0)
        total = gl.sum(step, 0) * unit
        grown = gl.associative_scan(step, 0, plus)
        gl.store(decay_out + channel, gl.exp2(total))
        k_tile, q_tile = raw.index(2 * half), raw.index(2 * half + 1)
        k = k_tile.load(each).to(gl.float32) * k_scale
        q = q_tile.load(each).to(gl.float32) * q_scale
        k_fall = k * gl.exp2(grown * -unit - ANCHOR)
        rise = gl.exp2(grown * unit + ANCHOR)
        logits.store((k_fall * gl.exp2(total + ANCHOR)[None, :]).to(work))
        top, rest = parted(k_fall)
        fall_high.index(half).store(top)
        fall_low.index(half).store(rest)
        k_tile.store((k * rise).to(work))
        q_tile.store((q * rise).to(work))
    both = gl.zeros([2 * C, C], gl.float32, thin)
    fence_async_shared()
    gl.thread_barrier()
    for half in gl.static_range(2):
        tma.async_copy_shared_to_global(kh_desc, [line, half * HALF], gate.index(half))
        high, columns = left.index(half), fall_high.index(half).permute((1, 0))
        both = warpgroup_mma(high, fall_low.index(half).permute((1, 0)), both, is_async=True)
        both = warpgroup_mma(high, columns, both, is_async=True)
    both = warpgroup_mma_wait(0, deps=[both])
    return both


@gluon.jit(do_not_specialize=["first"])
def prep_hopper_kernel(
    q_desc,
    k_desc,
    g_desc,
    kt_desc,
    qt_desc,
    kh_desc,
    inv_desc,
    att_desc,
    beta,
    a_log,
    dt_bias,
    chunk_table,
    decay_out,
    beta_out,
    q_norm,
    k_norm,
    scale,
    bound,
    first,
    chunks,
    heads,
    q_h,
    k_h,
    g_h,
    beta_t,
    beta_h,
    K: gl.constexpr,
    C: gl.constexpr,
    ANCHOR: gl.constexpr,
    GATE: gl.constexpr,
    SIGMOID: gl.constexpr,
):
    """As `triton_prep.prep_kernel`; grid (chunks H). ``C`` 32, ``K`` 128, four warps; q and k
    are normalised."""
    work: gl.constexpr = gl.bfloat16
    HALF: gl.constexpr = K // 2
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    rows: gl.constexpr = gl.SliceLayout(1, thin)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stacked: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * C, K], work)
    pair: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], work)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # The heads of a chunk run next to each other, as they lie in memory.
    chunk = first + gl.program_id(0) // heads
    head = gl.program_id(0) % heads
    start = gl.load(chunk_table + 2 * chunk)
    length = gl.load(chunk_table + 2 * chunk + 1)
    raw = gl.allocate_shared_memory(work, [4, C, HALF], q_desc.layout)
    gate = gl.allocate_shared_memory(work, [2, C, HALF], g_desc.layout)
    fall_high = gl.allocate_shared_memory(work, [2, C, HALF], q_desc.layout)
    fall_low = gl.allocate_shared_memory(work, [2, C, HALF], q_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [2 * C], plain)
    stack = raw._reinterpret(work, [2 * C, K], stacked)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    gl.thread_barrier()
    columns = (head * q_h, head * k_h, head * g_h)
    copy_inputs((q_desc, k_desc, g_desc), raw, gate, bar, start, columns)
    space = head.to(gl.int64) * chunks + chunk
    line = (head * chunks + chunk) * C
    rate = 0.0
    if GATE:
        rate = gl.exp(gl.load(a_log + head).to(gl.float32)) * -LOG2E
    stack_row = gl.arange(0, 2 * C, layout=rows)
    token = stack_row % C
    mbarrier.wait(bar, 0)
    if length < C:
        clear_rows(stack, length, C)
    norm, factor = row_scales(stack, scale, C, rows)
    gl.store(k_norm + space * C + token, norm, mask=stack_row < C)
    gl.store(q_norm + space * C + token, norm, mask=stack_row >= C)
    scales.store(factor)
    both = pair_products(
        raw,
        gate,
        fall_high,
        fall_low,
        scales,
        dt_bias,
        head * K,
        decay_out + space * K,
        rate,
        bound,
        length,
        kh_desc,
        line,
        ANCHOR,
        GATE,
    )
    place = (start + token).to(gl.int64) * beta_t + head.to(gl.int64) * beta_h
    strength = token_strength(beta + place, token < length, SIGMOID)
    gl.store(beta_out + space * C + token, strength, mask=stack_row < C)
    column = gl.arange(0, C, layout=gl.SliceLayout(0, thin))[None, :]
    kept = column < (token + gl.where(stack_row < C, 0, 1))[:, None]
    both = gl.where(kept, both, 0.0)
    gl.thread_barrier()  # every warp has read the factors
    lower = fall_high.index(0)._reinterpret(gl.float16, [2 * C, C], pair)
    lower.store((both * strength[:, None]).to(gl.float16))
    pairs = fall_low.index(0)._reinterpret(work, [2, C, C], pair)
    pairs._reinterpret(work, [2 * C, C], pair).store(both.to(work))
    scale_in_place(stack, 2.0**-ANCHOR, wide)
    pairs.index(0).store(unit_lower_inverse(lower.slice(0, C), C).to(work))
    fence_async_shared()
    gl.thread_barrier()
    for half in gl.static_range(2):
        at = half * HALF
        tma.async_copy_shared_to_global(kt_desc, [line, at], raw.index(2 * half))
        tma.async_copy_shared_to_global(qt_desc, [line, at], raw.index(2 * half + 1))
    tma.async_copy_shared_to_global(inv_desc, [line, 0], pairs.index(0))
    tma.async_copy_shared_to_global(att_desc, [line, 0], pairs.index(1))
    tma.store_wait(0)
    gate._keep_alive()  # its copy may still read it while the inverse wants memory
