"""Row statistics and gradients of a tile of logits in Triton.

A tile is ``[R, C]``: some rows, and of each the columns from ``start`` on. With x a logit, m the
largest of its row, u = (x - m) log2(e) / temperature and S = sum 2^u over the row:
    log p = ln2 (u - log2 S)        entropy = ln2 (log2 S - sum u 2^u / S)
    dx = (g [v = target] - p (g + h (log p + entropy))) / temperature
for upstream gradients g of the log-prob and h of the entropy. Differences are taken before they are
scaled, and every u is at most 0: nothing cancels, however large the logits are.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# What stands for a column beyond the last, and for the largest of a lane that has met none: finite,
# so that 0 times their differences is 0, and far apart, so that the former weighs nothing.
NOTHING = tl.constexpr(-3.0e30)
UNMET = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["start"])  # wide loads need to know what divides columns
def statistics_kernel(
    logits,
    pitch,
    targets,
    peak,
    total,
    weighted,
    picked,
    entropy,
    start,
    columns,
    scale,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row of the tile; grid (R). ``peak``, ``total``, ``weighted`` and ``picked`` carry m, S,
    sum u 2^u (of unscaled u) and the target's logit from tile to tile; the last one leaves in
    them m, log2 S, the same sum and the log-prob. A target that is no column makes log2 S and the
    log-prob NaN. ``scale`` is log2(e) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * pitch
    lane = tl.arange(0, BLOCK)
    # Each lane keeps the statistics of its own columns; those of earlier tiles enter lane 0.
    m = tl.full([BLOCK], UNMET, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    w = tl.zeros([BLOCK], tl.float32)
    target_logit = float("nan")
    if not FIRST:
        m = tl.where(lane == 0, tl.load(peak + row), m)
        s = tl.where(lane == 0, tl.load(total + row), s)
        w = tl.where(lane == 0, tl.load(weighted + row), w)
        target_logit = tl.load(picked + row)
    for begin in tl.range(0, columns, BLOCK, num_stages=STAGES):
        inside = begin + lane < columns
        x = tl.load(source + begin + lane, mask=inside, other=NOTHING).to(tl.float32)
        # One of the two rescalings of an online softmax is by 2^0: a single exponential will do.
        step = x - m
        above = step > 0
        decay = tl.exp2(tl.abs(step) * -scale)
        kept = tl.where(above, decay, 1.0)
        w = w * kept - decay * step * tl.where(above, s, -1.0)
        s = s * kept + tl.where(above, 1.0, decay)
        m = tl.maximum(m, x)
    top = tl.max(m, 0)
    decay = tl.exp2((m - top) * scale)
    mass = tl.sum(s * decay, 0)
    moment = tl.sum((w + (m - top) * s) * decay, 0)
    place = (tl.load(targets + row) - start).to(tl.int64)
    if (place >= 0) & (place < columns):
        target_logit = tl.load(source + place).to(tl.float32)
    if LAST:
        log_mass = tl.log2(mass)
        tl.store(entropy + row, LN2 * (log_mass - scale * moment / mass))
        known = target_logit == target_logit
        mass = tl.where(known, log_mass, float("nan"))
        target_logit = LN2 * (scale * (target_logit - top) - mass)
    tl.store(peak + row, top)
    tl.store(total + row, mass)
    tl.store(weighted + row, moment)
    tl.store(picked + row, target_logit)


@triton.jit(do_not_specialize=["start"])  # wide loads need to know what divides columns
def gradient_kernel(
    logits,
    grads,
    pitch,
    grad_pitch,
    targets,
    peak,
    log_total,
    entropy,
    d_logprob,
    d_entropy,
    start,
    columns,
    scale,
    inverse,
    BLOCK: tl.constexpr,
    LOGPROB: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One row of the tile; grid (R). ``grads`` are the logits' own rows: each fp32 row holds, when
    done, its gradients in the narrower type at its beginning. ``inverse`` is 1 / temperature."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * pitch
    result = grads + row * grad_pitch
    top = tl.load(peak + row)
    log_mass = tl.load(log_total + row)
    here = (tl.load(targets + row) - start).to(tl.int64)
    g = 0.0
    pull = 0.0
    slope = 0.0
    if LOGPROB:
        g = tl.load(d_logprob + row) * inverse
        pull = g
    if ENTROPY:
        h = tl.load(d_entropy + row) * inverse
        pull += h * tl.load(entropy + row)
        slope = h * LN2
    lane = tl.arange(0, BLOCK)
    for begin in tl.range(0, columns, BLOCK):
        inside = begin + lane < columns
        x = tl.load(source + begin + lane, mask=inside, other=top).to(tl.float32)
        power = (x - top) * scale - log_mass
        dx = -tl.exp2(power) * (pull + slope * power)
        dx = tl.where(begin + lane == here, dx + g, dx)
        # Other lanes may still have to read what these gradients are about to overwrite.
        tl.debug_barrier()
        tl.store(result + begin + lane, dx.to(grads.dtype.element_ty), mask=inside)
