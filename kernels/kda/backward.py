"""The backward passes of chunked KDA on the GPU."""

from __future__ import annotations

import torch

from ..device import is_hopper, launch
from .descriptors import rows_of, shared, shared_blocks
from .forward import SCAN_REGISTERS, VALUE_BLOCK, chunks_ahead
from .gluon_grad import grad_hopper_kernel
from .gluon_scan_backward import scan_backward_hopper_kernel
from .segments import segments
from .tables import Options, Prepared, tables
from .triton_grad import grad_kernel
from .triton_scan import scan_backward_kernel

GRAD_PIECE, GRAD_WARPS = 64, 4


def scan_backward(
    prepared: Prepared,
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    initial: bool,
    maps: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Third pass: Z, the state gradients leaving each chunk, and that of the initial state."""
    heads, count, size, width = prepared.kt.shape
    values = d_out.shape[2]
    work = prepared.kt
    kept = (
        work.new_empty(heads, count, size, values),
        work.new_empty(heads, count, values, width),
    )

    def edges(rows: int) -> torch.Tensor:
        return work.new_empty(rows, heads, width, values, dtype=torch.float32)

    cut = segments(options.bounds, heads, size, d_out.device)
    if cut is None or maps is None:
        order = tables(options.bounds, size, d_out.device).sequences
        d_initial = edges(len(order)) if initial else None
        scan_back(prepared, d_out, kept, order, d_final, d_initial)
    else:
        driven, starts = edges(len(maps)), edges(len(maps))
        scan_back(prepared, d_out, None, cut.after, None, driven)
        leaving = cut.leaving(maps, driven, d_final)
        scan_back(prepared, d_out, kept, cut.sequences, leaving, starts)
        d_initial = starts.index_select(0, cut.first) if initial else None
    return *kept, d_initial


def scan_back(
    prepared: Prepared,
    d_out: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None,
    sequences: torch.Tensor,
    d_final: torch.Tensor | None,
    d_initial: torch.Tensor | None,
) -> None:
    """Backward state pass over ``sequences`` [N, 4], into ``kept`` (Z and the state gradients
    leaving chunks) and ``d_initial``."""
    z, d_states = kept or (None, None)
    heads, count, size, width = prepared.kt.shape
    values = d_out.shape[2]
    block = min(values, VALUE_BLOCK)
    grid = (len(sequences) * heads, values // block)
    constants = {
        "K": width,
        "V": values,
        "BV": block,
        "C": size,
        "INITIAL": d_initial is not None,
        "FINAL": d_final is not None,
        "OUT": z is not None,
    }
    hopper = width == values == 128 and size == 32 and is_hopper(d_out.device)
    if hopper and d_out.dtype == torch.bfloat16:
        launch(scan_backward_hopper_kernel)[(grid[0] * grid[1],)](
            *shared_blocks(prepared),
            rows_of(d_out, size, block),
            shared(d_states.view(-1, width), block, width) if d_states is not None else None,
            d_initial,
            d_final,
            z,
            sequences,
            count,
            heads,
            d_out.stride(1),
            **constants,
            STAGES=chunks_ahead(grid[0] * grid[1], d_out.device),
            num_warps=4,
            maxnreg=SCAN_REGISTERS,
        )
        return
    launch(scan_backward_kernel)[grid](
        *prepared.descriptors(),
        prepared.decay,
        prepared.beta,
        d_out,
        d_initial,
        d_final,
        z,
        d_states,
        sequences,
        count,
        heads,
        d_out.stride(0),
        d_out.stride(1),
        **constants,
        num_warps=4,
        num_stages=3,
    )


def gradients(
    prepared: Prepared,
    inputs: tuple[torch.Tensor, ...],
    parameters: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    d_out: torch.Tensor,
    chunk_values: tuple[torch.Tensor, ...],
    options: Options,
) -> tuple[torch.Tensor | None, ...]:
    """Last pass: gradients of q, k, v, g, beta and of the two gate parameters (None without gate).

    ``inputs`` are the five, ``parameters`` A_log and dt_bias, ``chunk_values`` are U, Z, the states
    entering the chunks and the state gradients leaving them.
    """
    q, k, v, g, _ = inputs
    heads, count, size, width = prepared.kt.shape
    piece = min(width, GRAD_PIECE)
    dq, dk, dv, dg, d_beta = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs
    )
    d_rate = q.new_empty(heads, count, width // piece, dtype=torch.float32)
    d_bias = q.new_empty(heads, count, width, dtype=torch.float32)
    table = tables(options.bounds, size, q.device).chunks
    common = (
        *(prepared.beta, prepared.q_norm, prepared.k_norm),
        *(dq, dk, dv, dg, d_beta, d_rate, d_bias),
        *(options.scale, options.bound, count, heads),
    )
    constants = {
        "K": width,
        "V": v.shape[2],
        "C": size,
        "PIECE": piece,
        "ANCHOR": options.anchor,
        "NORM": options.norm,
        "GATE": options.gate,
        "SIGMOID": options.sigmoid,
    }
    narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v, g, d_out))
    if width == v.shape[2] == 128 and size == 32 and is_hopper(q.device) and narrow:
        u, z, states, d_states = chunk_values
        launch(grad_hopper_kernel)[(count * heads * (width // piece),)](
            *(rows_of(x, size, piece) for x in (q, k, g)),
            *(rows_of(x, size, x.shape[2] // 2) for x in (v, out, d_out)),
            shared(u.view(-1, u.shape[3]), size, u.shape[3]),
            shared(z.view(-1, z.shape[3]), size, z.shape[3] // 2),
            *(shared(x.view(-1, width), x.shape[2], piece) for x in (states, d_states)),
            *parameters,
            table,
            *common,
            *(x.stride(1) for x in (q, k, g, v, d_out)),
            **constants,
            num_warps=4,
        )
    else:
        launch(grad_kernel)[(count, heads, width // piece)](
            *inputs[:4],
            out,
            *parameters,
            table,
            d_out,
            *chunk_values,
            *common,
            *(x.stride(0) for x in (q, k, v, g, d_out)),
            *(x.stride(1) for x in (q, k, v, g, d_out)),
            **constants,
            FAST=prepared.kt.dtype != torch.float32,
            num_warps=GRAD_WARPS,
        )
    d_a_log = d_dt_bias = None
    if options.gate:
        d_a_log, d_dt_bias = d_rate.sum((1, 2)), d_bias.sum(1).flatten()
    return dq, dk, dv, dg, d_beta, d_a_log, d_dt_bias
