"""``farhorizon bench sync``: weights from one process to another as a run sends them, beside a
plain transfer of as many bytes between the same two.

With two GPUs through NCCL, with one through memory that both processes share, else through gloo. It
needs no Ray: a process publishes as rank 0 of a learner does, another takes over as an actor does.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from ..configs.benchmarks import SyncBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.schema import SyncConfig
from ..kernels.digest import digests
from ..policy import Policy, PolicyConfig
from ..policy.links import LOOPBACK, Meeting, Place, Receiver, Sender, Sharing, choose
from ..policy.weights import Announcement, Bucket, Publication, WeightManifest
from ..rl.publish import Publisher
from ..rollout.narrow import NarrowWeights
from ..rollout.sync import PolicyWeights, WeightReceiver
from .measure import lines_to, origin
from .together import LOOSE_TOLERANCE

LEAST_SHARE = 0.6  # of the speed of the plain transfer
MOST_PROOF = 0.1, 0.05  # seconds, or that share of a sync, of digests and canary together
PROOF = ("digests", "verify", "prove", "canary")
Figures = dict[str, float]


class Engine:
    """That of a learner of one rank which holds a policy and trains nothing."""

    rank = 0

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.device = next(policy.parameters()).device
        self.manifest = WeightManifest.of(policy.state_dict())

    def gathered_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `farhorizon.rl.engine.Engine.gathered_state`."""
        state = self.policy.state_dict()
        return ((name, state[name]) for name in self.manifest.names)


class Learner:
    """What is asked of a learner to publish."""

    version, threshold_version, temperature = 1, 1, 1.0

    def __init__(self, policy: Policy) -> None:
        self.engine = Engine(policy)
        self._weights = PolicyWeights(policy)

    def score(self, ids: np.ndarray) -> np.ndarray:
        """As `farhorizon.rl.learner.Learner.score` of one that computes as the other process."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.engine.device.type == "cuda"):
            return self._weights.score(ids, self.temperature)


def bench_sync(config: SyncBenchConfig) -> int:
    """Print a line for each size of buckets and add it to ``output``; returns 0. RunFailed if a
    sync is refused."""
    from .plan import read_policy

    check_bounds(config)
    if not config.bucket_mb:
        raise UserError("bucket_mb: name at least one size")
    policy, _ = read_policy(config.policy)
    told = origin("sync") | {"policy": config.policy}
    with lines_to(config.output) as take:
        for bucket_mb in config.bucket_mb:
            found = run(policy, bucket_mb, config.repeats, config.seed)
            take(told | {"bucket_mb": bucket_mb, **found})
    return 0


def run(policy: PolicyConfig, bucket_mb: int, repeats: int, seed: int) -> Mapping[str, Any]:
    """The figures of one size of buckets, printed."""
    context = multiprocessing.get_context("spawn")
    ends: tuple[Connection, Connection] = context.Pipe()
    out = context.SimpleQueue()
    arguments = (policy.to_dict(), bucket_mb, repeats, seed, ends, out)
    try:
        spawn(_side, arguments, nprocs=2)
    except ProcessRaisedException as error:
        text = str(error).strip().splitlines()[-1]
        raise RunFailed(f"bench sync: a process failed with {text}") from error
    transport, figures = out.get()
    return {"transport": transport} | _tell(transport, bucket_mb, figures)


def _tell(transport: str, bucket_mb: int, figures: Figures) -> Figures:
    """Print the figures, and return them with shares."""
    share = figures["link"] / figures["moving"]
    proof = sum(figures[name] for name in PROOF)
    sync = figures["moving"] + figures["verify"] + figures["swap"]
    allowed = max(MOST_PROOF[0], MOST_PROOF[1] * sync)
    size, link, moving = (figures[name] for name in ("bytes", "link", "moving"))
    parts = ", ".join(f"{name} {figures[name] * 1e3:.1f} ms" for name in (*PROOF, "swap"))
    print(
        f"{transport}, {size / 2**30:.2f} GiB in buckets of {bucket_mb} MB: "
        f"{size / moving / 1e9:.2f} GB/s, plain {size / link / 1e9:.2f} GB/s: {share:.0%} of it "
        f"({'' if share >= LEAST_SHARE else 'not '}reached: {LEAST_SHARE:.0%})\n"
        f"  {parts}; a sync {sync * 1e3:.1f} ms, of which digests and canary {proof * 1e3:.1f} ms "
        f"({'' if proof <= allowed else 'not '}reached: {allowed * 1e3:.0f} ms)",
        flush=True,
    )
    return figures | {"share": share, "sync": sync, "proof": proof}


def _side(
    rank: int,
    sizes: dict[str, Any],
    bucket_mb: int,
    repeats: int,
    seed: int,
    ends: tuple[Connection, Connection],
    out: Any,
) -> None:
    """One of the two processes; 0 is the learner."""
    gpus = torch.cuda.device_count()
    if gpus > 0:
        torch.cuda.set_device(rank % min(gpus, 2))
    device = "cuda" if gpus > 0 else "cpu"
    other = ends[rank]
    other.send(Place.here("", gpus > 0))
    places = [Place.here("", gpus > 0), other.recv()]
    transport = choose("auto" if gpus > 0 else "collective", *_ordered(places, rank))
    torch.manual_seed(seed + rank)
    with torch.device(device):
        policy = Policy(PolicyConfig.from_dict(sizes))
    if rank == 1 and gpus > 0:  # as the native engine on a GPU
        policy = policy.bfloat16()
    if rank == 0:
        _publish(Learner(policy), transport, bucket_mb, repeats, seed, other)
    else:
        found = _take_over(policy, bucket_mb, repeats, other)
        out.put((transport, found))


def _ordered(places: Sequence[Place], rank: int) -> tuple[Place, list[Place]]:
    """The learner's place, and that of the other."""
    return places[rank], [places[1 - rank]]


