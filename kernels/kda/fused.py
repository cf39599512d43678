"""Chunked KDA on the GPU: checks and autograd around the four passes."""

from __future__ import annotations

from typing import Any

import torch

from .passes import gradients, prepare_chunks, scan, scan_backward
from .tables import Options

HEAD_SIZES = (16, 32, 64, 128)


class ChunkKda(torch.autograd.Function):
    """``q, k, g [T, H, K]``, ``v [T, H, V]``, ``beta [T, H]``, ``initial [N, H, K, V]``, packed."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        a_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        initial: torch.Tensor | None,
        final: bool,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        prepared = prepare_chunks(q, k, g, beta, a_log, dt_bias, options)
        save = any(ctx.needs_input_grad)
        out, last, written, states = scan(prepared, v, initial, final, save, options)
        if save:
            ctx.save_for_backward(q, k, v, g, beta, a_log, dt_bias, initial, out)
            ctx.prepared, ctx.written, ctx.states = prepared, written, states
            ctx.options = options
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *inputs, a_log, dt_bias, initial, out = ctx.saved_tensors
        d_out, d_final = grads
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_out = rows_aligned(d_out)
        d_final = None if d_final is None else d_final.contiguous()
        z, d_states, d_initial = scan_backward(
            ctx.prepared, d_out, d_final, initial is not None, ctx.options
        )
        found = gradients(
            ctx.prepared,
            tuple(inputs),
            (a_log, dt_bias),
            out,
            d_out,
            (ctx.written, z, ctx.states, d_states),
            ctx.options,
        )
        *most, d_a_log, d_dt_bias = found
        if a_log is not None and d_a_log is not None:
            d_a_log = d_a_log.to(a_log.dtype)
        if dt_bias is not None and d_dt_bias is not None:
            d_dt_bias = d_dt_bias.to(dt_bias.dtype)
        if d_initial is not None:
            d_initial = d_initial.to(initial.dtype)
        return *most, d_a_log, d_dt_bias, d_initial, None, None


def rows_aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where its rows can be copied in blocks, else a contiguous copy."""
    aligned = x.data_ptr() % 16 == 0
    for dim, stride in enumerate(x.stride()[:-1]):
        aligned = aligned and (x.shape[dim] == 1 or stride * x.element_size() % 16 == 0)
    return x if aligned and x.stride(-1) == 1 else x.contiguous()


def chunk_kda_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    final: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`farhorizon.kernels.kda.chunk_kda` on packed rows ``[T, H, .]``, T > 0, in bf16 products.

    ValueError names a head size that is not of `HEAD_SIZES`. A decay that is given and lies outside
    [bound, 0] becomes NaN.
    """
    for name, x in (("q", q), ("v", v)):
        if x.shape[2] not in HEAD_SIZES:
            allowed = ", ".join(map(str, HEAD_SIZES))
            raise ValueError(
                f"{name} has head size {x.shape[2]}; on GPU it must be one of {allowed}"
            )
    if initial_state is not None:
        initial_state = initial_state.to(torch.float32).contiguous()
    q, k, v, g = (rows_aligned(x) for x in (q, k, v, g))
    return ChunkKda.apply(q, k, v, g, beta, a_log, dt_bias, initial_state, final, options)
