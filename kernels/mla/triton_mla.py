"""Latent attention of decode steps in Triton: parts of a sequence, their merge, a new latent.

With scores s_t = scale (q . c_t + r . k_t) of the cached latents c_t and shared keys k_t, a part
keeps m = max s_t, l = sum e^(s_t - m) and sum e^(s_t - m) c_t; exponents are base 2. The parts of a
sequence have `part_of` its length tokens, which depends on nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of(length, PART: tl.constexpr, PARTS: tl.constexpr):
    """Tokens of a part: ``PART``, or as many times that as leave at most ``PARTS`` parts. Short
    sequences, of which there are many where time matters, have larger ones, which cost less."""
    least = tl.where(length <= 32 * PART, 2 * PART, PART)
    return tl.maximum(least, (length + PART * PARTS - 1) // (PART * PARTS) * PART)


@triton.jit(do_not_specialize=["count"])
def part_kernel(
    query,
    shared,
    cache,
    places,
    lengths,
    partial,
    stats,
    scale,
    count,
    parts,
    query_n,
    query_h,
    shared_n,
    shared_h,
    cache_s,
    cache_t,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One part of one sequence for ``BH`` heads; grid (N * parts * H / BH), heads first, then
    sequences. ``partial [N, parts, H, R]`` takes sums, ``stats [2, N, parts, H]`` m and l."""
    groups: tl.constexpr = (H + BH - 1) // BH
    group = tl.program_id(0) % groups
    sequence = tl.program_id(0) // groups % count
    part = tl.program_id(0) // (groups * count)
    place = tl.load(places + sequence)
    length = tl.load(lengths + sequence).to(tl.int32)
    share = part_of(length, PART, PARTS)
    start = part * share
    if (place < 0) | (start >= length):
        return
    end = tl.minimum(start + share, length)
    head = group * BH + tl.arange(0, BH)
    rank, extra, token = tl.arange(0, BR), tl.arange(0, BP), tl.arange(0, BT)
    there = (head < H)[:, None]
    lead = sequence.to(tl.int64)
    q = tl.load(
        query + lead * query_n + head[:, None] * query_h + rank[None, :],
        mask=there & (rank < R)[None, :],
        other=0.0,
    )
    r = tl.load(
        shared + lead * shared_n + head[:, None] * shared_h + extra[None, :],
        mask=there & (extra < P)[None, :],
        other=0.0,
    )
    rows = cache + place.to(tl.int64) * cache_s
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    mixed = tl.zeros([BH, BR], tl.float32)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        at = first + token
        line = rows + at.to(tl.int64)[:, None] * cache_t
        inside = (at < end)[:, None]
        latent = tl.load(line + rank[None, :], mask=inside & (rank < R)[None, :], other=0.0)
        key = tl.load(line + R + extra[None, :], mask=inside & (extra < P)[None, :], other=0.0)
        latent, key = latent.to(q.dtype), key.to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(r, tl.trans(key), scores, input_precision="ieee") * scale
        scores = tl.where((at < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        power = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(power, 1)
        mixed = tl.dot(power.to(q.dtype), latent, mixed * shrink[:, None], input_precision="ieee")
        top = higher
    line = (lead * parts + part) * H + head
    tl.store(partial + line[:, None] * R + rank[None, :], mixed, mask=there & (rank < R)[None, :])
    tl.store(stats + line, top, mask=head < H)
    tl.store(stats + count.to(tl.int64) * parts * H + line, total, mask=head < H)


@triton.jit(do_not_specialize=["count"])
def merge_kernel(
    partial,
    stats,
    places,
    lengths,
    out,
    count,
    parts,
    H: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """All parts of one head of one sequence, ``BS`` at a time; grid (N * H, R / BR), heads first.
    ``out [H, N, R]``."""
    sequence, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    length = tl.load(lengths + sequence).to(tl.int32)
    length = tl.where(tl.load(places + sequence) < 0, 0, length)
    used = tl.cdiv(length, part_of(length, PART, PARTS))
    every, some = tl.arange(0, PARTS), tl.arange(0, BS)
    rank = tl.program_id(1) * BR + tl.arange(0, BR)
    line = (sequence * parts + every) * H + head
    tops = tl.load(stats + line, mask=every < used, other=float("-inf"))
    totals = tl.load(stats + count.to(tl.int64) * parts * H + line, mask=every < used, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(tl.exp2(tl.where(every < used, tops - top, 0.0)) * totals, 0)
    mixed = tl.zeros([BR], tl.float32)
    for first in tl.range(0, used, BS):
        part = first + some
        row = (sequence * parts + part) * H + head
        weight = tl.exp2(tl.load(stats + row, mask=part < used, other=float("-inf")) - top)
        sums = tl.load(
            partial + row[:, None] * R + rank[None, :],
            mask=(part < used)[:, None] & (rank < R)[None, :],
            other=0.0,
        )
        mixed += tl.sum(weight[:, None] * sums, 0)
    mixed = tl.where(used > 0, mixed / total, 0.0)
    place = (head * count.to(tl.int64) + sequence) * R + rank
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=rank < R)


@triton.jit
def append_kernel(
    entry,
    weight,
    cache,
    places,
    position,
    eps,
    entry_n,
    cache_s,
    cache_t,
    R: tl.constexpr,
    P: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
):
    """The new latent of one sequence; grid (N)."""
    sequence = tl.program_id(0)
    place = tl.load(places + sequence).to(tl.int64)
    if place < 0:
        return
    rank, extra = tl.arange(0, BR), tl.arange(0, BP)
    line = entry + sequence.to(tl.int64) * entry_n
    latent = tl.load(line + rank, mask=rank < R, other=0.0)
    key = tl.load(line + R + extra, mask=extra < P, other=0.0)
    wide = latent.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / R + eps)
    scale = tl.load(weight + rank, mask=rank < R, other=0.0).to(tl.float32)
    normed = (wide * inverse * scale).to(entry.dtype.element_ty)
    target = cache + place * cache_s + tl.load(position + sequence).to(tl.int64) * cache_t
    tl.store(target + rank, normed.to(cache.dtype.element_ty), mask=rank < R)
    tl.store(target + R + extra, key.to(cache.dtype.element_ty), mask=extra < P)
