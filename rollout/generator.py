"""Continuous batching over decode states: token ids in, sampled token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..configs.schema import InFlight
from ..policy import DecodeState, Policy
from ..policy.decode import takes_steps
from ..policy.images import Placed
from .memory import enough_memory
from .routes import RouteLog
from .rows import ROW, Drafts, Opening, Pace, StopSets
from .sampler import checked, sample
from .sight import Sight
from .states import Flight, Packed, Slots
from .turns import Turns
from .types import Completion, FinishReason, GeneratorCounters, SamplingParams


class NativeGenerator:
    """The project's own engine: one `DecodeState` row per session, in one packed forward a step.

    Siblings share one prefill: their row is forked when the prompt is done. Weights may change
    between steps only (`updating`). Running completions then do as ``in_flight`` says; of those
    that go on the versions of tokens say so. What else is given to a sequence is read by the new
    weights alone: prompts that are half done start again, and a session makes its state anew when
    it is extended, unless that is at most ``keep_states`` versions behind. ``prefill_tokens``
    bounds the tokens of one forward, longer prompts go in pieces. With ``record_routes``
    completions have the routes of what was read.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int = 0,
        prefill_tokens: int = 8192,
        keep_states: int = 0,
        record_routes: bool = False,
        in_flight: InFlight = "keep",
    ) -> None:
        self.policy = policy.eval()
        self.seed = seed
        self.version = 0
        self.counters = GeneratorCounters()
        self._prefill_tokens, self._keep_states = prefill_tokens, keep_states
        self._in_flight: InFlight = in_flight
        self._device = next(policy.parameters()).device
        self._turns = Turns()
        self._stops = StopSets(policy.config.vocab_size)
        self._last_session = -1
        self._sight, self._routes = Sight(policy), RouteLog(policy, record_routes)
        self._flight = None
        self.clear()

    def clear(self) -> None:
        if self._flight is not None:
            self._flight.drop()
        self._flight: Flight | None = None
        slots = takes_steps(self.policy)
        self._states = Slots(self.policy, self._routes.wanted) if slots else Packed(self.policy)
        self._rows = np.zeros(0, ROW)
        self._row_of: dict[int, int] = {}
        self._ids: dict[int, list[np.ndarray]] = {}  # all tokens of a session
        self._sight.clear()
        self._routes.clear()
        self._pieces: dict[int, np.ndarray] = {}  # given tokens that the state has not seen
        self._openings: dict[int, Opening] = {}
        self._unplaced: list[np.ndarray] = []
        self._closed: list[int] = []
        self._num_asked = 0
        self._drafts, self._pace = Drafts(), Pace(self._prefill_tokens)
        self._turns.clear()

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold off forward passes."""
        return self._turns.take()

    @contextmanager
    def updating(self, number: int) -> Iterator[None]:
        new = number != self.version
        with self._turns.update(new and self._in_flight == "wait", self._running):
            yield
            self.version = number
            if new and self._in_flight == "abort":
                self._start_over()

    @property
    def _state(self) -> DecodeState | None:
        return self._states.state

    @property
    def busy(self) -> bool:
        return self._num_asked > 0

    def open(
        self,
        prompt: np.ndarray,
        keys: Sequence[int],
        params: SamplingParams,
        position: int | None = None,
        images: Sequence[Placed] = (),
    ) -> list[int]:
        """As in `Generator`; ``position`` is the length of the trajectory where the prompt is
        only its end (default: the length of the prompt). ``keys`` are `sampler.stream_key`s."""
        if len(prompt) == 0 or not keys:
            raise ValueError("open: a session needs a prompt token and a key")
        sessions = list(range(self._last_session + 1, self._last_session + 1 + len(keys)))
        self._last_session = sessions[-1]
        row = np.zeros(1, ROW)
        row["session"], row["key"] = sessions[0], keys[0]
        row["position"] = len(prompt) if position is None else position
        opening = Opening(np.asarray(prompt, np.int64), keys, sessions)
        with self.exclusive():
            row["version"] = self.version
            self._ask(row, 0, params, len(prompt), int(prompt[-1]))
            self._openings[sessions[0]] = opening
            self._pieces[sessions[0]] = opening.prompt
            self._ids |= {session: [opening.prompt] for session in sessions}
            for session in sessions:
                self._sight.add(session, images, 0)
            self._unplaced.append(row)
            self._num_asked += len(keys)
            self._turns.admit(sessions[0])
        self.counters.prompt_tokens += len(prompt) * len(keys)
        self.counters.reused_tokens += len(prompt) * (len(keys) - 1)
        return sessions

    def extend(
        self,
        session: int,
        token_ids: np.ndarray,
        params: SamplingParams,
        images: Sequence[Placed] = (),
    ) -> None:
        with self.exclusive():
            rows, row = self._rows, self._row_of[session]
            assert rows["todo"][row] == 0, "extend: the session is still sampling"
            piece = np.empty(1 + len(token_ids), np.int64)
            piece[0], piece[1:] = rows["last"][row], token_ids
            rows["position"][row] += len(token_ids)
            self._ask(rows, row, params, len(piece), int(piece[-1]))
            self._pieces[session] = piece
            self._sight.add(session, images, sum(map(len, self._ids[session])))
            self._ids[session].append(piece[1:])
            self._num_asked += 1
            self._turns.admit(session)
        self.counters.prompt_tokens += len(token_ids)

    def close(self, session: int) -> None:
        assert self._rows[self._row_of[session]]["todo"] == 0, "close: the session is sampling"
        self._closed.append(self._row_of.pop(session))
        del self._ids[session]
        self._sight.forget(session)
        self._routes.forget(session)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        with self.exclusive(), enough_memory(self.policy):
            self._turns.released()
            done = self._step()
            self._turns.settle(self._running())
        return done

    def _step(self) -> list[tuple[int, Completion]]:
        if self._flight is not None:
            return self._land(self._flight)
        self._place()
        if self._pieces:
            self._renew()
        if self._running() == 0:
            return []
        active = np.flatnonzero(self._rows["todo"])
        if self._turns.held:
            active = active[~np.isin(self._rows["session"][active], self._turns.held)]
        active, take = self._pace.plan(self._rows["todo"], active)
        if isinstance(self._states, Slots) and self._only_sampled(active, take):
            flight = self._states.fly(self._rows, active, self._stops.table, self.version)
            self._flight = flight
            return self._land(flight)
        logits = self._forward(active, take)
        self.counters.steps += 1
        rows = self._rows
        rows["todo"][active] -= take
        ready = rows["todo"][active] == 0
        if not ready.all():
            active, logits = active[ready], logits[self._index(np.flatnonzero(ready))]
        if self._openings:
            active, logits = self._fork(active, logits)
        return self._sample(active, logits) if len(active) else []

    def _running(self) -> int:
        """Completions that were asked for and are not held."""
        opened = (self._openings.get(session) for session in self._turns.held)
        return self._num_asked - sum(1 if one is None else len(one.sessions) for one in opened)

    def _ask(
        self, rows: np.ndarray, row: int, params: SamplingParams, todo: int, last: int
    ) -> None:
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
        # Column first: assigning through a record costs several times as much.
        rows["todo"][row], rows["last"][row], rows["count"][row] = todo, last, 0
        rows["budget"][row], rows["temperature"][row] = params.max_tokens, params.temperature
        rows["stop"][row] = self._stops.number(params.stop_token_ids)

    def _place(self) -> None:
        """Drop closed rows and give new sessions theirs."""
        if self._closed:
            keep = np.delete(np.arange(len(self._rows)), self._closed)
            self._closed = []
            self._take_rows(keep)
            self._states.keep(keep)
        if self._unplaced:
            fresh = np.concatenate(self._unplaced)
            self._states.add(len(fresh))
            self._take_rows(np.arange(len(self._rows)), fresh)
            self._unplaced = []

    def _renew(self) -> None:
        """Forget what old weights made of sequences that have given tokens to be read."""
        for session in self._pieces:
            row = self._row_of[session]
            behind = self.version - int(self._rows["version"][row])
            if behind > (0 if session in self._openings else self._keep_states):
                self._read_again(session, row)

    def _read_again(self, session: int, row: int) -> None:
        """Let the weights of now read a sequence from its start."""
        rows, ids = self._rows, np.concatenate(self._ids[session])
        self._routes.renew(session)
        self.counters.renewed_tokens += len(ids) - int(rows["todo"][row])
        self._states.renew(row)
        rows["todo"][row], rows["version"][row] = len(ids), self.version
        self._pieces[session] = ids

    @torch.inference_mode()
    def _start_over(self) -> None:
        """Throw away what completions have sampled, to sample it anew."""
        if self._flight is not None:
            self._flight.drop()
            self._flight = None
        rows = self._rows
        for row in np.flatnonzero(rows["todo"]).tolist():
            session, count = int(rows["session"][row]), int(rows["count"][row])
            if count:
                self.counters.discarded_tokens += count
                rows["position"][row] -= count
                rows["count"][row] = rows["todo"][row] = 0
                self._read_again(session, row)

    def _take_rows(self, index: np.ndarray, fresh: np.ndarray | None = None) -> None:
        """Reorder, repeat or drop rows, then append ``fresh`` ones."""
        more = 0 if fresh is None else len(fresh)
        self._rows = (
            self._rows[index] if fresh is None else np.concatenate((self._rows[index], fresh))
        )
        self._drafts.take(index, more)
        self._row_of = {int(s): i for i, s in enumerate(self._rows["session"])}

    def _forward(self, active: np.ndarray, take: np.ndarray) -> Tensor:
        """Feed the planned tokens; logits [len(active), V] after the last of each row."""
        rows = self._rows
        longest = int(take.max())
        images: dict[str, Any] = {}
        if longest == 1 and not self._pieces:
            ids, cu_seqlens = rows["last"][active][:, None], None
        else:
            ends = np.cumsum(take)
            flat = rows["last"][active].repeat(take)
            read: list[tuple[int, int, int, int]] = []
            for row, end, length in zip(active.tolist(), ends.tolist(), take.tolist(), strict=True):
                session = int(rows["session"][row])
                piece = self._pieces.get(session)
                if piece is None:
                    continue
                flat[end - length : end] = piece[:length]
                known = sum(map(len, self._ids[session])) - int(rows["todo"][row])
                read.append((session, known, length, end - length))
                self.counters.prefill_tokens += length
                if length == len(piece):
                    del self._pieces[session]
                else:
                    self._pieces[session] = piece[length:]
            images = self._sight.inputs(read)
            if longest * len(take) == len(flat):
                ids, cu_seqlens = flat.reshape(len(take), longest), None
            else:
                ids = flat[None]
                cu_seqlens = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
        input_ids = torch.from_numpy(ids).to(self._device)
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(self._device)
        mine = rows[active]
        with self._routes.reading(mine["session"], mine["position"] - mine["todo"], take):
            return self._states.forward(active, take, input_ids, cu_seqlens, images)

    def _fork(self, active: np.ndarray, logits: Tensor) -> tuple[np.ndarray, Tensor]:
        """Give every sequence of a finished prompt a row of its own."""
        repeats = np.ones(len(self._rows), np.int64)
        done: list[Opening] = []
        for row in active.tolist():
            opening = self._openings.pop(int(self._rows["session"][row]), None)
            if opening is not None:
                repeats[row] = len(opening.sessions)
                done.append(opening)
        if repeats.max() == 1:
            return active, logits
        index = np.arange(len(repeats)).repeat(repeats)
        self._states.repeat(index)
        self._take_rows(index)
        for opening in done:
            first = self._row_of[opening.sessions[0]] + 1 - len(opening.sessions)
            own = slice(first, first + len(opening.sessions))
            self._rows["session"][own] = opening.sessions
            self._rows["key"][own] = np.array(opening.keys, np.uint64)
            self._routes.fork(opening.sessions)
        self._row_of = {int(s): i for i, s in enumerate(self._rows["session"])}
        taking_part = np.zeros(len(repeats), np.bool_)
        taking_part[active] = True
        expand = np.arange(len(active)).repeat(repeats[active])
        return np.flatnonzero(taking_part[index]), logits[self._index(expand)]

    def _sample(self, active: np.ndarray, logits: Tensor) -> list[tuple[int, Completion]]:
        mine = self._rows[active]
        drawn = sample(logits, mine["temperature"], mine["key"], mine["position"])
        return self._record(active, *drawn, self.version)

    def _only_sampled(self, active: np.ndarray, take: np.ndarray) -> bool:
        """Whether each of these rows reads the token that was sampled last, and nothing else."""
        given = self._pieces and any(int(s) in self._pieces for s in self._rows["session"][active])
        return int(take.max()) == 1 and not given

    def _land(self, flight: Flight) -> list[tuple[int, Completion]]:
        """Take what a step drew, after the next one was started if nothing else is to be done."""
        others = self._pieces or self._closed or self._unplaced
        if not others and flight.goes_on():
            flight.start(self.version)
        active, drawn, routes, version = flight.land()
        mine = self._rows[active]
        tokens, logprobs = checked(drawn)
        if routes is not None:
            ones = np.ones(len(active), np.int64)
            self._routes.add(mine["session"], mine["position"] - 1, ones, routes)
        self.counters.steps += 1
        out = self._record(active, tokens, logprobs, version)
        flight.alive[flight.alive] = self._rows["todo"][active] != 0
        if not flight.alive.any():
            flight.drop()
        if not flight.in_the_air:
            self._flight = None
        return out

    def _record(
        self, active: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> list[tuple[int, Completion]]:
        """Note tokens that were sampled by weights of ``version``."""
        rows = self._rows
        whole = len(active) == len(rows)
        mine = rows if whole else rows[active]
        count = mine["count"]
        self._drafts.add(active, count, tokens, logprobs, version)
        stopped = self._stops.table[mine["stop"], tokens]
        ended = stopped | (count + 1 >= mine["budget"])
        mine["last"], mine["todo"] = tokens, ~ended
        mine["position"] += 1
        mine["count"] += 1
        if not whole:
            rows[active] = mine
        self.counters.sampled_tokens += len(active)
        self.counters.stale_tokens += int(np.count_nonzero(mine["version"] != version))
        return self._completions(active, np.flatnonzero(ended), stopped)

    def _completions(
        self, active: np.ndarray, ended: np.ndarray, stopped: np.ndarray
    ) -> list[tuple[int, Completion]]:
        self._num_asked -= len(ended)
        out = []
        for i in ended.tolist():
            row = int(active[i])
            count, session = int(self._rows["count"][row]), int(self._rows["session"][row])
            finish = FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            drawn = self._drafts.of(row, count)
            completion = Completion(*drawn, finish, self._routes.take(session))
            self._ids[session].append(completion.token_ids)
            out.append((session, completion))
        return out

    def _index(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self._device)
