"""Which mean the loss is, on sequences of known lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.rl.aggregation import token_weights
from farhorizon.rl.batch import shares
from farhorizon.rl.losses import reinforce
from farhorizon.rl.objective import Objective
from farhorizon.rl.types import Sample

# Three sequences with 1, 2 and 5 trained tokens of loss 6, 3 and 1.
LENGTHS, LOSSES = {4: 1, 2: 2, 8: 5}, {4: 6.0, 2: 3.0, 8: 1.0}
WANT = {
    "token": (6 + 2 * 3 + 5) / 8,
    "sequence": (6 + 3 + 1) / 3,
    "constant": (6 + 2 * 3 + 5) / 3 / 10,
}


def loss(aggregation: Any, ids: Sequence[int], **kwargs: Any) -> float:
    """Of these sequences' share; a masked NaN stands behind each."""
    advantages, mask, names = [], [], []
    for name in ids:
        advantages += [LOSSES[name]] * LENGTHS[name] + [math.nan]
        mask += [True] * LENGTHS[name] + [False]
        names += [name] * (LENGTHS[name] + 1)
    ones = torch.full((len(mask),), -1.0, dtype=torch.float64)
    objective = Objective(reinforce, aggregation=aggregation, length=10)
    return objective(
        ones,
        ones,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask),
        sequence_ids=torch.tensor(names),
        denominator=8,
        **kwargs,
    ).loss.item()


@pytest.mark.parametrize("aggregation", WANT)
def test_means_by_hand_under_any_split(aggregation: Any) -> None:
    want = WANT[aggregation]
    assert loss(aggregation, [4, 2, 8]) == pytest.approx(want, rel=1e-12)
    for split in ([[4], [2], [8]], [[8, 4], [2]], [[2, 8], [4]]):
        got = sum(loss(aggregation, ids, sequences=3) for ids in split)
        assert got == pytest.approx(want, rel=1e-12), split


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_weights_of_masked_tokens_alone_are_finite(aggregation: Any) -> None:
    weights = token_weights(
        torch.tensor([False, False]),
        torch.tensor([-1, -1]),
        aggregation=aggregation,
        tokens=8,
        sequences=3,
        length=10,
    )
    assert weights is not None and weights.isfinite().all()


def test_micro_batches_and_ranks_divide_by_the_tokens_of_all() -> None:
    """C02: two tokens of loss 1, six of loss 0, a sequence per micro-batch; 0.5 is the fault."""
    samples = []
    for number, (trained, advantage) in enumerate(((2, 1.0), (6, 0.0))):
        mask = np.arange(trained + 1) > 0
        ids, logprobs = np.zeros(trained + 1, np.int64), np.full(trained + 1, -1.0, np.float32)
        samples.append(Sample(number, ids, mask, logprobs, np.where(mask, advantage, 0)))
    for ranks in (1, 2, 3):
        total = 0.0
        for share in shares(samples, ranks, 1):
            for batch in share.micro_batches:
                logprobs = torch.tensor(batch.behavior_logprobs)
                total += Objective(reinforce)(
                    logprobs,
                    logprobs,
                    torch.tensor(batch.advantages, dtype=torch.float32),
                    torch.tensor(batch.loss_mask),
                    sequence_ids=torch.tensor(batch.sequence_ids),
                    denominator=share.denominator,
                    sequences=share.sequences,
                ).loss.item()
        assert total == 0.25, ranks