def _publish(
    learner: Any, transport: str, bucket_mb: int, repeats: int, seed: int, other: Connection
) -> None:
    """The learner's part: plain transfers, then syncs, each when the other asks for it."""
    tolerance = LOOSE_TOLERANCE if learner.engine.device.type == "cuda" else None
    settings = SyncConfig(bucket_mb=bucket_mb, canary_tolerance=tolerance)
    publisher = Publisher(learner, seed, learner.engine.policy.config.vocab_size, lambda one: one)
    other.send(publisher.connect(transport, LOOPBACK, 1))
    other.send(publisher.announce())
    state = [tensor for _, tensor in learner.engine.gathered_state()]
    times = [_timed(lambda: digests(state)) for _ in range(repeats + 1)]
    other.send(statistics.median(times[1:]))
    payloads = _payloads(learner.engine.manifest.nbytes, bucket_mb, learner.engine.device)
    if publisher.sender is None:
        sharing = Sharing(1)
        other.send([sharing.give(Bucket(0, 0, payload)) for payload in payloads])
        other.recv()
        sharing.release()
    else:
        publisher.sender.join()
        for _ in range(repeats + 1):
            other.recv()
            _move(publisher.sender, payloads)
    del payloads
    for _ in range(repeats + 1):
        other.recv()
        other.send(publisher.publish(settings))
    other.recv()
    publisher.release()
    if publisher.sender is not None:
        publisher.sender.close()


def _take_over(policy: Policy, bucket_mb: int, repeats: int, other: Connection) -> Figures:
    """The actor's part; medians of seconds, and the bytes of a sync."""
    meeting: Meeting | None = other.recv()
    announced: Announcement = other.recv()
    hashing: float = other.recv()
    device = next(policy.parameters()).device
    link = None if meeting is None else Receiver(meeting, 1)
    payloads = _payloads(announced.manifest.nbytes, bucket_mb, device)
    plain = _copies(payloads, other) if link is None else _broadcasts(link, payloads, other)
    times = [_timed(plain) for _ in range(repeats + 1)]
    del plain, payloads
    if link is None:
        other.send("")
    narrow = policy.dtype == torch.bfloat16
    receiver = WeightReceiver(NarrowWeights(policy) if narrow else PolicyWeights(policy))
    rounds: list[Figures] = []
    for turn in range(repeats + 1):
        own = replace(announced, turn=turn)
        rounds.append(_sync(receiver, own, link, device.type, other))
    other.send("")
    if link is not None:
        link.close()
    medians = {name: statistics.median(one[name] for one in rounds[1:]) for name in rounds[0]}
    size = float(announced.manifest.nbytes)
    return medians | {"link": statistics.median(times[1:]), "digests": hashing, "bytes": size}


def _copies(payloads: Sequence[torch.Tensor], other: Connection) -> Callable[[], None]:
    """A plain transfer out of memory that the other shares."""
    shared = [one.open(0).payload for one in other.recv()]

    def plain() -> None:
        for own, given in zip(payloads, shared, strict=True):
            own.copy_(given)

    return plain


def _broadcasts(
    link: Receiver, payloads: Sequence[torch.Tensor], other: Connection
) -> Callable[[], None]:
    """A plain transfer through the group."""
    link.join()

    def plain() -> None:
        other.send("")
        _move(link, payloads)

    return plain


def _sync(
    receiver: WeightReceiver,
    announced: Announcement,
    link: Receiver | None,
    device: str,
    other: Connection,
) -> Figures:
    """One sync; "moving" is from the first tensor gathered to the last received."""
    receiver.begin(announced)
    other.send("")
    began = 0.0
    if link is None:
        publication: Publication = other.recv()
        began = time.perf_counter()
        for parcel in publication.buckets:
            receiver.load(parcel.open(0))
        moving = publication.seconds + time.perf_counter() - began
    else:
        for bucket in link.receive(announced, device):
            began = began or time.perf_counter()
            receiver.load(bucket)
        received = time.perf_counter() - began
        publication = other.recv()
        moving = max(publication.seconds, received)
    receiver.verify(publication)
    receiver.commit()
    return {"moving": moving, **receiver.seconds}


def _move(link: Sender | Receiver, payloads: Sequence[torch.Tensor]) -> None:
    """A plain broadcast of each."""
    for work in [link.broadcast(payload) for payload in payloads]:
        link.wait(work)


def _payloads(size: int, bucket_mb: int, device: torch.device) -> list[torch.Tensor]:
    """That many bytes, in pieces of the size of buckets."""
    whole, rest = divmod(size, bucket_mb << 20)
    sizes = [bucket_mb << 20] * whole + ([rest] if rest else [])
    return [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]


def _timed(call: Callable[[], object]) -> float:
    """Seconds of a call, with what it leaves a GPU to do."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began
