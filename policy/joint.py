"""Linear maps of one input as one product, where their weights lie side by side in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

ALIGNED = 8  # rows that a product is filled up to: its own rows then begin on 16 bytes


@torch.no_grad()
def lay_together(weights: Sequence[nn.Parameter]) -> None:
    """Move weights ``[n_i, ...]`` of one dtype and device to one buffer, in order, without gaps.

    They stay the parameters they were, but for what holds on to their old memory; whatever
    replaces their memory parts them again.
    """
    first = weights[0]
    rows = sum(map(len, weights))
    buffer = first.new_zeros(-(-rows // ALIGNED) * ALIGNED, *first.shape[1:])
    start = 0
    for weight in weights:
        part = buffer[start : start + len(weight)]
        weight.data = part.copy_(weight)
        start += len(weight)


def together(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of weights that `lay_together` moved, perhaps with rows behind the last that mean
    nothing; None of others, and where a gradient is wanted."""
    first = weights[0]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return None  # it would be that of the first alone
    offset = first.storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        alike = weight.dtype == first.dtype and weight.shape[1:] == first.shape[1:]
        if not (same and alike) or weight.storage_offset() != offset or not weight.is_contiguous():
            return None
        offset += weight.numel()
    rows = -(-sum(map(len, weights)) // ALIGNED) * ALIGNED
    end = first.storage_offset() + rows * first[0].numel()
    if first.untyped_storage().nbytes() < end * first.itemsize:
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat(weights)``, without a copy where they lie together."""
    found = together(weights) if weights[0].is_cuda else None
    return torch.cat(tuple(weights)) if found is None else found[: sum(map(len, weights))]


def joint(x: torch.Tensor, parts: Sequence[nn.Module]) -> torch.Tensor | None:
    """The results ``[T, n_i]`` of linear maps of ``x [T, D]`` side by side, and perhaps columns
    behind them that mean nothing; None on a CPU, where weights do not lie together, and of modules
    that are more than their weight."""
    if not x.is_cuda or not all(map(is_plain, parts)):
        return None
    found = together([part.weight for part in parts])  # type: ignore[misc]
    return None if found is None else F.linear(x, found)


def split_joint(x: torch.Tensor, parts: Sequence[nn.Module]) -> list[torch.Tensor] | None:
    """The results of `joint` one by one."""
    found = joint(x, parts)
    if found is None:
        return None
    sizes = [len(part.weight) for part in parts]  # type: ignore[arg-type]
    return list(found.split((*sizes, found.shape[1] - sum(sizes)), -1)[:-1])


def each(x: torch.Tensor, parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The results of linear maps of ``x [T, D]``, by one product where `joint` is one."""
    return split_joint(x, parts) or [part(x) for part in parts]


def is_plain(part: nn.Module) -> bool:
    """Whether a linear map is nothing but its weight; hooks on all modules of a process are not
    looked for."""
    hooks = (
        part._forward_hooks,
        part._forward_pre_hooks,
        part._backward_hooks,
        part._backward_pre_hooks,
    )
    own = "forward" in vars(part)
    return type(part) is nn.Linear and part.bias is None and not own and not any(hooks)
