"""Where a generator keeps the decode states of its sequences.

Rows here are the generator's: sequence i of it. `Packed` holds exactly these in one `DecodeState`,
whose rows move as sequences come and go. `Slots`, on a GPU, gives each a place that stays the same
until it ends, so that captured steps can find it, and reuses places that are free.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..policy import DecodeState, Policy
from ..policy.decode import (
    CapturedSteps,
    Drawn,
    StepInputs,
    Steps,
    bucket_of,
    lay_out,
    stop_table,
)
from ..policy.state import LatentCache

LEAST_SLOTS, LEAST_TOKENS = 8, 512  # memory that grows by doubling begins here


class States(Protocol):
    """The decode states of a generator's sequences."""

    state: DecodeState | None

    def keep(self, index: np.ndarray) -> None:
        """Drop all rows but ``index``, which stay in order."""
        ...

    def add(self, count: int) -> None:
        """Append empty rows."""
        ...

    def renew(self, row: int) -> None:
        """Forget all that a row has read."""
        ...

    def repeat(self, index: np.ndarray) -> None:
        """Reorder rows to ``index``, sorted, where a repeated one is forked."""
        ...

    def forward(
        self,
        active: np.ndarray,
        take: np.ndarray,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        images: dict[str, Any],
    ) -> Tensor:
        """Feed ``take`` tokens to each of the rows ``active``; logits after the last of each."""
        ...


