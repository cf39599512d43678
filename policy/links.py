"""Ways of buckets from the learner to the rollout actors: Ray's object store, memory of a GPU that
both share, and a process group of rank 0 of the learner and all actors.

That group is made without torch's default one, which the ranks of the learner have among them.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ..configs.errors import RunFailed, UserError, last_line
from .weights import Announcement, Bucket

SECONDS = 600.0  # without any news from the other side, after which a sync has failed
AHEAD = 2  # buckets that are on their way while another is made
PAUSE = 2e-4  # seconds between two looks at a transfer
LOOPBACK = "127.0.0.1"
_C10D: Any = dist  # whose names for groups without the default one have no types
_STOP = "stop"
_abandoned: list[Any] = []


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: its machine, and the name that its GPU has everywhere ("" without)."""

    node: str
    gpu: str

    @classmethod
    def here(cls, node: str, on_gpu: bool) -> Place:
        """The place of this process."""
        if not on_gpu:
            return cls(node, "")
        return cls(node, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


def choose(transport: str, learner: Place, actors: Sequence[Place]) -> str:
    """``objects``, ``ipc`` or ``collective``: what is asked for, or of ``auto`` the fastest that
    there is for these places. UserError if what is asked for cannot be."""
    gpus = [place.gpu for place in (learner, *actors)]
    shared = all(gpus) and len(set(gpus)) == 1
    apart = all(gpus) and len(set(gpus)) == len(gpus)
    if transport == "auto":
        return "ipc" if shared else "collective" if apart else "objects"
    if transport == "ipc" and not shared:
        raise UserError(
            "sync.transport=ipc: learner and rollout actors are not all on one GPU; set "
            "sync.transport=auto"
        )
    if transport == "collective" and any(gpus) and not apart:
        raise UserError(
            "sync.transport=collective: rank 0 of the learner and the rollout actors do not have "
            "a GPU each; set sync.transport=auto"
        )
    return transport


@dataclass(frozen=True, slots=True)
class StoredBucket:
    """A bucket as Ray keeps it: ``payload`` uint8 [N] of the CPU, read-only where it comes out."""

    first: int
    count: int
    payload: np.ndarray

    @classmethod
    def of(cls, bucket: Bucket) -> StoredBucket:
        """That of a bucket of any device."""
        return cls(bucket.first, bucket.count, bucket.payload.cpu().numpy())

    def open(self, reader: int) -> Bucket:
        """A copy on the CPU."""
        return Bucket(self.first, self.count, torch.from_numpy(self.payload.copy()))


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A bucket in memory of the GPU that its readers share, by what each needs to find it."""

    first: int
    count: int
    handles: tuple[Any, ...]

    def open(self, reader: int) -> Bucket:
        """The bucket where it lies, for one of the readers, once. RunFailed where the memory cannot
        be reached."""
        rebuild, arguments = self.handles[reader]
        with _reaching("opened"):
            return Bucket(self.first, self.count, rebuild(*arguments))


@contextmanager
def _reaching(how: str) -> Iterator[None]:
    """Around memory of a GPU that two processes are to reach."""
    try:
        yield
    except RuntimeError as error:
        raise RunFailed(
            f"weight sync: memory of the GPU cannot be {how} ({last_line(error)}); set "
            "sync.transport=objects"
        ) from error


class Sharing:
    """The side of `SharedBucket` whose memory it is, for ``readers`` processes on the same GPU."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._held: list[Tensor] = []

    def give(self, bucket: Bucket) -> SharedBucket:
        """Share a bucket until `release`."""
        self._held.append(bucket.payload)
        with _reaching("shared"):
            handles = tuple(reduce_tensor(bucket.payload) for _ in range(self._readers))
        return SharedBucket(bucket.first, bucket.count, handles)

    def release(self) -> None:
        """Take back all memory; its readers have to have let go of it."""
        self._held.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of a group meet, how many they are, and what carries their tensors."""

    host: str
    port: int
    size: int
    backend: str

    def stop(self) -> None:
        """Let the sender give up what it is sending; nothing if it is gone."""
        with suppress(RuntimeError):
            limit = timedelta(seconds=5)
            _C10D.TCPStore(self.host, self.port, None, False, limit, False).set(_STOP, "")


class _Member:
    """A process of the group: number 0 sends, all others receive."""

    def __init__(self, meeting: Meeting, rank: int, seconds: float, listener: int = -1) -> None:
        self._meeting, self._rank, self._seconds = meeting, rank, seconds
        place: dict[str, Any] = {} if listener < 0 else {"master_listen_fd": listener}
        self._store = _C10D.TCPStore(
            meeting.host,
            meeting.port,
            meeting.size,
            listener >= 0,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            **place,
        )
        self._group: Any = None

    def join(self) -> None:
        """Make the group, once; waits until all members do."""
        if self._group is None:
            store = _C10D.PrefixStore("group", self._store)
            make = _gloo if self._meeting.backend == "gloo" else _nccl
            self._group = make(store, self._rank, self._meeting, timedelta(seconds=self._seconds))

    def broadcast(self, payload: Tensor) -> Any:
        """Begin to send it, or to receive into it."""
        options = _C10D.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._group.broadcast([payload], options)

    def wait(self, work: Any) -> None:
        """Until a transfer is done; raises RuntimeError where it has failed, was stopped, or takes
        too long: a process that has died makes others wait without end on a GPU."""
        began = time.monotonic()
        for looks in count(1):
            if work.is_completed():
                break
            if time.monotonic() - began > self._seconds:
                raise RunFailed(f"nothing came through for {self._seconds:g} s")
            if looks % 50 == 0 and self._store.check([_STOP]):
                raise RunFailed("another process has failed")
            time.sleep(PAUSE)
        work.wait()

    def close(self) -> None:
        """Leave the group, with nothing on its way; safe to call twice."""
        self._group = None

    def abandon(self, busy: Any) -> None:
        """Leave the group with ``busy`` on its way. On GPUs that is ended; what gloo has begun goes
        on to its time limit, and whoever frees it or its group waits for that: so nobody does."""
        group, self._group = self._group, None
        if group is not None:
            _abandoned.append((group, busy))
            with suppress(RuntimeError):
                group.abort()


class Sender(_Member):
    """The learner's side. What it cannot send it leaves out, and says so to the receivers: the
    ranks of the learner have to gather all tensors whatever happens."""

    def __init__(self, host: str, receivers: int, on_gpu: bool, seconds: float = SECONDS) -> None:
        """Listens at ``host``, which is `LOOPBACK` where all are on one machine."""
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        meeting = Meeting(host, port, receivers + 1, "nccl" if on_gpu else "gloo")
        super().__init__(meeting, 0, seconds, listener.detach())
        self._turn = 0
        self._said: tuple[list[str], list[str]] = [], []  # keys of the last turn, and of this one
        self._failure: str | None = None
        self._pending: deque[tuple[Tensor, Any]] = deque()

    @property
    def meeting(self) -> Meeting:
        """What receivers need."""
        return self._meeting

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Send the buckets of one publication in the block; the receivers hear of how it ends."""
        if self._failure is not None:
            raise RunFailed(f"weight sync: {self._failure}")
        # Of the last turn some may still be read.
        for key in self._said[0]:
            self._store.delete_key(key)
        self._said = self._said[1], []
        self._turn = number
        try:
            self.join()
            yield
        except BaseException as error:
            self._fail(error)
            raise
        self.finish()
        if self._failure is None:
            self._say("end")

    def send(self, bucket: Bucket) -> None:
        """Begin to send a bucket, whose memory is the sender's until it has arrived."""
        if self._failure is not None:
            return
        try:
            self._say(f"{bucket.first} {bucket.count} {bucket.payload.numel()}")
            if bucket.payload.numel() > 0:
                self._pending.append((bucket.payload, self.broadcast(bucket.payload)))
        except RuntimeError as error:
            self._fail(error)
        self._wait_for_all_but(AHEAD)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, most: int) -> None:
        try:
            while len(self._pending) > most:
                self.wait(self._pending[0][1])
                self._pending.popleft()
        except RuntimeError as error:
            self._fail(error)

    def _say(self, what: str) -> None:
        key = f"{self._turn}/{len(self._said[1])}"
        self._said[1].append(key)
        self._store.set(key, what)

    def _fail(self, error: BaseException) -> None:
        self._failure = last_line(error)
        self._store.set(_STOP, "")  # to those who wait for what does not come any more
        self.abandon(self._pending)
        self._pending = deque()
        self._say(f"failed {self._failure}")


