"""The counts of Quantile Balancing for Hopper, in Gluon; `triton_histogram` has the plain twin.

A program counts all bins of a few experts in shared memory, over many tokens, and adds them to the
counts in memory once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def scores_of(x, LOGITS: gl.constexpr):
    """As `triton_sigmoid.sigmoid`, to the bit."""
    if LOGITS:
        below = 1.0 + gl.exp2(x * -1.4426950408889634)
        x = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], dtype=gl.float32, is_pure=True, pack=1
        )
    return x


@gluon.jit
def bits_of(
    score,
    top,
    bottom,
    per,
    own,
    kept,
    COARSE: gl.constexpr,
    SIDE: gl.constexpr,
    WINDOW: gl.constexpr,
    FIRST: gl.constexpr,
    SHIFT: gl.constexpr,
    SOME: gl.constexpr,
    LOGITS: gl.constexpr,
):
    """The bin of every score above the bits of 2^23 as fp32, as in `count_kernel` with ``own`` the
    biases; with ``SOME``, the one behind the last where not ``kept``."""
    required = top[:, None] - scores_of(score, LOGITS)
    coarse = (required - bottom) * per
    # the maximum with what is no number is the other one
    coarse = gl.minimum(gl.maximum(coarse, 0.0), COARSE - 1.0)
    bits = gl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, 0f4B000000;", "=r,f", [coarse], dtype=gl.int32, is_pure=True, pack=1
    )
    away = required - own[None, :]
    step = gl.maximum(gl.abs(away).to(gl.int32, bitcast=True) >> SHIFT, FIRST)
    upper: gl.constexpr = 0x4B000000 + COARSE + SIDE - FIRST
    lower: gl.constexpr = 0x4B000000 + COARSE + SIDE - 1 + FIRST
    fine = gl.where(away < 0, lower - step, step + upper)
    bits = gl.where(gl.abs(away) < WINDOW, fine, bits)
    if SOME:
        bits = gl.where(kept, bits, 0x4B000000 + COARSE + 2 * SIDE)
    return bits


@gluon.jit
def read(place, mask, SOME: gl.constexpr):
    return gl.load(place, mask=mask, other=0.0) if SOME else gl.load(place)


@gluon.jit
def increment(address):
    """Add 1 to the 32 bits at each address in shared memory."""
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.b32 $0, 0;",
        "=r,r",
        [address],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def address_of(offset):
    """The address of bytes of shared memory, ``offset`` behind where that of the program begins."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a; mov.b32 a, global_smem; add.u32 $0, $1, a;}",
        "=r,r",
        [offset],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit(do_not_specialize=["tokens"])
