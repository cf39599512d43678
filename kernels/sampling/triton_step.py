"""What a decode step knows without the host: the random numbers of its tokens, and what follows.

Random numbers are those of splitmix64 (Steele et al., 2014): number ``position`` of a stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def point_kernel(keys, position, out, count, BLOCK: tl.constexpr):
    """``out`` fp64 [N] in [0, 1) for streams ``keys`` int64 [N], which hold 64 bits; grid (N /
    BLOCK)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
    number = tl.load(position + at, mask=inside, other=0).to(tl.uint64) + 1
    x = key + number * tl.full([BLOCK], GOLDEN, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([BLOCK], MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([BLOCK], MIX_2, tl.uint64)
    x = (x ^ (x >> 31)) >> 11
    # 53 bits: exact
    tl.store(out + at, x.to(tl.int64).to(tl.float64) * (1.0 / (1 << 53)), mask=inside)


@triton.jit
def advance_kernel(
    drawn,
    stops,
    ids,
    places,
    past,
    position,
    left,
    stop,
    count,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make of a step's inputs int32 [N] those of the next; grid (N / BLOCK). A sequence is over,
    its place -1, when its set of ``stops`` uint8 [S, V] has the token, or none is ``left``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=-1)
    used = inside & (place >= 0)
    token = tl.load(drawn + 2 * at, mask=used, other=0.0).to(tl.int32)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # of logits that are not finite
    rest = tl.load(left + at, mask=used, other=0) - 1
    row = tl.load(stop + at, mask=used, other=0).to(tl.int64) * V
    ended = tl.load(stops + row + token, mask=used, other=0) != 0
    tl.store(places + at, tl.where(ended | (rest <= 0), -1, place), mask=used)
    tl.store(ids + at, token, mask=used)
    tl.store(left + at, rest, mask=used)
    tl.store(past + at, tl.load(past + at, mask=used, other=0) + 1, mask=used)
    tl.store(position + at, tl.load(position + at, mask=used, other=0) + 1, mask=used)
