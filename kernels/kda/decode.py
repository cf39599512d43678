"""A whole decode step of KDA on the GPU: when its kernel serves, and its launch."""

from __future__ import annotations

import torch

from ..device import launch, on_device_of
from .fused import HEAD_SIZES
from .step import FLOATS
from .triton_decode import decode_kernel

# A program is a head, for the norm is over all of it. It takes ``COLUMNS`` of the state at a time
# and holds ``HELD`` such blocks in registers, so that three programs share an SM at head size 128,
# and loads, sums and stores of different heads overlap. Each warp has 32 channels or more: with
# fewer, Triton loads the small vectors again for every register of the state.
COLUMNS, HELD, WARPS = 64, 1, 4

Tensor = torch.Tensor


def takes_decode(narrow: tuple[Tensor, ...], initial: Tensor) -> bool:
    """Whether `decode_step` computes this, and not torch: a state ``initial`` in fp32, nothing of
    ``narrow``, the other arguments, in fp64, head sizes of `HEAD_SIZES`, and no gradient that is
    asked for."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*narrow, initial)):
        return False
    sizes = initial.shape[2] in HEAD_SIZES and initial.shape[3] in HEAD_SIZES
    return sizes and initial.dtype == torch.float32 and all(x.dtype in FLOATS for x in narrow)


def decode_step(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    initial: Tensor,
    *,
    bound: float,
    eps: float,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`farhorizon.kernels.kda.decode_kda` for ``rows`` qkv, z, beta, gate and tail, which are read
    where they are if their channels lie side by side, and ``parameters`` kernel, weight, A_log and
    dt_bias. With ``places`` it is `decode_kda_`, of contiguous states and tails."""
    qkv, z, beta, gate, tail = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
    kernel, weight, a_log, dt_bias = (x.contiguous() for x in parameters)
    count, (_, heads, width, values) = len(qkv), initial.shape
    if places is None:
        initial = initial.contiguous()
        final, new_tail = torch.empty_like(initial), qkv.new_empty(tail.shape)
    else:
        final, new_tail, places = initial, tail, places.contiguous()
    out = qkv.new_empty(count, heads * values)
    with on_device_of(qkv):
        launch(decode_kernel)[(count * heads,)](
            *(qkv, kernel, tail, z, beta, gate, weight, a_log, dt_bias),
            *(initial, final, new_tail, out, places, eps, bound, heads),
            *(qkv.stride(0), tail.stride(0), tail.stride(1)),
            *(x.stride(0) for x in (z, beta, gate)),
            W=kernel.shape[1],
            K=width,
            V=values,
            BV=min(values, COLUMNS),
            HELD=HELD,
            PLACED=places is not None,
            FAST=qkv.is_cuda,
            num_warps=min(WARPS, -(-width // 32)),
        )
    return out, final, new_tail
