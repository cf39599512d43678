"""Causal attention on the GPU through what torch brings."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN alone uses the tensor cores of Hopper, and takes values of another size than keys.
ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def causal_attention_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...], scale: float
) -> torch.Tensor:
    """`farhorizon.kernels.attention.causal_attention` in 16 bits; sequences of one length at once,
    else one by one."""
    lengths = [b - a for a, b in pairwise(bounds)]
    if min(lengths) == max(lengths):
        return dense(q, k, v, len(lengths), scale)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([dense(*some, count=1, scale=scale) for some in parts])


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int, scale: float
) -> torch.Tensor:
    """``count`` sequences of one length, one behind the other in ``[T, H, .]``."""
    q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(ORDER, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
