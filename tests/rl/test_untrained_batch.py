"""A micro-batch in which no token is trained: it is read, and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import shares
from farhorizon.rl.learner import Learner
from farhorizon.rl.types import Sample

pytestmark = pytest.mark.usefixtures("only_rank")


def sample(number: int, length: int, trained: int) -> Sample:
    random = np.random.default_rng(number)
    mask = np.arange(length) >= length - trained
    logprobs = np.where(mask, -4.0, 0.0).astype(np.float32)
    advantages = np.where(mask, 1.5, 0.0).astype(np.float32)
    return Sample(number, random.integers(0, 64, length), mask, logprobs, advantages)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "k25"])
@pytest.mark.parametrize("minibatches", [1, 2])  # with a pass before the first step, and without
def test_it_learns_nothing(name: Any, minibatches: int) -> None:
    results = []
    for lengths in ([(9, 5)], [(9, 5), (7, 0)]):
        torch.manual_seed(0)
        policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=4))
        config = LearnerConfig(lr=1e-2, thresholds="freeze")
        learner = Learner(policy, config, temperature=1.0)
        samples = [sample(number, *sizes) for number, sizes in enumerate(lengths)]
        (share,) = shares(samples, 1, 1)  # a micro-batch each
        assert len(share.micro_batches) == len(samples) and share.denominator == 5
        algorithm = make_algorithm(AlgorithmConfig(name=name))
        found = learner.update([share] * minibatches, algorithm.loss, algorithm.decoupled)
        results.append((found, [t.clone() for _, t in learner.engine.gathered_state()]))
    (first, weights), (second, others) = results
    assert not second.skipped
    for key in ("loss", "grad_norm", "entropy"):
        assert second.metrics[key] == pytest.approx(first.metrics[key], rel=1e-6), key
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
