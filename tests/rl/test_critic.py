"""Advantages and returns of a critic on packed tokens, by hand."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from farhorizon.configs.bounds import check_bounds
from farhorizon.configs.load import override_config
from farhorizon.configs.schema import AlgorithmConfig
from farhorizon.rl.algorithms import make_algorithm
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
        kinds=("", ""),
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


def test_a_reward_reaches_the_first_token_of_a_long_episode_by_default() -> None:
    """Whatever the critic says in between: a trace below 1 would leave the first of a thousand
    tokens with what values claim."""
    count = 1000
    ids = np.zeros(count, np.int64)
    rewards = np.zeros(count)
    rewards[-1] = 1
    batch = replace(
        packed(),
        input_ids=ids,
        cu_seqlens=np.array([0, count], np.int32),
        loss_mask=np.ones(count, np.bool_),
        behavior_logprobs=ids.astype(np.float32),
        advantages=ids.astype(np.float32),
        sequence_ids=ids,
        kinds=("",),
        rewards=rewards,
        terminated=np.array([True]),
    )
    critic = make_algorithm(AlgorithmConfig(name="ppo")).critic
    assert critic is not None
    values = torch.linspace(0.5, -0.5, count)
    got = judge(batch, values, torch.zeros(1), critic)
    assert torch.allclose(got.returns, torch.ones(count, dtype=torch.float64), atol=1e-6)
    assert got.advantages[0] == pytest.approx(0.5, abs=1e-6)


def test_what_is_added_to_rewards_is_judged_as_they_are() -> None:
    """The KL to a reference, taken off the reward of each token."""
    batch, last = packed(), torch.tensor([9.0, 8.0])
    values = torch.tensor([0.5, 1.0, 1.0, 2.0, 3.0])
    more = torch.tensor([-0.5, 0.25, -1.0, 0.0, -2.0], dtype=torch.float64)
    assert batch.rewards is not None
    rewards = batch.rewards.copy()
    rewards[batch.loss_mask] += more.numpy()
    got = judge(batch, values, last, CRITIC, more)
    want = judge(replace(batch, rewards=rewards), values, last, CRITIC)
    assert got.advantages.tolist() == pytest.approx(want.advantages.tolist())
    assert got.advantages[2].item() == 0.0  # 2 - 1 - 1, with nothing to come


def test_the_last_sequence_may_be_the_one_that_terminates() -> None:
    """The same two sequences in the other order have the same advantages."""
    one = packed()
    order = np.array([7, 8, 9, 0, 1, 2, 3, 4, 5, 6])
    assert one.rewards is not None and one.terminated is not None
    other = replace(
        one,
        cu_seqlens=np.array([0, 3, 10], np.int32),
        loss_mask=one.loss_mask[order],
        rewards=one.rewards[order],
        terminated=one.terminated[::-1].copy(),
    )
    values = torch.tensor([2.0, 3.0, 0.5, 1.0, 1.0])
    got = judge(other, values, torch.tensor([8.0, 9.0]), CRITIC)
    assert got.advantages.tolist() == [0.75, 5.0, 0.9375, -0.25, 1.0]


def whitened(*ranks: list[float]) -> list[list[float]]:
    """What each of these ranks gets, as threads that exchange their sums; [] has no tokens."""
    barrier = threading.Barrier(len(ranks))
    sent: list[torch.Tensor] = [torch.zeros(0)] * len(ranks)

    def one(rank: int) -> list[float]:
        def reduce(tensors: list[torch.Tensor], op: str = "sum") -> None:
            sent[rank] = tensors[0].clone()
            barrier.wait(10)
            both = torch.stack(sent)
            barrier.wait(10)
            tensors[0].copy_(both.sum(0) if op == "sum" else both.amax(0))

        given = torch.tensor(ranks[rank], dtype=torch.float64)
        mine = [Judged(given * 0 + 7, given, given + 7)] if ranks[rank] else []
        made = whiten_over_ranks(mine, reduce, torch.device("cpu"))
        for judged in made:
            assert judged.values.tolist() == [7.0] * len(given)
            assert judged.returns.tolist() == [x + 7 for x in ranks[rank]]
        return [x for judged in made for x in judged.advantages.tolist()]

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def test_whitening_pools_what_all_ranks_have() -> None:
    """C03: a rank without tokens takes part and changes nothing."""
    left, right = whitened([1.0, 3.0], [5.0, 7.0])
    assert left == pytest.approx([-3 / math.sqrt(5), -1 / math.sqrt(5)])
    assert right == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5)])
    assert whitened([1.0, 3.0], []) == [[-1.0, 1.0], []]
    assert whitened([], [-1.0, -3.0]) == [[], [1.0, -1.0]]
    assert whitened([0.3, 0.3], [0.1 + 0.2]) == [[0.0, 0.0], [0.0]]
    assert whitened([0.3], [0.5]) == [[pytest.approx(-1.0)], [pytest.approx(1.0)]]
    assert whitened([-2.0]) == [[0.0]]
    assert whitened([], []) == [[], []]


@pytest.mark.parametrize("padding", [2, 100])
def test_tokens_that_are_not_trained_are_no_part_of_whitening(padding: int) -> None:
    """C03: advantages 1 and 3 beside any number of others become -1 and 1."""
    mask = np.tile(np.arange(padding + 1) == 1, 2)
    batch = replace(
        packed(),
        cu_seqlens=np.array([0, padding + 1, 2 * padding + 2], np.int32),
        loss_mask=mask,
        rewards=np.where(mask, np.repeat([1.0, 3.0], padding + 1), 7.0),
    )
    one = judge(batch, torch.zeros(2), torch.zeros(2), replace(CRITIC, gamma=0.0))
    (white,) = whiten_over_ranks([one], lambda *_: None, torch.device("cpu"))
    assert one.advantages.tolist() == [1.0, 3.0] and white.advantages.tolist() == [-1.0, 1.0]


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
    assert {"kl", "value_error", "value_clip_fraction"} == set(out.metrics)


def test_a_value_clip_of_zero_leaves_the_plain_square() -> None:
    config = override_config(AlgorithmConfig(name="ppo"), ["value_clip=0"])
    check_bounds(config)
    values = torch.tensor([3.0], requires_grad=True)  # moved by 2 towards a return of 4
    before = Judged(*(torch.tensor([x], dtype=torch.float64) for x in (1.0, 3.0, 4.0)))
    for made, loss in ((config, 0.5), (AlgorithmConfig(name="ppo"), 0.5 * 2.8**2)):
        critic = make_algorithm(made).critic
        assert critic is not None
        none = LossOutput(torch.zeros(()), {})
        out = with_values(none, critic, values, before, torch.tensor([True]), 1)
        assert out.loss.item() == pytest.approx(0.1 * loss)
        assert float(out.metrics["value_error"]) == 0.5


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
    assert (stats.groups_without_variance, stats.groups_left_out, stats.without_reward) == (0, 0, 1)
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


def test_groups_for_a_critic_are_counted_by_their_rewards() -> None:
    """Equal ones have no variance and are learned from; failed ones have neither."""
    equal = tuple(episode(i, StopReason.TERMINATED, 0.5, 1.0) for i in range(2))
    failed = Group("u", (episode(0, StopReason.ERROR),))
    kept, stats = samples_of_groups([Group("t", equal), failed], None)
    assert [len(members) for members in kept] == [2]
    assert (stats.groups, stats.groups_without_variance, stats.groups_left_out) == (2, 1, 1)
    assert samples_of_groups([failed], None)[0] == []


def test_rewards_beyond_the_sampled_turns_are_kept() -> None:
    trajectory = episode(0, StopReason.TERMINATED, 0.5, 1.0, 2.0)
    assert trajectory.rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 3.0, 0]