class Receiver(_Member):
    """An actor's side, whose number is 1 or more."""

    def __init__(self, meeting: Meeting, rank: int, seconds: float = SECONDS) -> None:
        """RunFailed if nobody listens there."""
        try:
            super().__init__(meeting, rank, seconds)
        except RuntimeError as error:
            raise RunFailed(
                f"weight sync: the learner cannot be reached at {meeting.host}:{meeting.port} "
                f"({last_line(error)})"
            ) from error

    def receive(self, announced: Announcement, device: str) -> Generator[Bucket]:
        """The buckets of an announced publication, in memory of their own on ``device``, each as
        soon as it is complete. RunFailed if they stop coming."""
        coming: deque[tuple[Bucket, Any]] = deque()
        complete = False
        try:
            self.join()
            for index in count():
                said = self._store.get(f"{announced.turn}/{index}").decode()
                if said.startswith("failed"):
                    raise RunFailed(f"the learner says {said.removeprefix('failed ')}")
                if said == "end":
                    break
                first, number, size = map(int, said.split())
                bucket = Bucket(first, number, _room(size, device))
                coming.append((bucket, self.broadcast(bucket.payload) if size > 0 else None))
                while len(coming) > AHEAD:
                    yield self._arrived(*coming.popleft())
            while coming:
                yield self._arrived(*coming.popleft())
            complete = True
        except RuntimeError as error:
            raise RunFailed(
                f"weight sync of version {announced.number}: the weights stopped coming "
                f"({last_line(error)})"
            ) from error
        finally:
            if not complete:
                self.abandon(coming)
                self._meeting.stop()

    def _arrived(self, bucket: Bucket, work: Any) -> Bucket:
        if work is not None:
            self.wait(work)
        return bucket


