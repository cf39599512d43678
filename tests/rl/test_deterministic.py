"""learner.deterministic: torch adds up in one order during an update, and says what it cannot."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import deterministic

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import shares
from farhorizon.rl.deterministic import WORKSPACE, prepare, same_bits
from farhorizon.rl.learner import Learner
from farhorizon.rl.types import Sample

TINY = PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=4)
ON_GPU = LearnerConfig(deterministic=True, gpus=1.0, dtype="bfloat16")


def samples() -> list[Sample]:
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate((5, 9)):
        mask = np.arange(length) > 1
        logprobs = np.where(mask, -2.0, 0.0).astype(np.float32)
        advantages = np.where(mask, random.normal(), 0).astype(np.float32)
        ids = random.integers(0, 64, length)
        made.append(Sample(number, ids, mask, logprobs, advantages))
    return made


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_forward_and_backward_of_an_update_are(wanted: bool, checkpointing: Any) -> None:
    torch.manual_seed(0)
    policy = Policy(TINY)
    config = LearnerConfig(deterministic=wanted, checkpointing=checkpointing)
    learner = Learner(policy, config, temperature=1.0)
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    policy.lm_head.register_forward_pre_hook(look)
    hook = policy.model.embed_tokens.weight.register_hook(look)
    result = learner.update(shares(samples(), 1, 100), make_algorithm(AlgorithmConfig()).loss)
    hook.remove()
    assert seen == [wanted, wanted] and not result.skipped
    assert not torch.are_deterministic_algorithms_enabled()
    memory: Any = deterministic
    assert memory.fill_uninitialized_memory  # as it was


def test_what_torch_cannot_add_in_one_order_is_named() -> None:
    given, at, put = torch.zeros(4), torch.tensor([1, 1]), torch.ones(2)
    given.put_(at, put)
    with pytest.raises(RunFailed) as caught, same_bits(True):
        given.put_(at, put)
    assert str(caught.value) == (
        "learner.deterministic: put_ does not have a deterministic implementation; leave it out"
    )
    with pytest.raises(RuntimeError, match="size of tensor"), same_bits(True):
        torch.add(torch.zeros(2), torch.zeros(3))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_is_prepared_before_its_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    for config in (LearnerConfig(deterministic=True), LearnerConfig(gpus=1.0)):
        prepare(config)
        assert WORKSPACE not in os.environ
    prepare(ON_GPU)
    assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(UserError, match=r":4096:8 or :16:8 .* which has ':0:0'; unset it"):
        prepare(ON_GPU)
    with pytest.raises(UserError, match=r"needs learner\.dtype=bfloat16 on a GPU"):
        prepare(LearnerConfig(deterministic=True, gpus=1.0))
