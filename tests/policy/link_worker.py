"""A member of a group as a process of its own, which the tests kill.

link_worker.py send                  prints the port, sends all of `buckets` and waits
link_worker.py receive PORT RANK     prints a line for each bucket, and what it was told
"""

from __future__ import annotations

import os
import sys
import time

import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.policy.links import LOOPBACK, Meeting, Receiver, Sender
from farhorizon.policy.weights import Announcement, Bucket, WeightManifest

RECEIVERS, SECONDS = 2, 300.0
SIZES = (7, 0, 3_000_000, 64)
ANNOUNCED = Announcement(5, WeightManifest(()))


def buckets(turn: int) -> list[Bucket]:
    """Random ones."""
    drawn = torch.Generator().manual_seed(turn)
    return [
        Bucket(n, 1, torch.randint(0, 256, (size,), generator=drawn, dtype=torch.uint8))
        for n, size in enumerate(SIZES)
    ]


def send() -> None:
    sender = Sender(LOOPBACK, RECEIVERS, on_gpu=False, seconds=SECONDS)
    print(sender.meeting.port, flush=True)
    with sender.turn(0):
        for bucket in buckets(0):
            sender.send(bucket)
        time.sleep(600)


def receive(port: int, rank: int) -> None:
    receiver = Receiver(Meeting(LOOPBACK, port, RECEIVERS + 1, "gloo"), rank, SECONDS)
    try:
        for bucket in receiver.receive(ANNOUNCED, "cpu"):
            print("bucket", bucket.first, flush=True)
    except RunFailed as error:
        print(error, flush=True)
    os._exit(0)  # not to wait for what gloo has begun


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send()
    receive(int(sys.argv[2]), int(sys.argv[3]))
