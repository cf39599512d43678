"""Sending side of a weight sync: buckets of every tensor, digests, and a scored canary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..configs.errors import RunFailed
from ..configs.schema import SyncConfig
from ..policy.value import VALUE_PREFIX
from ..policy.weights import (
    Bucket,
    PolicyVersion,
    Publication,
    ThresholdVersion,
    WeightManifest,
    fill_buckets,
    policy_digest,
)
from .learner import Learner

TOLERANCE = 1e-4  # nats, between two forwards in fp32


def publish(
    learner: Learner, config: SyncConfig, seed: int, vocab_size: int, put: Callable[[Bucket], Any]
) -> Publication | None:
    """The learner's current version, ready to be taken over; None on ranks other than 0.

    A collective: under ZeRO 3 every rank gives its shards. ``put`` stores a bucket (in Ray) and
    returns what stands for it. What is sent are the tensors the next forward of the learner will
    use, parameters and persistent buffers alike, looked up by name at the time of the call; not
    those of a value head, which no rollout has.
    RunFailed, on every rank, for weights that no longer give probabilities.
    """
    engine = learner.engine
    served = [s for s in engine.manifest.specs if not s.name.startswith(VALUE_PREFIX)]
    manifest = WeightManifest(tuple(served))
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
    # Of the buffers themselves, no sharding touches them, and not of what is gathered to be sent.
    buffers = dict(engine.policy.named_buffers())
    thresholds = ThresholdVersion.of(learner.threshold_version, buffers)
    stored, digests = [], []
    state = (pair for pair in engine.gathered_state() if not pair[0].startswith(VALUE_PREFIX))
    filled = fill_buckets(manifest, state, config.bucket_mb << 20)
    for bucket, bucket_digests in filled:
        stored.append(put(bucket))
        digests.extend(bucket_digests)
    return Publication(
        version=PolicyVersion(learner.version, policy_digest(manifest, digests)),
        manifest=manifest,
        buckets=tuple(stored),
        digests=tuple(digests),
        canary_ids=ids,
        canary_logprobs=logprobs,
        temperature=learner.temperature,
        tolerance=TOLERANCE if config.canary_tolerance is None else config.canary_tolerance,
        thresholds=thresholds,
    )
