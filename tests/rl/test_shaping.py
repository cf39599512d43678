"""Rewards by length, on numbers one can check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from farhorizon.rl.shaping import budgeted, length_reward, overlong


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


def test_length_reward_within_a_group() -> None:
    lengths = torch.tensor([10, 20, 30, 10, 30, 7, 5, 5])
    correct = torch.tensor([True, True, True, False, False, True, True, False])
    groups = torch.tensor([2, 2, 2, 2, 2, 3, 4, 4])
    got = length_reward(lengths, correct, groups).tolist()
    assert got == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
