"""All rollout actors of a run, seen from the driver: submissions, weight syncs, and processes that
end before they should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from threading import Lock
from typing import Any, NoReturn, Protocol

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..configs.errors import RunFailed, UserError, last_line
from ..configs.schema import ChatConfig, EnvConfig, InFlight, RolloutConfig, SyncConfig
from ..envs.registry import resolve_plugins
from ..envs.types import Task
from ..policy.links import LOOPBACK, Meeting, Place, choose
from ..policy.weights import Announcement, PolicyVersion, Publication
from .actor import RolloutActor
from .types import Group, RolloutStats

_ACTOR_CPUS = 0.01  # threads are bounded by the config; any number of actors fits a laptop
_STOP_SECONDS = 60.0  # for a learner to finish what it gathers once nobody receives it


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

    An actor whose process ends is started again from ``checkpoint``, brought to the version that
    the others have, and plays again what it had not finished: the same tokens, if the version is
    the one that it began with. ``tell`` is told so in a line.

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
        tell: Callable[[str], None] = print,
    ) -> None:
        self.checkpoint = checkpoint  # of the run's, the newest: others may be removed
        self._config, self._tell = rollout, tell
        self._group = _reserve(rollout)
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
        self.times: dict[str, float] = {}  # of the last sync, see `sync`
        self._syncing = Lock()
        self._learner: Publisher | None = None
        self._transport: str | None = None
        self._meeting: Meeting | None = None
        self.restarted = 0  # actors that were started again
        self._playing: list[Part] = []  # what is not collected, in the order of submission
        self.actors: list[Any] = [self._start(slot) for slot in range(rollout.actors)]
        try:
            self.process_ids = self._load(self.actors)
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
                    self._revive(lost, {part.slot}, self.version)
                else:
                    self._playing.remove(part)
        finally:
            self._playing = [part for part in self._playing if part not in parts]
        dealt = chain.from_iterable(zip_longest(*(results[part][0] for part in parts)))
        groups = [group for group in dealt if group is not None]
        stats = RolloutStats.merge(results[part][1] for part in parts)
        check_errors(groups, stats, self._config.max_error_fraction)
        return groups, stats

    def sleep(self) -> None:
        """With ``rollout.vllm.sleep``: give the memory of all engines, where nothing plays, to the
        learner on their GPU, until they play again or take weights over."""
        if not self._config.vllm.sleep:
            return
        try:
            _get([a.sleep.remote() for a in self.actors])
        except ActorLost as lost:
            self._revive(lost, set(), self.version)
            self.sleep()

    def sync(self, learner: Publisher) -> None:
        """Bring every actor to the learner's version, between decode steps of what they play.

        Nobody swaps before all have verified all tensors. ``times`` has, afterwards, the seconds of
        each part, of the slowest actor: "send" (gather, digest and give away), "receive" and those
        of `WeightReceiver`; "bytes", and "bytes_per_second" from the first tensor gathered to the
        last received. RunFailed while another thread is in it.
        """
        if not self._syncing.acquire(blocking=False):
            raise RunFailed("weight sync refused: another is at work; one comes after the other")
        self._learner = learner
        try:
            self._sync(learner)
        except ActorLost as lost:
            self._revive(lost, set())
        finally:
            self._syncing.release()

    def _sync(self, learner: Publisher) -> None:
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
        parts: list[Mapping[str, float]] = _get(
            [a.finish_update.remote(announced.number) for a in self.actors]
        )
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

    def _start(self, slot: int) -> Any:
        actor = self._actor
        if self._group is not None:
            place = PlacementGroupSchedulingStrategy(self._group, slot)
            actor = actor.options(scheduling_strategy=place)
        return actor.remote(self.checkpoint, *self._arguments)

    def _load(self, actors: Sequence[Any]) -> list[int]:
        """Their process ids, once they are ready. vLLM takes for its own what others take of its
        GPU while it starts: there one comes after the other."""
        alone = self._config.engine == "vllm" and 0 < self._config.gpus < 1
        size = 1 if alone else max(len(actors), 1)
        parts = [actors[first : first + size] for first in range(0, len(actors), size)]
        return [number for part in parts for number in _get([a.load.remote() for a in part])]

    def _revive(
        self, lost: ActorLost, slots: set[int], version: PolicyVersion | None = None
    ) -> None:
        """Start the actors of ``slots``, and all others that are gone, again: on the learner's
        weights, which have to be those of a ``version``, with what they had not finished."""
        again: set[int] = set()
        while True:
            try:
                new = slots | self._gone()
                again |= new
                self._count(lost, new)
                for slot in new:
                    ray.kill(self.actors[slot])
                    self.actors[slot] = self._start(slot)
                found = self._load([self.actors[slot] for slot in sorted(new)])
                for slot, process_id in zip(sorted(new), found, strict=True):
                    self.process_ids[slot] = process_id
                self._transport = None  # chosen anew, for where they are now
                if self._learner is not None:
                    self._sync(self._learner)
                break
            except ActorLost as error:
                lost, slots = error, set()
        if version is not None and self.version != version:
            raise RunFailed(
                f"{lost}; the weights of version {version.number} that it played with are not "
                "those that the learner has"
            )
        for part in self._playing:
            if part.slot in again and _death(part.ref) is not None:
                run = self.actors[part.slot].run
                part.ref = run.remote(part.tasks, part.group_size, part.greedy)

    def _gone(self) -> set[int]:
        """Slots whose actors do not answer any more."""
        pings = [actor.ping.remote() for actor in self.actors]
        return {slot for slot, ref in enumerate(pings) if _death(ref) is not None}

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

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

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
            # An actor may miss another before Ray tells of its end.
            _raise(next(filter(None, map(_death, receiving)), error))
        return learner.published(sending), max(ray.get(receiving))


def _reserve(rollout: RolloutConfig) -> PlacementGroup | None:
    """Of actors with several GPUs a bundle for each, which is on one machine and stays theirs while
    they start again."""
    if rollout.gpus <= 1:
        return None
    bundle = {"CPU": _ACTOR_CPUS, "GPU": rollout.gpus}
    return placement_group([bundle] * rollout.actors, strategy="SPREAD")


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
        raise ActorLost(
            "a rollout actor ended while it worked: it was killed, ran out of memory, or its "
            f"environment ended the process ({last_line(error)})"
        ) from error
    if isinstance(error.cause, UserError | RunFailed):
        raise error.cause from None
    raise error


def _death(ref: ray.ObjectRef) -> RayError | None:
    """Wait for the end of a call: that of its actor, if it did not bring it to one itself."""
    try:
        ray.get(ref)
    except RayTaskError:
        return None
    except RayError as error:
        return error
    return None
