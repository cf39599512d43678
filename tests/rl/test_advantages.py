"""Advantages on numbers one can check by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from farhorizon.rl.advantages import (
    batch_normalised,
    distillation,
    gae,
    group_relative,
)


def _advantages(rewards: list[float], groups: list[int], **kwargs: str) -> list[float]:
    return group_relative(torch.tensor(rewards), torch.tensor(groups), **kwargs).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.35, 0.7, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(reward: float, baseline: str, dtype: torch.dtype) -> None:
    """C01 (a)."""
    for n in range(1, 17):
        rewards = torch.full((n,), reward, dtype=dtype)
        got = group_relative(rewards, torch.zeros(n, dtype=torch.int64), baseline=baseline)  # type: ignore[arg-type]
        assert got.dtype == torch.float32 and got.tolist() == [0.0] * n


def test_last_bit_of_a_sum_is_not_an_advantage() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert group_relative(rewards, torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
    cancelled = torch.tensor([0.1 + 0.2 - 0.3, -0.3 + 0.2 + 0.1, 0.0], dtype=torch.float64)
    assert cancelled.any()
    assert group_relative(cancelled, torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("unit", [5e-7, 1e-3, 1.0, 1e6])
def test_the_unit_of_rewards_does_not_matter(unit: float) -> None:
    assert _advantages([0.0, unit], [0, 0]) == pytest.approx([-1.0, 1.0])
    assert _advantages([unit, unit * (1 + 1e-5)], [0, 0]) == pytest.approx([-1.0, 1.0])
    assert _advantages([unit] * 2, [0, 0]) == [0.0, 0.0]


@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_rewards_closer_than_fp32_tells_apart_are_equal(unit: float) -> None:
    """Four steps of fp32 by the largest; and 1e-12 where terms of order one cancel."""
    zeros = torch.zeros(2, dtype=torch.int64)
    for given, least in ((unit, unit * 2**-21), (0.0, 1e-12)):
        for part, want in ((0.995, [0.0, 0.0]), (1.005, [-1.0, 1.0])):
            rewards = torch.tensor([given, given + least * part], dtype=torch.float64)
            assert group_relative(rewards, zeros).tolist() == pytest.approx(want)


def test_a_small_spread_of_large_rewards_is_a_spread() -> None:
    rewards = torch.tensor([1e6, 1e6 + 0.5, 1e6 + 1], dtype=torch.float64)
    got = group_relative(rewards, torch.zeros(3, dtype=torch.int64)).tolist()
    assert got == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)], rel=1e-6)
    assert batch_normalised(rewards, torch.arange(3)).tolist() == pytest.approx(got)


def test_population_deviation() -> None:
    """C01 (b)."""
    got = _advantages([0.35] * 7 + [0.95], [0] * 8)
    assert got == pytest.approx([-0.37796] * 7 + [2.64575], abs=1e-5)
    got = _advantages([0.35] * 7 + [0.95], [0] * 8, scale="none")
    assert got == pytest.approx([-0.075] * 7 + [0.525], abs=1e-6)


def test_leave_one_out_takes_mean_and_deviation_of_the_others() -> None:
    """C01 (c)."""
    got = _advantages([0.35] * 7 + [0.95], [0] * 8, baseline="leave_one_out")
    assert got[7] == pytest.approx(0.6, abs=1e-6)  # its peers have no spread: not divided
    # a peer of the other seven: mean 0.35 + 0.6 / 7, deviation 0.6 * sqrt(6) / 7
    assert got[0] == pytest.approx(-(0.6 / 7) / (0.6 * math.sqrt(6) / 7), abs=1e-5)
    got = _advantages([1.0, 0.0, 0.0], [0] * 3, baseline="leave_one_out", scale="none")
    assert got == pytest.approx([1.0, -0.5, -0.5])


def test_groups_are_formed_by_id_not_by_position() -> None:
    rewards = [1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    groups = [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    want = [0.0] * 4 + [-0.70711, -0.70711, 1.41421] + [0.0] * 4
    got = _advantages([float(r) for r in rewards], groups)
    assert got == pytest.approx(want, abs=1e-5)
    assert got[:4] == [0.0] * 4 and got[7:] == [0.0] * 4
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    shuffled = group_relative(torch.tensor(rewards)[order], torch.tensor(groups)[order])
    assert torch.equal(shuffled, torch.tensor(got)[order])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_leaves_its_group(bad: float) -> None:
    """C22."""
    got = _advantages([1.0, bad, 0.0, 1.0], [0] * 4)
    assert got == pytest.approx([0.70711, 0.0, -1.41421, 0.70711], abs=1e-5)
    assert got[1] == 0.0
    assert _advantages([bad] * 4, [0] * 4) == [0.0] * 4
    assert _advantages([bad, 1.0], [0, 0]) == [0.0, 0.0]


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5; one episode of two steps that terminates, one that is cut off
    got = gae(
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([0.5, 1.0, 2.0, 3.0]),
        torch.tensor([False, True, False, False]),
        torch.tensor([False, False, False, True]),
        torch.tensor([9.0, 9.0, 9.0, 8.0]),
        0.5,
        0.5,
    )
    # t1: 2 - 1 = 1; t0: 1 + 0.5 * 1 - 0.5 + 0.25 * 1 = 1.25
    # t3: 4 + 0.5 * 8 - 3 = 5; t2: 3 + 0.5 * 3 - 2 + 0.25 * 5 = 3.75
    assert got.tolist() == [1.25, 1.0, 3.75, 5.0]


def test_gae_bootstraps_an_unfinished_end() -> None:
    no = torch.tensor([False])
    got = gae(torch.tensor([1.0]), torch.tensor([2.0]), no, no, torch.tensor([4.0]), 0.5, 0.9)
    assert got.tolist() == [1.0]


def test_gae_of_one_token_episodes_and_of_an_end_that_is_both() -> None:
    """A termination wins over a truncation; nothing leaks into the episode before."""
    got = gae(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([0.5, 0.5, 0.5]),
        torch.tensor([True, True, False]),
        torch.tensor([False, True, True]),
        torch.tensor([8.0, 8.0, 8.0]),
        0.5,
        0.5,
    )
    assert got.tolist() == [0.5, 1.5, 6.5]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.0), (0.97, 0.8)])
def test_gae_is_the_sum_of_its_definition(gamma: float, lam: float) -> None:
    random = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, generator=random, dtype=torch.float64)
    ends = torch.tensor([False] * 5 + [True])
    none = torch.zeros(6, dtype=torch.bool)
    for terminated, following in ((ends, 0.0), (none, 4.0)):
        got = gae(
            rewards, values, terminated, ends & ~terminated, torch.full((6,), 4.0), gamma, lam
        )
        after = [*values[1:].tolist(), following]
        deltas = [float(rewards[t]) + gamma * after[t] - float(values[t]) for t in range(6)]
        want = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 6)) for t in range(6)]
        assert got.tolist() == pytest.approx(want, rel=1e-5)


def test_normalisation_over_the_batch() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0, 7.0])
    groups = torch.tensor([0, 0, 1, 1])
    got = batch_normalised(rewards, groups).tolist()  # mean 4, deviation sqrt(5)
    assert got == pytest.approx([v / math.sqrt(5) for v in (-3, -1, 1, 3)])
    got = batch_normalised(rewards, groups, baseline="mean").tolist()
    assert got == [-1.0, 1.0, -1.0, 1.0]
    uneven = batch_normalised(torch.tensor([0.0, 1.0, 0.0, 3.0]), groups, baseline="mean").tolist()
    assert uneven == pytest.approx([v / math.sqrt(1.25) for v in (-0.5, 0.5, -1.5, 1.5)])


@pytest.mark.parametrize("baseline", ["none", "mean"])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.35, 0.7, -1.0])
def test_a_batch_of_equal_rewards_gives_exactly_zero(reward: float, baseline: str) -> None:
    for n in range(1, 17):
        groups = torch.arange(n) % 3
        got = batch_normalised(torch.full((n,), reward), groups, baseline=baseline)  # type: ignore[arg-type]
        assert got.dtype == torch.float32 and got.tolist() == [0.0] * n


def test_groups_of_equal_rewards_differ_in_the_batch_but_not_from_their_mean() -> None:
    rewards, groups = torch.tensor([0.7] * 7 + [0.2] * 7), torch.arange(14) // 7
    assert batch_normalised(rewards, groups).tolist() == pytest.approx([1.0] * 7 + [-1.0] * 7)
    assert batch_normalised(rewards, groups, baseline="mean").tolist() == [0.0] * 14


@pytest.mark.parametrize("baseline", ["none", "mean"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200, -1e308])
def test_a_reward_that_is_none_leaves_the_batch(bad: float, baseline: Any) -> None:
    rewards = torch.tensor([1.0, bad, 0.0, 1.0], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    got = batch_normalised(rewards, groups, baseline=baseline).tolist()
    assert got == pytest.approx([0.70711, 0.0, -1.41421, 0.70711], abs=1e-5) and got[1] == 0.0
    nothing = torch.full((3,), bad, dtype=torch.float64)
    assert batch_normalised(nothing, groups[:3], baseline=baseline).tolist() == [0.0] * 3


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("huge", [1.1e15, 1e39, 1e200, -1e308])
def test_a_reward_beyond_all_bounds_leaves_its_group(
    huge: float, scale: Any, baseline: Any
) -> None:
    """Its square, or the sum of two, would be no number."""
    rewards = torch.tensor([1.0, huge, 0.0, huge, 3.0], dtype=torch.float64)
    groups = torch.zeros(5, dtype=torch.int64)
    own = torch.tensor([0, 2, 4])
    got = group_relative(rewards, groups, scale=scale, baseline=baseline)
    want = group_relative(rewards[own], groups[own], scale=scale, baseline=baseline)
    assert got[own].tolist() == want.tolist() and got[[1, 3]].tolist() == [0.0, 0.0]
    largest = group_relative(torch.tensor([1e15, -1e15, 0.0]), groups[:3], scale=scale)
    assert largest.isfinite().all() and largest[0] > 0 > largest[1]


def test_advantages_have_no_gradient() -> None:
    rewards, groups = torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([0, 0])
    end = torch.tensor([False, True])
    for made in (
        group_relative(rewards, groups),
        batch_normalised(rewards, groups),
        gae(rewards, rewards, end, ~end, rewards, 1.0, 1.0),
    ):
        assert not made.requires_grad


def test_a_teachers_advantage_is_bounded() -> None:
    policy = torch.tensor([-1.0, -2.0, -9.0, -1.0, math.nan], requires_grad=True)
    teacher = torch.tensor([-1.5, -1.0, -1.0, -math.inf, -1.0])
    mask = torch.tensor([True] * 4 + [False])
    got = distillation(policy, teacher, mask, bound=2.0)
    assert got.tolist() == [-0.5, 1.0, 2.0, -2.0, 0.0] and not got.requires_grad


def test_what_the_policy_never_gives_no_teacher_praises() -> None:
    never, yes = torch.tensor([-math.inf]), torch.tensor([True])
    for teacher in (never, torch.tensor([-1.0])):
        assert distillation(never, teacher, yes, bound=2.0).tolist() == [0.0]


def test_gae_without_steps() -> None:
    none, no = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert gae(none, none, no, no, none, 1.0, 1.0).tolist() == []
