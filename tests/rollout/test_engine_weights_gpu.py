"""Weights that come on a GPU: kept on the host before they are served, to go back to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.policy.weights import Publication

from ..syncing import receive
from .fake_engine import publish, state
from .test_engine_weights import make

pytestmark = pytest.mark.gpu


def on_gpu(number: int) -> tuple[dict[str, torch.Tensor], Publication]:
    weights = state(number)
    publication = publish(weights, number)
    buckets = tuple(replace(b, payload=b.payload.cuda()) for b in publication.buckets)
    return weights, replace(publication, buckets=buckets)


def test_those_of_before_are_served_again(tmp_path: Path) -> None:
    engine, receiver = make(tmp_path)
    for number in (1, 2, 3):
        weights, publication = on_gpu(number)
        receive(receiver, publication, "in place")
        for fault in ("stale", "swapped"):
            engine.fault = fault
            with pytest.raises(RunFailed):
                receive(receiver, on_gpu(9)[1], "in place")
            served = engine.model.served()
            assert all(torch.equal(served[name], weights[name]) for name in weights)
    assert receiver.seconds["keep"] > 0
