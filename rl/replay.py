"""Routing replay on the learner: whose experts it computes with, and where statistics come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from ..configs.errors import RunFailed, UserError
from ..configs.schema import LearnerConfig
from ..policy.routing import Routed, Routes
from .types import MicroBatch, Sample


class Replay:
    """The setting ``learner.replay`` for one policy. UserError if that has no experts, of which
    the settings of thresholds are as well."""

    def __init__(self, policy: Any, config: LearnerConfig) -> None:
        self.policy, self._source = policy, config.replay
        self._frozen = config.thresholds == "freeze"
        given = {"replay": config.replay != "off", "thresholds": config.thresholds != "track"}
        for key in (key for key, changed in given.items() if changed):
            if not (isinstance(policy, Routed) and policy.routers()):
                raise UserError(
                    f"learner.{key}={getattr(config, key)} would have no effect: the policy has no "
                    "experts; leave it out"
                )

    def wants_pass_before(self, steps: int) -> bool:
        """Whether an update of so many steps needs the learner's routes from before the first."""
        return self._source == "learner" and steps > 1

    def active(self, passed: bool) -> bool:
        """Whether a step replays routes, alike on every rank; ``passed`` says that there was a
        forward before the update."""
        return self._source == "rollout" or (self._source == "learner" and passed)

    def routes(self, batch: MicroBatch, before: Routes | None) -> Routes | None:
        """The routes that a micro-batch is learned from, if it has any; ``before`` are those of
        the pass before the update."""
        return batch.routes if self._source == "rollout" else before

    def taking(self, routes: Routes | None) -> AbstractContextManager[None]:
        """Context of forwards, and of backwards that compute them again, on these routes."""
        return nullcontext() if routes is None else self.policy.replayed_routes(routes)

    def first_pass(
        self, batch: MicroBatch, forward: Callable[[], Any]
    ) -> tuple[Any, Routes | None]:
        """What ``forward`` gives before the update, and the routes that the update keeps to."""
        if self._source != "learner" or batch.padding:
            with self.taking(self.routes(batch, None)):
                return forward(), None
        with self.policy.recorded_routes() as recording:
            out = forward()
        return out, Routes(recording.take(), np.ones(len(batch.input_ids), np.bool_))

    def counts(self, number: int) -> bool:
        """Whether a step that replays routes wants the free ones of its micro-batch ``number``,
        alike on every rank: thresholds are made of all, those that stay only tell a load."""
        return number == 0 or not self._frozen

    def count_free(
        self, batch: MicroBatch, routes: Routes | None, forward: Callable[[], Any]
    ) -> None:
        """Statistics of a micro-batch whose ``routes`` will be replayed; without, only a forward
        that other ranks may wait for."""
        counted = routes is not None and not batch.padding
        with torch.no_grad(), self.policy.routing_statistics() if counted else nullcontext():
            forward()


def share_recorded(groups: Sequence[list[Sample]]) -> float:
    """Share of tokens, trained or not, whose routes the rollout recorded; RunFailed if it is 0,
    where a learner would replay nothing."""
    samples = [sample for group in groups for sample in group]
    known = sum(int(s.routes.known.sum()) for s in samples if s.routes is not None)
    if known == 0:
        raise RunFailed(
            "learner.replay=rollout: the rollout recorded no routes to replay; set "
            "learner.replay=learner or off"
        )
    return known / sum(map(len, samples))
