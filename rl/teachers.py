"""Policies that training learns from on its own samples: frozen copies beside the learner, on every
rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..configs.schema import TeacherConfig
from .advantages import distillation
from .ratio import bounded, difference, masked, possible
from .reference import score
from .types import MicroBatch


@dataclass(frozen=True, slots=True)
class Distillation:
    """How much teachers count: ``coefficient`` times advantages of at most ``bound`` nats."""

    coefficient: float
    bound: float


def teaches(teacher: TeacherConfig, kind: str) -> bool:
    """Whether tasks of a kind are among those it teaches."""
    return not teacher.kinds or kind in teacher.kinds


@dataclass(frozen=True, slots=True)
class Taught:
    """Log-probs [R] of the teachers of each token, weighed, and bool [R] where it has any."""

    logprobs: Tensor
    known: Tensor


class Teachers:
    """Scores what was sampled, without gradient, and says what to make of it.

    A sequence is scored by the teachers of its kind alone. Where there are several, their log-probs
    are averaged by weight: that is the sum of the KLs to each of them, but for a factor. Policies
    stay whole on each rank, in their own precision, those of one folder once.
    """

    def __init__(
        self,
        teachers: Sequence[TeacherConfig],
        policies: dict[str, Any],
        setting: Distillation,
        temperature: float,
    ) -> None:
        self.teachers, self.setting, self.temperature = teachers, setting, temperature
        self.policies = {folder: own.requires_grad_(False) for folder, own in policies.items()}
        self.device = next(policies[teachers[0].policy].parameters()).device

    def score(self, batch: MicroBatch, positions: np.ndarray) -> Taught:
        """What the teachers say of the tokens at ``positions`` [R], none of which is a sequence's
        first."""
        of = np.searchsorted(batch.cu_seqlens, positions, side="right") - 1
        total = torch.zeros(len(positions), dtype=torch.float64, device=self.device)
        weight = torch.zeros_like(total)
        for teacher in self.teachers:
            mine = np.array([teaches(teacher, k) and not batch.padding for k in batch.kinds])
            if not mine[of].any():
                continue
            kept = mine[of]
            place = np.cumsum(np.repeat(mine, np.diff(batch.cu_seqlens))) - 1
            part, own_positions = batch.of_sequences(mine), place[positions[kept]]
            policy = self.policies[teacher.policy]
            own = score(policy, part, own_positions, self.temperature).double()
            rows = torch.from_numpy(np.flatnonzero(kept)).to(self.device)
            total.index_add_(0, rows, teacher.weight * own)
            weight.index_add_(0, rows, torch.full_like(own, teacher.weight))
        known = weight > 0
        return Taught((total / torch.where(known, weight, 1.0)).float(), known)

    def teach(
        self, logprobs: Tensor, taught: Taught, mask: Tensor, denominator: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages [R] for the policy as it is now, and sums over tokens by ``denominator``:
        tokens that have a teacher, KL(policy || teacher) by the estimator k1, and tokens at the
        bound."""
        own = possible(logprobs, logprobs, mask & taught.known)
        gap = distillation(logprobs, taught.logprobs, own, bound=self.setting.bound)
        away = bounded(difference(logprobs.detach(), taught.logprobs, own))
        at_bound = own & (gap.abs() >= self.setting.bound)
        sums = {
            "teacher_tokens": own.to(gap.dtype),
            "teacher_kl": masked(away, own),
            "teacher_bounded": at_bound.to(gap.dtype),
        }
        told = {name: values.sum() / denominator for name, values in sums.items()}
        return self.setting.coefficient * gap, told
