"""How states go from one stretch of a long sequence to the next, in Triton (see `segments`).

Every element is one sum in fp64, in the order of the channels: neither settings for fp32 products
nor what else is in the batch can change a bit of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chain_kernel(
    step,
    state,
    driven,
    out,
    wanted,
    heads,
    step_row,
    step_column,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOME: tl.constexpr,
):
    """out = step state + driven, ``ROWS`` by ``COLUMNS`` of one head; grid (N * H, K // ROWS,
    V // COLUMNS). With ``SOME`` only of the sequences that are ``wanted`` [N]."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = (line * K + row[:, None]) * V + column[None, :]
    on = tl.load(wanted + line // heads) != 0 if SOME else True
    if on:
        total = tl.load(driven + place).to(tl.float64)
        for k in range(K):
            left = tl.load(step + line * K * K + row * step_row + k * step_column)
            right = tl.load(state + (line * K + k) * V + column)
            total += left.to(tl.float64)[:, None] * right.to(tl.float64)[None, :]
        tl.store(out + place, total.to(tl.float32))


@triton.jit
def restart_kernel(
    state,
    entering,
    maps,
    driven,
    wanted,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Start a new stretch at ``state`` where it is ``wanted`` [N]; grid (N * H, K // ROWS)."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, K)
    value = tl.arange(0, V)
    if tl.load(wanted + line // heads) != 0:
        place = (line * K + row[:, None]) * V + value[None, :]
        tl.store(entering + place, tl.load(state + place))
        tl.store(driven + place, tl.zeros([ROWS, V], tl.float32))
        square = (line * K + row[:, None]) * K + channel[None, :]
        tl.store(maps + square, tl.where(row[:, None] == channel[None, :], 1.0, 0.0))
