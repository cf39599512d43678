"""The backward passes of chunked KDA on the GPU."""

from __future__ import annotations

import torch

from .descriptors import is_hopper, launch, rows_of, shared, shared_blocks
from .forward import SCAN_REGISTERS
from .gluon_grad import grad_hopper_kernel
from .gluon_scan_backward import scan_backward_hopper_kernel
from .tables import Options, Prepared, tables
from .triton_grad import grad_kernel
from .triton_scan import scan_backward_kernel

GRAD_PIECE, GRAD_WARPS = 64, 4


def scan_backward(
    prepared: Prepared,
    d_out: torch.Tensor,
    d_final: torch.Tensor | None,
    initial: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Third pass: Z, the state gradients leaving each chunk, and that of the initial state."""
    heads, count, size, width = prepared.kt.shape
    values = d_out.shape[2]
    order = tables(options.bounds, size, d_out.device).sequences
    work = prepared.kt
    z = work.new_empty(heads, count, size, values)
    d_states = work.new_empty(heads, count, values, width)
    edge = (len(order), heads, width, values)
    d_initial = work.new_empty(edge, dtype=torch.float32) if initial else None
    block = min(values, 64)
    grid = (len(order) * heads, values // block)
    shape = {"K": width, "V": values, "BV": block, "C": size}
    modes = {"INITIAL": initial, "FINAL": d_final is not None}
    hopper = width == values == 128 and size == 32 and is_hopper(z.device)
    if hopper and d_out.dtype == torch.bfloat16:
        launch(scan_backward_hopper_kernel)[grid](
            *shared_blocks(prepared),
            rows_of(d_out, size, block),
            shared(d_states.view(-1, width), block, width),
            d_initial,
            d_final,
            z,
            order,
            count,
            heads,
            d_out.stride(1),
            **shape,
            **modes,
            STAGES=3,
            num_warps=4,
            maxnreg=SCAN_REGISTERS,
        )
        return z, d_states, d_initial
    launch(scan_backward_kernel)[grid](
        *prepared.descriptors(),
        prepared.decay,
        prepared.beta,
        d_out,
        d_initial,
        d_final,
        z,
        d_states,
        order,
        count,
        heads,
        d_out.stride(0),
        d_out.stride(1),
        **shape,
        **modes,
        num_warps=4,
        num_stages=3,
    )
    return z, d_states, d_initial


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
    modes = {"NORM": options.norm, "GATE": options.gate, "SIGMOID": options.sigmoid}
    table = tables(options.bounds, size, q.device).chunks
    narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v, g, d_out))
    if width == v.shape[2] == 128 and size == 32 and is_hopper(q.device) and narrow:
        u, z, states, d_states = chunk_values
        launch(grad_hopper_kernel)[(count * (width // piece), heads)](
            *(rows_of(x, size, piece) for x in (q, k, g)),
            *(rows_of(x, size, x.shape[2] // 2) for x in (v, out, d_out)),
            shared(u.view(-1, u.shape[3]), size, u.shape[3]),
            shared(z.view(-1, z.shape[3]), size, z.shape[3] // 2),
            *(shared(x.view(-1, width), x.shape[2], piece) for x in (states, d_states)),
            *parameters,
            table,
            prepared.beta,
            prepared.q_norm,
            prepared.k_norm,
            dq,
            dk,
            dv,
            dg,
            d_beta,
            d_rate,
            d_bias,
            options.scale,
            options.bound,
            count,
            heads,
            *(x.stride(1) for x in (q, k, g, v, d_out)),
            K=width,
            V=v.shape[2],
            C=size,
            PIECE=piece,
            ANCHOR=options.anchor,
            **modes,
            num_warps=4,
        )
    else:
        launch(grad_kernel)[(count, heads, width // piece)](
            q,
            k,
            v,
            g,
            out,
            *parameters,
            table,
            d_out,
            *chunk_values,
            prepared.beta,
            prepared.q_norm,
            prepared.k_norm,
            dq,
            dk,
            dv,
            dg,
            d_beta,
            d_rate,
            d_bias,
            options.scale,
            options.bound,
            count,
            heads,
            *(x.stride(0) for x in (q, k, v, g, d_out)),
            *(x.stride(1) for x in (q, k, v, g, d_out)),
            K=width,
            V=v.shape[2],
            C=size,
            PIECE=piece,
            ANCHOR=options.anchor,
            **modes,
            FAST=prepared.kt.dtype != torch.float32,
            num_warps=GRAD_WARPS,
        )
    d_a_log = d_dt_bias = None
    if options.gate:
        d_a_log, d_dt_bias = d_rate.sum((1, 2)), d_bias.sum(1).flatten()
    return dq, dk, dv, dg, d_beta, d_a_log, d_dt_bias
