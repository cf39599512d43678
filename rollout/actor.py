"""Ray shell of the rollout: actors that play episodes, and the driver's view of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from ..configs.errors import RunFailed, UserError, last_line
from ..configs.schema import ChatConfig, EnvConfig, RolloutConfig
from ..envs.registry import make_config, resolve_plugins
from ..envs.types import Task
from ..policy.weights import Bucket, PolicyVersion, Publication
from .calls import EnvCalls
from .engines import build
from .episode import run_groups
from .sync import WeightReceiver
from .types import Group, RolloutStats

_ACTOR_CPUS = 0.01  # threads are bounded by the config; any number of actors fits a laptop


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
    def finish_update(self) -> PolicyVersion:
        """Swap between two decode steps, and prove it."""
        with self._generator.exclusive():
            version = self._receiver.commit()
            self._generator.version = version.number
        return version


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

    def sync(self, publication: Publication) -> None:
        """Bring every actor to a published version, between decode steps of what they play.

        Nobody swaps before all have verified all tensors.
        """
        announced = replace(publication, buckets=())
        _get([a.begin_update.remote(announced) for a in self.actors])
        for bucket in publication.buckets:
            _get([a.load_bucket.remote(bucket) for a in self.actors])
        _get([a.verify_update.remote() for a in self.actors])
        _get([a.finish_update.remote() for a in self.actors])
        self.version = publication.version

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
        raise RunFailed(
            "a rollout actor ended while it worked: it was killed, ran out of memory, or its "
            f"environment ended the process ({last_line(error)})"
        ) from error
