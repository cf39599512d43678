"""Grouped products of the experts, in Triton.

With rows in the order of their experts, x of a row its token's input, g and u = x w1^T and x w3^T,
a = act(g, u), y = a w2^T and out = sum over a token's routes of weight y. Given d out, of a row

    d a = d out w2      d weight = a . d a      d (g, u) = weight d a act'(g, u)
    d x = d g w1 + d u w3      d w2 = d out^T (weight a)      d w1, d w3 = (d g, d u)^T x

g and u are kept, nothing of the width of the outputs is; a is made again.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(x, scale: tl.constexpr, most: tl.constexpr):
    """2^(x scale), at most 2^most; NaN stays NaN."""
    return tl.exp2(tl.minimum(x * scale, most, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def opening(x, a, BOUND: tl.constexpr):
    """1 - a, for a = e^(-2 y) of y = x / BOUND: tanh(y) (1 + a), and near 0, where the difference
    cancels, y (1 + a) to 2e-5."""
    return tl.where(tl.abs(x) < BOUND / 256, x * (1.0 / BOUND) * (1.0 + a), 1.0 - a)


@triton.jit
def activated(gate, up, BOUND: tl.constexpr, UP_BOUND: tl.constexpr):
    """SiTU-GLU with its bounds, SwiGLU if ``BOUND`` is None; one division for both tanh, of which
    each is (1 - a) / (1 + a), and the sigmoid."""
    below = 1.0 + power(gate, -LOG2E, 60.0)
    if BOUND is None:
        return gate * up / below
    else:
        a, b = power(gate, -2.0 * LOG2E / BOUND, 28.0), power(up, -2.0 * LOG2E / UP_BOUND, 28.0)
        share = 1.0 / ((1.0 + a) * (1.0 + b) * below)
        opened = opening(gate, a, BOUND) * opening(up, b, UP_BOUND)
        return opened * share * (BOUND * UP_BOUND)


@triton.jit
def slopes(gate, up, BOUND: tl.constexpr, UP_BOUND: tl.constexpr):
    """`activated` and its derivatives by ``gate`` and ``up``."""
    below = 1.0 + power(gate, -LOG2E, 60.0)
    if BOUND is None:
        s = 1.0 / below
        h = gate * s
        return h * up, up * (s + h * (1.0 - s)), h
    else:
        a, b = power(gate, -2.0 * LOG2E / BOUND, 28.0), power(up, -2.0 * LOG2E / UP_BOUND, 28.0)
        above, beside = 1.0 + a, 1.0 + b
        share = 1.0 / (above * beside * below)
        s = above * beside * share
        t = opening(gate, a, BOUND) * (below * beside * share)
        u = opening(up, b, UP_BOUND) * (above * below * share)
        h = BOUND * t * s
        w = UP_BOUND * u
        return h * w, w * (s * (1.0 - t * t) + h * (1.0 - s)), h * (1.0 - u * u)


@triton.jit
def tile_of(tile_expert, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Expert, rows and columns of this program's tile."""
    across: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0) // across
    rows = tile.to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    return tl.load(tile_expert + tile).to(tl.int64), rows, columns


@triton.jit
def gate_up_kernel(
    x, x_stride, token, w1, w3, before, inner, tile_expert, E: tl.constexpr, I: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SAVE: tl.constexpr,
    BOUND: tl.constexpr, UP_BOUND: tl.constexpr
):  # fmt: skip
    """``inner [rows, I]``, and with ``SAVE`` what it is made of, ``before [rows, 2 I]``."""
    expert, rows, columns = tile_of(tile_expert, I, BM, BN)
    if expert < E:
        taken = tl.load(token + rows)
        k = tl.arange(0, BK)
        from_x = x + tl.maximum(taken, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
        at = (expert * I + columns)[None, :] * D + k[:, None]
        gate, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for start in range(0, D, BK):
            here = start + k < D
            part = tl.load(from_x + start, mask=(taken >= 0)[:, None] & here[None, :], other=0.0)
            mask = here[:, None] & (columns < I)[None, :]
            gate = tl.dot(part, tl.load(w1 + at + start, mask=mask, other=0.0), gate)
            up = tl.dot(part, tl.load(w3 + at + start, mask=mask, other=0.0), up)
        mask = (columns < I)[None, :] & (rows >= 0)[:, None]
        kind = inner.dtype.element_ty
        if SAVE:
            place = before + rows[:, None] * (2 * I) + columns[None, :]
            tl.store(place, gate.to(kind), mask=mask)
            tl.store(place + I, up.to(kind), mask=mask)
        place = inner + rows[:, None] * I + columns[None, :]
        tl.store(place, activated(gate, up, BOUND, UP_BOUND).to(kind), mask=mask)


@triton.jit
def rows_kernel(
    left, first, second, out, tile_expert, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PARTS: tl.constexpr, TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr
):  # fmt: skip
    """``out [rows, N]``: ``left [rows, PARTS K]`` times the experts' matrices ``[E, K, N]``, or
    ``TURNED`` ``[E, N, K]``, ``first`` and then ``second``."""
    expert, rows, columns = tile_of(tile_expert, N, BM, BN)
    if expert < E:
        k = tl.arange(0, BK)
        from_left = left + rows[:, None] * (PARTS * K) + k[None, :]
        if TURNED:
            at = (expert * N + columns)[None, :] * K + k[:, None]
        else:
            at = (expert * K + k)[:, None] * N + columns[None, :]
        total = tl.zeros([BM, BN], tl.float32)
        for part in tl.static_range(PARTS):
            weight = first if part == 0 else second
            for start in range(0, K, BK):
                here = start + k < K
                a = tl.load(from_left + part * K + start, mask=here[None, :], other=0.0)
                mask = here[:, None] & (columns < N)[None, :]
                step = start if TURNED else start * N
                total = tl.dot(a, tl.load(weight + at + step, mask=mask, other=0.0), total)
        place = out + rows[:, None] * N + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(columns < N)[None, :])


