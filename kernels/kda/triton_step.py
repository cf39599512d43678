"""One token of the KDA recurrence in Triton: every element of the state is read and written once.

Both sums over the state are taken before it is written, as one pass needs it. With the decay
a = e^g and everything normalised:
    e = beta (v - (a k)^T S)    o = (a q)^T S + (q^T k) e    S <- Diag(a) S + k e^T
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid


@triton.jit
def step_kernel(
    q,
    k,
    v,
    g,
    beta,
    a_log,
    dt_bias,
    initial,
    final,
    out,
    scale,
    bound,
    heads,
    q_n,
    k_n,
    v_n,
    g_n,
    beta_n,
    q_h,
    k_h,
    v_h,
    g_h,
    beta_h,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    FINAL: tl.constexpr,
    FAST: tl.constexpr,
):
    """``BV`` value columns of one head of one sequence; grid (N * H * V / BV), columns first."""
    blocks: tl.constexpr = V // BV
    line = tl.program_id(0) // blocks
    sequence = (line // heads).to(tl.int64)
    head = (line % heads).to(tl.int64)
    edge = line.to(tl.int64) * K * V
    channel = tl.arange(0, K)
    column = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    place = channel[:, None] * V + column[None, :]
    # all loads first: what only needs the small ones is computed while the state is on its way
    state = tl.load(initial + edge + place)
    query = tl.load(q + sequence * q_n + head * q_h + channel).to(tl.float32)
    decay = tl.load(g + sequence * g_n + head * g_h + channel).to(tl.float32)
    strength = tl.load(beta + sequence * beta_n + head * beta_h).to(tl.float32)
    value = tl.load(v + sequence * v_n + head * v_h + column).to(tl.float32)
    rate, bias = 0.0, 0.0
    if GATE:
        rate = tl.load(a_log + head).to(tl.float32)
        bias = tl.load(dt_bias + head * K + channel).to(tl.float32)
    key = tl.load(k + sequence * k_n + head * k_h + channel).to(tl.float32)

    if NORM:
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    query *= scale
    if GATE:
        decay = bound * sigmoid(tl.exp(rate) * (decay + bias), FAST)
    decay = tl.exp(decay)
    if SIGMOID:
        strength = tl.sigmoid(strength)
    known = tl.sum((decay * key)[:, None] * state, 0)
    read = tl.sum((decay * query)[:, None] * state, 0)
    error = (value - known) * strength
    if FINAL:
        tl.store(final + edge + place, decay[:, None] * state + key[:, None] * error[None, :])
    read += tl.sum(query * key, 0) * error
    tl.store(out + line.to(tl.int64) * V + column, read.to(out.dtype.element_ty))
