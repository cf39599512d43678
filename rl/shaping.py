"""Rewards of trajectories changed by their length, before advantages are taken; all arrays [N].

Lengths are numbers of sampled tokens. Rewards that are not finite stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shaping:
    """The changes that a config asks for, in this order: `length_reward` times its coefficient,
    `overlong` (with ``limit``), `budgeted`. ``budget`` is that of tasks that say none, ``efforts``
    are factors on budgets by the kind of task."""

    length_reward: float = 0.0
    limit: int | None = None
    buffer: int = 1
    budget: int | None = None
    efforts: Mapping[str, float] = field(default_factory=dict)

    def budgets(self, own: Sequence[int | None], kinds: Sequence[str]) -> Tensor:
        """Tokens that each trajectory may take, by its task's ``own`` budget and kind, fp64 [N];
        inf where there is no budget."""
        given = [self.budget if budget is None else budget for budget in own]
        return torch.tensor(
            [
                float("inf") if budget is None else budget * self.efforts.get(kind, 1.0)
                for budget, kind in zip(given, kinds, strict=True)
            ],
            dtype=torch.float64,
        )

    def acts(self, budgets: Tensor) -> bool:
        """Whether anything can change a reward."""
        lengths = self.length_reward != 0 or self.limit is not None
        return lengths or bool(budgets.isfinite().any())

    def __call__(
        self,
        rewards: Tensor,
        lengths: Tensor,
        correct: Tensor,
        group_ids: Tensor,
        budgets: Tensor,
    ) -> Tensor:
        """Rewards as they are learned from, fp64 [N]; ``budgets`` [N] as `budgets` makes them."""
        rewards = rewards.double()
        if self.length_reward:
            rewards = rewards + self.length_reward * length_reward(
                lengths, correct, group_ids, rewards.isfinite()
            )
        if self.limit is not None:
            rewards = rewards + overlong(lengths, limit=self.limit, buffer=self.buffer)
        return budgeted(rewards, lengths, budgets=budgets)


UNSHAPED = Shaping()  # but for budgets that tasks have of their own


def overlong(lengths: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Soft overlong punishment, to be added to rewards: 0 down to -1 over the last ``buffer``
    tokens below ``limit``, and -1 above.

    DAPO, arXiv:2503.14476 equation 13.
    """
    assert lengths.ndim == 1 and 0 < buffer <= limit
    return ((limit - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def budgeted(rewards: Tensor, lengths: Tensor, *, budgets: Tensor) -> Tensor:
    """Rewards, and -1 where a trajectory is longer than its budget: K3's effort control.

    ``budgets`` are tau_b * b0 of each task: a multiplier of the tokens that the first policy took;
    inf is none.
    """
    assert rewards.ndim == 1 and rewards.shape == lengths.shape == budgets.shape
    over = (lengths > budgets) & torch.isfinite(rewards)
    return torch.where(over, torch.full_like(rewards, -1.0), rewards)


def length_reward(lengths: Tensor, correct: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """K1.5's length reward, to be added to rewards: 0.5 for the shortest of a group down to -0.5
    for the longest, and for wrong answers at most 0; 0 where all are equally long.

    arXiv:2501.12599 section 2.3.3; ``correct`` is bool. Only ``valid`` members, bool too, are
    compared; the others get 0.
    """
    assert lengths.ndim == 1
    assert lengths.shape == correct.shape == group_ids.shape == valid.shape
    values = torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    for group in torch.unique(group_ids[valid]):
        members = torch.nonzero(valid & (group_ids == group)).flatten()
        own = lengths[members].double()
        spread = own.max() - own.min()
        if spread > 0:
            values[members] = 0.5 - (own - own.min()) / spread
    return torch.where(correct, values, values.clamp(max=0.0))
