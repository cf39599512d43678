"""Published weights in a policy of 16 bits: rounded once, when they are served, and proven so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..policy import Policy
from ..policy.weights import Publication, ThresholdVersion, WeightManifest
from .proof import WORDS
from .sync import PolicyWeights


class NarrowWeights(PolicyWeights):
    """`Holder` of a policy in bfloat16 that takes publications in fp32: to nearest, ties to even.

    Thresholds, and the gates and convolutions that are fp32 in it as well, keep every bit.
    """

    rounds = True

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._next: Mapping[str, Tensor] = {}  # rounded, where the policy is

    @property
    def manifest(self) -> WeightManifest:
        wide = (
            replace(spec, dtype="float32") if spec.dtype == "bfloat16" else spec
            for spec in super().manifest.specs
        )
        return WeightManifest(tuple(wide))

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        live = self.policy.state_dict()
        self._next = {name: tensor.to(live[name]) for name, tensor in weights.items()}

    @contextmanager
    def serving(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        try:
            with super().serving(self._next):
                yield
        finally:
            self._next = {}

    def difference(self, publication: Publication) -> str | None:
        live = self.policy.state_dict()
        names = publication.manifest.names
        wrong = torch.stack([_differ(live[name], self._next[name]) for name in names])
        for name, differs in zip(names, wrong.tolist(), strict=True):
            if differs:
                kind = str(live[name].dtype).removeprefix("torch.")
                return f"{name}: what is served is not what was published, as {kind}"
        meant = publication.thresholds
        own = dict(ThresholdVersion.of(meant.number, live).digests)
        for name, digest in meant.digests:
            if own.get(name) != digest:
                return f"{name}: not what the learner routes with, version {meant.number}"
        return None


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether any bit of two tensors of one shape and dtype does, a bool on their device."""
    bits = WORDS[one.element_size()]
    return (one.reshape(-1).view(bits) != other.reshape(-1).view(bits)).any()
