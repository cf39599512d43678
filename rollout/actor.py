"""Ray shell of the rollout: actors that play episodes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import ray
import torch

from ..configs.schema import ChatConfig, EnvConfig, InFlight, RolloutConfig
from ..envs.registry import make_config
from ..envs.types import Task
from ..policy.links import Meeting, Place, Receiver
from ..policy.memory import free_cached
from ..policy.weights import Announcement, Publication
from .calls import EnvCalls
from .engines import build
from .episode import run_groups
from .requests import RequestGenerator
from .sync import WeightReceiver
from .types import Group, RolloutStats


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
        played = run_groups(
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
        if 0 < self._config.gpus < 1:
            self._generator.clear()  # states of sequences that have ended
            free_cached(self._config.gpus)
        return played

    @ray.method(concurrency_group="sync")
    def sleep(self) -> None:
        """Give the engine's memory to the learner; what needs it next takes it back."""
        assert isinstance(self._generator, RequestGenerator)
        self._generator.sleep()

    @ray.method(concurrency_group="sync")
    def ping(self) -> None:
        """Answer, also while episodes are played."""

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
    def finish_update(self, number: int) -> Mapping[str, float]:
        """Swap between two decode steps to the version of that number, and prove it; what each
        part of the update took."""
        with self._generator.updating(number):
            self._receiver.commit()
            free_cached(self._config.gpus)
        return self._receiver.seconds
