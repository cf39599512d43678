"""Ray shell of the rollout: actors that play episodes, and the driver's view of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from threading import Lock
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from ..configs.errors import RunFailed, UserError, last_line
from ..configs.schema import ChatConfig, EnvConfig, InFlight, RolloutConfig
from ..envs.registry import make_config, resolve_plugins
from ..envs.types import Task
from ..policy.weights import Bucket, PolicyVersion, Publication
from .calls import EnvCalls
from .engines import build
from .episode import run_groups
from .sync import WeightReceiver
from .types import Group, RolloutStats

_ACTOR_CPUS = 0.01  # threads are bounded by the config; any number of actors fits a laptop


class ActorLost(RunFailed):
    """An actor's process is gone, and with it what it was doing."""


@dataclass(eq=False, slots=True)
class Part:
    """What the actor of a ``slot`` plays of a submission, and the result that is to come."""

    slot: int
    tasks: list[Task]
    group_size: int
    greedy: bool
    ref: ray.ObjectRef


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
        in_flight: InFlight = "keep",
    ) -> None:
        self._wanted = chat or ChatConfig()
        self._in_flight: InFlight = in_flight
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
            in_flight=self._in_flight,
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
    def ping(self) -> None:
        """Answer, also while episodes are played."""

    @ray.method(concurrency_group="sync")
    def begin_update(self, publication: Publication) -> None:
        """Compare what is announced with what this policy has."""
        self._receiver.begin(publication)

    @ray.method(concurrency_group="sync")
    def load_bucket(self, bucket: Bucket) -> None:
        """Take in one bucket."""
        self._receiver.load(bucket)

    @ray.method(concurrency_group="sync")
    def verify_update(self) -> None:
        """Check completeness and digests of what came in."""
        self._receiver.verify()

    @ray.method(concurrency_group="sync")
    def finish_update(self, number: int) -> PolicyVersion:
        """Swap between two decode steps to the version of that number, and prove it."""
        with self._generator.updating(number):
            return self._receiver.commit()


