"""Taking over published weights: complete, bit-exact and proven on a canary, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..configs.errors import RunFailed
from ..policy import Policy
from ..policy.weights import (
    Bucket,
    PolicyVersion,
    Publication,
    WeightManifest,
    digest,
    digests,
    policy_digest,
    read_bucket,
)


class SyncError(RunFailed):
    """A publication was refused; the message names the tensor, the old weights are in place."""


class Holder(Protocol):
    """What serves the weights of a policy, and can take others between two forward passes."""

    @property
    def manifest(self) -> WeightManifest:
        """The tensors that it takes, as publications name them."""
        ...

    def serving(self, weights: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Serve ``weights``, which are all of the manifest, from the block on; if it raises, those
        of before are served again, bit for bit. The tensors are the holder's to write to."""
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

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def manifest(self) -> WeightManifest:
        return WeightManifest.of(self.policy.state_dict())

    @contextmanager
    def serving(self, weights: dict[str, Tensor]) -> Iterator[None]:
        self._exchange(weights)
        try:
            yield
        except BaseException:
            self._exchange(weights)
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

    @torch.no_grad()
    def _exchange(self, weights: dict[str, Tensor]) -> None:
        """Swap contents in place."""
        live = self.policy.state_dict()
        for name, tensor in weights.items():
            old = live[name].clone()
            live[name].copy_(tensor)
            weights[name] = old


class WeightReceiver:
    """The rollout side of one policy: `begin`, `load` each bucket, `verify`, then `commit`.

    Buckets go to shadow copies, so that generation continues with the old weights until `commit`,
    the only call that must not overlap a forward pass. Any step may raise `SyncError`; the holder
    then still serves, bit for bit, the weights it had before `begin`.
    """

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.version: PolicyVersion | None = None  # None: as loaded from the checkpoint
        self._publication: Publication | None = None
        self._shadow: dict[str, Tensor] = {}

    def begin(self, publication: Publication) -> None:
        """Compare tensor names, shapes and dtypes; the publication's buckets are not looked at."""
        self._publication, self._shadow = None, {}
        manifest = publication.manifest
        difference = self._holder.manifest.difference(manifest)
        if difference is not None:
            raise self._refuse(publication, difference)
        if len(publication.digests) != len(manifest.specs):
            raise self._refuse(
                publication, f"{len(publication.digests)} digests for {len(manifest.specs)} tensors"
            )
        self._publication = publication

    def load(self, bucket: Bucket) -> None:
        """Copy a bucket's tensors; order does not matter."""
        publication = self._begun()
        try:
            for spec, tensor in read_bucket(publication.manifest, bucket):
                self._shadow[spec.name] = tensor
        except ValueError as error:
            raise self._refuse(publication, str(error)) from None

    def verify(self) -> None:
        """Check that every tensor came, with the bytes that were published, and that thresholds are
        those the learner routes with."""
        publication = self._begun()
        for name in publication.manifest.names:
            if name not in self._shadow:
                raise self._refuse(publication, f"{name}: no bucket held it")
        if (reason := difference(publication, self._shadow)) is not None:
            raise self._refuse(publication, reason)

    def commit(self) -> PolicyVersion:
        """Swap the weights in, then check digests and the canary on what is now being served."""
        publication, shadow = self._begun(), self._shadow
        self._publication, self._shadow = None, {}
        with self._holder.serving(shadow):
            reason = self._holder.difference(publication) or self._canary(publication)
            if reason is not None:
                raise self._refuse(publication, reason)
        self.version = publication.version
        return publication.version

    def _begun(self) -> Publication:
        if self._publication is None:
            raise SyncError("weight sync: no publication has been accepted")
        return self._publication

    def _refuse(self, publication: Publication, reason: str) -> SyncError:
        self._publication = None
        return SyncError(f"weight sync of version {publication.version.number} refused: {reason}")

    def _canary(self, publication: Publication) -> str | None:
        found = self._holder.score(publication.canary_ids, publication.temperature)
        gap = np.abs(found - publication.canary_logprobs)
        worst = int(np.argmax(np.where(np.isfinite(gap), gap, np.inf))) if len(gap) else 0
        if len(gap) == 0 or gap[worst] <= publication.tolerance:
            return None
        return (
            f"canary token {worst + 1}: log-prob off by {gap[worst]:.2e}, more than "
            f"{publication.tolerance:.2e}"
        )


def difference(publication: Publication, tensors: Mapping[str, Tensor]) -> str | None:
    """What first sets ``tensors`` apart from those that were published, by digests; None if
    nothing."""
    names = publication.manifest.names
    found = digests([tensors[name] for name in names])
    for name, own, expected in zip(names, found, publication.digests, strict=True):
        if own != expected:
            return (
                f"{name}: its bytes are not those published (digest {own[:8]}, not {expected[:8]})"
            )
    for name, meant in publication.thresholds.digests:
        if name not in tensors or digest(tensors[name]) != meant:
            return (
                f"{name}: not the threshold that the learner routes with, version "
                f"{publication.thresholds.number}"
            )
    if policy_digest(publication.manifest, found) != publication.version.digest:
        return "the digest of the whole policy differs although that of each tensor agrees"
    return None
