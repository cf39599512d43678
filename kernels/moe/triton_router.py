"""The router in Triton: logits of all experts, the choice among them, weights of the chosen.

The choice is exact. A score plus its threshold becomes an integer of the same order, and with the
number of the expert below it one that no other expert of the token has: equal scores go to the
lowest number. All experts are compared with one bound alone, which leaves few candidates; only
they are compared with each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid

LOWEST = tl.constexpr(-(1 << 31))  # below the key of any number
NUMBERS = tl.constexpr((1 << 31) - 1)


@triton.jit(do_not_specialize=["rows", "tiles"])
def product_kernel(
    x_desc,
    weight_desc,
    out,
    rows,
    tiles,
    N: tl.constexpr,
    D: tl.constexpr,
    TERMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``out [rows, N] = x weight^T``, walking over tiles; sums are fp32 and go along D.

    Of numbers in two 16-bit parts, those of ``x`` one below the other, and so in ``weight``, the
    first ``TERMS`` of the products high high, high low, low high are taken, one after another.
    """
    across: tl.constexpr = (N + BN - 1) // BN
    steps: tl.constexpr = (D + BK - 1) // BK
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile // across * BM, tile % across * BN
        total = tl.zeros([BM, BN], tl.float32)
        for step in tl.range(TERMS * steps, num_stages=STAGES):
            term, at = step // steps, step % steps * BK
            left = x_desc.load([term // 2 * rows + row, at])
            right = weight_desc.load([term % 2 * N + column, at])
            total = tl.dot(left, right.T, total)
        i, j = tl.arange(0, BM)[:, None], column + tl.arange(0, BN)[None, :]
        corner = out + (tl.full([], 0, tl.int64) + row) * N
        mask = (i < rows - row) & (j < N)
        tl.store(corner + i * N + j, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def key_of(x, FAST: tl.constexpr):
    """A 32-bit integer in the order of fp32 numbers that are not -0; NaN is above all."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # a GPU's sums have one NaN only, and its bits are those of the highest key
    return key if FAST else tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def number_of(key):
    """The fp32 number with this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def score_at(values, place, inside, LOGITS: tl.constexpr, FAST: tl.constexpr):
    """Scores at ``place``, of which ``values`` are the logits with ``LOGITS``."""
    score = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    return sigmoid(score, FAST) if LOGITS else score


@triton.jit
def biased_key(score, bias, place, inside, LOGITS: tl.constexpr, FAST: tl.constexpr):
    """Keys of scores with the thresholds at ``place``; below those of all numbers outside."""
    biased = score + tl.load(bias + place, mask=inside, other=0.0)
    if not LOGITS:
        biased += 0.0  # -0 becomes 0; what the sigmoid yields is no -0, nor are sums with it
    return tl.where(inside, key_of(biased, FAST), LOWEST)


@triton.jit
def upper_middle(low, high):
    """Half way from low to high, rounded up; their sum may not fit."""
    return (low | high) - ((low ^ high) >> 1)


# Loads of single numbers have a layout in which candidates can be stored as well: for that the
# compiler must not know how the numbers are aligned.
@triton.jit(do_not_specialize_on_alignment=["values", "bias"])
def select_kernel(
    values,
    bias,
    given,
    known,
    candidates,
    experts,
    cutoff,
    chosen,
    weights,
    E: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    LOGITS: tl.constexpr,
    GIVEN: tl.constexpr,
    MIX: tl.constexpr,
    FAST: tl.constexpr,
):
    """The best ``K`` of ``E`` experts of one token in falling order, and the biased score of the
    next; grid (tokens). ``values [T, E]`` are scores, or with ``LOGITS`` what the sigmoid makes
    scores. ``A <= 16`` rows of ``B`` hold those of a token. ``candidates [T, C]`` is room to work
    in, ``C`` at least the smaller of K + 1 and E.

    With ``GIVEN``, tokens where ``known`` is not 0 take the experts ``given [T, K]`` instead. With
    ``MIX``, ``chosen [T, K]`` takes the scores of the experts, and ``weights`` their shares of the
    sum; ``S`` is the power of two that ``K`` is padded to.
    """
    wanted: tl.constexpr = min(K + 1, E)
    # backwards: the cache still holds the logits that were written last
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    values += token * E
    candidates += token * C
    experts += token * K
    row, column = tl.arange(0, A)[:, None], tl.arange(0, B)
    place = row * B + column[None, :]
    score = score_at(values, place, place < E, LOGITS, FAST)
    key = biased_key(score, bias, place, place < E, LOGITS, FAST)
    # Of the largest in every column, enough lie at or above `low`: so do the best of the token.
    low = tl.full([], LOWEST + 1, tl.int32)
    if wanted <= min(B, E):
        tops = tl.max(key, 0)
        low, high = tl.maximum(tl.min(tops, 0), low), tl.max(tops, 0)
        count = tl.full([], B, tl.int32)
        while (count > (wanted + C) // 2) & (low < high):
            middle = upper_middle(low, high)
            above = tl.sum((tops >= middle).to(tl.int32), 0)
            if above >= wanted:
                low, count = middle, above
            else:
                high = middle - 1
    # of every column, which of its experts are candidates, and above bit 16 how many
    mark = (1 << row) + (1 << 16)
    found = tl.sum(tl.where(key >= low, mark, 0), 0)
    count = tl.sum(found >> 16, 0)
    if count > C:
        # Ties, or the best share few columns: bounds that tell equal keys apart.
        packed = (key.to(tl.int64) << 32) | (NUMBERS - place)
        bound, top = low.to(tl.int64) << 32, tl.max(tl.max(packed, 0), 0)
        while count > C:
            middle = upper_middle(bound, top)
            above = tl.sum(tl.sum((packed >= middle).to(tl.int32), 0), 0)
            if above >= wanted:
                bound, count = middle, above
            else:
                top = middle - 1
        found = tl.sum(tl.where(packed >= bound, mark, 0), 0)
    slot = tl.cumsum(found >> 16, 0) - (found >> 16)
    found &= 0xFFFF
    while tl.max(found, 0) > 0:
        lowest = found & -found
        number = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(candidates + slot, number * B + column, mask=found > 0)
        found -= lowest
        slot += 1
    tl.debug_barrier()
    i = tl.arange(0, C)
    real = i < count
    expert = tl.load(candidates + i, mask=real, other=0)
    score = score_at(values, expert, real, LOGITS, FAST)
    key = biased_key(score, bias, expert, real, LOGITS, FAST)
    packed = (key.to(tl.int64) << 32) | (NUMBERS - expert)
    rank = tl.sum((packed[:, None] > packed[None, :]).to(tl.int32), 0)
    best = real & (rank < K)
    tl.store(experts + rank, expert.to(tl.int64), mask=best)
    if K < E:
        tl.store(cutoff + token + 0 * rank, number_of(key), mask=real & (rank == K))
    else:
        tl.store(cutoff + token, -float("inf"))
    slot = tl.arange(0, S)
    taken = slot < K
    if MIX:
        chosen += token * K
        tl.store(chosen + rank, score, mask=best)
        tl.debug_barrier()
        share = tl.load(chosen + slot, mask=taken, other=0.0)
        if GIVEN and tl.load(known + token) != 0:
            other = tl.load(given + token * K + slot, mask=taken, other=0).to(tl.int64)
            share = tl.where(taken, score_at(values, other, taken, LOGITS, FAST), 0.0)
            tl.store(experts + slot, other, mask=taken)
            tl.store(chosen + slot, share, mask=taken)
        tl.store(weights + token * K + slot, share / (tl.sum(share, 0) + 1e-20), mask=taken)
