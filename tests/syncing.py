"""Publications on their way to a receiver in this process, over each transport that CPUs have."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from torch import Tensor

from farhorizon.configs.schema import SyncConfig
from farhorizon.policy.links import (
    LOOPBACK,
    Meeting,
    Place,
    Receiver,
    Sender,
    Sharing,
    StoredBucket,
)
from farhorizon.policy.weights import Announcement, Bucket, Publication, layout
from farhorizon.rollout.sync import WeightReceiver

TRANSPORTS = ("objects", "collective", "ipc")  # the last one without a GPU: pickled by value
SECONDS = 120.0


def carried(publication: Publication, transport: str) -> list[Bucket]:
    """The buckets of a publication as a receiver gets them; "in place" they are what they were."""
    if transport == "in place":
        return list(publication.buckets)
    if transport == "collective":
        return _sent(publication)
    give: Any = StoredBucket.of if transport == "objects" else Sharing(1).give
    return [pickle.loads(pickle.dumps(give(bucket))).open(0) for bucket in publication.buckets]


def _sent(publication: Publication) -> list[Bucket]:
    sender = Sender(LOOPBACK, 1, on_gpu=False, seconds=SECONDS)
    receiver = Receiver(sender.meeting, 1, SECONDS)

    def send() -> None:
        with sender.turn(publication.turn):
            for bucket in publication.buckets:
                sender.send(bucket)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        return list(receiver.receive(publication.announced, "cpu"))
    finally:
        thread.join()
        receiver.close()
        sender.close()


def receive(receiver: WeightReceiver, publication: Publication, transport: str = "objects") -> None:
    """All of a sync."""
    receiver.begin(publication.announced)
    for bucket in carried(publication, transport):
        receiver.load(bucket)
    receiver.verify(publication)
    receiver.commit()


def place_of(publication: Publication, name: str) -> tuple[Bucket, slice]:
    """The bucket that holds a tensor, and where in it."""
    index = publication.manifest.names.index(name)
    for bucket in publication.buckets:
        if bucket.first <= index < bucket.first + bucket.count:
            specs = publication.manifest.specs[bucket.first : bucket.first + bucket.count]
            start = layout(specs)[0][index - bucket.first]
            return bucket, slice(start, start + specs[index - bucket.first].nbytes)
    raise AssertionError(name)


def bytes_of(publication: Publication, name: str) -> Tensor:
    """Those of a tensor in its bucket, writable."""
    bucket, where = place_of(publication, name)
    return bucket.payload[where]


class Learner:
    """`Publisher` in the driver's process that gives one publication."""

    def __init__(self, publication: Publication) -> None:
        self.publication = publication
        self.sync_config = SyncConfig()

    def ask(self, method: str, *arguments: Any) -> Place | Meeting | Announcement | None:
        answers = {"place": Place("", ""), "announce": self.publication.announced}
        return answers.get(method)

    def start_publishing(self) -> list[ray.ObjectRef]:
        return []

    def published(self, refs: Sequence[ray.ObjectRef]) -> Publication:
        given = tuple(ray.put(StoredBucket.of(bucket)) for bucket in self.publication.buckets)
        return replace(self.publication, buckets=given, seconds=0.1)

    def close(self) -> None:
        pass
