"""Linear maps of one input as one product, where their weights lie side by side in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.device import takes_kernels
from ..kernels.once import once_differentiable
from ..kernels.precision import as_given, product_dtype

WIDE = 16  # rows that a product with gradient is filled up to
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


def trained(
    x: torch.Tensor, groups: Sequence[Sequence[nn.Module]]
) -> tuple[torch.Tensor, ...] | None:
    """The results of linear maps of ``x [T, D]`` where a gradient is wanted, those of a group side
    by side in one product, perhaps with columns behind them that mean nothing.

    None on a CPU, for numbers that are not multiplied as they are in 16 bits, without gradient, and
    of modules that are more than their weight.
    """
    parts = [part for group in groups for part in group]
    wanted = torch.is_grad_enabled() and takes_kernels(x) and x.dtype == product_dtype(x)
    if not wanted or not all(map(is_plain, parts)):
        return None
    weights = [part.weight for part in parts]
    return Maps.apply(x, tuple(map(len, groups)), *weights)  # type: ignore[no-any-return]


class Maps(torch.autograd.Function):
    """Linear maps of one input in its dtype; the products of the backward pass add up its gradient
    themselves."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: tuple[int, ...], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        matrices, rest = [], list(weights)
        for count in counts:
            group, rest = rest[:count], rest[count:]
            matrices.append(group[0].to(x.dtype) if count == 1 else side_by_side(group, x.dtype))
        ctx.save_for_backward(x, *matrices)
        ctx.counts, ctx.kinds = counts, [(len(weight), weight.dtype) for weight in weights]
        ctx.set_materialize_grads(False)
        with as_given(x):
            return tuple(F.linear(x, matrix) for matrix in matrices)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        dx: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = []
        kinds = iter(ctx.kinds)
        with as_given(x):
            for count, matrix, d in zip(ctx.counts, matrices, upstream, strict=True):
                own = [next(kinds) for _ in range(count)]
                if d is None:
                    of_weights += [None] * count
                    continue
                dx = d @ matrix if dx is None else dx.addmm_(d, matrix)
                sizes = [rows for rows, _ in own]
                pieces = (d.t() @ x).split((*sizes, len(matrix) - sum(sizes)))
                of_weights += [
                    piece.to(dtype) for piece, (_, dtype) in zip(pieces, own, strict=False)
                ]
        return dx, None, *of_weights


def side_by_side(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``weights [n_i, D]`` one behind the other in ``dtype``, filled up with zeros to rows that a
    product is aligned with."""
    sizes = list(map(len, weights))
    rows = -(-sum(sizes) // WIDE) * WIDE
    out = weights[0].new_empty(rows, weights[0].shape[1], dtype=dtype)
    *places, behind = out.split((*sizes, rows - sum(sizes)))
    for place, weight in zip(places, weights, strict=True):
        place.copy_(weight)
    behind.zero_()
    return out


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
