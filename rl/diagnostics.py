"""What a step says beyond means over tokens: agreement by position, and spread of advantages.

Everything is sums that add up over micro-batches and ranks, in one fp64 array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .ratio import bounded, difference, masked
from .types import MicroBatch

EDGES = (0, 256, 1024, 4096, 16384, 65536, 262144)  # first token of a trajectory in each range
SIZE = 3 * len(EDGES) + 3


def tally(
    batch: MicroBatch,
    positions: np.ndarray,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> Tensor:
    """Sums over the tokens at ``positions`` [R] of a micro-batch, fp64 [SIZE], for `metrics`.

    Per range of positions in a trajectory: tokens, ratios, and KL of learner and sampler; then
    tokens, advantages and their squares.
    """
    borders = batch.cu_seqlens
    index = positions - borders[np.searchsorted(borders, positions, side="right") - 1]
    range_ = torch.tensor(np.searchsorted(EDGES, index, side="right") - 1, device=logprobs.device)
    log_ratio = bounded(difference(logprobs.detach(), behavior_logprobs, mask)).double()
    ratio, one, own = log_ratio.exp(), mask.double(), masked(advantages, mask).double()
    columns = torch.stack([one, masked(ratio, mask), masked(ratio - 1 - log_ratio, mask)])
    sums = columns.new_zeros(3, len(EDGES)).index_add(1, range_, columns)
    return torch.cat([sums.flatten(), torch.stack([one.sum(), own.sum(), own.square().sum()])])


def metrics(sums: Sequence[float]) -> dict[str, float]:
    """Means of what `tally` counted, for the ranges that have tokens."""
    found: dict[str, float] = {}
    tokens, ratios, kls = np.reshape(sums[:-3], (3, len(EDGES)))
    for edge, count, ratio, kl in zip(EDGES, tokens, ratios, kls, strict=True):
        if count:
            found |= {f"ratio_from_{edge}": ratio / count, f"kl_from_{edge}": kl / count}
    count, total, squares = sums[-3:]
    if count:
        mean = total / count
        found["advantage_mean"] = mean
        found["advantage_std"] = float(np.sqrt(np.maximum(squares / count - mean**2, 0.0)))
    return {name: float(value) for name, value in found.items()}


def combined(name: str, values: Sequence[float]) -> float:
    """A metric of several optimizer steps: their mean, or the largest if its name says so."""
    return float(np.max(values) if name.endswith("_max") else np.mean(values))


def loads(name: str, values: Sequence[float]) -> dict[str, float]:
    """Max / mean load of each layer with experts, in their order, and the largest."""
    own = {f"{name}_layer_{number}": load for number, load in enumerate(values)}
    return {f"{name}_max": max(values, default=1.0), **own}
