"""Mixture over depth in Triton, forward and backward, on rows ``[R, D]`` of sources v_0 .. v_m.

The last source may be a sum, partial + update, rounded as it is stored. With d = query n (n the
weight of the norm), r_i = rsqrt(mean(v_i^2) + eps), s_i = d.v_i r_i and p = softmax(s):
    h = sum p_i v_i    x = h r w    r = rsqrt(mean(h^2) + eps), w the weight of the next norm
With u = dx w r and c = u.h r^2 / D, dh = u - c h; without a next norm x = h and dh = dx. Then
    ds_i = p_i (dh.v_i - dh.h)    dv_i = p_i dh + ds_i r_i (d - s_i r_i / D v_i)
    d_query = n sum ds_i r_i v_i    d_n = query sum ds_i r_i v_i    dw = sum dx h r

A program takes rows one by one, whole, in a tile ``[BT, BE]``: a thread holds lines of BE adjacent
elements and adds up within them first. ``GROUP`` sources at a time are reduced in one go, while the
next of them are on their way; forward, the softmax is carried on from group to group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import load_group, load_weight, place_of, settled, totals, widen


@triton.jit
def carry_on(
    group,
    zero,
    direction,
    eps,
    stat,
    top,
    total,
    mixed,
    FIRST: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    SAVE: tl.constexpr,
    FAST: tl.constexpr,
):
    """The softmax with a group more: its greatest score, and sums relative to that."""
    parts = ()
    for i in tl.static_range(len(group)):
        wide = widen(group[i], 0, FAST)
        parts = parts + (tl.sum(wide * direction, 1), tl.sum(wide * wide, 1))
    sums = totals(parts)
    scores = ()
    highest = top
    for i in tl.static_range(len(group)):
        inverse = tl.rsqrt(sums[2 * i + 1] / D + eps)
        scores = scores + (sums[2 * i] * inverse,)
        highest = tl.maximum(highest, scores[i])
        if SAVE:
            tl.store(stat + FIRST + i, scores[i])
            tl.store(stat + M + FIRST + i, inverse)
    shrink = tl.exp(top - highest)  # 0 in the first group
    total *= shrink
    mixed *= shrink
    for i in tl.static_range(len(group)):
        power = tl.exp(scores[i] - highest)
        total += power
        mixed += power * widen(group[i], zero, FAST)
    return highest, total, mixed


@triton.jit(do_not_specialize=["rows", "each"])
def mix_kernel(
    sources,
    update,
    summed,
    query,
    norm,
    next_norm,
    out,
    stats,
    rows,
    each,
    eps,
    M: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    GROUP: tl.constexpr,
    UPDATE: tl.constexpr,
    NORM: tl.constexpr,
    SAVE: tl.constexpr,
    FAST: tl.constexpr,
):
    """``each`` rows; grid (rows / each). ``stats [rows, 2 M + 1]`` takes all s_i, all r_i and r, if
    ``SAVE``."""
    column = tl.arange(0, BT)[:, None] * BE + tl.arange(0, BE)[None, :]
    inside = column < D
    direction = load_weight(query, column, D) * load_weight(norm, column, D)
    if NORM:
        scale = load_weight(next_norm, column, D)
    zero = rows >> 31
    first = tl.program_id(0).to(tl.int64) * each
    end = tl.minimum(first + each, rows)
    place = place_of(first, column, zero, D, BE)
    ahead = load_group(sources, update, summed, place, inside, 0, GROUP, M, UPDATE)
    for row in tl.range(first, end):
        place = place_of(row, column, zero, D, BE)
        stat = stats + row * (2 * M + 1)
        top = float("-inf")
        total = 0.0
        mixed = tl.zeros([BT, BE], tl.float32)
        for g in tl.static_range(0, M, GROUP):
            group = ahead
            if g + GROUP < M:
                ahead = load_group(
                    *(sources, update, summed, place, inside),
                    *(g + GROUP, g + 2 * GROUP, M, UPDATE),
                )
            else:
                after = place_of(row + 1, column, zero, D, BE)
                ahead = load_group(
                    *(sources, update, summed, after, inside & (row + 1 < end)),
                    *(0, GROUP, M, UPDATE),
                )
                if UPDATE:
                    tl.store(summed + place, group[len(group) - 1], mask=inside)
            top, total, mixed = carry_on(
                group, zero, direction, eps, stat, top, total, mixed, g, M, D, SAVE, FAST
            )
        mixed /= total
        if NORM:
            inverse = tl.rsqrt(tl.sum(tl.sum(mixed * mixed, 1), 0) / D + eps)
            if SAVE:
                tl.store(stat + 2 * M, inverse)
            mixed *= inverse * scale
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weights_of(stat, M: tl.constexpr):
    """The softmax of stored scores."""
    scores = ()
    for i in tl.static_range(M):
        scores = scores + (tl.load(stat + i),)
    top = scores[0]
    for i in tl.static_range(1, M):
        top = tl.maximum(top, scores[i])
    powers = ()
    total = 0.0
    for i in tl.static_range(M):
        powers = powers + (tl.exp(scores[i] - top),)
        total += powers[i]
    weights = ()
    for i in tl.static_range(M):
        weights = weights + (powers[i] / total,)
    return weights


@triton.jit
def load_carried(carried, place, inside, FIRST: tl.constexpr, END: tl.constexpr, CARRIED, M):
    """What later users of the sources found for these."""
    group = ()
    for i in tl.static_range(FIRST, END):
        if i < M:
            one = 0.0
            if CARRIED[i]:
                one = tl.load(carried[i] + place, mask=inside, other=0.0)
            group = group + (one,)
    return group


@triton.jit
def spread(
    group,
    extra,
    results,
    place,
    inside,
    weights,
    stat,
    direction,
    d_mixed,
    d_direction,
    along,
    zero,
    CARRIED: tl.constexpr,
    FIRST: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    FAST: tl.constexpr,
):
    """Gradients of a group of sources, stored; and of the direction, with theirs. ``along`` is the
    sum of d_mixed mixed, for the first group still to be added up."""
    parts = ()
    if FIRST == 0:
        parts = (along,)
    for i in tl.static_range(len(group)):
        parts = parts + (tl.sum(d_mixed * widen(group[i], zero << 1, FAST), 1),)
    sums = totals(parts)
    if FIRST == 0:
        along = sums[0]
        sums = sums[1:]
    for i in tl.static_range(len(group)):
        inverse = tl.load(stat + M + FIRST + i)
        pull = weights[FIRST + i] * (sums[i] - along) * inverse
        if M == 1:
            pull = 0.0
        wide = widen(group[i], zero, FAST)
        d_direction = settled(d_direction + pull * wide, FAST)
        d_source = weights[FIRST + i] * d_mixed + pull * direction
        d_source += wide * (-pull * inverse * tl.load(stat + FIRST + i) / D)
        if CARRIED[FIRST + i]:
            d_source += widen(extra[i], 0, FAST)
        result = results[FIRST + i]
        tl.store(result + place, d_source.to(result.dtype.element_ty), mask=inside)
    return d_direction, along


@triton.jit(do_not_specialize=["rows", "each"])
def mix_backward_kernel(
    sources,
    d_out,
    carried,
    results,
    query,
    norm,
    next_norm,
    stats,
    d_directions,
    d_norms,
    rows,
    each,
    CARRIED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    NORM: tl.constexpr,
    FAST: tl.constexpr,
):
    """``each`` rows; grid (rows / each). ``results`` are gradients of the sources, with ``carried``
    added where CARRIED says so, which may be the same; ``d_directions`` and ``d_norms [grid, D]``
    take sums over these rows."""
    column = tl.arange(0, BT)[:, None] * BE + tl.arange(0, BE)[None, :]
    inside = column < D
    direction = load_weight(query, column, D) * load_weight(norm, column, D)
    d_direction = tl.zeros([BT, BE], tl.float32)
    if NORM:
        d_norm = tl.zeros([BT, BE], tl.float32)
    zero = rows >> 31
    first = tl.program_id(0).to(tl.int64) * each
    for row in tl.range(first, tl.minimum(first + each, rows)):
        place = place_of(row, column, zero, D, BE)
        stat = stats + row * (2 * M + 1)
        d_mixed = widen(tl.load(d_out + place, mask=inside, other=0.0), 0, FAST)
        weights = weights_of(stat, M)
        mixed = tl.zeros([BT, BE], tl.float32)
        ahead = load_group(sources, d_out, d_out, place, inside, 0, GROUP, M, False)
        held = ahead
        for g in tl.static_range(0, M, GROUP):
            group = ahead
            ahead = load_group(
                sources, d_out, d_out, place, inside, g + GROUP, g + 2 * GROUP, M, False
            )
            for i in tl.static_range(len(group)):
                mixed += weights[g + i] * widen(group[i], 0, FAST)
            mixed = settled(mixed, FAST)
            held = held + ahead
        place = place_of(row, column, zero << 1, D, BE)
        more = load_carried(carried, place, inside, 0, GROUP, CARRIED, M)
        if NORM:
            inverse = tl.load(stat + 2 * M)
            d_norm = settled(d_norm + d_mixed * mixed * inverse, FAST)
            d_mixed *= load_weight(next_norm, column, D) * inverse
            pull = tl.sum(tl.sum(d_mixed * mixed, 1), 0) * inverse * inverse / D
            d_mixed -= mixed * pull
        along = tl.sum(d_mixed * mixed, 1)
        for g in tl.static_range(0, M, GROUP):
            extra = more
            if HELD:
                group = held[g : g + GROUP]
            else:
                group = load_group(sources, d_out, d_out, place, inside, g, g + GROUP, M, False)
            more = load_carried(carried, place, inside, g + GROUP, g + 2 * GROUP, CARRIED, M)
            d_direction, along = spread(
                *(group, extra, results, place, inside, weights, stat, direction),
                *(d_mixed, d_direction, along, zero, CARRIED, g, M, D, FAST),
            )
    share = tl.program_id(0).to(tl.int64) * D + column
    tl.store(d_directions + share, d_direction, mask=inside)
    if NORM:
        tl.store(d_norms + share, d_norm, mask=inside)


@triton.jit(do_not_specialize=["shares"])
def finish_kernel(
    d_directions,
    d_norms,
    query,
    norm,
    d_query,
    d_norm,
    d_next,
    shares,
    D: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradients of the weights from their shares, added in a fixed order; grid (D / BD)."""
    column = tl.program_id(0) * BD + tl.arange(0, BD)
    direction = tl.zeros([BS, BD], tl.float32)
    following = tl.zeros([BS, BD], tl.float32)
    for start in tl.range(0, shares, BS, num_stages=STAGES):
        share = start + tl.arange(0, BS)
        inside = (share < shares)[:, None] & (column < D)[None, :]
        place = share.to(tl.int64)[:, None] * D + column[None, :]
        direction += tl.load(d_directions + place, mask=inside, other=0.0)
        if NORM:
            following += tl.load(d_norms + place, mask=inside, other=0.0)
    total = tl.sum(direction, 0)
    of_query = total * load_weight(norm, column, D)
    of_norm = total * load_weight(query, column, D)
    tl.store(d_query + column, of_query.to(d_query.dtype.element_ty), mask=column < D)
    tl.store(d_norm + column, of_norm.to(d_norm.dtype.element_ty), mask=column < D)
    if NORM:
        of_next = tl.sum(following, 0)
        tl.store(d_next + column, of_next.to(d_next.dtype.element_ty), mask=column < D)
