"""An engine in miniature whose tensors are fused, padded and derived from those it is given.

Its parts go wrong on demand, once each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from farhorizon.configs.errors import RunFailed
from farhorizon.policy.weights import (
    Bucket,
    PolicyVersion,
    Publication,
    ThresholdVersion,
    WeightManifest,
    pack,
    policy_digest,
)
from farhorizon.rollout.proof import Proof

WIDTH, VOCABULARY, EXPERTS, PADDING = 4, 12, 6, 2
BIAS = "gate.e_score_correction_bias"
SHAPES = {
    "embed.weight": (VOCABULARY, WIDTH),
    **{f"{name}_proj.weight": (WIDTH, WIDTH) for name in "qkv"},
    BIAS: (EXPERTS,),
    "lm_head.weight": (VOCABULARY, WIDTH),
}
IDS = np.arange(10) % VOCABULARY


def state(seed: int) -> dict[str, Tensor]:
    """Published tensors of a random policy."""
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}


def logits(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """What a policy of these weights says behind each of the ids."""
    x = weights["embed.weight"][ids]
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
    x = q * torch.sigmoid(k) + v + weights[BIAS].mean()
    return x @ weights["lm_head.weight"].T


def logprobs(weights: Mapping[str, Tensor], temperature: float) -> np.ndarray:
    """What a policy of these weights says of `IDS`."""
    ids = torch.from_numpy(IDS)
    found = (logits(weights, ids) / temperature).log_softmax(-1)
    return found[torch.arange(len(ids) - 1), ids[1:]].numpy()


def publish(weights: Mapping[str, Tensor], number: int, tolerance: float = 1e-4) -> Publication:
    """What a learner of these weights would publish, one tensor to a bucket."""
    manifest = WeightManifest.of(weights)
    tensors = ((name, weights[name]) for name in manifest.names)
    buckets, digests = pack(manifest, tensors, 1, lambda bucket: bucket)
    return Publication(
        PolicyVersion(number, policy_digest(manifest, digests)),
        manifest,
        tuple(buckets),
        digests,
        IDS,
        logprobs(weights, 0.7),
        0.7,
        tolerance,
        ThresholdVersion.of(number, weights),
    )


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.empty(EXPERTS), requires_grad=False)


class Model(nn.Module):
    """Serves ``fused`` with padding behind it, and ``turned``, which is made from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.fused = nn.Parameter(torch.empty(3 * WIDTH + PADDING, WIDTH), requires_grad=False)
        self.turned = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.gate = Gate()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.skipped: set[str] = set()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Layer by layer through new tensors, as engines do it that keep addresses."""
        fresh = torch.empty(self.fused.shape)
        for row, name in enumerate("qkv"):
            fresh[row * WIDTH : (row + 1) * WIDTH].copy_(weights[f"{name}_proj.weight"])
        self.fused.data.copy_(fresh)
        self.embed.weight.data.copy_(weights["embed.weight"])
        self.lm_head.weight.data.copy_(weights["lm_head.weight"])
        if "threshold" not in self.skipped:
            self.gate.e_score_correction_bias.data.copy_(weights[BIAS])
        if "derived" not in self.skipped:
            self.turned.data.copy_(self.fused[2 * WIDTH : 3 * WIDTH].T)

    def served(self) -> dict[str, Tensor]:
        """The policy that it computes, under published names."""
        q, k, _ = self.fused[: 3 * WIDTH].split(WIDTH)
        bias = self.gate.e_score_correction_bias
        parts = (self.embed.weight, q, k, self.turned.T, bias.float(), self.lm_head.weight)
        return {name: part.detach().clone() for name, part in zip(SHAPES, parts, strict=True)}


class FakeEngine:
    """`WeightEngine` of a `Model`; ``fault`` is what goes wrong in the next load."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.model = Model()
        self._proof = Proof(self.model)
        self.fault = ""
        self.model.load_weights(weights)

    def take(self, bucket: Bucket) -> Bucket:
        return bucket

    def load(self, weights: Mapping[str, Tensor]) -> None:
        fault, self.fault = self.fault, ""
        old = self.model.turned.clone()
        self.model.skipped = {fault}
        bias = self.model.gate.e_score_correction_bias
        if bias.dtype != torch.float32:
            self.model.gate.e_score_correction_bias = nn.Parameter(bias.float(), False)
        self._proof.load(lambda: self.model.load_weights(weights))
        with torch.no_grad():
            if fault == "stale":
                self.model.turned.copy_(old)
            elif fault == "swapped":
                rows = self.model.fused[: 2 * WIDTH].roll(WIDTH, 0)
                self.model.fused[: 2 * WIDTH] = rows
            elif fault == "rounded":
                bias = self.model.gate.e_score_correction_bias
                self.model.gate.e_score_correction_bias = nn.Parameter(bias.bfloat16(), False)
            elif fault == "broken":
                raise RunFailed("vllm: loading weights ran out of memory")

    def difference(self, weights: Mapping[str, Tensor]) -> str | None:
        return self._proof.difference(lambda: self.model.load_weights(weights))

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        return logprobs(self.model.served(), temperature)