def _room(size: int, device: str) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise RunFailed(
            "the GPU has no room for a second set of weights; lower rollout.vllm.memory or "
            "rollout.concurrency, or set sync.transport=objects"
        ) from None


def _gloo(store: Any, rank: int, meeting: Meeting, timeout: timedelta) -> Any:
    """A group of CPUs. On one machine no port of it is open to others."""
    made = _C10D.ProcessGroupGloo
    options = made._Options()
    own = LOOPBACK if meeting.host == LOOPBACK else _own_address(meeting)
    options._devices = [made.create_device(hostname=own)]
    options._timeout = timeout
    return made(store, rank, meeting.size, options)


def _nccl(store: Any, rank: int, meeting: Meeting, timeout: timedelta) -> Any:
    """A group of GPUs. By itself torch would end the process of whoever waits for a member that has
    died; it is for `_Member.wait` to tell of it."""
    made = _C10D.ProcessGroupNCCL
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    if meeting.host == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback_interface())
    try:
        options = made.Options()
        options._timeout = 2 * timeout
        return made(store, rank, meeting.size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def loopback_interface() -> str:
    """The name of the network interface that only this machine reaches."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _own_address(meeting: Meeting) -> str:
    """The address of this machine from which the meeting is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))
        return probe.getsockname()[0]
