"""Routes of experts as data, and what a policy does with them beside its forward: it counts them
for its thresholds, records them, and takes those of another forward (routing replay)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..kernels.device import upload
from .moe import Router, max_over_mean, update_routers
from .thresholds import TRACK, ThresholdRule


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of T tokens: ``experts`` [T, layers, k] in the order in which they were chosen, uint8
    where their numbers fit, else int16; ``known`` bool [T] is false for tokens without, whose
    experts mean nothing."""

    experts: np.ndarray
    known: np.ndarray

    def __len__(self) -> int:
        return len(self.known)

    def first(self, count: int) -> Routes:
        """Those of the first ``count`` tokens."""
        return Routes(self.experts[:count], self.known[:count])

    @staticmethod
    def join(parts: Sequence[Routes | None], lengths: Sequence[int]) -> Routes | None:
        """Those of sequences of ``lengths`` end to end, some perhaps without; None if all are."""
        some = next((part for part in parts if part is not None), None)
        if some is None:
            return None
        experts = np.zeros((sum(lengths), *some.experts.shape[1:]), some.experts.dtype)
        known = np.zeros(len(experts), np.bool_)
        start = 0
        for part, length in zip(parts, lengths, strict=True):
            if part is not None:
                experts[start : start + length] = part.experts
                known[start : start + length] = part.known
            start += length
        return Routes(experts, known)


def route_dtype(router: Router) -> torch.dtype:
    """That of recorded experts: the smaller of those that `Routes` names which holds them all."""
    return torch.uint8 if len(router.e_score_correction_bias) <= 1 << 8 else torch.int16


class Recording:
    """The routes of forwards while it lasts."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._dtype = route_dtype(routers[0])
        self._layers: list[list[torch.Tensor]] = []
        for router in routers:
            router.recorded = []
            self._layers.append(router.recorded)

    def take(self) -> np.ndarray:
        """Experts ``[T, layers, k]`` of all tokens since the last call, packed as in `Routes`."""
        stacked = torch.stack([torch.cat(parts) for parts in self._layers], 1)
        for parts in self._layers:
            parts.clear()
        return stacked.to(self._dtype).cpu().numpy()


class Routed(nn.Module):
    """The part of a policy that concerns its routers. ``threshold_rule`` says how they balance."""

    threshold_rule: ThresholdRule = TRACK

    def routers(self) -> list[Router]:
        """The routers in layer order."""
        return [m for m in self.modules() if isinstance(m, Router)]

    @contextmanager
    def routing_statistics(self, valid: torch.Tensor | None = None) -> Iterator[None]:
        """Count the routing of forwards inside; ``valid`` bool [T] leaves tokens out.

        Nothing else is ever counted: evaluation, scoring and recomputation in backward run
        outside of this context. Of forwards on replayed routes only the load is.
        """
        routers = self.routers()
        for router in routers:
            router.collecting, router.valid = True, valid
        try:
            yield
        finally:
            for router in routers:
                router.collecting, router.valid = False, None

    @contextmanager
    def recorded_routes(self) -> Iterator[Recording]:
        """Record the routes of forwards inside. ValueError for a policy without experts."""
        routers = self.routers()
        if not routers:
            raise ValueError("a policy without experts has no routes")
        try:
            yield Recording(routers)
        finally:
            for router in routers:
                router.recorded = None

    @contextmanager
    def replayed_routes(self, routes: Routes) -> Iterator[None]:
        """Let forwards inside, recomputed ones too, take ``routes`` where they are known.

        Mixing weights and the choice for other tokens are the policy's own. ValueError if the
        routes are not those of its layers.
        """
        routers = self.routers()
        if routes.experts.shape[1:] != (len(routers), *{router.k for router in routers}):
            raise ValueError(
                f"routes of {list(routes.experts.shape[1:])} layers and experts per token for "
                f"{len(routers)} routers of {sorted({router.k for router in routers})}"
            )
        count = min(len(router.e_score_correction_bias) for router in routers)
        meant = routes.known[:, None, None]
        low, high = (end(routes.experts, where=meant, initial=0) for end in (np.min, np.max))
        if low < 0 or high >= count:
            raise ValueError(f"routes to experts {low} to {high} for routers of {count} experts")
        device = routers[0].weight.device
        # copies: arrays that Ray shares are read-only
        experts, known = (
            upload(torch.tensor(array), device) for array in (routes.experts, routes.known)
        )
        for number, router in enumerate(routers):
            router.given = experts[:, number], known
        try:
            yield
        finally:
            for router in routers:
                router.given = None

    def routing_counts(self) -> list[torch.Tensor]:
        """Integer tensors to be summed in place over data-parallel ranks."""
        return [count for router in self.routers() for count in router.counts()]

    def replayed_loads(self) -> list[float]:
        """Max / mean load per layer of the replayed routes that were counted."""
        loads = [router.replayed_load for router in self.routers()]
        return max_over_mean(torch.stack(loads)).tolist() if loads else []

    def update_thresholds(self) -> list[float]:
        """Set the next thresholds in place; max / mean load per layer of what was counted."""
        return update_routers(self.routers(), self.threshold_rule)

    def clear_routing_counts(self) -> None:
        """Forget counts of a step that was skipped."""
        for router in self.routers():
            router.clear()