class Packed:
    """One state with a row for every sequence and no other; nothing where there are none."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.state: DecodeState | None = None

    def keep(self, index: np.ndarray) -> None:
        assert self.state is not None
        self.state = self.state.select(self._index(index)) if len(index) else None

    def add(self, count: int) -> None:
        empty = self._empty(count)
        self.state = empty if self.state is None else DecodeState.cat([self.state, empty])

    def renew(self, row: int) -> None:
        assert self.state is not None
        self.state.put(self._index(np.array([row])), self._empty(1))

    def repeat(self, index: np.ndarray) -> None:
        assert self.state is not None
        self.state = self.state.select(self._index(index))

    def forward(
        self,
        active: np.ndarray,
        take: np.ndarray,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        images: dict[str, Any],
    ) -> Tensor:
        assert self.state is not None
        if len(active) == self.state.num_sequences:
            out = self._policy(input_ids, cu_seqlens, self.state, last_only=True, **images)
            self.state = out.state
            return out.logits
        index = self._index(active)
        part = self.state.lend(index)
        out = self._policy(input_ids, cu_seqlens, part, last_only=True, **images)
        self.state.take_back(index, part)
        return out.logits

    def _empty(self, count: int) -> DecodeState:
        policy = self._policy
        return DecodeState.empty(policy.config, count, policy.device, policy.dtype)

    def _index(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self._policy.device)


class Slots:
    """A state of more rows than sequences; ``places`` [N] are those of the sequences, ``past``
    counts the tokens of every place. Memory grows by doubling and stays."""

    def __init__(self, policy: Policy, record: bool) -> None:
        self._policy, self._record = policy, record
        self.state: DecodeState | None = None
        self.places, self.past = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._free: list[int] = []
        self._steps: Steps | None = None
        self._marked = 0  # stop sets that the steps know
        self._checked = -1  # version of the weights that were looked for last

    def keep(self, index: np.ndarray) -> None:
        self._free += np.delete(self.places, index).tolist()
        self.places = self.places[index]

    def add(self, count: int) -> None:
        fresh = self._take(count)
        self._clear(fresh)
        self.places = np.concatenate((self.places, fresh))

    def renew(self, row: int) -> None:
        self._clear(self.places[row : row + 1])

    def repeat(self, index: np.ndarray) -> None:
        again = np.concatenate(([False], index[1:] == index[:-1]))
        source = self.places[index[again]]
        fresh = self._take(len(source))
        self.places = self.places[index]
        self.places[again] = fresh
        self.past[fresh] = self.past[source]
        assert self.state is not None
        old, new, used = self._index(source), self._index(fresh), int(self.past[source].max())
        for layer in self.state.layers:
            for kept in layer.tensors():
                part = kept[:, :used] if isinstance(layer, LatentCache) else kept
                part[new] = part[old]

    def forward(
        self,
        active: np.ndarray,
        take: np.ndarray,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        images: dict[str, Any],
    ) -> Tensor:
        assert self.state is not None
        places = self.places[active]
        self._make_room(int((self.past[places] + take).max()))
        index = self._index(places)
        part = self.state.lend(index)
        part.lengths = self._index(self.past[places])
        out = self._policy(input_ids, cu_seqlens, part, last_only=True, **images)
        self.state.take_back(index, part)
        self.past[places] += take
        return out.logits

    def fly(self, rows: np.ndarray, active: np.ndarray, stops: np.ndarray, version: int) -> Flight:
        """Begin steps of the ``active`` ones of the generator's ``rows``, each of which has one
        token to read; ``stops`` bool [S, V] are its stop sets, ``version`` that of the weights."""
        assert self.state is not None
        mine, places = rows[active], self.places[active]
        self._make_room(int(self.past[places].max()) + 1)
        steps = self._current(stops, version)
        graph = steps.captured(len(active))
        graph.give(
            StepInputs(
                temperature=mine["temperature"],
                keys=mine["key"].view(np.int64),
                ids=mine["last"],
                places=places,
                past=self.past[places],
                position=mine["position"],
                left=mine["budget"] - mine["count"],
                stop=mine["stop"],
            )
        )
        return Flight(self, graph, active.copy(), places, mine["budget"] - mine["count"], version)

    def _current(self, stops: np.ndarray, version: int) -> Steps:
        """Steps for the weights, the state and the stop sets as they lie now."""
        assert self.state is not None
        steps = self._steps
        moved = steps is not None and version != self._checked and steps.stale()
        self._checked = version
        if steps is None or moved or len(stops) > len(steps.stops):
            self._steps = steps = None  # its graphs give memory back before others take some
            lay_out(self._policy)
            table = stop_table(len(stops), stops.shape[1], self._policy.device)
            steps = self._steps = Steps(self._policy, self.state, table, self._record)
            self._marked = 0
        if len(stops) > self._marked:
            steps.stops[: len(stops)] = torch.from_numpy(stops.view(np.uint8)).to(
                steps.stops.device
            )
            self._marked = len(stops)
        return steps

    def _make_room(self, length: int) -> None:
        """Let every place hold ``length`` tokens; steps are captured anew where that moves any."""
        assert self.state is not None
        for layer in self.state.layers:
            if isinstance(layer, LatentCache) and layer.latent.shape[1] < length:
                layer.reserve(max(length, LEAST_TOKENS))
                self._steps = None

    def _take(self, count: int) -> np.ndarray:
        """Places that are free, perhaps after making more."""
        if self.state is None or len(self._free) < count:
            have = 0 if self.state is None else self.state.num_sequences
            least = max(LEAST_SLOTS, have - len(self._free) + count)
            total = 1 << (least - 1).bit_length()
            more = DecodeState.empty(
                self._policy.config, total - have, self._policy.device, self._policy.dtype
            )
            self.state = more if self.state is None else DecodeState.cat([self.state, more])
            self.past = np.concatenate((self.past, np.zeros(total - have, np.int64)))
            self._free += range(total - 1, have - 1, -1)
            self._steps = None
        self._free.sort(reverse=True)  # neighbours, where there are some: their caches are one view
        return np.array([self._free.pop() for _ in range(count)], np.int64)

    def _clear(self, places: np.ndarray) -> None:
        assert self.state is not None
        self.past[places] = 0
        index = self._index(places)
        for layer in self.state.layers:
            if not isinstance(layer, LatentCache):  # which is read up to its length only
                for kept in layer.tensors():
                    kept[index] = 0

    def _index(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self._policy.device)


class Flight:
    """Steps of the same rows, one after another: the next is started before the results of the one
    before are read, so that the GPU does not wait for the host.

    ``active`` are the rows, in ``alive`` those that go on; the device knows itself which of them
    are over, and leaves their states alone.
    """

    def __init__(
        self,
        slots: Slots,
        graph: CapturedSteps,
        active: np.ndarray,
        places: np.ndarray,
        left: np.ndarray,
        version: int,
    ) -> None:
        self._slots, self._graph = slots, graph
        self.active, self._places, self._left = active, places, left
        self.alive = np.ones(len(active), np.bool_)
        self._air: list[tuple[Drawn, int]] = []  # steps, with the version of their weights
        self.start(version)

    @property
    def in_the_air(self) -> bool:
        """Whether results have not been read."""
        return bool(self._air)

    def start(self, version: int) -> None:
        """Start a step with weights of this version."""
        self._air.append((self._graph.start(), version))

    def goes_on(self) -> bool:
        """Whether one more step has tokens to draw and room for them, and no smaller one would
        do."""
        assert self._slots.state is not None
        places = self._places[self.alive & (self._left > len(self._air))]
        if not len(places) or bucket_of(len(places)) != self._graph.size:
            return False
        longest = int(self._slots.past[places].max()) + len(self._air) + 1
        caches = [x for x in self._slots.state.layers if isinstance(x, LatentCache)]
        return all(longest <= cache.latent.shape[1] for cache in caches)

    def land(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
        """Results of the first step in the air: rows that were alive, what they drew fp64 [n, 2],
        their routes, and the version of the weights."""
        step, version = self._air.pop(0)
        drawn, routes = step.wait()
        self._slots.past[self._places[self.alive]] += 1
        self._left = self._left - 1
        rows = self.active[self.alive]
        taken = None if routes is None else routes[self.alive]
        return rows, drawn[self.alive], taken, version

    def drop(self) -> None:
        """Wait for steps that nobody wants: their graph may go away now."""
        while self._air:
            self._air.pop()[0].wait()
