"""Memory that does not suffice: one line with the tensor, its size and a way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig
from farhorizon.policy import Policy, PolicyConfig, moe
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.learner import Learner
from farhorizon.rl.memory import enough_memory, ways_out
from farhorizon.rl.types import MicroBatch, Share

TEXT = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.20 GiB is free."
)


def full(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError(TEXT)


def share(*edges: int) -> Share:
    tokens = edges[-1]
    zeros = np.zeros(tokens, np.float32)
    batch = MicroBatch(
        input_ids=zeros.astype(np.int64),
        cu_seqlens=np.array(edges),
        loss_mask=zeros > 0,
        behavior_logprobs=zeros,
        advantages=zeros,
        sequence_ids=zeros.astype(np.int64),
        kinds=("",) * (len(edges) - 1),
    )
    return Share((batch,), 1, 1)


def test_the_module_the_line_and_the_size_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(PolicyConfig.tiny())
    monkeypatch.setattr(moe, "grouped_experts", full)
    with (
        pytest.raises(RunFailed) as caught,
        enough_memory(policy, [share(0, 5, 9)], LearnerConfig()),
    ):
        policy(torch.zeros(1, 9, dtype=torch.long))
    text = str(caught.value)
    assert text.startswith("learner: the GPU's memory does not suffice for 1.50 GiB in model")
    assert "block_sparse_moe (policy/moe.py, line" in text and "grouped_experts(" in text
    assert "set learner.checkpointing=layers" in text
    assert "lower learner.micro_batch_tokens: 9 tokens were computed at once" in text
    assert "\n" not in text


def test_before_anything_is_computed_no_tokens_are_named() -> None:
    policy = Policy(PolicyConfig.tiny())
    with (
        pytest.raises(RunFailed) as caught,
        enough_memory(policy, (), LearnerConfig(ranks=2)),
    ):
        full(None)
    text = str(caught.value)
    assert text.startswith("learner: the GPU's memory does not suffice for 1.50 GiB (")
    assert "tokens" not in text and "checkpointing" not in text
    assert "; raise learner.zero_stage above 0" in text


def test_what_is_set_already_is_no_way_out() -> None:
    config = LearnerConfig(checkpointing="layers", optimizer="muon", ranks=2, zero_stage=1)
    assert list(ways_out(70, False, config)) == [
        "lower context: one sequence has 70 tokens",
        "raise learner.zero_stage above 1",
    ]


@pytest.mark.usefixtures("only_rank")
def test_the_output_head_sees_trained_tokens_alone() -> None:
    """C26: 100 trained tokens of 400."""
    policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    rows: list[int] = []
    policy.lm_head.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    (whole,) = share(0, 150, 400).micro_batches
    mask = np.zeros(400, np.bool_)
    mask[30:80] = mask[350:] = True
    given = Share((replace(whole, loss_mask=mask),), 100, 2)
    learner = Learner(policy, LearnerConfig(), temperature=1.0)
    learner.update([given], make_algorithm(AlgorithmConfig()).loss)
    learner.evaluate(given)
    assert rows == [100, 100]


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, ["zero_stage", "expert_parallel", "optimizer"]),
        ({"expert_parallel": 2}, ["zero_stage", "expert_parallel", "optimizer"]),
        ({"expert_parallel": 4, "zero_stage": 2}, []),
        ({"expert_parallel": 2, "optimizer": "muon"}, ["expert_parallel"]),
        ({"optimizer": "muon", "zero_stage": 1}, ["zero_stage"]),
        ({"zero_stage": 3}, ["optimizer"]),
    ],
)
def test_experts_are_divided_where_that_goes(changes: dict[str, Any], ways: list[str]) -> None:
    config = LearnerConfig(checkpointing="layers", ranks=4, **changes)
    _, *told = ways_out(70, False, config, experts=8)
    assert [text.split("learner.")[1].split("=")[0].split()[0] for text in told] == ways
    odd = LearnerConfig(ranks=3)  # 8 experts are no thirds
    assert not any("expert_parallel" in text for text in ways_out(70, False, odd, experts=8))


def test_other_errors_pass() -> None:
    with (
        pytest.raises(KeyError),
        enough_memory(torch.nn.Identity(), [share(0, 2)], LearnerConfig()),
    ):
        raise KeyError("x")
