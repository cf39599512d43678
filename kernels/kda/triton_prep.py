"""First pass of the chunked KDA forward in Triton: everything in a chunk that needs no state.

With the inclusive cumulative log decay G of a chunk, in powers of two, and its total G_C:
    Kt = K 2^G    Qt = s Q 2^G    Kh = K 2^(G_C - G)    decay = 2^(G_C)
    att = s tril(Q 2^G (K 2^-G)^T)    inv = (I + diag(beta) stril(K 2^G (K 2^-G)^T))^-1 - I
The two factors of a product carry the constants 2^ANCHOR and 2^-ANCHOR, which keep both inside the
range of bf16 for every decay down to the bound and never depend on the data: appending tokens to a
sequence cannot change a bit of what came before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid

BOUND_SLACK = tl.constexpr(1.004)  # the bound itself, rounded to bf16, may lie below


@triton.jit
def gate_log2(z, a_log, bias, bound, GATE: tl.constexpr, FAST: tl.constexpr):
    """Log decay ``[C, P]`` in powers of two from its logit, or from the natural log decay itself;
    a given decay outside [bound, 0] becomes NaN, so that it cannot pass unseen."""
    if GATE:
        wide = tl.exp(a_log) * (z + bias)
        return bound * sigmoid(wide, FAST) * 1.4426950408889634
    inside = (z <= 0) & (z >= bound * BOUND_SLACK)
    return tl.where(inside, z * 1.4426950408889634, float("nan"))


@triton.jit
def exact_dot(x, ones):
    """Product of an fp32 ``x`` with a matrix of zeros and ones, summed in fp32: running sums along
    the columns at the speed of the tensor cores. In bf16 ``x`` goes in as three parts that add up
    to it."""
    if ones.dtype == tl.float32:
        return tl.dot(x, ones, input_precision="ieee")
    high = x.to(ones.dtype)
    rest = x - high.to(tl.float32)
    middle = rest.to(ones.dtype)
    low = (rest - middle.to(tl.float32)).to(ones.dtype)
    total = tl.dot(low, ones)
    total = tl.dot(middle, ones, acc=total)
    return tl.dot(high, ones, acc=total)


@triton.jit
def merge_blocks(inverse, lower, SIZE: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr):
    """From the inverses of the diagonal blocks of ``SIZE`` to those of twice the size."""
    i = tl.arange(0, C)[:, None] // SIZE
    j = tl.arange(0, C)[None, :] // SIZE
    block = tl.where((i % 2 == 1) & (j == i - 1), lower, 0.0)
    if SIZE == 1:
        return inverse - block
    if HALF:
        left = inverse.to(tl.float16)
        product = tl.dot(left, block.to(tl.float16)).to(tl.float16)
        return inverse - tl.dot(product, left)
    product = tl.dot(inverse, block, input_precision="ieee")
    return inverse - tl.dot(product, inverse, input_precision="ieee")


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, HALF: tl.constexpr):
    """(I + lower)^-1 of a strictly lower ``[C, C]``, C 16 or 32, by merging diagonal blocks.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: no powers of ``lower`` appear, so equal
    keys do no harm. ``HALF`` multiplies in fp16 with fp32 sums, for entries of at most 1.
    """
    same = tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :]
    inverse = tl.where(same, 1.0, 0.0)
    inverse = merge_blocks(inverse, lower, 1, C, HALF)
    inverse = merge_blocks(inverse, lower, 2, C, HALF)
    inverse = merge_blocks(inverse, lower, 4, C, HALF)
    inverse = merge_blocks(inverse, lower, 8, C, HALF)
    if C == 32:
        inverse = merge_blocks(inverse, lower, 16, C, HALF)
    return inverse


@triton.jit(do_not_specialize=["first"])
def prep_kernel(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    chunk_table,
    kt_out,
    qt_out,
    kh_out,
    inv_out,
    att_out,
    decay_out,
    beta_out,
    q_norm,
    k_norm,
    scale,
    bound,
    first,
    chunks,
    q_t,
    k_t,
    g_t,
    beta_t,
    q_h,
    k_h,
    g_h,
    beta_h,
    K: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    ANCHOR: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of one head; grid (chunks, H). Rows past the sequence's end write zeros."""
    chunk = first + tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(chunk_table + 2 * chunk).to(tl.int64)
    length = tl.load(chunk_table + 2 * chunk + 1)
    row = tl.arange(0, C)
    valid = row < length
    inside = valid[:, None]
    column = tl.arange(0, PIECE)
    q += start * q_t + head.to(tl.int64) * q_h
    k += start * k_t + head.to(tl.int64) * k_h
    g += start * g_t + head.to(tl.int64) * g_h
    space = head.to(tl.int64) * chunks + chunk  # this chunk's place in the workspaces
    work = kt_out.dtype.element_ty

    q_scale = tl.full([C], 1.0, tl.float32)
    k_scale = tl.full([C], 1.0, tl.float32)
    if NORM:
        q_square = tl.zeros([C], tl.float32)
        k_square = tl.zeros([C], tl.float32)
        for piece in tl.static_range(K // PIECE):
            channel = (piece * PIECE + column)[None, :]
            q_raw = tl.load(q + row[:, None] * q_t + channel, mask=inside, other=0.0)
            k_raw = tl.load(k + row[:, None] * k_t + channel, mask=inside, other=0.0)
            q_square += tl.sum(q_raw.to(tl.float32) * q_raw.to(tl.float32), 1)
            k_square += tl.sum(k_raw.to(tl.float32) * k_raw.to(tl.float32), 1)
        q_scale = tl.rsqrt(q_square + 1e-6)
        k_scale = tl.rsqrt(k_square + 1e-6)
    tl.store(q_norm + space * C + row, q_scale)
    tl.store(k_norm + space * C + row, k_scale)
    q_scale *= scale

    rate = 0.0
    if GATE:
        rate = tl.load(a_log + head).to(tl.float32)
    unanchor: tl.constexpr = 2.0 ** (-ANCHOR)
    lower = tl.zeros([C, C], tl.float32)
    reads = tl.zeros([C, C], tl.float32)
    for piece in tl.static_range(K // PIECE):
        channel = piece * PIECE + column
        bias = tl.zeros([PIECE], tl.float32)
        if GATE:
            bias = tl.load(dt_bias + head * K + channel).to(tl.float32)
        g_raw = tl.load(g + row[:, None] * g_t + channel[None, :], mask=inside, other=0.0)
        step = gate_log2(
            g_raw.to(tl.float32), rate, bias[None, :], bound, GATE, PRECISION != "ieee"
        )
        step = tl.where(inside, step, 0.0)
        total = tl.sum(step, 0)
        grown = tl.cumsum(step, 0)
        rise = tl.exp2(grown + ANCHOR)
        fall = tl.exp2(-ANCHOR - grown)
        k_raw = tl.load(k + row[:, None] * k_t + channel[None, :], mask=inside, other=0.0)
        q_raw = tl.load(q + row[:, None] * q_t + channel[None, :], mask=inside, other=0.0)
        k_wide = k_raw.to(tl.float32) * k_scale[:, None]
        k_rise = k_wide * rise
        q_rise = q_raw.to(tl.float32) * q_scale[:, None] * rise
        k_fall = k_wide * fall
        if PRECISION == "bf16":
            columns = tl.trans(k_fall.to(work))
            lower = tl.dot(k_rise.to(work), columns, acc=lower)
            reads = tl.dot(q_rise.to(work), columns, acc=reads)
        else:
            columns = tl.trans(k_fall)
            lower = tl.dot(k_rise, columns, acc=lower, input_precision=PRECISION)
            reads = tl.dot(q_rise, columns, acc=reads, input_precision=PRECISION)
        place = (space * C + row[:, None]) * K + channel[None, :]
        tl.store(kt_out + place, (k_rise * unanchor).to(work))
        tl.store(qt_out + place, (q_rise * unanchor).to(work))
        tl.store(kh_out + place, (k_fall * tl.exp2(total + ANCHOR)[None, :]).to(work))
        tl.store(decay_out + space * K + channel, tl.exp2(total))

    strength = tl.load(
        beta + (start + row) * beta_t + head.to(tl.int64) * beta_h, mask=valid, other=0.0
    ).to(tl.float32)
    if SIGMOID:
        strength = tl.sigmoid(strength)
    else:  # the backward pass divides by it
        strength = tl.where(tl.abs(strength) < 1e-18, 1e-18, strength)
    strength = tl.where(valid, strength, 0.0)
    tl.store(beta_out + space * C + row, strength)
    below = row[:, None] > row[None, :]
    lower = tl.where(below, lower * strength[:, None], 0.0)
    reads = tl.where(row[:, None] >= row[None, :], reads, 0.0)
    inverse = unit_lower_inverse(lower, C, NORM and PRECISION != "ieee")
    inverse = tl.where(below, inverse, 0.0)
    place = (space * C + row[:, None]) * C + row[None, :]
    tl.store(inv_out + place, inverse.to(work))
    tl.store(att_out + place, reads.to(work))
