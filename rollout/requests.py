"""A generator over an engine that takes requests: ids of a whole sequence in, one completion out.

Such an engine (`farhorizon.rollout.vllm`) has no sessions. What sequences share it finds again in
a cache of prefixes, whose entries carry a salt: a request that is made after a change of weights
never finds states of before that are older than it may. One of before the change that has no token
yet is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from ..configs.errors import RunFailed, UserError
from ..configs.schema import InFlight
from ..policy.images import Placed
from .turns import Turns
from .types import Completion, FinishReason, GeneratorCounters, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A completion behind ``token_ids`` int64 [T]; its draws depend on ``seed`` alone, and it
    shares states with requests of the same ``salt``. Of one that ``leads`` the first token is
    told. The routes of its first ``routed`` tokens are known."""

    session: int
    token_ids: np.ndarray
    params: SamplingParams
    seed: int
    salt: str
    leads: bool = False
    routed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion: ``token_ids`` int32 [n], ``logprobs`` fp32 [n], ``versions`` int32 [n]; and how
    many of the request's tokens the cache had states of. ``routes`` [m, layers, k], packed as in
    `Routes`, are those of all tokens whose routes were not known but the last, which nothing has
    read."""

    session: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: FinishReason
    cached: int
    routes: np.ndarray | None = None


class RequestEngine(Protocol):
    """What serves requests; sequences have at most ``limit`` tokens."""

    limit: int

    def add(self, request: Request) -> None:
        """Queue a request; a session has one at a time."""
        ...

    def step(self) -> tuple[list[int], list[Answer]]:
        """One forward pass: leading sessions that have a token, and completions that ended."""
        ...

    def prefilling(self) -> list[int]:
        """Sessions whose requests have no token yet, in the order in which they came."""
        ...

    def abort(self, sessions: Sequence[int]) -> int:
        """Forget the requests of these sessions; how many tokens they had sampled."""
        ...

    def set_version(self, number: int) -> None:
        """Tokens that are sampled from now on are of this weight version."""
        ...

    def sleep(self) -> None:
        """Give memory to others until it is needed again; no state is found afterwards."""
        ...


@dataclass(slots=True)
class _Session:
    """A sequence: its ids in pieces, and how many tokens its trajectory has before them."""

    key: int
    before: int
    pieces: list[np.ndarray]
    length: int
    params: SamplingParams  # of its last request
    version: int  # of the weights that its states began with
    asked: int  # that of its last request
    fresh: int = 0  # tokens that no request had before
    routed: int = 0  # tokens whose routes a completion took along
    opened: bool = True  # its first request has not been answered

    def append(self, token_ids: np.ndarray) -> None:
        self.pieces.append(token_ids)
        self.length += len(token_ids)


def request_seed(key: int, position: int) -> int:
    """Of a completion whose first token has this index in the trajectory, in [0, 2**63)."""
    text = f"{key}\0{position}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


class RequestGenerator:
    """`Generator` on a `RequestEngine`: each turn is a request with all that came before.

    Siblings wait for the first token of the first of them, and find the states of their prompt
    then. Weights may change between steps only (`updating`). After a change completions that have
    tokens do as ``in_flight`` says; the versions of those that go on say so. What else is read from
    then on is read by the new weights alone, unless a sequence has states that are at most
    ``keep_states`` versions behind.
    A completion depends on its key and the index of its first token, never on its company.
    """

    def __init__(
        self,
        engine: RequestEngine,
        seed: int = 0,
        keep_states: int = 0,
        in_flight: InFlight = "keep",
    ) -> None:
        self._engine, self.seed, self._keep_states = engine, seed, keep_states
        self._in_flight: InFlight = in_flight
        self.counters = GeneratorCounters()
        self._turns = Turns()
        self._last_session = -1
        self._sessions: dict[int, _Session] = {}
        self._asked: set[int] = set()
        self._followers: dict[int, list[int]] = {}  # siblings that wait for the state of a prompt
        self.version = self._told = 0
        engine.set_version(0)

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold off forward passes."""
        return self._turns.take()

    @contextmanager
    def updating(self, number: int) -> Iterator[None]:
        waits = number != self.version and self._in_flight == "wait"
        with self._turns.update(waits, self._running):
            yield
            self.version = number

    def sleep(self) -> None:
        """Let the engine give its memory to others, until the next step or the next weights."""
        with self.exclusive():
            self._engine.sleep()

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def open(
        self,
        prompt: np.ndarray,
        keys: Sequence[int],
        params: SamplingParams,
        position: int | None = None,
        images: Sequence[Placed] = (),
    ) -> list[int]:
        """As in `Generator`; ``position`` is the length of the trajectory where the prompt is
        only its end (default: the length of the prompt)."""
        if len(prompt) == 0 or not keys:
            raise ValueError("open: a session needs a prompt token and a key")
        self._check(len(prompt), params, images)
        ids = np.asarray(prompt, np.int64)
        before = 0 if position is None else position - len(ids)
        sessions = list(range(self._last_session + 1, self._last_session + 1 + len(keys)))
        self._last_session = sessions[-1]
        with self.exclusive():
            now = self.version
            for session, key in zip(sessions, keys, strict=True):
                one = _Session(key, before, [ids], len(ids), params, now, now, len(ids))
                self._sessions[session] = one
            self._asked.update(sessions)
            if len(sessions) > 1:
                self._followers[sessions[0]] = sessions[1:]
            self._request(sessions[0])
        self.counters.prompt_tokens += len(ids) * len(keys)
        return sessions

    def extend(
        self,
        session: int,
        token_ids: np.ndarray,
        params: SamplingParams,
        images: Sequence[Placed] = (),
    ) -> None:
        assert session not in self._asked, "extend: the session is still sampling"
        one = self._sessions[session]
        self._check(one.length + len(token_ids), params, images)
        one.append(np.asarray(token_ids, np.int64))
        one.fresh += len(token_ids)
        one.params = params
        with self.exclusive():
            self._asked.add(session)
            self._request(session)
        self.counters.prompt_tokens += len(token_ids)

    def step(self) -> list[tuple[int, Completion]]:
        if not self._asked:
            return []
        with self.exclusive():
            if self._told != self.version:
                self._change_version()
            for session in self._turns.released():
                self._ask(session)
            if self._running() == 0:  # what is asked is held
                return []
            begun, answers = self._engine.step()
            self._asked -= {answer.session for answer in answers}  # the engine has forgotten them
            self.counters.steps += 1
            for session in {*begun, *(answer.session for answer in answers)} & set(self._followers):
                for follower in self._followers.pop(session):
                    self._ask(follower)
            self._turns.settle(self._running())
        return [(answer.session, self._take(answer)) for answer in answers]

    def close(self, session: int) -> None:
        assert session not in self._asked, "close: the session is sampling"
        del self._sessions[session]

    def clear(self) -> None:
        waiting = {session for group in self._followers.values() for session in group}
        with self.exclusive():
            self._engine.abort(sorted(self._asked - waiting - set(self._turns.held)))
            self._sessions.clear()
            self._followers.clear()
            self._asked.clear()
            self._turns.clear()

    def _check(self, length: int, params: SamplingParams, images: Sequence[Placed]) -> None:
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
        if images:
            raise UserError("rollout: this engine takes no images; use the native one")
        if length + params.max_tokens > self._engine.limit:
            raise UserError(
                f"context={self._engine.limit}: a sequence of {length} tokens with "
                f"{params.max_tokens} to sample is longer"
            )

    def _change_version(self) -> None:
        """Tell the engine, and make requests of before anew that have no token yet."""
        self._told = self.version
        self._engine.set_version(self.version)
        if self._in_flight == "abort":
            waiting = {session for group in self._followers.values() for session in group}
            running = sorted(self._asked - waiting - set(self._turns.held))
            old = [s for s in running if self._sessions[s].asked != self.version]
        else:
            old = [s for s in self._engine.prefilling() if self._too_old(self._sessions[s])]
        self.counters.discarded_tokens += self._engine.abort(old)
        for session in old:
            self._ask(session)

    def _too_old(self, one: _Session) -> bool:
        """Whether new weights may not go on with the states of a session."""
        return self.version - one.version > (0 if one.opened else self._keep_states)

    def _running(self) -> int:
        """Completions that were asked for and are not held."""
        held = self._turns.held
        return len(self._asked) - sum(1 + len(self._followers.get(s, ())) for s in held)

    def _request(self, session: int) -> None:
        if self._turns.admit(session):
            self._ask(session)

    def _ask(self, session: int) -> None:
        one = self._sessions[session]
        if len(one.pieces) > 1:
            one.pieces = [np.concatenate(one.pieces)]
        if self._too_old(one):
            one.version = self.version
        one.asked = self.version
        seed = request_seed(one.key, one.before + one.length)
        leads = session in self._followers
        salt = str(one.version)
        ids = one.pieces[0]
        self._engine.add(Request(session, ids, one.params, seed, salt, leads, one.routed))

    def _take(self, answer: Answer) -> Completion:
        if len(answer.logprobs) != len(answer.token_ids) or len(answer.token_ids) == 0:
            raise RunFailed(
                f"rollout: {len(answer.logprobs)} log-probs of {len(answer.token_ids)} tokens"
            )
        if not np.isfinite(answer.logprobs).all():
            raise RunFailed(
                "rollout: a log-prob is not finite: the weights of this policy have grown too "
                "large; go on from an earlier checkpoint, with a lower lr"
            )
        one, counters = self._sessions[answer.session], self.counters
        read = one.length - answer.cached
        counters.prefill_tokens += read
        counters.renewed_tokens += max(0, read - one.fresh)
        if one.opened:
            counters.reused_tokens += answer.cached
        counters.sampled_tokens += len(answer.token_ids)
        counters.stale_tokens += int(np.count_nonzero(answer.versions != one.version))
        # The last token was drawn but not read.
        one.fresh, one.opened = 1, False
        one.append(np.asarray(answer.token_ids, np.int64))
        routes = answer.routes
        if routes is not None:
            if len(routes) != one.length - 1 - one.routed:
                raise RunFailed(
                    f"rollout: routes of {len(routes)} tokens where those of tokens {one.routed} "
                    f"to {one.length - 1} were asked for"
                )
            one.routed += len(routes)
        return Completion(answer.token_ids, answer.logprobs, answer.versions, answer.finish, routes)
