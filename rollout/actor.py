"""Ray shell of the rollout: actors that play episodes, and the driver's view of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, NoReturn, Protocol

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from ..configs.errors import RunFailed, UserError, last_line
from ..configs.schema import ChatConfig, EnvConfig, RolloutConfig, SyncConfig
from ..envs.registry import make_config, resolve_plugins
from ..envs.types import Task
from ..policy.links import LOOPBACK, Meeting, Place, Receiver, choose
from ..policy.weights import Announcement, PolicyVersion, Publication
from .calls import EnvCalls
from .engines import build
from .episode import run_groups
from .sync import WeightReceiver
from .types import Group, RolloutStats

_ACTOR_CPUS = 0.01  # threads are bounded by the config; any number of actors fits a laptop
_STOP_SECONDS = 60.0  # for a learner to finish what it gathers once nobody receives it


class RolloutActor:
    """One engine with its environments; weight updates arrive while episodes run.

    A Ray actor with two threads: ``run`` has one, the update calls share the other.
    """

    def __init__(
        self,
        checkpoint: str,
        env: EnvConfig,
        rollout: RolloutConfig,
        context: int,
        seed: int,
        visible_context: int | None = None,
        record_routes: bool = False,
        chat: ChatConfig | None = None,
    ) -> None:
        self._wanted = chat or ChatConfig()
        self._checkpoint, self._env, self._config = checkpoint, env, rollout
        self._context, self._seed, self._visible = context, seed, visible_context
        self._record_routes = record_routes

    def load(self) -> int:
        """Read the checkpoint and build one environment to see that it works; the process id.

        Apart from the constructor, so that the user's mistakes arrive as they are.
        """
        if self._config.threads > 0:
            torch.set_num_threads(self._config.threads)
        env = make_config(self._env)
        with suppress(Exception):  # as at the end of an episode, which this cannot change
            env.close()
        built = build(
            self._checkpoint,
            self._config,
            self._context,
            self._seed,
            self._wanted,
            images=env.shows_images,
            record_routes=self._record_routes,
        )
        self._generator, self._chat = built.generator, built.chat
        self._receiver = WeightReceiver(built.holder)
        self._calls = EnvCalls(self._config.concurrency, self._config.env_timeout_s)
        return os.getpid()

    def run(
        self, tasks: Sequence[Task], group_size: int, greedy: bool = False
    ) -> tuple[list[Group], RolloutStats]:
        """Play a group of episodes per task; greedy groups are for evaluation only."""
        config = replace(self._config, temperature=0.0) if greedy else self._config
        return run_groups(
            self._generator,
            tasks,
            group_size,
            lambda: make_config(self._env),
            self._chat,
            config,
            self._context,
            self._visible,
            self._calls,
        )

    @ray.method(concurrency_group="sync")
    def place(self) -> Place:
        """Where this actor runs."""
        return Place.here(ray.util.get_node_ip_address(), self._config.gpus > 0)

    @ray.method(concurrency_group="sync")
    def connect(self, number: int, meeting: Meeting | None) -> None:
        """Be the reader of that number, in the group that meets there."""
        self._number = number
        self._link = None if meeting is None else Receiver(meeting, number + 1)

    @ray.method(concurrency_group="sync")
    def begin_update(self, announced: Announcement) -> None:
        """Compare what is announced with what this policy has."""
        self._receiver.begin(announced)

    @ray.method(concurrency_group="sync")
    def take_buckets(self, given: Sequence[Any]) -> float:
        """Take in buckets, given by what stands for each; the seconds it took."""
        began = time.perf_counter()
        for one in given:
            parcel = ray.get(one) if isinstance(one, ray.ObjectRef) else one
            self._receiver.load(parcel.open(self._number))
        return time.perf_counter() - began

    @ray.method(concurrency_group="sync")
    def receive_buckets(self, announced: Announcement) -> float:
        """Take in buckets as the learner sends them; the seconds from the first to the last."""
        assert self._link is not None
        began = 0.0
        device = "cuda" if self._config.gpus > 0 else "cpu"
        with closing(self._link.receive(announced, device)) as coming:
            for bucket in coming:
                began = began or time.perf_counter()
                self._receiver.load(bucket)
        return time.perf_counter() - began

    @ray.method(concurrency_group="sync")
    def verify_update(self, publication: Publication) -> None:
        """Check completeness and digests of what came in."""
        self._receiver.verify(publication)

    @ray.method(concurrency_group="sync")
    def finish_update(self) -> Mapping[str, float]:
        """Swap between two decode steps, and prove it; what each part of the update took."""
        with self._generator.exclusive():
            version = self._receiver.commit()
            self._generator.version = version.number
        return self._receiver.seconds


class Publisher(Protocol):
    """The learner as `RolloutPool.sync` uses it."""

    @property
    def sync_config(self) -> SyncConfig:
        """The settings of a sync."""
        ...

    def ask(self, method: str, *arguments: Any) -> Any:
        """What rank 0 answers to ``place``, ``connect``, ``announce`` or ``release``."""
        ...

    def start_publishing(self) -> list[ray.ObjectRef]:
        """Let every rank give its part of the current version."""
        ...

    def published(self, refs: Sequence[ray.ObjectRef]) -> Publication:
        """What came of it, once all have; raises what ended the learner."""
        ...

    def close(self) -> None:
        """End the learner."""
        ...


class RolloutPool:
    """All rollout actors of a run, used from the driver.

    Raises the user's mistakes (checkpoint, environment) and `SyncError` as they were raised in
    the actor, without Ray's wrapping.
    """

    def __init__(
        self,
        checkpoint: str,
        env: EnvConfig,
        rollout: RolloutConfig,
        context: int,
        seed: int,
        visible_context: int | None = None,
        record_routes: bool = False,
        chat: ChatConfig | None = None,
    ) -> None:
        self._max_error_fraction = rollout.max_error_fraction
        threads = {"OMP_NUM_THREADS": str(rollout.threads)} if rollout.threads > 0 else {}
        actor: Any = ray.remote(  # type: ignore[call-overload]
            num_cpus=_ACTOR_CPUS,
            num_gpus=rollout.gpus,
            concurrency_groups={"sync": 1},
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": threads},
        )(RolloutActor)
        own = (checkpoint, resolve_plugins(env), rollout, context, seed)
        how = (visible_context, record_routes, chat)
        self.actors: list[Any] = [actor.remote(*own, *how) for _ in range(rollout.actors)]
        self.version: PolicyVersion | None = None  # None: as in the checkpoint
        self.times: dict[str, float] = {}  # of the last sync, see `sync`
        self._transport: str | None = None
        self._meeting: Meeting | None = None
        try:
            self.process_ids: list[int] = _get([a.load.remote() for a in self.actors])
        except BaseException:
            self.close()
            raise

    def submit(
        self, tasks: Sequence[Task], group_size: int, greedy: bool = False
    ) -> list[ray.ObjectRef]:
        """Start episodes, tasks dealt out in turn; an actor plays its submissions in order."""
        count = len(self.actors)
        return [
            actor.run.remote(list(tasks[i::count]), group_size, greedy)
            for i, actor in enumerate(self.actors)
            if i < len(tasks)
        ]

    def collect(self, refs: Sequence[ray.ObjectRef]) -> tuple[list[Group], RolloutStats]:
        """Wait for one submission; its groups in the order of the tasks.

        Raises RunFailed if more than ``rollout.max_error_fraction`` of the episodes failed.
        """
        parts: list[tuple[list[Group], RolloutStats]] = _get(list(refs))
        dealt = chain.from_iterable(zip_longest(*(groups for groups, _ in parts)))
        groups = [group for group in dealt if group is not None]
        stats = RolloutStats.merge(stats for _, stats in parts)
        check_errors(groups, stats, self._max_error_fraction)
        return groups, stats

    def sync(self, learner: Publisher) -> None:
        """Bring every actor to the learner's version, between decode steps of what they play.

        Nobody swaps before all have verified all tensors. ``times`` has, afterwards, the seconds of
        each part, of the slowest actor: "send" (gather, digest and give away), "receive" and those
        of `WeightReceiver`; "bytes", and "bytes_per_second" from the first tensor gathered to the
        last received.
        """
        self.times = {}
        if self._transport is None:
            self._transport = self._connect(learner)
        announced: Announcement = learner.ask("announce")
        _get([a.begin_update.remote(announced) for a in self.actors])
        if self._transport == "collective":
            publication, received = self._receive(learner, announced)
            moving = max(publication.seconds, received)
        else:
            publication = learner.published(learner.start_publishing())
            given = publication.buckets
            received = max(_get([a.take_buckets.remote(given) for a in self.actors]))
            moving = publication.seconds + received
        proof = replace(publication, buckets=())
        _get([a.verify_update.remote(proof) for a in self.actors])
        parts: list[Mapping[str, float]] = _get([a.finish_update.remote() for a in self.actors])
        learner.ask("release")
        self.version = publication.version
        size = float(publication.manifest.nbytes)
        self.times = {
            "send": publication.seconds,
            "receive": received,
            **{part: max(own[part] for own in parts) for part in parts[0]},
            "bytes": size,
            "bytes_per_second": size / max(moving, 1e-9),
        }

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _connect(self, learner: Publisher) -> str:
        """Choose how weights travel, by where everybody has landed."""
        places: list[Place] = _get([a.place.remote() for a in self.actors])
        own: Place = learner.ask("place")
        transport = choose(learner.sync_config.transport, own, places)
        near = len({place.node for place in (own, *places)}) == 1
        host = LOOPBACK if near else own.node
        self._meeting = learner.ask("connect", transport, host, len(places))
        _get([a.connect.remote(i, self._meeting) for i, a in enumerate(self.actors)])
        return transport

    def _receive(self, learner: Publisher, announced: Announcement) -> tuple[Publication, float]:
        """Both sides at the same time. The failure of one is not left for the other to wait for."""
        assert self._meeting is not None
        sending = learner.start_publishing()
        receiving = [a.receive_buckets.remote(announced) for a in self.actors]
        waiting = [*receiving, *sending]
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
        except RayError as error:
            self._meeting.stop()
            ready, late = ray.wait(sending, num_returns=len(sending), timeout=_STOP_SECONDS)
            if late:
                learner.close()
            else:
                learner.published(ready)  # raises what ended the learner, if anything did
            _raise(error)
        return learner.published(sending), max(ray.get(receiving))


def check_errors(groups: Sequence[Group], stats: RolloutStats, limit: float) -> None:
    """RunFailed when a larger share than ``limit`` of the episodes ended in an error."""
    if stats.errors > limit * stats.episodes:
        errors = (t.error for g in groups for t in g.trajectories if t.error is not None)
        raise RunFailed(
            f"{stats.errors} of {stats.episodes} episodes failed, more than "
            f"rollout.max_error_fraction={limit}; the first with "
            f"{next(errors, 'no text').splitlines()[0]}"
        )


def _get(refs: list[ray.ObjectRef]) -> list[Any]:
    try:
        return ray.get(refs)
    except RayError as error:
        _raise(error)


def _raise(error: RayError) -> NoReturn:
    """With what one line can say of an actor's failure, or else with the actor's own traceback."""
    if not isinstance(error, RayTaskError):
        raise RunFailed(
            "a rollout actor ended while it worked: it was killed, ran out of memory, or its "
            f"environment ended the process ({last_line(error)})"
        ) from error
    if isinstance(error.cause, UserError | RunFailed):
        raise error.cause from None
    raise error
