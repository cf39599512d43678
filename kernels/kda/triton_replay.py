"""What comes before the passes of a replayed step, in Triton: the new rows and the tables."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def enter_kernel(
    q,
    k,
    v,
    g,
    beta,
    q_rows,
    k_rows,
    v_rows,
    g_rows,
    beta_rows,
    lengths,
    chunks,
    sequences,
    ends,
    reached,
    places,
    span,
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
    C: tl.constexpr,
):
    """One token of each sequence into its chunk of ``C`` rows; grid (N, H).

    Writes the tables ``chunks`` and ``sequences`` (as in `tables.Tables`) of all chunks, ``ends``
    as ``sequences`` but with tokens only in chunks that are full now, ``reached``: whether a
    stretch of ``span`` tokens is, and ``places``, the rows of the new tokens.
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + number)
    place = (length % C).to(tl.int32)
    line = number * C + place
    row = line.to(tl.int64) * heads + head
    n = number.to(tl.int64)
    h = head.to(tl.int64)
    channel = tl.arange(0, K)
    value = tl.arange(0, V)
    tl.store(q_rows + row * K + channel, tl.load(q + n * q_n + h * q_h + channel))
    tl.store(k_rows + row * K + channel, tl.load(k + n * k_n + h * k_h + channel))
    tl.store(g_rows + row * K + channel, tl.load(g + n * g_n + h * g_h + channel))
    tl.store(v_rows + row * V + value, tl.load(v + n * v_n + h * v_h + value))
    tl.store(beta_rows + row, tl.load(beta + n * beta_n + h * beta_h))
    if head == 0:
        tokens = place + 1
        full = tokens == C
        tl.store(chunks + 2 * number, number * C)
        tl.store(chunks + 2 * number + 1, tokens)
        column = tl.arange(0, 4)
        entry = tl.where(column < 2, number, number * C)
        tl.store(sequences + 4 * number + column, tl.where(column == 3, tokens, entry))
        whole = tl.where(full, C, 0)
        tl.store(ends + 4 * number + column, tl.where(column == 3, whole, entry))
        tl.store(reached + number, ((length + 1) % span == 0).to(tl.int32))
        tl.store(places + number, line)
