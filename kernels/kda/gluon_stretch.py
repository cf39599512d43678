"""Maps and driven states of stretches for Hopper, in Gluon: one pass for both (see `segments`).

One warp copies the matrices of coming chunks into shared memory, once for two groups of four warps:
one makes columns of the driven state, the other the same columns of the map.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_scan import copy_chunks, open_stages, run_chunks


@gluon.jit
def stretch_hopper_kernel(
    kt_desc,
    qt_desc,
    kh_desc,
    inv_desc,
    att_desc,
    decay_desc,
    beta_desc,
    v_desc,
    maps,
    driven,
    sequence_table,
    chunks,
    heads,
    v_h,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    STAGES: gl.constexpr,
    MAP_REGISTERS: gl.constexpr,
):
    """`gluon_scan.scan_hopper_kernel` twice, with the same bits, without outputs: from zero to
    ``driven``, and without values from the identity to ``maps``. ``V`` is ``K``; no sequence is
    empty; grid (N H V / BV)."""
    column = gl.program_id(0) % (V // BV) * BV
    head = gl.program_id(0) // (V // BV) % heads
    sequence = gl.program_id(0) // (V // BV * heads)
    number = gl.load(sequence_table + 4 * sequence).to(gl.int64)
    first = gl.load(sequence_table + 4 * sequence + 1)
    start = gl.load(sequence_table + 4 * sequence + 2)
    length = gl.load(sequence_table + 4 * sequence + 3)
    count = gl.cdiv(length, C)
    descs = (kt_desc, qt_desc, kh_desc, inv_desc, att_desc, decay_desc, beta_desc, v_desc)
    buffers, ready, free = open_stages(descs, STAGES, 2)
    edge = (number * heads + head) * K * V
    line = head * chunks + first
    gl.warp_specialize(
        [
            (run_chunks, (
                buffers, ready, free, None, None, driven, None, None, 0, length, count, 0, column,
                edge, K, V, BV, C, False, True, False, True, False, False, STAGES,
            )),
            (run_chunks, (
                buffers, ready, free, None, None, maps, None, None, 0, length, count, 0, column,
                edge, K, V, BV, C, False, True, False, False, False, False, STAGES,
            )),
            (copy_chunks, (
                descs, buffers, ready, free, line, start, head * v_h + column, count, STAGES,
                False, True, False,
            )),
        ],
        [4, 1],
        [MAP_REGISTERS, 24],
    )  # fmt: skip
