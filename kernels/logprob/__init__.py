"""Token log-probs and entropy of a tempered softmax, in row blocks that never hold all logits."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["naive_token_logprobs", "token_logprobs"]

BLOCK_ELEMENTS = 1 << 26  # logits held at once: 256 MiB in fp32


def naive_token_logprobs(
    hidden: torch.Tensor, lm_head: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` with all logits at once: the specification."""
    logits = (hidden @ lm_head.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def token_logprobs(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    block_elements: int = BLOCK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of the distribution softmax(hidden lm_head^T / T).

    ``hidden [T, D]``, ``lm_head [V, D]``, ``targets [T]`` -> two fp32 ``[T]`` (fp64 for fp64).
    At most ``block_elements`` logits exist at a time, in backward too.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = max(1, block_elements // lm_head.shape[0])
    if len(targets) <= rows:
        return naive_token_logprobs(hidden, lm_head, targets, temperature)
    parts = [
        checkpoint(naive_token_logprobs, h, lm_head, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
