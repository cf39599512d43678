"""Reductions of several tensors over ranks in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensors: Sequence[Tensor], op: str = "sum") -> None:
    """Reduce tensors over all ranks ("sum" or "max"), in place; nothing without a process group.

    They travel in their common dtype: do not mix integers with floats.
    """
    if not tensors or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
