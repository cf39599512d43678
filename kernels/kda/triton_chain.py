"""How states go from one stretch of a long sequence to the next, in Triton (see `segments`).

Every element is one sum in fp64, in the order of the channels: neither settings for fp32 products
nor what else is in the batch can change a bit of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(matrix, column, K: tl.constexpr, ROWS: tl.constexpr):
    """``ROWS`` rows of a matrix of ``K`` columns, each a tensor of its own."""
    rows = ()
    for k in tl.static_range(ROWS):
        rows = rows + (tl.load(matrix + k * K + column),)
    return rows


@triton.jit
def walk_kernel(
    steps,
    driven,
    states,
    held,
    walks,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """From the state of one stretch to that of the next, all along the sequences of ``walks``
    [M, 2] (first and last stretch); grid (M * H, V // COLUMNS).

    state of the next [K, V] = step^T state + driven, of the stretch before the move; the first is
    given. ``BACKWARD`` starts at the last. A column of the state depends on the same column alone:
    a program keeps ``COLUMNS`` of them, and hands them from thread to thread through two places in
    ``held`` [M * H, V // COLUMNS, 2, K, COLUMNS], in fp64, used in turn.
    """
    line = tl.program_id(0)
    head = line % heads
    first = tl.load(walks + line // heads * 2)
    last = tl.load(walks + line // heads * 2 + 1)
    channel = tl.arange(0, K)
    column = tl.arange(0, COLUMNS)
    place = channel[:, None] * V + tl.program_id(1) * COLUMNS + column[None, :]
    cell = channel[:, None] * COLUMNS + column[None, :]
    held += (line.to(tl.int64) * (V // COLUMNS) + tl.program_id(1)) * (2 * K * COLUMNS)
    spot = (last if BACKWARD else first).to(tl.int64) * heads + head
    state = tl.load(states + spot * (K * V) + place)
    for i in range(last - first):
        given = held + i % 2 * (K * COLUMNS)
        tl.store(given + cell, state.to(tl.float64))
        total = tl.load(driven + spot * (K * V) + place).to(tl.float64)
        matrix = spot * (K * K)
        spot += -heads if BACKWARD else heads
        rows = load_rows(steps + matrix, channel, K, ROWS)
        for k in range(0, K, ROWS):
            # Rows are read one block ahead; behind the last of a map come the first of the next.
            ahead = tl.where(k + ROWS == K, spot * (K * K), matrix + (k + ROWS) * K)
            coming = load_rows(steps + ahead, channel, K, ROWS)
            # The state is there for all threads; and the compiler leaves the loads above it.
            tl.debug_barrier()
            for j in tl.static_range(ROWS):
                right = tl.load(given + (k + j) * COLUMNS + column)
                total += rows[j].to(tl.float64)[:, None] * right[None, :]
            rows = coming
        state = total.to(tl.float32)
        tl.store(states + spot * (K * V) + place, state)


@triton.jit
def chain_kernel(
    steps,
    state,
    driven,
    out,
    wanted,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A move as in `walk_kernel`, with the same bits, of the sequences that are ``wanted`` [N]:
    out = step^T state + driven, ``ROWS`` by ``COLUMNS`` of one head; grid (N * H, K // ROWS,
    V // COLUMNS)."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = (line * K + row[:, None]) * V + column[None, :]
    if tl.load(wanted + line // heads) != 0:
        total = tl.load(driven + place).to(tl.float64)
        for k in range(K):
            left = tl.load(steps + (line * K + k) * K + row)
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
