"""Groups of a sender and receivers: what arrives, and what is told when one of them is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.policy.links import LOOPBACK, Place, Receiver, Sender, choose
from farhorizon.policy.weights import Announcement, Bucket, WeightManifest

from .link_worker import buckets

NOTHING = WeightManifest(())


def send(sender: Sender, turn: int) -> None:
    with sender.turn(turn):
        for bucket in buckets(turn):
            sender.send(bucket)


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(LOOPBACK, 2, on_gpu=False, seconds=300)
    yield made
    made.close()


def test_every_receiver_gets_all_buckets_of_each_turn(sender: Sender) -> None:
    """Beside a default group of the process, which stays as it is."""
    found: dict[int, list[list[Bucket]]] = {1: [], 2: []}

    def receive(rank: int) -> None:
        receiver = Receiver(sender.meeting, rank, 300)
        for turn in range(3):
            announced = Announcement(5, NOTHING, turn)
            found[rank].append(list(receiver.receive(announced, "cpu")))
        receiver.close()

    own = not dist.is_initialized()  # tests of the learner have one
    if own:
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    threads = [threading.Thread(target=receive, args=(rank,)) for rank in found]
    try:
        for thread in threads:
            thread.start()
        for turn in range(3):
            send(sender, turn)
        for thread in threads:
            thread.join()
        assert dist.get_world_size() == 1
    finally:
        if own:
            dist.destroy_process_group()
    for turns in found.values():
        for turn, got in enumerate(turns):
            for one, sent in zip(got, buckets(turn), strict=True):
                assert (one.first, one.count) == (sent.first, sent.count)
                assert torch.equal(one.payload, sent.payload)


def test_nobody_else_can_reach_a_meeting_on_one_machine(sender: Sender) -> None:
    with socket.create_connection((LOOPBACK, sender.meeting.port)):
        pass
    others = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    for address in others - {LOOPBACK, "::1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, sender.meeting.port), timeout=2).close()


Worker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def worker() -> Iterator[Worker]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("link_worker.py")
        command = [sys.executable, str(script), *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_receiver_that_dies_between_buckets_stops_the_others(worker: Worker) -> None:
    """In seconds, not after the time that a transfer may take; the sender goes on without a word,
    and is refused at the next turn."""
    sender = Sender(LOOPBACK, 2, on_gpu=False, seconds=300)
    dying, other = (worker("receive", sender.meeting.port, rank) for rank in (1, 2))
    big = buckets(0)[2]
    with sender.turn(0):
        sender.send(big)
        sender.finish()
        dying.kill()
        dying.wait()
        began = time.monotonic()
        for _ in range(9):
            sender.send(big)
    told = [text for text in iter(lambda: line(other), "") if not text.startswith("bucket")]
    assert time.monotonic() - began < 100
    assert len(told) == 1
    assert told[0].startswith("weight sync of version 5: the weights stopped coming (")
    with pytest.raises(RunFailed, match=r"^weight sync: "), sender.turn(1):
        raise AssertionError


def test_a_sender_that_dies_is_told_by_the_receivers(worker: Worker) -> None:
    leader = worker("send")
    port = line(leader)
    others = [worker("receive", port, rank) for rank in (1, 2)]
    for other in others:
        assert line(other) == "bucket 0"
    leader.kill()
    began = time.monotonic()
    for other in others:
        told = [text for text in iter(lambda o=other: line(o), "") if not text.startswith("bu")]
        assert len(told) == 1
        assert told[0].startswith("weight sync of version 5: the weights stopped coming (")
    assert time.monotonic() - began < 100


def test_a_sender_that_fails_says_why(sender: Sender) -> None:
    told: list[str] = []

    def receive(rank: int) -> None:
        try:
            list(Receiver(sender.meeting, rank, 300).receive(Announcement(5, NOTHING), "cpu"))
        except RunFailed as error:
            told.append(str(error))

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    with pytest.raises(RunFailed, match="not finite"), sender.turn(0):
        sender.send(buckets(0)[0])
        sender.finish()
        raise RunFailed("learner: the log-probs of version 5 are not finite; lower learner.lr")
    for thread in threads:
        thread.join()
    assert len(told) == 2
    for text in told:
        assert "the learner says learner: the log-probs of version 5 are not finite" in text


def test_a_member_that_does_not_come_is_not_waited_for_without_end() -> None:
    sender = Sender(LOOPBACK, 1, on_gpu=False, seconds=1)
    with pytest.raises(RuntimeError), sender.turn(0):
        raise AssertionError
    receiver = Receiver(sender.meeting, 1, 1)
    with pytest.raises(RunFailed, match="the weights stopped coming"):
        list(receiver.receive(Announcement(5, NOTHING, 1), "cpu"))


def test_a_stop_ends_a_wait(sender: Sender) -> None:
    """For transfers that do not notice the death of a member: here one that only does not take."""
    receivers = [Receiver(sender.meeting, rank, 300) for rank in (1, 2)]
    joining = [threading.Thread(target=receiver.join) for receiver in receivers]
    for thread in joining:
        thread.start()
    big = torch.zeros(200_000_000, dtype=torch.uint8)  # more than sockets hold
    threading.Timer(0.5, sender.meeting.stop).start()
    began = time.monotonic()
    with sender.turn(0):
        for thread in joining:
            thread.join()
        sender.send(Bucket(0, 1, big))
    assert 0.3 < time.monotonic() - began < 100
    with pytest.raises(RunFailed, match="another process has failed"), sender.turn(1):
        raise AssertionError
    for receiver in receivers:
        receiver.close()


A, B, C, NONE = (Place("here", gpu) for gpu in ("gpu-1", "gpu-2", "gpu-3", ""))


@pytest.mark.parametrize(
    ("learner", "actors", "chosen"),
    [
        (NONE, [NONE, NONE], "objects"),
        (A, [NONE], "objects"),
        (NONE, [A], "objects"),
        (A, [A], "ipc"),
        (A, [A, A], "ipc"),
        (A, [B], "collective"),
        (A, [B, C], "collective"),
        (A, [A, B], "objects"),
        (A, [B, B], "objects"),
    ],
)
def test_the_fastest_way_that_there_is(learner: Place, actors: list[Place], chosen: str) -> None:
    assert choose("auto", learner, actors) == chosen
    assert choose("objects", learner, actors) == "objects"
    for wanted in ("ipc", "collective"):
        if wanted == chosen or (
            wanted == "collective" and not any(p.gpu for p in [learner, *actors])
        ):
            assert choose(wanted, learner, actors) == wanted
        else:
            with pytest.raises(
                UserError, match=rf"^sync\.transport={wanted}: .* set sync.transport=au"
            ):
                choose(wanted, learner, actors)
