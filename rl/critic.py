"""What a critic makes of rewards: advantages and returns of the tokens of packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .advantages import equal, gae
from .losses import value_loss
from .types import LossOutput, MicroBatch


@dataclass(frozen=True, slots=True)
class Critic:
    """How values are learned: discount, trace and loss of PPO with GAE.

    ``value_coefficient`` multiplies the critic's loss, ``value_clip`` bounds how far a value moves;
    0 does not bound it.
    """

    gamma: float
    lam: float
    value_coefficient: float
    value_clip: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Of the trained tokens of a micro-batch, [R]: values before the update, and what became of
    them."""

    values: Tensor
    advantages: Tensor
    returns: Tensor


def judge(
    batch: MicroBatch, values: Tensor, last: Tensor, critic: Critic, more: Tensor | None = None
) -> Judged:
    """Advantages of the trained tokens from their ``values`` [R] and those behind each sequence's
    last token, ``last`` [N]: where the episode was cut off, that is what was to come. ``more`` [R]
    is added to their rewards."""
    assert batch.rewards is not None and batch.terminated is not None
    values, last = values.double(), last.double()
    positions = np.flatnonzero(batch.loss_mask)
    of = np.searchsorted(batch.cu_seqlens, positions, side="right") - 1  # sequence of each token
    ends = torch.from_numpy(np.append(of[1:] != of[:-1], True)).to(values.device)
    finished = torch.from_numpy(batch.terminated[of]).to(values.device)
    rewards = torch.from_numpy(batch.rewards[positions]).to(values.device)
    advantages = gae(
        rewards if more is None else rewards + more,
        values,
        ends & finished,
        ends & ~finished,
        last[torch.from_numpy(of).to(values.device)],
        critic.gamma,
        critic.lam,
    ).double()
    return Judged(values, advantages, advantages + values)


def whiten_over_ranks(
    judged: Sequence[Judged], reduce: Callable[[list[Tensor], str], None], device: torch.device
) -> list[Judged]:
    """The same with advantages normalised over all of them, of every rank; a collective.

    Advantages without spread become 0.
    """
    mine = torch.cat(
        [torch.zeros(0, dtype=torch.float64, device=device)] + [j.advantages for j in judged]
    )
    sums = torch.stack([mine.new_tensor(len(mine)), mine.sum()])
    reduce([sums], "sum")
    count, mean = sums[0].clamp(min=1), sums[1] / sums[0].clamp(min=1)
    squares = (mine - mean).square().sum().reshape(1)
    ends = torch.stack([mine.max(), -mine.min()]) if len(mine) else mine.new_full((2,), -torch.inf)
    reduce([squares], "sum")
    reduce([ends], "max")
    flat = equal(-ends[1], ends[0])
    spread = (squares / count).sqrt()
    return [
        Judged(j.values, j.advantages * 0 if flat else (j.advantages - mean) / spread, j.returns)
        for j in judged
    ]


def with_values(
    output: LossOutput,
    critic: Critic,
    values: Tensor,
    judged: Judged,
    mask: Tensor,
    denominator: int,
) -> LossOutput:
    """An objective's output with the critic's loss added; ``values`` [R] as they are now."""
    own = value_loss(
        values,
        judged.values.to(values.dtype),
        judged.returns.to(values.dtype),
        mask,
        denominator=denominator,
        clip=critic.value_clip or None,
    )
    loss = output.loss + critic.value_coefficient * own.loss
    return LossOutput(loss, {**output.metrics, **own.metrics}, output.maxima)
