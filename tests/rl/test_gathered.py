"""Weights on their way out of an engine."""

from __future__ import annotations

import pytest
import torch

from farhorizon.configs.schema import LearnerConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.weights import digest, pack, read_bucket
from farhorizon.rl import engine
from farhorizon.rl.learner import Learner

pytestmark = pytest.mark.usefixtures("only_rank")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_tensor_that_is_held_keeps_its_numbers(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket holds tensors of several gathers, each of which ZeRO 3 ends with the next."""
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    expected = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    config = LearnerConfig(zero_stage=stage)  # type: ignore[arg-type]
    own = Learner(policy, config, temperature=1.0).engine
    monkeypatch.setattr(engine, "GATHER_BYTES", 1)
    held = dict(own.gathered_state())
    assert len([digest(tensor) for _, tensor in own.gathered_state()]) == len(expected)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    (bucket,), found = pack(own.manifest, own.gathered_state(), 1 << 30, lambda one: one)
    assert list(found) == [digest(expected[name]) for name in own.manifest.names]
    packed = read_bucket(own.manifest, bucket)
    assert all(torch.equal(packed[name], expected[name]) for name in expected)
