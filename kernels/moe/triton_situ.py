"""SiTU-GLU in Triton, forward and backward, on rows ``[R, I]`` of gate and up.

With t = tanh(gate / beta), s = sigmoid(gate), h = beta t s, u = tanh(up / linear), y = h linear u:
    dgate = dy linear u (s (1 - t^2) + h (1 - s))    dup = dy h (1 - u^2)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """And its slope 1 - tanh^2. Nothing cancels: near 0 it is the series, good to 1e-6."""
    below = sigmoid(-2 * tl.abs(x), FAST)
    square = x * x
    series = x * (1 + square * (-0.33333334 + square * (0.13333334 - 0.053968254 * square)))
    bent = 1 - 2 * below
    bent = tl.where(x < 0, -bent, bent)
    return tl.where(square < 0.04, series, bent), 4 * below * (1 - below)


@triton.jit(do_not_specialize=["rows"])
def situ_kernel(
    gate,
    up,
    out,
    rows,
    gate_stride,
    up_stride,
    beta,
    linear,
    I: tl.constexpr,
    BR: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """``BR`` rows and ``BLOCK`` columns; grid (R / BR, I / BLOCK). ``out [R, I]`` is contiguous."""
    row = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < I)
    a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    t, _ = tanh(a / beta, FAST)
    u, _ = tanh(b / linear, FAST)
    y = beta * t * sigmoid(a, FAST) * (linear * u)
    tl.store(out + row * I + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def situ_backward_kernel(
    gate,
    up,
    d_out,
    d_gate,
    d_up,
    rows,
    gate_stride,
    up_stride,
    out_stride,
    beta,
    linear,
    I: tl.constexpr,
    BR: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """`situ_kernel` backwards; ``d_gate`` and ``d_up [R, I]`` are contiguous."""
    row = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < I)
    a = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    t, t_slope = tanh(a / beta, FAST)
    s = sigmoid(a, FAST)
    u, u_slope = tanh(b / linear, FAST)
    bent = beta * t * s
    # 1 - s as the sigmoid of -gate: it does not cancel
    slope = s * t_slope + bent * sigmoid(-a, FAST)
    place = row * I + column
    tl.store(d_gate + place, (dy * linear * u * slope).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + place, (dy * bent * u_slope).to(d_up.dtype.element_ty), mask=inside)
