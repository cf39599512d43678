"""Last pass of the chunked KDA backward in Triton: all input gradients of one chunk of one head.

S enters the chunk, dS is the gradient of the state that leaves it, U and Z are the written values
and their gradient (`triton_scan`), G the cumulative log decay in powers of two and T its total:
    dA = s stril(dO U^T)    dL = -diag(beta) stril(Z U^T)
    dq     = s 2^G (dO S^T) + sum_j dA_ij k_j 2^(G_i - G_j)
    dk_row = -2^G (beta Z S^T) + sum_j dL_ij k_j 2^(G_i - G_j)
    dk_col = 2^(T - G) (U dS^T) + sum_i (dA_ij q_i + dL_ij k_i) 2^(G_i - G_j)
    dG     = q dq + k (dk_row - dk_col); every row also gets
             rowsum(2^T S dS) + sum_i k_i 2^(T - G_i) (U dS^T)_i through the running sum
Terms with i = j have decay 1 and no part in dG; they join dq and dk afterwards. Every other term
enters dG at i and leaves it at j, so both places take the product of the same rounded factors: what
must cancel in the running sum then cancels exactly. In 16 bits five roundings of one size would
make up the error of dg, of U, dA, q_i 2^G_i, k_j 2^-G_j and dg itself: k_j 2^-G_j goes in as two
parts, which leaves four. The factors carry the constants of `triton_prep`. The L2 normalisation
needs q.dq = dO.O and k.dk = 2 Z.U - beta Z.V, so that channels can be split; the gradient of the
logit of beta is (1 - beta) Z.U.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid_slope
from .triton_prep import exact_dot, gate_log2


@triton.jit
def tile(start, head, row, column, row_stride, head_stride):
    """Offsets of ``[rows, columns]`` of one head, from token ``start`` on."""
    return (start + row[:, None]) * row_stride + head * head_stride + column[None, :]


@triton.jit
def row_products(x, y, C: tl.constexpr):
    """x_i . y_i of two tiles of ``C`` rows."""
    same = tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :]
    return tl.sum(tl.where(same, tl.dot(x, tl.trans(y), input_precision="ieee"), 0.0), 1)


@triton.jit
def pair_gradients(do, z, u, strength, scale, C: tl.constexpr):
    """dA and dL ``[C, C]`` below the diagonal, the diagonals of s dO U^T and Z U^T, and the power
    of two that dA and dL were divided by: the products to come carry 2^+-ANCHOR, and would leave
    the range of fp32 unless these are near 1."""
    row = tl.arange(0, C)
    same = row[:, None] == row[None, :]
    below = row[:, None] > row[None, :]
    columns = tl.trans(u)
    d_lower = tl.dot(z, columns, input_precision="ieee")
    d_reads = tl.dot(do, columns, input_precision="ieee") * scale
    self_write = tl.sum(tl.where(same, d_lower, 0.0), 1)
    self_read = tl.sum(tl.where(same, d_reads, 0.0), 1)
    d_lower = tl.where(below, d_lower * -strength[:, None], 0.0)
    d_reads = tl.where(below, d_reads, 0.0)
    size = binary_size(tl.max(tl.max(tl.maximum(tl.abs(d_lower), tl.abs(d_reads)), 1), 0))
    d_lower = (d_lower * (1.0 / size)).to(u.dtype)
    d_reads = (d_reads * (1.0 / size)).to(u.dtype)
    return d_reads, d_lower, self_read, self_write, size


@triton.jit
def parted(x, WORK: tl.constexpr):
    """``x`` as two numbers of the type ``WORK``, and their sum in fp32."""
    high = x.to(WORK)
    low = (x - high.to(tl.float32)).to(WORK)
    return high, low, high.to(tl.float32) + low.to(tl.float32)


@triton.jit
def dot_parts(high, low, y):
    product = tl.dot(low, y, input_precision="ieee")
    return tl.dot(high, y, acc=product, input_precision="ieee")


@triton.jit
def binary_size(x):
    """The power of two at or below ``x``, within 2^+-100; 2^-100 for 0."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, (127 - 100) << 23), (127 + 100) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def gate_gradients(d_step, logit, across, rate, bias, bound, FAST: tl.constexpr):
    """Gradients of the logits ``[P, C]`` and, summed over the chunk, of the bias and of A_log."""
    wide = tl.exp(rate) * (logit + bias[:, None])
    d_wide = tl.where(across, d_step * bound * sigmoid_slope(wide, FAST), 0.0)
    d_logit = d_wide * tl.exp(rate)
    return d_logit, tl.sum(d_logit, 1), tl.sum(tl.sum(d_wide * wide, 1), 0)


