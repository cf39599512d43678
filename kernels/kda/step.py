"""One token of every sequence on the GPU, for decoding: when its kernel serves, and its launch."""

from __future__ import annotations

import torch

from ..device import launch, on_device_of
from .fused import HEAD_SIZES
from .triton_step import step_kernel

# Of the shares of a state that one program may take the largest that leaves registers for four
# programs on an SM: the loads of one overlap with the stores of others.
ELEMENTS, WARPS = 8192, 4

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Tensor = torch.Tensor


def takes_step(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    initial: Tensor,
) -> bool:
    """Whether `recurrent_step` computes this, and not torch: one token a sequence, nothing in fp64,
    head sizes of `HEAD_SIZES`, a state in fp32, and no gradient that is asked for."""
    q, _, v, _, _ = inputs
    given = [x for x in (*inputs, *parameters) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, initial)):
        return False
    sizes = q.shape[-1] in HEAD_SIZES and v.shape[-1] in HEAD_SIZES
    types = initial.dtype == torch.float32 and all(x.dtype in FLOATS for x in given)
    return q.shape[1] == 1 and sizes and types


def recurrent_step(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    initial: Tensor,
    *,
    final: bool,
    scale: float,
    bound: float,
    norm: bool,
    sigmoid: bool,
) -> tuple[Tensor, Tensor | None]:
    """`farhorizon.kernels.kda.recurrent_kda` for ``inputs`` ``q, k, g [N, 1, H, K]``, ``v [N, 1, H,
    V]``, ``beta [N, 1, H]``; ``parameters`` A_log and dt_bias, both None where g is the log decay.

    The new state is a tensor of its own: ``initial`` is never written.
    """
    q, k, v, g = (x if x.stride(3) == 1 else x.contiguous() for x in inputs[:4])
    beta = inputs[4]
    count, _, heads, width = q.shape
    values = v.shape[3]
    a_log, dt_bias = (None if x is None else x.contiguous() for x in parameters)
    initial = initial.contiguous()
    last = torch.empty_like(initial) if final else None
    out = v.new_empty(v.shape)
    block = min(values, ELEMENTS // width)
    grid = count * heads * (values // block)
    if grid:
        rows = (q, k, v, g, beta)
        with on_device_of(v):
            launch(step_kernel)[(grid,)](
                *(*rows, a_log, dt_bias, initial, last, out),
                *(scale, bound, heads),
                *(x.stride(0) for x in rows),
                *(x.stride(2) for x in rows),
                K=width,
                V=values,
                BV=block,
                NORM=norm,
                GATE=a_log is not None,
                SIGMOID=sigmoid,
                FINAL=final,
                FAST=v.is_cuda,
                num_warps=WARPS,
            )
    return out, last