def count_hopper_kernel(
    values,
    cutoff,
    valid,
    low,
    scale,
    bias,
    counts,
    counted,
    tokens,
    E: gl.constexpr,
    COARSE: gl.constexpr,
    SIDE: gl.constexpr,
    WINDOW: gl.constexpr,
    FIRST: gl.constexpr,
    SHIFT: gl.constexpr,
    BE: gl.constexpr,
    DEPTH: gl.constexpr,
    MASKED: gl.constexpr,
    LOGITS: gl.constexpr,
):
    """As `count_kernel`, for ``BE`` experts; grid (E / BE, programs that share the tokens).

    A row of the table holds one bin of all ``BE`` experts, 16 or 32. A lane of a warp has one
    expert, so that lanes hit different banks whatever their bins are, or two at most hit one. A
    thread reads ``DEPTH`` tokens while it counts those before. Nothing but the table may take
    shared memory: its address is that of all of it.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 // BE
    BT: gl.constexpr = LANES * WARPS * DEPTH
    SOME: gl.constexpr = MASKED or E % BE > 0
    tile: gl.constexpr = gl.BlockedLayout([DEPTH, 1], [LANES, BE], [WARPS, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BE, BE // 4], [WARPS, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BINS: gl.constexpr = COARSE + 2 * SIDE
    PARTS: gl.constexpr = BINS // (8 * WARPS) + 1  # of the rows of the table: one behind the last
    table = gl.allocate_shared_memory(gl.int32, [PARTS, 8 * WARPS, BE], plain)
    for part in range(PARTS):
        table.index(part).store(gl.zeros([8 * WARPS, BE], gl.int32, wide))
    gl.thread_barrier()
    row = gl.arange(0, BT, layout=gl.SliceLayout(1, tile))
    expert = gl.arange(0, BE, layout=gl.SliceLayout(0, tile))
    # Where the counts of an expert begin, less what the bits of 2^23 come to, as 32 bits wrap.
    HIDDEN: gl.constexpr = ((1 << 31) - 0x4B000000 * BE * 4) % (1 << 32) - (1 << 31)
    begin = address_of(expert * 4 + HIDDEN)[None, :]
    share, shares = gl.program_id(1), gl.num_programs(1)
    mine = (gl.program_id(0) * BE + expert < E)[None, :]
    own = values + gl.program_id(0) * BE + row.to(gl.int64)[:, None] * E + expert[None, :]
    bottom, per = gl.load(low), gl.load(scale)
    taker = gl.program_id(0) * BE + expert
    own_bias = gl.load(bias + taker, mask=taker < E, other=0.0)
    number = gl.zeros([BT], gl.int32, gl.SliceLayout(1, tile))
    whole = tokens // BT
    if share < whole:
        score = read(own + share.to(gl.int64) * (BT * E), mine, E % BE > 0)
        top = gl.load(cutoff + share * BT + row)
        for at in range(share, whole, shares):
            later = gl.minimum(at + shares, whole - 1)  # behind the last one, that again
            ahead = read(own + later.to(gl.int64) * (BT * E), mine, E % BE > 0)
            over = gl.load(cutoff + later * BT + row)
            kept = mine
            if MASKED:
                inside = gl.load(valid + at * BT + row) != 0
                number += inside.to(gl.int32)
                kept &= inside[:, None]
            bits = bits_of(
                *(score, top, bottom, per, own_bias, kept),
                *(COARSE, SIDE, WINDOW, FIRST, SHIFT, SOME, LOGITS),
            )
            increment(bits * (BE * 4) + begin)
            score, top = ahead, over
    if share == whole % shares:
        inside = whole * BT + row < tokens
        if MASKED:
            inside &= gl.load(valid + whole * BT + row, mask=inside, other=0) != 0
            number += inside.to(gl.int32)
        kept = mine & inside[:, None]
        score = read(own + whole.to(gl.int64) * (BT * E), kept, True)
        top = gl.load(cutoff + whole * BT + row, mask=inside, other=0.0)
        bits = bits_of(
            *(score, top, bottom, per, own_bias, kept),
            *(COARSE, SIDE, WINDOW, FIRST, SHIFT, True, LOGITS),
        )
        increment(bits * (BE * 4) + begin)
    if gl.program_id(0) == 0:
        if MASKED:
            gl.atomic_add(counted + 0 * row, number.to(gl.int64), sem="relaxed")
        elif share == 0:
            gl.atomic_add(counted, tokens.to(gl.int64), sem="relaxed")
    gl.thread_barrier()
    # A warp turns 8 bins around: in memory the bins of an expert are neighbours.
    down: gl.constexpr = gl.BlockedLayout([8 // LANES, 1], [LANES, BE], [WARPS, 1], [1, 0])
    across: gl.constexpr = gl.BlockedLayout([1, BE // 4], [8, 4], [WARPS, 1], [0, 1])
    bin = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(1, across))[:, None]
    taker = gl.program_id(0) * BE + gl.arange(0, BE, layout=gl.SliceLayout(0, across))[None, :]
    into = counts + taker * BINS + bin
    for part in range(PARTS):
        found = gl.convert_layout(table.index(part).load(down), across)
        first = part * 8 * WARPS
        gl.atomic_add(into + first, found, mask=(found > 0) & (first + bin < BINS), sem="relaxed")


@gluon.jit(do_not_specialize=["routes"])
def load_hopper_kernel(
    experts,
    valid,
    load,
    routes,
    E: gl.constexpr,
    K: gl.constexpr,
    BINS: gl.constexpr,
    DEPTH: gl.constexpr,
    MASKED: gl.constexpr,
):
    """As `load_kernel`, with grid (programs): each counts in shared memory, of which nothing else
    may take any, and adds to ``load`` once. What does not count is in bin E of ``BINS``."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK: gl.constexpr = 32 * WARPS * DEPTH
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    wide: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    table = gl.allocate_shared_memory(gl.int32, [BINS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    table.store(gl.zeros([BINS], gl.int32, wide))
    gl.thread_barrier()
    place = gl.arange(0, BLOCK, layout=line)
    for block in range(gl.program_id(0), gl.cdiv(routes, BLOCK), gl.num_programs(0)):
        route = block.to(gl.int64) * BLOCK + place
        inside = route < routes
        expert = gl.load(experts + route, mask=inside, other=E).to(gl.int32)
        if MASKED:
            inside &= gl.load(valid + route // K, mask=inside, other=0) != 0
        inside &= (expert >= 0) & (expert < E)
        increment(address_of(gl.where(inside, expert, E) * 4))
    gl.thread_barrier()
    number = gl.arange(0, BINS, layout=wide)
    found = table.load(wide)
    mask = (number < E) & (found > 0)
    gl.atomic_add(load + number, found.to(gl.int64), mask=mask, sem="relaxed")
