"""The router: scores of all experts, the choice, mixing weights, and what balancing counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..precision import as_given, widen
from .histogram import Counts
from .route import check_choice, mixing_weights, route, takes_selection


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    given: tuple[torch.Tensor, torch.Tensor] | None = None,
    counts: Counts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts ``[T, k]`` int64 and mixing weights ``[T, k]``, fp32 or wider, by `route`, of tokens
    ``x [T, D]`` with the scores sigmoid(x weight^T), ``weight [E, D]``, ``bias [E]`` (K3 report
    2.3).

    Scores are fp32 or wider whatever autocast says. ``given`` routes [T, k] are taken where their
    mask [T] is set. Differentiable in ``x`` and ``weight`` through the weights, on a GPU once.
    ``counts`` are added to in place. ValueError for a k out of range, and for what is of another
    number of tokens or experts, or of another width.

    On a GPU it runs in Triton kernels where `route` does. Products of 16-bit numbers are exact;
    fp32 ones are taken as sums of two bf16, good to 2^-16, beside an fp16 x of two fp16. For a bf16
    x, gradients of logits are rounded to bf16.
    """
    _check(x, weight, bias, k, given, counts)
    if takes_selection(x, len(weight), k):
        from .fused import Routing

        return Routing.apply(x, weight, bias, k, given, counts)  # type: ignore[no-any-return]
    return naive_router(x, weight, bias, k, given, counts)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    given: tuple[torch.Tensor, torch.Tensor] | None,
    counts: Counts | None,
) -> None:
    check_choice(len(weight), bias, k)
    if x.dim() != 2 or weight.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"weight must be [E, D] for x [T, D], got {list(weight.shape)} for {list(x.shape)}"
        )
    if given is not None and len(given[0]) != len(x):
        raise ValueError(f"routes of {len(given[0])} tokens for {len(x)} tokens")
    if given is not None and given[0].shape[1] != k:
        raise ValueError(f"routes of {given[0].shape[1]} experts for k = {k}")
    masks = (None if given is None else given[1], None if counts is None else counts.valid)
    for mask in masks:
        if mask is not None and mask.shape != x.shape[:1]:
            raise ValueError(f"a mask must be [{len(x)}] as the tokens, got {list(mask.shape)}")
    if counts is None:
        return
    if counts.load.shape != bias.shape:
        raise ValueError(f"load must be {list(bias.shape)}, got {list(counts.load.shape)}")
    table = counts.histogram
    if table is not None and (len(table.bias), table.k) != (len(bias), k):
        raise ValueError(
            f"a histogram of {table.k} of {len(table.bias)} experts for {k} of {len(bias)}"
        )


def naive_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    given: tuple[torch.Tensor, torch.Tensor] | None = None,
    counts: Counts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`router` in torch, any float type, on any device: the specification."""
    with as_given(x):
        wide = widen(x)
        scores = torch.sigmoid(F.linear(wide, weight.to(wide.dtype)))
        experts, weights, cutoff = route(scores, bias, k)
        if given is not None:
            experts = torch.where(given[1][:, None], given[0].long(), experts)
            weights = mixing_weights(scores, experts)
    if counts is not None:
        taken = experts if counts.valid is None else experts[counts.valid.bool()]
        counts.load.add_(torch.bincount(taken.flatten(), minlength=len(counts.load)))
        if counts.histogram is not None:
            counts.histogram.add(scores, counts.valid, cutoff)
    return experts, weights
