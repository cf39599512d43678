"""Taking over published weights: complete, bit-exact and proven on a canary, or not at all."""

from __future__ import annotations

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
    policy_digest,
    read_bucket,
)


class SyncError(RunFailed):
    """A publication was refused; the message names the tensor, the old weights are in place."""


class WeightReceiver:
    """The rollout side of one policy: `begin`, `load` each bucket, `verify`, then `commit`.

    Buckets go to shadow copies, so that generation continues with the old weights until `commit`,
    the only call that must not overlap a forward pass. Any step may raise `SyncError`; the policy
    then still has, bit for bit, the weights it had before `begin`.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version: PolicyVersion | None = None  # None: as loaded from the checkpoint
        self._publication: Publication | None = None
        self._shadow: dict[str, Tensor] = {}

    def begin(self, publication: Publication) -> None:
        """Compare tensor names, shapes and dtypes; the publication's buckets are not looked at."""
        self._publication, self._shadow = None, {}
        manifest = publication.manifest
        difference = WeightManifest.of(self.policy.state_dict()).difference(manifest)
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
        self._compare(publication, self._shadow)

    def commit(self) -> PolicyVersion:
        """Swap the weights in, then check digests and the canary on what is now being served."""
        publication = self._begun()
        live = self.policy.state_dict()
        self._exchange(live)
        try:
            self._compare(publication, live)
            self._score_canary(publication)
        except BaseException:
            self._exchange(live)
            raise
        finally:
            self._publication, self._shadow = None, {}
        self.version = publication.version
        return publication.version

    def _begun(self) -> Publication:
        if self._publication is None:
            raise SyncError("weight sync: no publication has been accepted")
        return self._publication

    def _refuse(self, publication: Publication, reason: str) -> SyncError:
        self._publication = None
        return SyncError(f"weight sync of version {publication.version.number} refused: {reason}")

    def _compare(self, publication: Publication, tensors: dict[str, Tensor]) -> None:
        found = []
        for name, expected in zip(publication.manifest.names, publication.digests, strict=True):
            found.append(digest(tensors[name]))
            if found[-1] != expected:
                raise self._refuse(
                    publication,
                    f"{name}: its bytes are not those published "
                    f"(digest {found[-1][:8]}, not {expected[:8]})",
                )
        for name, meant in publication.thresholds.digests:
            if name not in tensors or digest(tensors[name]) != meant:
                raise self._refuse(
                    publication,
                    f"{name}: not the threshold that the learner routes with, version "
                    f"{publication.thresholds.number}",
                )
        if policy_digest(publication.manifest, found) != publication.version.digest:
            raise self._refuse(
                publication,
                "the digest of the whole policy differs although that of each tensor agrees",
            )

    @torch.no_grad()
    def _exchange(self, live: dict[str, Tensor]) -> None:
        """Swap contents with the shadow in place: whoever holds a parameter sees the change."""
        for name, shadow in self._shadow.items():
            old = live[name].clone()
            live[name].copy_(shadow)
            self._shadow[name] = old

    @torch.inference_mode()
    def _score_canary(self, publication: Publication) -> None:
        device = next(self.policy.parameters()).device
        ids = torch.as_tensor(np.array(publication.canary_ids, np.int64), device=device)
        out = self.policy(
            ids[None],
            rows=torch.arange(len(ids) - 1, device=device),
            targets=ids[1:],
            temperature=publication.temperature,
        )
        gap = np.abs(out.logprobs.float().cpu().numpy() - publication.canary_logprobs)
        worst = int(np.argmax(np.where(np.isfinite(gap), gap, np.inf))) if len(gap) else 0
        if len(gap) and not gap[worst] <= publication.tolerance:
            raise self._refuse(
                publication,
                f"canary token {worst + 1}: log-prob off by "
                f"{gap[worst]:.2e}, more than "
                f"{publication.tolerance:.2e}",
            )
