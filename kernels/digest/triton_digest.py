"""The digest in Triton: a chunk of one tensor at a time, whose sums are added up in any order, and
which is copied on the way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x, MIXER: tl.constexpr):
    """A bijection of uint64: shift, factor, shift, factor, shift."""
    x = (x ^ (x >> MIXER[0])) * tl.full([1], MIXER[1], tl.uint64)
    x = (x ^ (x >> MIXER[2])) * tl.full([1], MIXER[3], tl.uint64)
    return x ^ (x >> MIXER[4])


@triton.jit
def digest_kernel(
    plan,
    count,
    out,
    COPY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """``plan`` int64: of each of ``count`` tensors its address, bytes, the number of its first
    chunk and where a ``COPY`` goes, a multiple of 16; then the tensor of each chunk. ``out`` int64
    [count, 2], zeros. Grid (chunks), of ``CHUNK`` words each, an even number.

    Words are read from the multiples of 8 around them, which lie in the same page. Copies end in
    zeros, up to the next multiple of 16.
    """
    chunk = tl.program_id(0).to(tl.int64)
    owner = tl.load(plan + 4 * count + chunk)
    address = tl.load(plan + 4 * owner)
    size = tl.load(plan + 4 * owner + 1)
    start = (chunk - tl.load(plan + 4 * owner + 2)) * CHUNK
    to = tl.load(plan + 4 * owner + 3).to(tl.pointer_type(tl.uint64))
    room = (size + 15) // 16 * 2  # words of a copy
    late = address % 8  # bytes of the first of those multiples that are not ours
    low, high = (8 * late).to(tl.uint64), (64 - 8 * late).to(tl.uint64)
    words = (address - late).to(tl.pointer_type(tl.uint64))
    some = tl.arange(0, BLOCK).to(tl.int64)
    first = tl.zeros([BLOCK], tl.uint64)
    second = tl.zeros([BLOCK], tl.uint64)
    for i in tl.range(0, CHUNK, BLOCK):
        word = start + i + some
        left = size - 8 * word  # bytes from this word on
        x = tl.load(words + word, mask=left > 0, other=0)
        # where the word reaches into the next multiple
        rest = tl.load(words + word + 1, mask=(late > 0) & (left > 8 - late), other=0)
        x = tl.where(late > 0, (x >> low) | (rest << (high % 64)), x)
        unused = (8 * (8 - tl.minimum(tl.maximum(left, 1), 8))).to(tl.uint64)
        x = (x << unused) >> unused
        if COPY:
            tl.store(to + word, x, mask=word < room)
        place = (word + 1).to(tl.uint64)
        one = x + place * tl.full([1], STEPS[0], tl.uint64)
        other = x + place * tl.full([1], STEPS[1], tl.uint64)
        one = mixed(one, FIRST)
        other = mixed(other, SECOND)
        first += tl.where(left > 0, one, 0)
        second += tl.where(left > 0, other, 0)
    a, b = tl.sum(first, 0), tl.sum(second, 0)
    if start == 0:
        length = tl.full([1], 0, tl.uint64) + (size.to(tl.uint64) ^ tl.full([1], LENGTH, tl.uint64))
        a += tl.sum(mixed(length, FIRST), 0)
        b += tl.sum(mixed(length, SECOND), 0)
    tl.atomic_add(out + 2 * owner, a.to(tl.int64, bitcast=True))
    tl.atomic_add(out + 2 * owner + 1, b.to(tl.int64, bitcast=True))