@triton.jit
def inner_grad_kernel(
    d_out, d_stride, token, w2, before, d_before, inner, source, weights, partial, tile_expert,
    E: tl.constexpr, I: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BOUND: tl.constexpr, UP_BOUND: tl.constexpr
):  # fmt: skip
    """``d_before [rows, 2 I]``, ``inner [rows, I]`` times the weight of the row, and the weights'
    gradients ``partial [routes, I / BN]`` by columns. Rows that hold nothing become 0."""
    expert, rows, columns = tile_of(tile_expert, I, BM, BN)
    if expert < E:
        taken, route = tl.load(token + rows), tl.load(source + rows)
        k = tl.arange(0, BK)
        from_out = d_out + tl.maximum(taken, 0).to(tl.int64)[:, None] * d_stride + k[None, :]
        at = (expert * D + k)[:, None] * I + columns[None, :]
        total = tl.zeros([BM, BN], tl.float32)
        for start in range(0, D, BK):
            here = start + k < D
            a = tl.load(from_out + start, mask=(taken >= 0)[:, None] & here[None, :], other=0.0)
            mask = here[:, None] & (columns < I)[None, :]
            total = tl.dot(a, tl.load(w2 + at + start * I, mask=mask, other=0.0), total)
        mask = (columns < I)[None, :] & (rows >= 0)[:, None]
        place = rows[:, None] * (2 * I) + columns[None, :]
        gate = tl.load(before + place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(before + place + I, mask=mask, other=0.0).to(tl.float32)
        act, d_gate, d_up = slopes(gate, up, BOUND, UP_BOUND)
        across: tl.constexpr = (I + BN - 1) // BN
        into = partial + tl.maximum(route, 0).to(tl.int64) * across + tl.program_id(0) % across
        tl.store(into, tl.sum(total * act, 1), mask=route >= 0)
        real = (route >= 0)[:, None]
        kind = inner.dtype.element_ty
        weight = tl.load(weights + tl.maximum(route, 0)).to(tl.float32)[:, None]
        total = tl.where(real, total * weight, 0.0)
        tl.store(d_before + place, (total * d_gate).to(kind), mask=mask)
        tl.store(d_before + place + I, (total * d_up).to(kind), mask=mask)
        act = tl.where(real, act * weight, 0.0)
        tl.store(inner + rows[:, None] * I + columns[None, :], act.to(kind), mask=mask)


@triton.jit
def weights_kernel(
    left, left_stride, right, right_stride, token, out, starts, sizes, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, LEFT: tl.constexpr
):  # fmt: skip
    """``left^T right`` over the rows of each expert into ``out [PARTS, E, M / PARTS, N]``. Rows of
    the factor on the right, or with ``LEFT`` of the other, are those of ``token``."""
    across: tl.constexpr = (N + BN - 1) // BN
    down: tl.constexpr = (M + BM - 1) // BM
    expert = tl.program_id(0) // (down * across)
    m = tl.program_id(0) // across % down * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    first, size = tl.load(starts + expert), tl.load(sizes + expert)
    k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, size, BK):
        here = start + k < size
        row = (first + start + k).to(tl.int64)
        taken = tl.load(token + row, mask=here, other=0).to(tl.int64)
        a = tl.load(
            left + (taken if LEFT else row)[None, :] * left_stride + m[:, None],
            mask=here[None, :] & (m < M)[:, None],
            other=0.0,
        )
        b = tl.load(
            right + (row if LEFT else taken)[:, None] * right_stride + n[None, :],
            mask=here[:, None] & (n < N)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total)
    height: tl.constexpr = M // PARTS
    line = (m // height * E + expert).to(tl.int64) * height + m % height
    place = out + line[:, None] * N + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def combine_kernel(
    rows, place, weights, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr
):  # fmt: skip
    """``out [T, D]``: the sum of the rows of a token's routes in their order, times their weights;
    grid (T, D / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.range(0, K, loop_unroll_factor=8):  # that many rows are on their way
        row = tl.load(place + token * K + j).to(tl.int64)
        part = tl.load(rows + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + token * K + j).to(tl.float32)
        total += part
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=column < D)
