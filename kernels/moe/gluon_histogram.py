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


@gluon.jit(do_not_specialize=["tokens", "share"])
def count_hopper_kernel(
    values,
    cutoff,
    valid,
    low,
    scale,
    counts,
    counted,
    tokens,
    share,
    E: gl.constexpr,
    BINS: gl.constexpr,
    BT: gl.constexpr,
    BE: gl.constexpr,
    MASKED: gl.constexpr,
    LOGITS: gl.constexpr,
):
    """As `count_kernel`, for ``share`` tokens of ``BE`` experts; grid (E / BE, tokens / share).

    Nothing but the table may take shared memory: its address is that of all of it. ``BINS`` is at
    most 1024, the columns of the table.
    """
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BE, BE // 4], [8, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    table = gl.allocate_shared_memory(gl.int32, [BE, 1024], plain)
    for one in range(BE):
        table.index(one).store(gl.zeros([1024], gl.int32, flat))
    gl.thread_barrier()
    first = gl.program_id(1) * share
    row = gl.arange(0, BT, layout=gl.SliceLayout(1, tile))
    column = gl.arange(0, BE, layout=gl.SliceLayout(0, tile))
    expert = gl.program_id(0) * BE + column
    bottom, step = gl.load(low), gl.load(scale)
    limit = gl.minimum(first + share, tokens)
    number = gl.zeros([BT], gl.int32, gl.SliceLayout(1, tile))
    for start in range(first, limit, BT):
        token = start + row
        inside = token < limit
        if MASKED:
            inside = inside & (gl.load(valid + token, mask=inside, other=0) != 0)
        number += inside.to(gl.int32)
        mask = inside[:, None] & (expert < E)[None, :]
        place = token.to(gl.int64)[:, None] * E + expert[None, :]
        score = scores_of(gl.load(values + place, mask=mask, other=0.0), LOGITS)
        top = gl.load(cutoff + token, mask=inside, other=0.0)
        bins = (top[:, None] - score - bottom) * step
        # the maximum with what is no number is the other one; what does not count has a bin too
        bins = gl.minimum(gl.maximum(bins, 0.0), BINS - 1.0)
        bins = gl.where(mask, bins, 1023.0)
        begin = gl.full([BT, BE], 0, gl.int32, tile) + (column * 4096)[None, :]
        gl.inline_asm_elementwise(
            """{
            .reg .f32 x; .reg .b32 a, b;
            add.rz.f32 x, $1, 0f4B000000;
            mov.b32 a, x; and.b32 a, a, 1023; shl.b32 a, a, 2; add.u32 a, a, $2;
            mov.b32 b, global_smem; add.u32 a, a, b;
            red.shared.add.u32 [a], 1;
            mov.b32 $0, 0;
            }""",
            "=r,f,r",
            [bins, begin],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    if gl.program_id(0) == 0:
        gl.atomic_add(counted + 0 * row, number.to(gl.int64), sem="relaxed")
    gl.thread_barrier()
    bin = gl.arange(0, 1024, layout=flat)
    for one in range(gl.minimum(BE, E - gl.program_id(0) * BE)):
        found = table.index(one).load(flat)
        bins_of = counts + (gl.program_id(0) * BE + one) * BINS
        gl.atomic_add(bins_of + bin, found, mask=(found > 0) & (bin < BINS), sem="relaxed")
