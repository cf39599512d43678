"""A policy in bfloat16 that takes weights in fp32: rounded once, proven, or left alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from farhorizon.configs.schema import ChatConfig, RolloutConfig
from farhorizon.policy import Policy
from farhorizon.policy.weights import Publication, digest
from farhorizon.rollout.engines import build
from farhorizon.rollout.narrow import NarrowWeights
from farhorizon.rollout.sync import PolicyWeights, SyncError, WeightReceiver

from ..fakes import publish
from ..syncing import TRANSPORTS, receive
from .test_sync import KINDS, QUERY, THRESHOLD, make

GATES = ("A_log", "dt_bias", "conv1d.weight")
WIDE = (THRESHOLD, *(kind for kind in KINDS if kind.endswith(GATES)))


def narrow(seed: int) -> Policy:
    return make(seed).bfloat16()


def published(policy: Policy, number: int) -> Publication:
    return replace(publish(policy, number), tolerance=0.5)


def digests(policy: Policy) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in policy.state_dict().items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_rounded_once_and_some_not_at_all(transport: str) -> None:
    learner, rollout = make(1), narrow(0)
    receiver = WeightReceiver(NarrowWeights(rollout))
    receive(receiver, published(learner, 3), transport)
    exact = learner.state_dict()
    for name, tensor in rollout.state_dict().items():
        assert torch.equal(tensor, exact[name].to(tensor.dtype)), name
    assert rollout.get_parameter(QUERY).dtype == torch.bfloat16
    assert all(rollout.state_dict()[name].dtype == torch.float32 for name in WIDE)
    assert receiver.version is not None and receiver.version.number == 3


class Faulty(NarrowWeights):
    """Does something to what is served before it is proven."""

    def __init__(self, policy: Policy, name: str, fault: str) -> None:
        super().__init__(policy)
        self.name, self.fault = name, fault

    @contextmanager
    def serving(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        live = self.policy.state_dict()[self.name]
        stale = live.clone()
        with super().serving(weights):
            if self.fault == "stale":
                live.copy_(stale)
            elif self.fault == "cut":  # towards zero, as bits that are dropped
                bits = weights[self.name].view(torch.int32) & -65536
                live.copy_(bits.view(torch.float32))
            else:
                live.copy_(live.bfloat16())
            yield


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (QUERY, "stale"),
        ("lm_head.weight", "cut"),
        (THRESHOLD, "stale"),
        (THRESHOLD, "rounded"),
        ("model.layers.1.self_attn.A_log", "rounded"),
    ],
)
def test_what_is_served_otherwise_is_named_and_taken_back(name: str, fault: str) -> None:
    rollout = narrow(0)
    before = digests(rollout)
    with pytest.raises(SyncError, match=f"version 5 refused: {name}: what is served is not"):
        receive(WeightReceiver(Faulty(rollout, name, fault)), published(make(1), 5))
    assert digests(rollout) == before
    receiver = WeightReceiver(NarrowWeights(rollout))
    receive(receiver, published(make(1), 6))
    assert digests(rollout) != before


def test_thresholds_are_those_that_the_learner_routes_with() -> None:
    rollout, learner = narrow(0), make(1)
    before, publication = digests(rollout), published(learner, 5)
    meant = replace(publication.thresholds, digests=((THRESHOLD, "0" * 32),))
    with pytest.raises(SyncError, match=THRESHOLD):
        receive(WeightReceiver(NarrowWeights(rollout)), replace(publication, thresholds=meant))
    assert digests(rollout) == before


def test_a_wide_policy_does_not_round(tmp_path: Path) -> None:
    """And one in bfloat16 is not compared as if it were wide."""
    learner = make(1)
    with pytest.raises(SyncError, match=r"bfloat16 .* here, float32 .* there"):
        receive(WeightReceiver(PolicyWeights(narrow(0))), published(learner, 2))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RolloutConfig(), torch.float32),
        (RolloutConfig(dtype="bfloat16"), torch.bfloat16),
        (RolloutConfig(dtype="float32"), torch.float32),
    ],
)
def test_the_setting_decides(
    tiny_checkpoint: Path, settings: RolloutConfig, expected: torch.dtype
) -> None:
    built = build(str(tiny_checkpoint), settings, 64, 0, ChatConfig())
    holder = built.holder
    assert isinstance(holder, PolicyWeights)
    assert isinstance(holder, NarrowWeights) == (expected == torch.bfloat16)
    assert holder.policy.lm_head.weight.dtype == expected
    assert {spec.dtype for spec in holder.manifest.specs} == {"float32"}


@pytest.mark.parametrize(("first", "others", "taken"), [(4.0, 0.2, True), (0.7, 0.7, False)])
def test_rounding_may_move_single_tokens_but_not_all(
    first: float, others: float, taken: bool
) -> None:
    """Random ids are what a trained policy never sees: there two forwards differ."""
    publication = published(make(1), 5)
    gaps = np.full_like(publication.canary_logprobs, others)
    gaps[0] = first
    shifted = replace(publication, canary_logprobs=publication.canary_logprobs + gaps)
    receiver = WeightReceiver(NarrowWeights(narrow(0)))
    if taken:
        receive(receiver, shifted)
        return
    with pytest.raises(SyncError, match=r"5 refused: canary token \d+: .* in the mean, more than"):
        receive(receiver, shifted)
