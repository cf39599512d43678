"""RMSNorm in Triton, gated or not, forward and backward, on rows ``[R, V]``.

With n = x rsqrt(mean(x^2) + eps), s = sigmoid(gate) (1 without a gate) and y = n w s:
    dn = dy w s    dx = rsqrt(.) (dn - n mean(dn n))    dgate = dy n w s (1 - s)    dw = sum dy n s
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    gate,
    weight,
    out,
    rows,
    eps,
    V: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
):
    """``BR`` rows; grid (rows / BR)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BV)
    inside = (row < rows)[:, None] & (column < V)[None, :]
    place = row[:, None] * V + column[None, :]
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / V + eps)
    y = wide * inverse[:, None] * scale[None, :]
    if GATED:
        logit = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        y *= sigmoid(logit, FAST)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    x,
    gate,
    weight,
    d_out,
    dx,
    d_gate,
    d_weight,
    rows,
    eps,
    V: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
):
    """``BLOCKS`` times ``BR`` rows; grid (rows / (BR BLOCKS)). ``d_weight [grid, V]`` takes the
    sums over these rows."""
    column = tl.arange(0, BV)
    scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)
    total = tl.zeros([BR, BV], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        row = (tl.program_id(0).to(tl.int64) * BLOCKS + block) * BR + tl.arange(0, BR)
        inside = (row < rows)[:, None] & (column < V)[None, :]
        place = row[:, None] * V + column[None, :]
        wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        opened = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / V + eps)[:, None]
        normed = wide * inverse
        if GATED:
            logit = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
            opened *= sigmoid(logit, FAST)
        total += opened * normed
        pull = opened * scale[None, :]
        along = tl.sum(pull * normed, 1) / V
        d_x = inverse * (pull - normed * along[:, None])
        tl.store(dx + place, d_x.to(dx.dtype.element_ty), mask=inside)
        if GATED:  # 1 - s as the sigmoid of -gate: it does not cancel
            d_logit = pull * normed * sigmoid(-logit, FAST)
            tl.store(d_gate + place, d_logit.to(d_gate.dtype.element_ty), mask=inside)
    share = tl.program_id(0).to(tl.int64) * V
    tl.store(d_weight + share + column, tl.sum(total, 0), mask=column < V)
