"""Causal attention over packed sequences in plain torch, one sequence after another."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..precision import widen


def naive_causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...], scale: float
) -> torch.Tensor:
    """`causal_attention` with all scores of a sequence at once: the specification."""
    parts: list[torch.Tensor] = []
    for start, end in pairwise(bounds):
        queries, keys, values = (widen(x[start:end]).transpose(0, 1) for x in (q, k, v))
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        scores = (queries @ keys.mT * scale).masked_fill(future, -torch.inf)
        parts.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts).to(v.dtype)
