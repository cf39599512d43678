"""Taking over published weights: complete, bit-exact and proven on a canary, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..configs.errors import RunFailed
from ..policy import Policy
from ..policy.weights import (
    Announcement,
    Bucket,
    PolicyVersion,
    Publication,
    WeightManifest,
    digests,
    policy_digest,
    read_bucket,
)


class SyncError(RunFailed):
    """A publication was refused; the message names the tensor, the old weights are in place."""


class Holder(Protocol):
    """What serves the weights of a policy, and can take others between two forward passes."""

    @property
    def rounds(self) -> bool:
        """Whether it computes in 16 bits: of a canary the mean counts then, no single token."""
        ...

    @property
    def manifest(self) -> WeightManifest:
        """The tensors that it takes, as publications name them."""
        ...

    def take(self, bucket: Bucket) -> Bucket:
        """A bucket that came, where its tensors are wanted: itself, or a copy."""
        ...

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        """What can be done about the next ``weights`` while those of before are still served."""
        ...

    def serving(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Serve ``weights``, which are all of the manifest and were prepared, from the block on; if
        it raises, those of before are served again, bit for bit."""
        ...

    def difference(self, publication: Publication) -> str | None:
        """What first sets what is being served apart from a publication whose tensors were given
        to `serving`, naming the tensor; None if nothing."""
        ...

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probs of tokens 1..n-1 of int64 [n] by what is being served, fp32 [n - 1]."""
        ...


class PolicyWeights:
    """`Holder` of a policy in this process: whoever has one of its tensors sees the change."""

    rounds = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def manifest(self) -> WeightManifest:
        return WeightManifest.of(self.policy.state_dict())

    def take(self, bucket: Bucket) -> Bucket:
        return bucket

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        pass

    @contextmanager
    def serving(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        live = self.policy.state_dict()
        old: dict[str, Tensor] = {}
        try:
            for name, tensor in weights.items():
                old[name] = live[name].clone()
                live[name].copy_(tensor)
            yield
        except BaseException:
            for name, tensor in old.items():
                live[name].copy_(tensor)
            raise

    def difference(self, publication: Publication) -> str | None:
        return difference(publication, self.policy.state_dict())

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        device = next(self.policy.parameters()).device
        ids = torch.as_tensor(np.array(token_ids, np.int64), device=device)
        out = self.policy(
            ids[None],
            rows=torch.arange(len(ids) - 1, device=device),
            targets=ids[1:],
            temperature=temperature,
        )
        return out.logprobs.float().cpu().numpy()


class WeightReceiver:
    """The rollout side of one policy: `begin`, `load` each bucket, `verify`, then `commit`.

    Buckets are shadow copies, so that generation continues with the old weights until `commit`,
    the only call that must not overlap a forward pass. Any step may raise `SyncError`; the holder
    then still serves, bit for bit, the weights it had before `begin`. ``seconds`` is what the last
    update took: "verify", "keep" (what a holder needs to go back), "swap", and in that "prove"
    (what is served against what was published) and "canary".
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.version: PolicyVersion | None = None  # None: as loaded from the checkpoint
        self.seconds: dict[str, float] = {}
        self._announced: Announcement | None = None
        self._verified: Publication | None = None
        self._shadow: dict[str, Tensor] = {}

    def begin(self, announced: Announcement) -> None:
        """Compare tensor names, shapes and dtypes with those that are served."""
        self._drop()
        difference = self._holder.manifest.difference(announced.manifest)
        if difference is not None:
            raise self._refuse(announced, difference)
        self._announced = announced

    def load(self, bucket: Bucket) -> None:
        """Take a bucket, whose memory is the receiver's until the end; order does not matter."""
        announced = self._begun()
        try:
            self._shadow |= read_bucket(announced.manifest, self._holder.take(bucket))
        except ValueError as error:
            raise self._refuse(announced, str(error)) from None

    def verify(self, publication: Publication) -> None:
        """Check that every tensor came, with the bytes that were published, and that thresholds are
        those the learner routes with; then prepare the holder."""
        announced, manifest = self._begun(), publication.manifest
        with self._timed("verify"):
            if publication.version.number != announced.number or manifest != announced.manifest:
                raise self._refuse(announced, "another version, or other tensors, than announced")
            if len(publication.digests) != len(manifest.specs):
                told = f"{len(publication.digests)} digests for {len(manifest.specs)} tensors"
                raise self._refuse(announced, told)
            for name in manifest.names:
                if name not in self._shadow:
                    raise self._refuse(announced, f"{name}: no bucket held it")
            if (reason := difference(publication, self._shadow)) is not None:
                raise self._refuse(announced, reason)
        with self._timed("keep"):
            self._holder.prepare(self._shadow)
        self._verified = publication

    def commit(self) -> PolicyVersion:
        """Swap the weights in, then check digests and the canary on what is now being served."""
        announced, publication, shadow = self._begun(), self._verified, self._shadow
        self._drop()
        if publication is None:
            raise self._refuse(announced, "it was not verified")
        with self._timed("swap"), self._holder.serving(shadow):
            with self._timed("prove"):
                reason = self._holder.difference(publication)
            if reason is None:
                with self._timed("canary"):
                    reason = self._canary(publication)
            if reason is not None:
                raise self._refuse(announced, reason)
        self.version = publication.version
        return publication.version

    def _drop(self) -> None:
        self._announced = self._verified = None
        self._shadow = {}

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began

    def _begun(self) -> Announcement:
        if self._announced is None:
            raise SyncError("weight sync: no publication has been accepted")
        return self._announced

    def _refuse(self, announced: Announcement, reason: str) -> SyncError:
        self._drop()
        return SyncError(f"weight sync of version {announced.number} refused: {reason}")

    def _canary(self, publication: Publication) -> str | None:
        found = self._holder.score(publication.canary_ids, publication.temperature)
        gap = np.abs(found - publication.canary_logprobs)
        worst = int(np.argmax(np.where(np.isfinite(gap), gap, np.inf))) if len(gap) else 0
        off = gap[worst] if len(gap) else 0.0
        if self._holder.rounds and len(gap):
            off = gap.mean()
        if off <= publication.tolerance:
            return None
        mean = f", all by {off:.2e} in the mean" if self._holder.rounds else ""
        return (
            f"canary token {worst + 1}: log-prob off by {gap[worst]:.2e}{mean}, more than "
            f"{publication.tolerance:.2e}"
        )


def difference(publication: Publication, tensors: Mapping[str, Tensor]) -> str | None:
    """What first sets ``tensors`` apart from those that were published, by digests; None if
    nothing."""
    names = publication.manifest.names
    found = dict(zip(names, digests([tensors[name] for name in names]), strict=True))
    for name, expected in zip(names, publication.digests, strict=True):
        own = found[name]
        if own != expected:
            return (
                f"{name}: its bytes are not those published (digest {own[:8]}, not {expected[:8]})"
            )
    for name, meant in publication.thresholds.digests:
        if found.get(name) != meant:
            return (
                f"{name}: not the threshold that the learner routes with, version "
                f"{publication.thresholds.number}"
            )
    if policy_digest(publication.manifest, found.values()) != publication.version.digest:
        return "the digest of the whole policy differs although that of each tensor agrees"
    return None