@triton.jit
def grad_kernel(
    q,
    k,
    v,
    g,
    out,
    a_log,
    dt_bias,
    chunk_table,
    d_out,
    u_in,
    z_in,
    h_in,
    dh_in,
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
    q_t,
    k_t,
    v_t,
    g_t,
    do_t,
    q_h,
    k_h,
    v_h,
    g_h,
    do_h,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    ANCHOR: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    FAST: tl.constexpr,
):
    """``PIECE`` key channels of one head; grid (chunks, H, K // PIECE). The three
    parameter-gradient outputs get one partial sum per program."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    start = tl.load(chunk_table + 2 * chunk).to(tl.int64)
    length = tl.load(chunk_table + 2 * chunk + 1)
    row = tl.arange(0, C)
    valid = row < length
    inside = valid[:, None]
    column = tl.arange(0, V)
    channel = piece * PIECE + tl.arange(0, PIECE)
    space = head * chunks + chunk
    line = space * C + row

    # All loads come first: their latencies then overlap.
    place = line[:, None] * V + column[None, :]
    u, z = tl.load(u_in + place), tl.load(z_in + place)
    work = u.dtype
    do = tl.load(d_out + tile(start, head, row, column, do_t, do_h), mask=inside, other=0.0)
    do = do.to(work)
    o = tl.load(out + tile(start, head, row, column, heads * V, V), mask=inside, other=0.0)
    value = tl.load(v + tile(start, head, row, column, v_t, v_h), mask=inside, other=0.0)
    across = valid[None, :]
    g_raw = tl.load(g + tl.trans(tile(start, head, row, channel, g_t, g_h)), mask=across, other=0.0)
    q_raw = tl.load(q + tl.trans(tile(start, head, row, channel, q_t, q_h)), mask=across, other=0.0)
    k_raw = tl.load(k + tl.trans(tile(start, head, row, channel, k_t, k_h)), mask=across, other=0.0)
    place = (space * V + column[:, None]) * K + channel[None, :]
    state, d_state = tl.load(h_in + place), tl.load(dh_in + place)
    strength = tl.load(beta + line)
    q_scale, k_scale = tl.load(q_norm + line), tl.load(k_norm + line)
    rate = tl.load(a_log + head).to(tl.float32) if GATE else 0.0
    bias = tl.zeros([PIECE], tl.float32)
    if GATE:
        bias = tl.load(dt_bias + head * K + channel).to(tl.float32)
    d_reads, d_lower, self_read, self_write, size = pair_gradients(do, z, u, strength, scale, C)
    q_along = tl.zeros([C], tl.float32)
    k_along = tl.zeros([C], tl.float32)
    if NORM:
        q_along = row_products(do, o.to(work), C)
        k_along = 2.0 * self_write - strength * row_products(z, value.to(work), C)
    if piece == 0:
        residual = z.to(tl.float32) * strength[:, None]
        values = tile(start, head, row, column, heads * V, V)
        tl.store(dv + values, residual.to(dv.dtype.element_ty), mask=inside)
        self_write *= 1.0 - strength if SIGMOID else 1.0 / strength
        order = (start + row) * heads + head
        tl.store(d_beta + order, self_write.to(d_beta.dtype.element_ty), mask=valid)

    # From here on channels are rows: PIECE of them fill the tensor cores.
    last = row_products(tl.trans(state), tl.trans(d_state), PIECE)
    logit = g_raw.to(tl.float32)
    step = tl.where(across, gate_log2(logit, rate, bias[:, None], bound, GATE, FAST), 0.0)
    total = tl.sum(step, 1)
    onward = tl.where(row[:, None] <= row[None, :], 1.0, 0.0).to(work)
    grown = exact_dot(step, onward)
    unanchor: tl.constexpr = 2.0 ** (-ANCHOR)
    rise = tl.exp2(grown + ANCHOR)
    fall = tl.exp2(-ANCHOR - grown)
    q_unit = q_raw.to(tl.float32) * q_scale[None, :]
    k_unit = k_raw.to(tl.float32) * k_scale[None, :]
    q_rise = (q_unit * rise).to(work)
    k_rise = (k_unit * rise).to(work)
    k_fall, k_fall_low, k_fallen = parted(k_unit * fall, work)

    part = tl.dot(tl.trans(state), tl.trans(do), input_precision="ieee")
    part *= rise * (unanchor * scale)
    d_grown = q_unit * part
    near = dot_parts(k_fall, k_fall_low, tl.trans(d_reads))
    d_grown += q_rise.to(tl.float32) * near * size
    gradient = part + rise * near * size + self_read[None, :] * k_unit - q_unit * q_along[None, :]
    gradient *= q_scale[None, :]
    target = tl.trans(tile(start, head, row, channel, heads * K, K))
    tl.store(dq + target, gradient.to(dq.dtype.element_ty), mask=across)

    gradient = tl.dot(tl.trans(state), tl.trans(z), input_precision="ieee")
    gradient *= rise * (strength * -unanchor)[None, :]
    d_grown += k_unit * gradient
    near = dot_parts(k_fall, k_fall_low, tl.trans(d_lower))
    d_grown += k_rise.to(tl.float32) * near * size
    gradient += rise * near * size
    part = tl.dot(tl.trans(d_state), tl.trans(u), input_precision="ieee")
    part *= fall * tl.exp2(total + ANCHOR)[:, None]
    d_grown -= k_unit * part
    last = last * tl.exp2(total) + tl.sum(k_unit * part, 1)
    gradient += part
    near = tl.dot(q_rise, d_reads, input_precision="ieee")
    near = tl.dot(k_rise, d_lower, acc=near, input_precision="ieee")
    d_grown -= k_fallen * near * size
    gradient += fall * near * size + self_read[None, :] * q_unit
    gradient = (gradient - k_unit * k_along[None, :]) * k_scale[None, :]
    tl.store(dk + target, gradient.to(dk.dtype.element_ty), mask=across)

    upto = tl.where(row[:, None] >= row[None, :], 1.0, 0.0).to(work)
    d_step = exact_dot(d_grown, upto) + last[:, None]
    if GATE:
        d_step, d_bias_part, d_rate_part = gate_gradients(
            d_step, logit, across, rate, bias, bound, FAST
        )
        tl.store(d_rate + space * (K // PIECE) + piece, d_rate_part)
        tl.store(d_bias + space * K + channel, d_bias_part)
    tl.store(dg + target, d_step.to(dg.dtype.element_ty), mask=across)
