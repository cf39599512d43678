"""A whole decode step of one KDA head in Triton, from the projected token to the normed output.

With q, k, v the SiLU of the short convolution, q and k normalised, and the decay a = e^g:
    e = b (v - (a k)^T S)    o = (a q)^T S + (q^T k) e    S <- Diag(a) S + k e^T
    y = o rsqrt(mean(o^2) + eps) w s(gate)    b = s(beta)    s the sigmoid
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv.triton_conv import convolve, taps_of
from ..triton_sigmoid import sigmoid


@triton.jit
def window_of(x_row, tail_row, tail_w, channel, W: tl.constexpr):
    """The last W inputs of some channels, as they are stored: the tail, then the token."""
    window = ()
    for i in tl.static_range(W - 1):
        window = window + (tl.load(tail_row + i * tail_w + channel),)
    return window + (tl.load(x_row + channel),)


@triton.jit
def keep_tail(window, new_row, channels, channel, W: tl.constexpr):
    for i in tl.static_range(W - 1):
        value = window[i + 1].to(new_row.dtype.element_ty)
        tl.store(new_row + i * channels + channel, value)


@triton.jit
def mixed(weights, window, dtype: tl.constexpr, W: tl.constexpr, FAST: tl.constexpr):
    """SiLU of the convolution, rounded to ``dtype`` and back in fp32."""
    wide = ()
    for i in tl.static_range(W):
        wide = wide + (window[i].to(tl.float32),)
    p = convolve(weights, wide, W)
    return (p * sigmoid(p, FAST)).to(dtype).to(tl.float32)


@triton.jit
def halved(pieces, COUNT: tl.constexpr):
    """Every one of ``COUNT`` vectors cut in two, in order."""
    halves = ()
    for i in tl.static_range(COUNT):
        pair = tl.reshape(pieces[i], [2, pieces[i].shape[0] // 2])
        halves = halves + tl.split(tl.trans(pair))
    return halves


@triton.jit
def cut(x, COUNT: tl.constexpr):
    """``x`` as ``COUNT`` vectors of one length, in order."""
    pieces = (x,)
    if COUNT > 1:
        pieces = halved(pieces, 1)
    if COUNT > 2:
        pieces = halved(pieces, 2)
    if COUNT > 4:
        pieces = halved(pieces, 4)
    tl.static_assert(COUNT <= 8)
    return pieces


@triton.jit
def decode_kernel(
    qkv,
    kernel,
    tail,
    z,
    beta,
    gate,
    weight,
    a_log,
    dt_bias,
    initial,
    final,
    new_tail,
    out,
    places,
    eps,
    bound,
    heads,
    qkv_n,
    tail_n,
    tail_w,
    z_n,
    beta_n,
    gate_n,
    W: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    HELD: tl.constexpr,
    PLACED: tl.constexpr,
    FAST: tl.constexpr,
):
    """One head of one sequence, ``BV`` value columns at a time; grid (N * H), heads first.

    ``HELD`` such blocks of the state are held in registers or on their way there. With ``PLACED``
    state and tail of sequence n lie in row ``places[n]``, below 0 nowhere, and the new ones may
    take the place of the old.
    """
    blocks: tl.constexpr = V // BV
    line = tl.program_id(0)
    sequence, head = (line // heads).to(tl.int64), line % heads
    row = sequence
    if PLACED:
        row = tl.load(places + sequence).to(tl.int64)
        if row < 0:  # what lies in memory might be no number, and would go through all layers
            nothing = tl.zeros([V], out.dtype.element_ty)
            tl.store(out + line.to(tl.int64) * V + tl.arange(0, V), nothing)
            return
    channels = heads * (2 * K + V)
    channel, column = tl.arange(0, K), tl.arange(0, V)
    q_c, k_c = head * K + channel, (heads + head) * K + channel
    v_c = 2 * heads * K + head * V + column
    # all loads first, the small ones before the state's: their arithmetic runs while those are on
    # their way
    x_row, tail_row = qkv + sequence * qkv_n, tail + row * tail_n
    q_window = window_of(x_row, tail_row, tail_w, q_c, W)
    k_window = window_of(x_row, tail_row, tail_w, k_c, W)
    v_window = window_of(x_row, tail_row, tail_w, v_c, W)
    q_taps = taps_of(kernel, q_c, True, W)
    k_taps = taps_of(kernel, k_c, True, W)
    v_taps = taps_of(kernel, v_c, True, W)
    rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head * K + channel).to(tl.float32)
    lean = tl.load(z + sequence * z_n + head * K + channel).to(tl.float32)
    strength = tl.sigmoid(tl.load(beta + sequence * beta_n + head).to(tl.float32))
    share = tl.arange(0, BV)
    logits, scales = (), ()
    for i in tl.static_range(blocks):
        part = i * BV + share
        logits = logits + (tl.load(gate + sequence * gate_n + head * V + part),)
        scales = scales + (tl.load(weight + part),)
    place = (row * heads + head) * (K * V) + channel[:, None] * V + share[None, :]
    states = ()
    for i in tl.static_range(min(HELD, blocks)):
        states = states + (tl.load(initial + place + i * BV),)

    if PLACED:
        tl.debug_barrier()  # every thread has what lies where the new tail goes
    new_row = new_tail + row * (W - 1) * channels
    keep_tail(q_window, new_row, channels, q_c, W)
    keep_tail(k_window, new_row, channels, k_c, W)
    keep_tail(v_window, new_row, channels, v_c, W)
    dtype: tl.constexpr = out.dtype.element_ty
    query = mixed(q_taps, q_window, dtype, W, FAST)
    key = mixed(k_taps, k_window, dtype, W, FAST)
    values = cut(mixed(v_taps, v_window, dtype, W, FAST), blocks)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
    query *= K**-0.5
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    decay = tl.exp(bound * sigmoid(tl.exp(rate) * (lean + bias), FAST))
    along = tl.sum(query * key, 0)

    reads, square = (), 0.0
    for i in tl.static_range(blocks):
        state = decay[:, None] * states[i]
        error = (values[i] - tl.sum(key[:, None] * state, 0)) * strength
        read = tl.sum(query[:, None] * state, 0) + along * error
        tl.store(final + place + i * BV, state + key[:, None] * error[None, :])
        if i + HELD < blocks:
            states = states + (tl.load(initial + place + (i + HELD) * BV),)
        read = read.to(dtype).to(tl.float32)
        square += tl.sum(read * read, 0)
        reads = reads + (read,)
    inverse = tl.rsqrt(square / V + eps)
    for i in tl.static_range(blocks):
        y = reads[i] * inverse * scales[i].to(tl.float32)
        y *= sigmoid(logits[i].to(tl.float32), FAST)
        tl.store(out + line.to(tl.int64) * V + i * BV + share, y.to(dtype))
