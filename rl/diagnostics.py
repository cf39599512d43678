"""What a step says beyond means over tokens: agreement by position, and spread of advantages; and
what several steps say together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from ..kernels.device import upload
from .ratio import difference, limited, masked, possible
from .types import MicroBatch

EDGES = (0, 256, 1024, 4096, 16384, 65536, 262144)  # first token of a trajectory in each range


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums and largest values of tokens, which combine over micro-batches, ranks and steps; fp64.

    ``ranges`` [3, R]: tokens, ratios, and KL of learner and sampler, per range of positions in a
    trajectory; ``highest`` [2, R] the largest ratio and KL of a token; ``spread`` [3]: tokens,
    advantages and their squares.
    """

    ranges: Tensor
    highest: Tensor
    spread: Tensor

    @staticmethod
    def empty(device: torch.device | str = "cpu") -> Tally:
        """What no token says."""
        shapes = (3, len(EDGES)), (2, len(EDGES)), (3,)
        return Tally(*(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes))

    def joined(self, other: Tally) -> Tally:
        """Of the tokens of both."""
        return Tally(
            self.ranges + other.ranges,
            torch.maximum(self.highest, other.highest),
            self.spread + other.spread,
        )

    def metrics(self) -> dict[str, float]:
        """Means and largest values, for the ranges that have tokens."""
        found: dict[str, float] = {}
        columns = zip(EDGES, *self.ranges.tolist(), *self.highest.tolist(), strict=True)
        for edge, count, ratio, kl, ratio_max, kl_max in columns:
            if count:
                found |= {f"ratio_from_{edge}": ratio / count, f"kl_from_{edge}": kl / count}
                found |= {f"ratio_from_{edge}_max": ratio_max, f"kl_from_{edge}_max": kl_max}
        count, total, squares = self.spread.tolist()
        if count:
            mean = total / count
            found["advantage_mean"] = mean
            found["advantage_std"] = float(np.sqrt(np.maximum(squares / count - mean**2, 0.0)))
        return found


def tally(
    batch: MicroBatch,
    positions: np.ndarray,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> Tally:
    """What the tokens at ``positions`` [R] of a micro-batch say; those that a policy never gives
    have no ratio."""
    borders = batch.cu_seqlens
    index = positions - borders[np.searchsorted(borders, positions, side="right") - 1]
    ranges = torch.from_numpy(np.searchsorted(EDGES, index, side="right") - 1)
    range_ = upload(ranges, logprobs.device)
    known = possible(logprobs, behavior_logprobs, mask)
    log_ratio = limited(difference(logprobs, behavior_logprobs, known)).double()
    ratio, one, own = log_ratio.exp(), mask.double(), masked(advantages, mask).double()
    apart = torch.stack([masked(ratio, known), ratio - 1 - log_ratio])
    none = Tally.empty(logprobs.device)
    return Tally(
        none.ranges.index_add(1, range_, torch.cat([known.double()[None], apart])),
        none.highest.scatter_reduce(1, range_.expand(2, -1), apart, "amax"),
        torch.stack([one.sum(), own.sum(), own.square().sum()]),
    )


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What an optimizer step said: ``means`` over its ``tokens``, ``others`` of the step as a
    whole, and its ``tally``, None where no policies are compared."""

    tokens: int
    means: Mapping[str, float]
    others: Mapping[str, float]
    tally: Tally | None

    @property
    def applied(self) -> bool:
        """Whether the step changed the weights."""
        return not self.others["skipped_steps"]


def over_steps(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Metrics of several optimizer steps: means over all their tokens, of others the mean of the
    steps that have it, or the largest if the name ends with ``_max``."""
    tokens = sum(step.tokens for step in steps)
    weighed = {
        name: sum(step.means[name] * step.tokens for step in steps) / tokens
        for name in steps[0].means
    }
    tallies = [step.tally for step in steps if step.tally is not None]
    of_ranges = reduce(Tally.joined, tallies).metrics() if tallies else {}
    names = dict.fromkeys(name for step in steps for name in step.others)
    others = {n: [step.others[n] for step in steps if n in step.others] for n in names}
    whole = {n: float(np.max(v) if n.endswith("_max") else np.mean(v)) for n, v in others.items()}
    return {**weighed, **of_ranges, **whole}


def stacked(parts: Sequence[Mapping[str, Tensor]]) -> tuple[list[str], Tensor]:
    """Scalars of the same names, and their values in that order [parts, names]; ValueError where
    a part has others."""
    names = list(parts[0])
    for part in parts:
        if part.keys() != parts[0].keys():
            other = ", ".join(sorted(part.keys() ^ parts[0].keys()))
            raise ValueError(f"metrics: not every micro-batch has {other}")
    return names, torch.stack([torch.stack([part[name] for name in names]) for part in parts])


def loads(name: str, values: Sequence[float]) -> dict[str, float]:
    """Max / mean load of each layer with experts, in their order, and the largest."""
    own = {f"{name}_layer_{number}": load for number, load in enumerate(values)}
    return {f"{name}_max": max(values, default=1.0), **own}
