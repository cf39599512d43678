"""Chunked KDA on the GPU: checks and autograd around the four passes."""

from __future__ import annotations

from typing import Any

import torch

from ..device import on_device_of
from ..once import once_differentiable
from .backward import gradients, scan_backward
from .forward import forward as run_forward
from .tables import Options, Prepared
from .triton_prep import BOUND_SLACK

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
        save: bool,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with on_device_of(v):
            done = run_forward((q, k, v, g, beta), (a_log, dt_bias), initial, final, save, options)
        if save:
            inputs = (q, k, v, g, beta, a_log, dt_bias, initial)
            ctx.save_for_backward(
                *inputs, done.out, done.written, done.states, done.maps, *done.prepared
            )
            ctx.options = options
        return done.out, done.last

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        *inputs, a_log, dt_bias, initial, out, written, states, maps = saved[:12]
        prepared = Prepared(*saved[12:])
        d_out, d_final = grads
        assert d_out is not None  # autograd fills in zeros
        d_out = rows_aligned(d_out)
        d_final = None if d_final is None else d_final.contiguous()
        with on_device_of(out):
            z, d_states, d_initial = scan_backward(
                prepared, d_out, d_final, initial is not None, maps, ctx.options
            )
            found = gradients(
                prepared,
                tuple(inputs),
                (a_log, dt_bias),
                out,
                d_out,
                (written, z, states, d_states),
                ctx.options,
            )
        *most, d_a_log, d_dt_bias = found
        if a_log is not None and d_a_log is not None:
            d_a_log = d_a_log.to(a_log.dtype)
        if dt_bias is not None and d_dt_bias is not None:
            d_dt_bias = d_dt_bias.to(dt_bias.dtype)
        return *most, d_a_log, d_dt_bias, d_initial, None, None, None


def rows_aligned(x: torch.Tensor) -> torch.Tensor:
    """``x [T, H, D]`` itself where its rows can be copied in blocks, else a contiguous copy."""
    row, head, unit = x.stride()
    steps = (row,) if x.shape[1] == 1 else (row, head)  # that of a single row counts all the same
    aligned = x.data_ptr() % 16 == 0 and unit == 1
    aligned = aligned and all(step > 0 and step * x.element_size() % 16 == 0 for step in steps)
    aligned = aligned and x.shape[1] * head < 2**31  # the copies count in 32 bits
    # `contiguous` would leave what begins at any address, and the stride of a single row, as it is
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def check_heads(width: int, values: int) -> None:
    """ValueError names a head size that is not of `HEAD_SIZES`."""
    for name, size in (("q", width), ("v", values)):
        if size not in HEAD_SIZES:
            allowed = ", ".join(map(str, HEAD_SIZES))
            raise ValueError(f"{name} has head size {size}; on GPU it must be one of {allowed}")


def check_decay(g: torch.Tensor, options: Options) -> None:
    """In torch's anomaly mode, ValueError for a given log decay that the kernels make NaN."""
    if options.gate or not torch.is_anomaly_enabled():
        return
    if (g < options.bound * BOUND_SLACK.value).any():
        raise ValueError(f"g falls below lower_bound {options.bound}, to {float(g.min())}")


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
    """`farhorizon.kernels.kda.chunk_kda` on packed rows ``[T, H, .]``, T > 0, in v's dtype.

    ValueError names a head size that is not of `HEAD_SIZES`. A decay that is given and lies outside
    [bound, 0] becomes NaN; in torch's anomaly mode it is a ValueError.
    """
    check_heads(q.shape[2], v.shape[2])
    check_decay(g, options)
    if initial_state is not None:
        initial_state = initial_state.to(torch.float32).contiguous()
    a_log, dt_bias = (None if x is None else x.contiguous() for x in (a_log, dt_bias))
    q, k, v, g = (rows_aligned(x) for x in (q.to(v.dtype), k.to(v.dtype), v, g))
    inputs = (q, k, v, g, beta, a_log, dt_bias, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return ChunkKda.apply(*inputs, final, save, options)
