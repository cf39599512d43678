"""Advantages and returns of a critic on packed tokens, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from farhorizon.rl.batch import samples_of_groups, shares
from farhorizon.rl.critic import Critic, Judged, judge, whiten_over_ranks, with_values
from farhorizon.rl.types import LossOutput, MicroBatch
from farhorizon.rollout.types import Group, StopReason, Trajectory

from .test_batch import given, sampled

CRITIC = Critic(gamma=0.5, lam=0.5, value_coefficient=0.1, value_clip=0.2)


def packed() -> MicroBatch:
    """Two turns that terminate (tokens 2, 5 and 6 sampled), and one that is cut off (8 and 9)."""
    mask = np.array([0, 0, 1, 0, 0, 1, 1, 0, 1, 1], np.bool_)
    rewards = np.array([0, 0, 1, 0, 0, 0, 2, 0, 0, 4], np.float64)
    ids = np.array([0] * 7 + [1] * 3)
    none = np.zeros(10, np.float32)
    return MicroBatch(
        input_ids=ids,
        cu_seqlens=np.array([0, 7, 10], np.int32),
        loss_mask=mask,
        behavior_logprobs=none,
        advantages=none,
        sequence_ids=ids,
        rewards=rewards,
        terminated=np.array([True, False]),
    )


def test_advantages_cross_tool_text_and_stop_at_the_end_of_a_sequence() -> None:
    values = torch.tensor([0.5, 1.0, 1.0, 2.0, 3.0])
    got = judge(packed(), values, torch.tensor([9.0, 8.0]), CRITIC)
    # token 6: 2 - 1 = 1; token 5: 0 + 0.5 - 1 + 0.25 = -0.25; token 2: 1 + 0.5 - 0.5 - 0.0625
    # token 9: 4 + 0.5 * 8 - 3 = 5; token 8: 0 + 1.5 - 2 + 1.25 = 0.75
    assert got.advantages.tolist() == [0.9375, -0.25, 1.0, 0.75, 5.0]
    assert got.returns.tolist() == [1.4375, 0.75, 2.0, 2.75, 8.0]
    assert got.values.tolist() == values.tolist()


def test_whitening_pools_what_all_ranks_have() -> None:
    """Two ranks whose sums are exchanged; one of them has no token in the last case."""

    def judged(*advantages: float) -> list[Judged]:
        one = torch.tensor(advantages, dtype=torch.float64)
        return [Judged(one * 0 + 7, one, one + 7)] if advantages else []

    def reduced(mine: list[Judged], other: list[Judged]) -> list[Judged]:
        """What one rank gets; the other's part of each message is computed as it would be."""
        both = torch.cat([j.advantages for j in [*mine, *other]])
        messages = iter(
            [
                torch.stack([both.new_tensor(len(both)), both.sum()]),
                (both - both.mean()).square().sum().reshape(1),
                torch.stack([both.max(), -both.min()]),
            ]
        )

        def reduce(tensors: list[torch.Tensor], op: str = "sum") -> None:
            tensors[0].copy_(next(messages))

        return whiten_over_ranks(mine, reduce, torch.device("cpu"))

    (left,) = reduced(judged(1.0, 3.0), judged(5.0, 7.0))
    assert left.advantages.tolist() == pytest.approx([-3 / math.sqrt(5), -1 / math.sqrt(5)])
    assert left.values.tolist() == [7.0, 7.0] and left.returns.tolist() == [8.0, 10.0]
    (flat,) = reduced(judged(0.3, 0.3), judged(0.1 + 0.2))
    assert flat.advantages.tolist() == [0.0, 0.0]
    assert reduced([], judged(1.0, 2.0)) == []
    (alone,) = reduced(judged(1.0, 3.0), [])
    assert alone.advantages.tolist() == [-1.0, 1.0]


def test_the_critics_loss_is_added() -> None:
    values = torch.tensor([1.5, 0.0], requires_grad=True)
    before = Judged(*(torch.tensor([x, 0.0], dtype=torch.float64) for x in (1.4, 9.0, 3.0)))
    out = with_values(
        LossOutput(torch.tensor(10.0), {"kl": torch.tensor(1.0)}),
        CRITIC,
        values,
        before,
        torch.tensor([True, False]),
        4,
    )
    assert out.loss.item() == pytest.approx(10 + 0.1 * 1.5**2 / 2 / 4)
    assert torch.autograd.grad(out.loss, values)[0].tolist() == pytest.approx([-0.0375, 0.0])
    assert {"kl", "value_loss", "value_clip_fraction"} == set(out.metrics)


def episode(sibling: int, stop: StopReason, *rewards: float) -> Trajectory:
    return Trajectory(
        task_id="t",
        sibling=sibling,
        segments=(given([1, 2]), sampled([3, 4]), given([5]), sampled([6, 7, 8]), given([9])),
        turn_rewards=rewards,
        reward=None if stop is StopReason.ERROR else sum(rewards),
        success=False,
        stop=stop,
        turns=len(rewards),
    )


def test_rewards_stand_on_the_last_token_of_their_turn() -> None:
    group = Group(
        "t",
        (
            episode(0, StopReason.TERMINATED, 0.5, 1.0),
            episode(1, StopReason.TURN_LIMIT, 0.5, 1.0),
            episode(2, StopReason.CONTEXT_LIMIT, 0.5),
            episode(3, StopReason.ERROR, 0.5),
        ),
    )
    (samples,), stats = samples_of_groups([group], None)
    assert [s.id for s in samples] == [0, 1, 2]  # equal rewards too have something to teach
    assert stats.groups_without_variance == 0 and stats.without_reward == 1
    for sample, last in zip(samples, (1.0, 1.0, 0.0), strict=True):
        assert sample.rewards is not None
        assert sample.rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0, last]
        assert not sample.advantages.any()
    assert [s.terminated for s in samples] == [True, False, False]
    (share,) = shares(samples, 1, 100)
    (batch,) = share.micro_batches
    assert batch.rewards is not None and batch.terminated is not None
    assert batch.rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 1] * 2 + [0, 0, 0, 0.5, 0, 0, 0, 0]
    assert batch.terminated.tolist() == [True, False, False]
    assert samples_of_groups([Group("t", (episode(0, StopReason.ERROR),))], None)[0] == []


def test_rewards_beyond_the_sampled_turns_are_kept() -> None:
    trajectory = episode(0, StopReason.TERMINATED, 0.5, 1.0, 2.0)
    assert trajectory.rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 3.0, 0]
