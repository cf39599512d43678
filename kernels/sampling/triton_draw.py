"""Drawing tokens in Triton: a row at a time, in blocks that are added up in one fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of(row, column, top, heat, V: tl.constexpr):
    """e^((x - top) / heat) in fp64, 0 behind the row."""
    x = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float64)
    return tl.exp((x - top) / heat)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    point,
    out,
    logits_n,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One row ``logits [V]``; grid (N). ``BLOCKS`` is the power of two that the number of blocks
    of ``BV`` is padded to."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * logits_n
    some, every = tl.arange(0, BV), tl.arange(0, BLOCKS)
    blocks: tl.constexpr = (V + BV - 1) // BV
    best = tl.full([BV], float("-inf"), tl.float32)
    where = some
    for i in tl.range(blocks):
        column = i * BV + some
        x = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
        where = tl.where(x > best, column, where)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    likeliest = tl.min(tl.where(best == top, where, V), 0)
    heat = tl.load(temperature + number)
    greedy = heat == 0.0
    heat = tl.where(greedy, 1.0, heat)
    high = top.to(tl.float64)
    sums = tl.zeros([BLOCKS], tl.float64)
    for i in tl.range(blocks):
        sums += tl.where(every == i, tl.sum(power_of(row, i * BV + some, high, heat, V), 0), 0.0)
    ends = tl.cumsum(sums, 0)
    total = tl.sum(tl.where(every == blocks - 1, ends, 0.0), 0)
    goal = tl.load(point + number) * total
    block = tl.minimum(tl.sum((ends <= goal).to(tl.int32), 0), blocks - 1)
    before = tl.sum(tl.where(every == block - 1, ends, 0.0), 0)
    column = block * BV + some
    power = power_of(row, column, high, heat, V)
    passed = tl.sum((before + tl.cumsum(power, 0) <= goal).to(tl.int32), 0)
    # where sums of both kinds differ, the last token that can be drawn
    last = tl.max(tl.where(power > 0, some, 0), 0)
    token = tl.where(greedy, likeliest, block * BV + tl.minimum(passed, last))
    x = tl.load(row + tl.minimum(token, V - 1)).to(tl.float64)
    tl.store(out + 2 * number, token.to(tl.float64))
    tl.store(out + 2 * number + 1, (x - high) / heat - tl.log(total))
