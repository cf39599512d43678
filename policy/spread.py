"""Experts divided over ranks: each computes its own on the tokens of all, which travel there and
back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.moe import grouped_experts, in_expert_order
from ..kernels.once import once_differentiable


def spread_experts(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    activation: tuple[float, float] | None,
    group: Any,
) -> torch.Tensor:
    """`grouped_experts` of this rank's tokens, where rank r of the ``group`` holds the r-th
    of equal parts of the experts, ``w1, w2, w3``.

    A collective, forward and backward; ranks may have different numbers of tokens, also none. Rows
    come back, times their weights, to where they were sent from and are summed in the order of the
    token's routes. The CPU waits for the numbers of rows. Gradients of the experts are those of
    the tokens of all these ranks.
    """
    own, ranks = len(w1), dist.get_world_size(group)

    def outputs(rows: torch.Tensor, scales: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        counts = torch.empty_like(sizes)  # of each rank's rows, those of each expert here
        dist.all_to_all_single(counts, sizes, group=group)
        sent, got = torch.stack([sizes, counts]).view(2, ranks, own).sum(2).tolist()
        arrived, weighing = (_Exchange.apply(part, sent, got, group) for part in (rows, scales))
        here = torch.arange(own, device=x.device).repeat(ranks)
        local = here.repeat_interleave(counts, output_size=sum(got))[:, None]
        done = grouped_experts(arrived, w1, w2, w3, local, weighing, activation, dense=False)
        return _Exchange.apply(done, got, sent, group)

    return in_expert_order(x, experts, weights, own * ranks, outputs)


class _Exchange(torch.autograd.Function):
    """Rows for every rank, ``sent`` of them one behind the other, against the ``got`` ones of each;
    gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: Any
    ) -> torch.Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _exchanged(rows, sent, got, group)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(upstream[0], ctx.got, ctx.sent, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: Any
) -> torch.Tensor:
    out = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), list(got), list(sent), group=group)
    return out
