"""Launches of the four passes of chunked KDA on the GPU.

The configurations are fixed, nothing is tuned at run time: the same inputs take the same kernels in
the same order on every machine of a kind. On Hopper the two state passes run in Gluon.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

from .gluon_grad import grad_hopper_kernel
from .gluon_scan import scan_hopper_kernel
from .gluon_scan_backward import scan_backward_hopper_kernel
from .tables import Options, Prepared, tables
from .triton_grad import grad_kernel
from .triton_prep import prep_kernel
from .triton_scan import scan_backward_kernel, scan_kernel

PREP_PRECISION = "bf16x3"  # of the products of q and k: bf16 alone costs a third in accuracy
GRAD_PIECE, GRAD_WARPS = 64, 4


def _launch(kernel: Any) -> Any:
    """The kernel as what takes a grid: its own signature does not show warps and constants."""
    return kernel


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has the instructions that the Gluon kernels use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def prepare_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    options: Options,
) -> Prepared:
    """First pass over ``q, k, g [T, H, K]`` and ``beta [T, H]``."""
    _, heads, width = q.shape
    size = options.size
    table = tables(options.bounds, size, q.device).chunks
    count = len(table)
    wide = q.dtype == torch.float32
    work = torch.float32 if wide else torch.bfloat16
    out = Prepared._make(
        (
            *q.new_empty(3, heads, count, size, width, dtype=work).unbind(),
            *q.new_empty(2, heads, count, size, size, dtype=work).unbind(),
            q.new_empty(heads, count, width, dtype=torch.float32),
            *q.new_empty(3, heads, count, size, dtype=torch.float32).unbind(),
        )
    )
    _launch(prep_kernel)[(count, heads)](
        q,
        k,
        g,
        beta,
        a_log,
        dt_bias,
        table,
        out.kt,
        out.qt,
        out.kh,
        out.inv,
        out.att,
        out.decay,
        out.beta,
        out.q_norm,
        out.k_norm,
        options.scale,
        options.bound,
        count,
        *(x.stride(0) for x in (q, k, g, beta)),
        *(x.stride(1) for x in (q, k, g, beta)),
        K=width,
        C=size,
        PIECE=min(width, 64),
        ANCHOR=options.anchor,
        NORM=options.norm,
        GATE=options.gate,
        SIGMOID=options.sigmoid,
        PRECISION="ieee" if wide else PREP_PRECISION,
        num_warps=2,
    )
    return out


def scan(
    prepared: Prepared,
    v: torch.Tensor,
    initial: torch.Tensor | None,
    final: bool,
    save: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Second pass: outputs, final states, and with ``save`` U and the states entering chunks."""
    heads, count, size, width = prepared.kt.shape
    tokens, _, values = v.shape
    order = tables(options.bounds, size, v.device).sequences
    out = v.new_empty(tokens, heads, values)
    work = prepared.kt
    last = work.new_empty(len(order), heads, width, values, dtype=torch.float32) if final else None
    written = work.new_empty(heads, count, size, values) if save else None
    states = work.new_empty(heads, count, values, width) if save else None
    block = min(values, 64)
    grid = (len(order) * heads, values // block)
    shape = {"K": width, "V": values, "BV": block, "C": size}
    modes = {"INITIAL": initial is not None, "FINAL": final, "SAVE": save}
    if width == values == 128 and size == 32 and is_hopper(v.device) and v.dtype == torch.bfloat16:
        _launch(scan_hopper_kernel)[grid](
            *shared_blocks(prepared),
            rows_of(v, size, block),
            shared(states.view(-1, width), block, width) if states is not None else None,
            prepared.decay,
            prepared.beta,
            out,
            initial,
            last,
            written,
            order,
            count,
            heads,
            v.stride(1),
            **shape,
            **modes,
            STAGES=3 if save else 4,
            num_warps=4,
        )
        return out, last, written, states
    _launch(scan_kernel)[grid](
        *prepared.descriptors(),
        prepared.decay,
        prepared.beta,
        v,
        out,
        initial,
        last,
        written,
        states,
        order,
        count,
        heads,
        v.stride(0),
        v.stride(1),
        **shape,
        **modes,
        num_warps=4,
        num_stages=3,
    )
    return out, last, written, states


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
        _launch(scan_backward_hopper_kernel)[grid](
            *shared_blocks(prepared),
            rows_of(d_out, size, block),
            shared(d_states.view(-1, width), block, width),
            prepared.decay,
            prepared.beta,
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
        )
        return z, d_states, d_initial
    _launch(scan_backward_kernel)[grid](
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


def shared(x: torch.Tensor, rows: int, columns: int) -> SharedDescriptor:
    """A matrix read or written in blocks through shared memory."""
    return SharedDescriptor(
        x, list(x.shape), list(x.stride()), [rows, columns], layout(rows, columns)
    )


@lru_cache
def layout(rows: int, columns: int) -> Any:
    return NVMMASharedLayout.get_default_for([rows, columns], bfloat16)


def shared_blocks(prepared: Prepared) -> list[SharedDescriptor]:
    """The five matrices of the first pass, one chunk a block."""
    matrices = (prepared.kt, prepared.qt, prepared.kh, prepared.inv, prepared.att)
    return [shared(x.view(-1, x.shape[3]), x.shape[2], x.shape[3]) for x in matrices]


def rows_of(x: torch.Tensor, rows: int, columns: int) -> SharedDescriptor:
    """``x [T, H, V]`` as a matrix with a row per token, whatever the distance between heads."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    return SharedDescriptor(
        x, [x.shape[0], width], [x.stride(0), 1], [rows, columns], layout(rows, columns)
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
    modes = {"NORM": options.norm, "GATE": options.gate, "SIGMOID": options.sigmoid}
    table = tables(options.bounds, size, q.device).chunks
    narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v, g, d_out))
    if width == v.shape[2] == 128 and size == 32 and is_hopper(q.device) and narrow:
        u, z, states, d_states = chunk_values
        _launch(grad_hopper_kernel)[(count, heads, width // piece)](
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
        _launch(grad_kernel)[(count, heads, width // piece)](
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
