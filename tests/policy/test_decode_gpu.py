"""Captured decode steps on the GPU: the bits of their kernels, beside forwards in fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farhorizon.launch.decode_measure import check_steps, contents, inputs, steps_of
from farhorizon.launch.parity import random_policy
from farhorizon.launch.plan import read_policy
from farhorizon.launch.step_measure import small_config
from farhorizon.policy import DecodeState, Policy
from farhorizon.policy.decode import lay_out, takes_steps

pytestmark = pytest.mark.gpu


@pytest.fixture
def policy() -> Policy:
    return random_policy(small_config(read_policy("1b")[0]), 0, "cuda")


def test_replays_equal_their_kernels_and_are_near_fp32(policy: Policy) -> None:
    assert takes_steps(policy)
    found = check_steps(policy, 0)
    assert 0 < found.steps < 0.01


@torch.inference_mode()
def test_a_sequence_draws_the_same_in_any_place(policy: Policy) -> None:
    """Three steps alone, and beside others in another row: the step's size is the same."""
    lay_out(policy)
    state = DecodeState.empty(policy.config, 8, "cuda", torch.bfloat16)
    state.reserve(64)
    for tensor in contents(state):
        tensor.normal_(0, 0.3)
        tensor[5] = tensor[2]
    graph = steps_of(policy, state).captured(4)
    found = []
    for places in ([2], [7, 1, 5, 0]):
        given = inputs([9] * len(places), places, [30] * len(places), 0)
        given.keys[:] = 77
        graph.give(given)
        found.append([graph.start().wait()[0].copy() for _ in range(3)])
    for alone, beside in zip(*found, strict=True):
        np.testing.assert_array_equal(alone[0], beside[2])


@torch.inference_mode()
def test_rows_without_a_place_and_those_that_are_over_stay(policy: Policy) -> None:
    state = DecodeState.empty(policy.config, 6, "cuda", torch.bfloat16)
    state.reserve(64)
    for tensor in contents(state):
        tensor.normal_(0, 0.3)
    graph = steps_of(policy, state).captured(3)
    given = inputs([1, 2, 3], [4, 0, 2], [10, 11, 12], 0)
    given.left[1] = 1
    graph.give(given)
    graph.start().wait()
    once = [tensor.clone() for tensor in contents(state)]
    graph.start().wait()
    for before, after in zip(once, contents(state), strict=True):
        same = [torch.equal(before[row], after[row]) for row in range(6)]
        assert same == [True, True, False, True, False, True]
