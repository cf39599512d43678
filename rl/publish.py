"""Sending side of a weight sync: buckets of every tensor, digests, and a scored canary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..configs.errors import RunFailed, last_line
from ..configs.schema import SyncConfig
from ..policy.links import Meeting, Sender, Sharing, StoredBucket
from ..policy.value import VALUE_PREFIX
from ..policy.weights import (
    Announcement,
    Bucket,
    PolicyVersion,
    Publication,
    ThresholdVersion,
    WeightManifest,
    pack,
    policy_digest,
)
from .learner import Learner

TOLERANCE = 1e-4  # nats, between two forwards in fp32


class Publisher:
    """One rank's side of all syncs of a run; ``store`` puts what it is given into Ray."""

    def __init__(
        self, learner: Learner, seed: int, vocab_size: int, store: Callable[[Any], Any]
    ) -> None:
        self._learner, self._seed, self._vocab_size = learner, seed, vocab_size
        self._store = store
        self._turn = 0
        self.sender: Sender | None = None
        self._sharing: Sharing | None = None

    def connect(self, transport: str, host: str, readers: int) -> Meeting | None:
        """Choose how buckets go to that many readers; where a group of them meets, which is at
        ``host``."""
        self.sender = self._sharing = None
        if transport == "ipc":
            self._sharing = Sharing(readers)
        if transport != "collective":
            return None
        self.sender = Sender(host, readers, self._learner.engine.device.type == "cuda")
        return self.sender.meeting

    def announce(self) -> Announcement:
        """What the next publication will have."""
        return Announcement(self._learner.version, served(self._learner), self._turn)

    def publish(self, config: SyncConfig) -> Publication | None:
        """As `publish`. A group of receivers is told of a failure before it is raised."""
        turn, self._turn = self._turn, self._turn + 1
        own = (self._learner, config, self._seed, self._vocab_size)
        self.release()
        try:
            if self.sender is not None:
                with self.sender.turn(turn):
                    return publish(*own, self.sender.send, turn, self.sender.finish)
            if self._sharing is not None:
                return publish(*own, self._sharing.give, turn)
            return publish(*own, lambda bucket: self._store(StoredBucket.of(bucket)), turn)
        except torch.OutOfMemoryError as error:
            raise RunFailed(
                f"learner: no room on the GPU to publish from ({last_line(error)}); lower "
                "sync.bucket_mb, or what the rollout has of this GPU, or set sync.transport=objects"
            ) from None

    def release(self) -> None:
        """The readers are done with what was shared."""
        if self._sharing is not None:
            self._sharing.release()


def served(learner: Learner) -> WeightManifest:
    """What is published of a learner: all but its value head, which no rollout has."""
    specs = learner.engine.manifest.specs
    return WeightManifest(tuple(s for s in specs if not s.name.startswith(VALUE_PREFIX)))


def publish(
    learner: Learner,
    config: SyncConfig,
    seed: int,
    vocab_size: int,
    give: Callable[[Bucket], Any],
    turn: int = 0,
    finish: Callable[[], None] | None = None,
) -> Publication | None:
    """The learner's current version, ready to be taken over; None on ranks other than 0.

    A collective: under ZeRO 3 every rank gives its shards. ``give`` sends a bucket or stores it,
    and returns what stands for it; ``finish`` waits until all are there. What is sent are the
    tensors the next forward of the learner will use, parameters and persistent buffers alike,
    looked up by name at the time of the call.
    RunFailed, on every rank, for weights that no longer give probabilities.
    """
    engine, manifest = learner.engine, served(learner)
    # Fresh ids for each version, so that no stale answer can match.
    ids = np.random.default_rng([seed, learner.version]).integers(
        0, vocab_size, config.canary_tokens, dtype=np.int64
    )
    logprobs = learner.score(ids)
    if not np.isfinite(logprobs).all():
        raise RunFailed(
            f"learner: the log-probs of version {learner.version} are not finite; lower learner.lr"
        )
    if engine.rank != 0:
        for _ in engine.gathered_state():
            pass
        return None
    began = time.perf_counter()
    # Of the buffers themselves, no sharding touches them, and not of what is gathered to be sent.
    buffers = dict(engine.policy.named_buffers())
    thresholds = ThresholdVersion.of(learner.threshold_version, buffers)
    state = (pair for pair in engine.gathered_state() if not pair[0].startswith(VALUE_PREFIX))
    given, digests = pack(manifest, state, config.bucket_mb << 20, give)
    if finish is not None:
        finish()
    return Publication(
        version=PolicyVersion(learner.version, policy_digest(manifest, digests)),
        manifest=manifest,
        buckets=tuple(given),
        digests=digests,
        canary_ids=ids,
        canary_logprobs=logprobs,
        temperature=learner.temperature,
        tolerance=TOLERANCE if config.canary_tolerance is None else config.canary_tolerance,
        thresholds=thresholds,
        turn=turn,
        seconds=time.perf_counter() - began,
    )
