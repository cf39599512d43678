"""State passes of chunked KDA in Triton: forward over the chunks of a sequence, and backward.

The state is held transposed, ``[V, K]``, in registers: it is then the left operand of every product
and never passes through shared memory. In the notation of `triton_prep`, per chunk:
    X = beta (V - Kt S)    U = X + inv X    O = Qt S + att U    S <- decay S + Kh^T U
and backward, from the last chunk to the first, with Z the gradient of beta (V - Kt S):
    dU = att^T dO + Kh dS    Z = dU + inv^T dU    dS <- decay dS + Qt^T dO - Kt^T (beta Z)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_kernel(
    kt_desc,
    qt_desc,
    kh_desc,
    inv_desc,
    att_desc,
    decay,
    beta,
    v,
    out,
    initial,
    final,
    u_out,
    h_out,
    sequence_table,
    chunks,
    heads,
    v_t,
    v_h,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    SAVE: tl.constexpr,
    DRIVEN: tl.constexpr,
    OUT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """``BV`` value columns of one head of one sequence; grid (N * H, V // BV).

    ``SAVE`` also writes U and the state entering each chunk, for the backward pass. Without
    ``DRIVEN`` the values are zero, and initial and final states are maps, held transposed
    ``[V, K]``. Without ``INITIAL`` states begin as zero, maps as the identity. Without ``OUT`` only
    final states are written. With ``WHOLE`` no state is read of a sequence without tokens, and no
    final one written of a sequence that ends inside a chunk, so that ``final`` may be ``initial``.
    """
    head = tl.program_id(0) % heads
    sequence = tl.program_id(0) // heads
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    number = tl.load(sequence_table + 4 * sequence).to(tl.int64)
    first = tl.load(sequence_table + 4 * sequence + 1)
    start = tl.load(sequence_table + 4 * sequence + 2).to(tl.int64)
    length = tl.load(sequence_table + 4 * sequence + 3)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    space = head.to(tl.int64) * chunks + first
    edge = (number * heads + head) * K * V
    if DRIVEN:
        edge += channel[None, :] * V + column[:, None]
    else:
        edge += column[:, None] * K + channel[None, :]
    if INITIAL:
        used = length > 0 if WHOLE else None
        state = tl.load(initial + edge, mask=used).to(tl.float32)
    elif not DRIVEN:
        state = tl.where(channel[None, :] == column[:, None], 1.0, 0.0)
    else:
        state = tl.zeros([BV, K], tl.float32)
    if DRIVEN:
        v += start * v_t + head.to(tl.int64) * v_h
    if OUT:
        out += (start * heads + head) * V
    for i in range(tl.cdiv(length, C)):
        line = ((head * chunks + first + i) * C).to(tl.int32)
        kt = kt_desc.load([line, 0])
        qt = qt_desc.load([line, 0])
        kh = kh_desc.load([line, 0])
        inv = inv_desc.load([line, 0])
        att = att_desc.load([line, 0])
        token = i * C + row
        inside = (token < length)[:, None]
        strength = tl.load(beta + (space + i) * C + row)
        shrink = tl.load(decay + (space + i) * K + channel)
        work = kt.dtype
        operand = state.to(work)
        x = -tl.dot(operand, tl.trans(kt), input_precision="ieee")
        if DRIVEN:
            place = token.to(tl.int64)[:, None] * v_t + column[None, :]
            x += tl.trans(tl.load(v + place, mask=inside, other=0.0)).to(tl.float32)
        x *= strength[None, :]
        u = tl.dot(x.to(work), tl.trans(inv), acc=x, input_precision="ieee").to(work)
        if OUT:
            o = tl.dot(operand, tl.trans(qt), input_precision="ieee")
            o = tl.dot(u, tl.trans(att), acc=o, input_precision="ieee")
            place = token.to(tl.int64)[:, None] * heads * V + column[None, :]
            tl.store(out + place, tl.trans(o).to(out.dtype.element_ty), mask=inside)
        if SAVE:
            place = ((space + i) * C + row[:, None]) * V + column[None, :]
            tl.store(u_out + place, tl.trans(u))
            place = ((space + i) * V + column[:, None]) * K + channel[None, :]
            tl.store(h_out + place, operand)
        state = tl.dot(u, kh, acc=state * shrink[None, :], input_precision="ieee")
    if FINAL:
        ended = (length > 0) & (length % C == 0) if WHOLE else None
        tl.store(final + edge, state, mask=ended)


@triton.jit
def scan_backward_kernel(
    kt_desc,
    qt_desc,
    kh_desc,
    inv_desc,
    att_desc,
    decay,
    beta,
    d_out,
    d_initial,
    d_final,
    z_out,
    dh_out,
    sequence_table,
    chunks,
    heads,
    do_t,
    do_h,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
    OUT: tl.constexpr,
):
    """As `scan_kernel`, chunks reversed; with ``OUT`` writes Z and the gradient of the state
    leaving each chunk, with ``INITIAL`` that of the initial state."""
    head = tl.program_id(0) % heads
    sequence = tl.program_id(0) // heads
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    number = tl.load(sequence_table + 4 * sequence).to(tl.int64)
    first = tl.load(sequence_table + 4 * sequence + 1)
    start = tl.load(sequence_table + 4 * sequence + 2).to(tl.int64)
    length = tl.load(sequence_table + 4 * sequence + 3)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    space = head.to(tl.int64) * chunks + first
    edge = ((number * heads + head) * K + channel[None, :]) * V + column[:, None]
    d_state = tl.load(d_final + edge).to(tl.float32) if FINAL else tl.zeros([BV, K], tl.float32)
    d_out += start * do_t + head.to(tl.int64) * do_h
    count = tl.cdiv(length, C)
    for step in range(count):
        i = count - 1 - step
        line = ((head * chunks + first + i) * C).to(tl.int32)
        kt = kt_desc.load([line, 0])
        qt = qt_desc.load([line, 0])
        kh = kh_desc.load([line, 0])
        inv = inv_desc.load([line, 0])
        att = att_desc.load([line, 0])
        token = i * C + row
        inside = (token < length)[:, None]
        place = token.to(tl.int64)[:, None] * do_t + column[None, :]
        do = tl.load(d_out + place, mask=inside, other=0.0).to(kt.dtype)
        strength = tl.load(beta + (space + i) * C + row)
        shrink = tl.load(decay + (space + i) * K + channel)
        work = kt.dtype
        operand = d_state.to(work)
        columns = tl.trans(do)
        du = tl.dot(operand, tl.trans(kh), input_precision="ieee")
        du = tl.dot(columns, att, acc=du, input_precision="ieee")
        z = tl.dot(du.to(work), inv, acc=du, input_precision="ieee")
        if OUT:
            place = ((space + i) * V + column[:, None]) * K + channel[None, :]
            tl.store(dh_out + place, operand)
            place = ((space + i) * C + row[:, None]) * V + column[None, :]
            tl.store(z_out + place, tl.trans(z).to(work))
        d_state = tl.dot(columns, qt, acc=d_state * shrink[None, :], input_precision="ieee")
        d_state = tl.dot((z * -strength[None, :]).to(work), kt, acc=d_state, input_precision="ieee")
    if INITIAL:
        tl.store(d_initial + edge, d_state)