class RolloutPool:
    """All rollout actors of a run, used from the driver.

    An actor whose process ends is started again from ``checkpoint``, brought to the version that
    the others have by what ``publish`` gives, and plays again what it had not finished: the same
    tokens, if the version is the one that it began with. ``tell`` is told so in a line.

    Raises the user's mistakes (checkpoint, environment) and `SyncError` as they were raised in
    the actor, without Ray's wrapping; RunFailed where actors end more often than
    ``rollout.restarts``.
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
        in_flight: InFlight = "keep",
        publish: Callable[[], Publication] | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.checkpoint = checkpoint  # of the run's, the newest: others may be removed
        self._config, self._publish, self._tell = rollout, publish, tell
        threads = {"OMP_NUM_THREADS": str(rollout.threads)} if rollout.threads > 0 else {}
        self._actor: Any = ray.remote(  # type: ignore[call-overload]
            num_cpus=_ACTOR_CPUS,
            num_gpus=rollout.gpus,
            concurrency_groups={"sync": 1},
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": threads},
        )(RolloutActor)
        own = (resolve_plugins(env), rollout, context, seed)
        self._arguments = (*own, visible_context, record_routes, chat, in_flight)
        self.version: PolicyVersion | None = None  # None: as in the checkpoint
        self._syncing = Lock()
        self.restarted = 0  # actors that were started again
        self._playing: list[Part] = []  # what is not collected, in the order of submission
        self.actors: list[Any] = [self._start() for _ in range(rollout.actors)]
        try:
            self.process_ids: list[int] = _get([a.load.remote() for a in self.actors])
        except BaseException:
            self.close()
            raise

    def submit(self, tasks: Sequence[Task], group_size: int, greedy: bool = False) -> list[Part]:
        """Start episodes, tasks dealt out in turn; an actor plays its submissions in order."""
        count = len(self.actors)
        parts = []
        for slot, actor in enumerate(self.actors[: len(tasks)]):
            own = list(tasks[slot::count])
            ref = actor.run.remote(own, group_size, greedy)
            parts.append(Part(slot, own, group_size, greedy, ref))
        self._playing += parts
        return parts

    def collect(self, parts: Sequence[Part]) -> tuple[list[Group], RolloutStats]:
        """Wait for one submission; its groups in the order of the tasks.

        Raises RunFailed if more than ``rollout.max_error_fraction`` of the episodes failed.
        """
        results: dict[Part, tuple[list[Group], RolloutStats]] = {}
        try:
            while waiting := {part.ref: part for part in parts if part not in results}:
                part = waiting[ray.wait(list(waiting))[0][0]]
                try:
                    (results[part],) = _get([part.ref])
                except ActorLost as lost:
                    self._revive(lost, self.version, {part.slot})
                else:
                    self._playing.remove(part)
        finally:
            self._playing = [part for part in self._playing if part not in parts]
        dealt = chain.from_iterable(zip_longest(*(results[part][0] for part in parts)))
        groups = [group for group in dealt if group is not None]
        stats = RolloutStats.merge(results[part][1] for part in parts)
        check_errors(groups, stats, self._config.max_error_fraction)
        return groups, stats

    def sync(self, publication: Publication) -> None:
        """Bring every actor to a published version, between decode steps of what they play.

        RunFailed while another thread is in it.
        """
        if not self._syncing.acquire(blocking=False):
            raise RunFailed("weight sync refused: another is at work; one comes after the other")
        try:
            self._sync(publication)
        except ActorLost as lost:
            self._revive(lost, publication.version, set())
        finally:
            self._syncing.release()

    def _sync(self, publication: Publication) -> None:
        """Nobody swaps before all have verified all tensors."""
        announced = replace(publication, buckets=())
        _get([a.begin_update.remote(announced) for a in self.actors])
        for bucket in publication.buckets:
            _get([a.load_bucket.remote(bucket) for a in self.actors])
        _get([a.verify_update.remote() for a in self.actors])
        _get([a.finish_update.remote(publication.version.number) for a in self.actors])
        self.version = publication.version

    def _start(self) -> Any:
        return self._actor.remote(self.checkpoint, *self._arguments)

    def _revive(self, lost: ActorLost, version: PolicyVersion | None, slots: set[int]) -> None:
        """Start the actors of ``slots``, and all others that are gone, again: at ``version``, with
        what they had not finished."""
        again: set[int] = set()
        while True:
            try:
                new = slots | self._gone()
                again |= new
                self._count(lost, new)
                for slot in new:
                    ray.kill(self.actors[slot])
                    self.actors[slot] = self._start()
                loading = [self.actors[slot].load.remote() for slot in sorted(new)]
                for slot, process_id in zip(sorted(new), _get(loading), strict=True):
                    self.process_ids[slot] = process_id
                if version is not None:
                    self._sync(self._published(lost, version))
                break
            except ActorLost as error:
                lost, slots = error, set()
        for part in self._playing:
            if part.slot in again and not _finished(part.ref):
                run = self.actors[part.slot].run
                part.ref = run.remote(part.tasks, part.group_size, part.greedy)

    def _gone(self) -> set[int]:
        """Slots whose actors do not answer any more."""
        pings = [actor.ping.remote() for actor in self.actors]
        return {slot for slot, ref in enumerate(pings) if not _finished(ref)}

    def _count(self, lost: ActorLost, slots: set[int]) -> None:
        """Say which actors start again; RunFailed if these are too many."""
        most = self._config.restarts
        if not slots:  # all of them answer
            raise RunFailed(str(lost)) from lost
        if self.restarted + len(slots) > most:
            raise RunFailed(
                f"{lost}; more than the rollout.restarts={most} of a run that start an actor again"
            ) from lost
        self.restarted += len(slots)
        which = ", ".join(f"{slot} (process {self.process_ids[slot]})" for slot in sorted(slots))
        self._tell(f"{lost}: actor {which} starts again, {self.restarted} of {most} restarts")

    def _published(self, lost: ActorLost, version: PolicyVersion) -> Publication:
        """The weights of ``version`` once more."""
        if self._publish is None:
            raise RunFailed(str(lost)) from lost
        publication = self._publish()
        if publication.version != version:
            raise RunFailed(
                f"{lost}; the learner's version {publication.version.number} is not the version "
                f"{version.number} that the others have"
            ) from lost
        return publication

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


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
    except RayTaskError as error:
        if isinstance(error.cause, UserError | RunFailed):
            raise error.cause from None
        raise  # whose text is the actor's own traceback
    except RayError as error:
        raise ActorLost(
            "a rollout actor ended while it worked: it was killed, ran out of memory, or its "
            f"environment ended the process ({last_line(error)})"
        ) from error


def _finished(ref: ray.ObjectRef) -> bool:
    """Wait for the end of a call: whether its actor brought it to one, if only by an error."""
    try:
        ray.get(ref)
    except RayTaskError:
        return True
    except RayError:
        return False
    return True
