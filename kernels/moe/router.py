"""The router: scores of all experts, the choice, mixing weights, and what balancing counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..precision import as_given, widen
from .histogram import Counts
from .route import mixing_weights, route, takes_selection


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
    ``counts`` are added to in place. ValueError for a k out of range, and for routes that were
    given for another number of tokens or experts.

    On a GPU it runs in Triton kernels where `route` does. Products of 16-bit numbers are exact;
    fp32 ones are taken as sums of two bf16, good to 2^-16. For a bf16 x, gradients of logits are
    rounded to bf16.
    """
    if not 1 <= k <= len(weight):
        raise ValueError(f"k must lie in [1, {len(weight)}], got {k}")
    if given is not None and len(given[0]) != len(x):
        raise ValueError(f"routes of {len(given[0])} tokens for {len(x)} tokens")
    if given is not None and given[0].shape[1] != k:
        raise ValueError(f"routes of {given[0].shape[1]} experts for k = {k}")
    if takes_selection(x, len(weight), k):
        from .fused import Routing

        return Routing.apply(x, weight, bias, k, given, counts)  # type: ignore[no-any-return]
    return naive_router(x, weight, bias, k, given, counts)


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
