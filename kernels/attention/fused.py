"""Causal attention on the GPU through what torch brings.

cuDNN alone uses the tensor cores of Hopper as they can be, but plans 50 to 100 ms for every new
length, and takes short sequences one by one. So long sequences go there, filled up to lengths that
come again, and all short ones together through one call of flash attention. Which way one goes is
a matter of its own length: its bits do not depend on its company.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..device import upload
from ..once import once_differentiable

# cuDNN takes values of another size than keys.
ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
LONG = 4096  # tokens of a sequence that cuDNN takes
STEP = 1024  # its lengths are multiples of this: each is planned once in a process
FLASH_HEAD = 256  # largest head size of flash attention

Tensor = torch.Tensor


def causal_attention_fused(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], scale: float
) -> Tensor:
    """`farhorizon.kernels.attention.causal_attention` in 16 bits. Where torch is to be
    deterministic, every sequence takes flash attention, which then is."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    lengths = [b - a for a, b in pairwise(bounds)]
    flash = takes_flash(q, v)
    if flash and (max(lengths) < LONG or torch.are_deterministic_algorithms_enabled()):
        return varlen(q, k, v, bounds, scale)
    if min(lengths) == max(lengths) and lengths[0] % STEP == 0:
        return dense(q, k, v, len(lengths), scale)
    parts = list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        short = flash and length < LONG
        groups.setdefault(0 if short else -(-length // STEP) * STEP, []).append(number)
    out: list[Tensor] = [v] * len(lengths)
    for full, members in groups.items():
        some = list(zip(*(parts[i] for i in members), strict=True))
        sizes = [lengths[i] for i in members]
        if full:
            # rows behind a sequence are seen by none of its own
            rows = [torch.cat([fill(x, full) for x in each]) for each in some]
            done = dense(*rows, count=len(members), scale=scale).split(full)
        else:
            ends = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
            done = varlen(*map(torch.cat, some), bounds=ends, scale=scale).split(sizes)
        for i, rows_of_one in zip(members, done, strict=True):
            out[i] = rows_of_one[: lengths[i]]
    return torch.cat(out)


def fill(x: Tensor, rows: int) -> Tensor:
    """``x [L, H, D]`` with zeros behind it."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, 0, 0, rows - len(x)))


def dense(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float) -> Tensor:
    """``count`` sequences of one length, one behind the other in ``[T, H, .]``."""
    q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(ORDER, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


def takes_flash(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention has kernels for such heads on this GPU."""
    width = q.shape[2]
    fits = width % 8 == 0 and v.shape[2] <= width <= FLASH_HEAD
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def edges(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """``bounds`` on the device."""
    return upload(torch.tensor(bounds, dtype=torch.int32), device)


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], scale: float) -> Tensor:
    """All sequences in one call of flash attention."""
    longest = max(b - a for a, b in pairwise(bounds))
    return Varlen.apply(q, k, v, edges(bounds, q.device), longest, scale)


class Varlen(torch.autograd.Function):
    """Flash attention of torch, whose values want the size of keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
    ) -> Tensor:
        width = v.shape[2]
        wide = F.pad(v, (0, q.shape[2] - width))
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, wide, ends, ends, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, ends)
        ctx.numbers = longest, scale
        return out[..., :width].contiguous()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset, ends = ctx.saved_tensors
        longest, scale = ctx.numbers
        width, more = v.shape[2], q.shape[2] - v.shape[2]
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(F.pad(d_out, (0, more)), q, k, F.pad(v, (0, more)), out, lse),
            *(ends, ends, longest, longest, 0.0, True, seed, offset),
            scale=scale,
        )
        return dq, dk, dv[..., :width], None, None, None
