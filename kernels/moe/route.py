"""Top-k routing by biased scores, mixed by unbiased ones (K3 report 2.3)."""

from __future__ import annotations

import torch

from ..precision import widen

MOST_EXPERTS, MOST_CHOICES = 4096, 64  # that the kernels choose among, and with the one behind


def route(
    scores: torch.Tensor, bias: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts, mixing weights and cutoff of every token.

    ``scores [T, E]`` after the sigmoid, ``bias [E]`` *added* for the choice only. Returns
    ``experts [T, k]`` int64 (ties to the lowest index), ``weights [T, k]`` fp32 or wider (the
    unbiased scores, renormalised) and ``cutoff [T]``, the biased (k+1)-th score (minus infinity
    if k = E). Differentiable in ``scores`` through the weights. ValueError for a k out of range and
    a bias of another number of experts.

    On a GPU it runs in a Triton kernel, unless scores are fp64, or more than 4096, or k above 63.
    """
    num_experts = scores.shape[-1]
    check_choice(num_experts, bias, k)
    scores = widen(scores)
    if takes_selection(scores, num_experts, k):
        from .fused import select

        experts = torch.empty(len(scores), k, dtype=torch.int64, device=scores.device)
        cutoff = select(scores.detach().contiguous(), bias, k, False, experts)
        return experts, mixing_weights(scores, experts), cutoff
    biased = scores.detach() + bias
    # a stable sort keeps equal scores in index order on every device; topk does not
    ranked, order = biased.sort(dim=-1, descending=True, stable=True)
    experts = order[:, :k]
    cutoff = ranked[:, k] if k < num_experts else ranked.new_full((len(ranked),), -torch.inf)
    return experts, mixing_weights(scores, experts), cutoff


def check_choice(num_experts: int, bias: torch.Tensor, k: int) -> None:
    """ValueError unless ``k`` of so many experts can be chosen by this bias."""
    if not 1 <= k <= num_experts:
        raise ValueError(f"k must lie in [1, {num_experts}], got {k}")
    if bias.shape != (num_experts,):
        raise ValueError(f"bias must be [{num_experts}], got {list(bias.shape)}")


def takes_selection(x: torch.Tensor, num_experts: int, k: int) -> bool:
    """Whether the kernels choose among so many experts, on the device and in the type of ``x``."""
    fits = num_experts <= MOST_EXPERTS and min(k + 1, num_experts) <= MOST_CHOICES
    return x.is_cuda and x.dtype != torch.float64 and fits


def mixing_weights(scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Weights ``[T, k]``, fp32 or wider, of ``experts [T, k]``, however those were chosen: their
    unbiased ``scores [T, E]``, renormalised. Differentiable in ``scores``."""
    chosen = widen(scores).gather(-1, experts)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
