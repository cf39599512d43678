"""Rewards by length, on numbers one can check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from farhorizon.rl.shaping import Shaping, budgeted, length_reward, overlong


def test_overlong_punishment_grows_over_the_buffer() -> None:
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 10**9])
    got = overlong(lengths, limit=100, buffer=20).tolist()
    assert got == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])


def test_above_its_budget_a_reward_is_minus_one() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.5, -3.0, math.nan])
    lengths = torch.tensor([10, 11, 5, 99, 99])
    budgets = torch.tensor([10.0, 10.0, 10.0, 10.0, 10.0])
    got = budgeted(rewards, lengths, budgets=budgets)
    assert got[:4].tolist() == [1.0, -1.0, 0.5, -1.0] and math.isnan(got[4])


def test_a_budget_is_the_tasks_own_times_the_effort_of_its_kind() -> None:
    shape = Shaping(budget=100, efforts={"low": 0.5, "max": 3.0})
    own, kinds = [None, 40, 40, None, 7], ["", "low", "max", "low", "other"]
    assert shape.budgets(own, kinds).tolist() == [100.0, 20.0, 120.0, 50.0, 7.0]
    unlimited = Shaping(efforts={"low": 0.5}).budgets([None, 9], ["low", "low"])
    assert unlimited.tolist() == [math.inf, 4.5]


def test_what_can_change_a_reward() -> None:
    none, one = torch.full((2,), math.inf), torch.tensor([math.inf, 5.0])
    assert not Shaping().acts(none) and not Shaping(efforts={"low": 2.0}).acts(none)
    assert Shaping().acts(one) and Shaping(limit=5).acts(none) and Shaping(-0.1).acts(none)


def test_one_token_more_is_longer() -> None:
    lengths, yes = torch.tensor([4, 3]), torch.ones(2, dtype=torch.bool)
    assert length_reward(lengths, yes, torch.zeros(2), yes).tolist() == [-0.5, 0.5]


def test_length_reward_within_a_group() -> None:
    lengths = torch.tensor([10, 20, 30, 10, 30, 7, 5, 5])
    correct = torch.tensor([True, True, True, False, False, True, True, False])
    groups = torch.tensor([2, 2, 2, 2, 2, 3, 4, 4])
    got = length_reward(lengths, correct, groups, groups > 0).tolist()
    assert got == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.0, 0.0]


def test_a_budget_has_the_last_word() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, math.nan])
    lengths = torch.tensor([10, 18, 20, 31, 99])
    correct = torch.tensor([True, True, False, True, False])
    groups = torch.tensor([0, 0, 0, 1, 2])
    shape = Shaping(length_reward=0.2, limit=20, buffer=10, budget=30)
    got = shape(rewards, lengths, correct, groups, shape.budgets([None] * 5, [""] * 5)).tolist()
    # 0.5, -0.3 and -0.5 of the length; 0, -0.8, -1 and -1 of what is overlong; -1 above 30
    assert got[:4] == pytest.approx([1.1, 1 - 0.06 - 0.8, -0.1 - 1.0, -1.0])
    assert math.isnan(got[4])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_failed_sibling_changes_no_reward_of_the_others(bad: float) -> None:
    """Whether it is the shortest, the longest, or in between."""

    def shaped(rewards: list[float], lengths: list[int]) -> list[float]:
        count = len(rewards)
        given = torch.tensor(rewards), torch.tensor(lengths)
        same = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
        shape = Shaping(length_reward=1.0, limit=1000, buffer=10)
        return shape(*given, *same, shape.budgets([500] * count, [""] * count)).tolist()

    for length in (3, 15, 99):
        got = shaped([bad, 1.0, 1.0], [length, 10, 20])
        assert got[1:] == shaped([1.0, 1.0], [10, 20]) == [1.5, 0.5]
        assert not math.isfinite(got[0])
    assert shaped([bad, 1.0], [3, 10])[1] == 1.0  # alone it is neither short nor long
