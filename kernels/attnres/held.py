"""Who holds a gradient that a backward pass hands on: a hook may have kept it, or
`torch.autograd.grad` may be asked for it, and then nothing is to be added to it in place."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch

from ..once import once_differentiable


def holders(gradients: tuple[Any, ...]) -> list[tuple[int, int]]:
    """References to each of a backward's arguments, tensors or None, in Python and in C++."""
    return [(0, 0) if d is None else (sys.getrefcount(d), d._use_count()) for d in gradients]


class Passed(torch.autograd.Function):
    """Its input; backward keeps in the dictionary of the node before, as `fused.Mix` does, what it
    hands on, and notes in its own who holds what it was handed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.ours = {}
        ctx.maker = x.grad_fn
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *d_blocks: torch.Tensor | None
    ) -> torch.Tensor | None:
        ctx.found = holders(d_blocks)
        result = torch.zeros(1)
        if isinstance(ctx.maker, type(ctx)):
            ctx.maker.ours[0] = result
        return result


@lru_cache(maxsize=1)
@torch.inference_mode(False)
def unheld() -> tuple[int, int]:
    """`holders` of a gradient that nobody holds but the node which it is made for: how many those
    are is a matter of torch's version."""
    with torch.enable_grad(), torch.device("cpu"):
        first: Any = Passed.apply(torch.zeros(1, requires_grad=True))
        Passed.apply(first).backward()
    return first.grad_fn.found[0]
