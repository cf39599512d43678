"""The counts of Quantile Balancing in Triton: one atomic sum in memory for each token and expert,
and for each route.

Sums of integers come out the same in any order. `gluon_histogram` has the form for Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(
    values,
    cutoff,
    valid,
    low,
    scale,
    bias,
    counts,
    counted,
    tokens,
    E: tl.constexpr,
    COARSE: tl.constexpr,
    SIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    MASKED: tl.constexpr,
    LOGITS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add ``BT`` tokens of ``BE`` experts to ``counts [E, bins]``; grid (tokens / BT, E / BE).

    ``values [T, E]`` are scores, or with ``LOGITS`` what the sigmoid makes scores. The bin is
    (cutoff - score - low) scale rounded down, the first or last of ``COARSE`` beyond them; nearer
    to the expert's ``bias`` than ``WINDOW`` one of ``SIDE`` more on either side, by the first bits
    of the distance. ``counted`` takes the number of tokens; with ``MASKED`` only those count where
    ``valid`` is not 0.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    inside = token < tokens
    if MASKED:
        inside &= tl.load(valid + token, mask=inside, other=0) != 0
    if tl.program_id(1) == 0:
        tl.atomic_add(counted, tl.sum(inside.to(tl.int64), 0), sem="relaxed")
    limit = tl.load(cutoff + token, mask=inside, other=0.0)
    mask = inside[:, None] & (expert < E)[None, :]
    place = token.to(tl.int64)[:, None] * E + expert[None, :]
    score = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    if LOGITS:
        score = sigmoid(score, FAST)
    required = limit[:, None] - score
    coarse = (required - tl.load(low)) * tl.load(scale)
    # the comparison is false of what is no number: that counts as the first
    coarse = tl.where(coarse > 0, tl.minimum(coarse, COARSE - 1), 0.0).to(tl.int32)
    away = required - tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
    step = tl.maximum((tl.abs(away).to(tl.int32, bitcast=True) >> SHIFT) - FIRST, 0)
    fine = COARSE + SIDE + tl.where(away < 0, -1 - step, step)
    bins = tl.where(tl.abs(away) < WINDOW, fine, coarse)
    into = counts + expert[None, :] * (COARSE + 2 * SIDE) + bins
    tl.atomic_add(into, 1, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["routes"])
def load_kernel(
    experts,
    valid,
    load,
    routes,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add to ``load [E]`` how often each is among ``experts [routes / K, K]``; with ``MASKED`` of
    tokens where ``valid`` is not 0. Grid (routes / BLOCK)."""
    route = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = route < routes
    if MASKED:
        inside &= tl.load(valid + route // K, mask=inside, other=0) != 0
    expert = tl.load(experts + route, mask=inside, other=0)
    tl.atomic_add(load + expert, tl.full([BLOCK], 1, tl.int64), mask=inside, sem="relaxed")
