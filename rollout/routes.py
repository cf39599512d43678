"""Routes of the tokens that a generator has read, kept until a completion takes them along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..policy import Policy


@dataclass(slots=True)
class _Session:
    """Rows of a session's first tokens: so many are ``given`` away, those in ``parts`` are not."""

    given: int = 0
    parts: list[np.ndarray] = field(default_factory=list)


class RouteLog:
    """Keeps the routes by which each token was read first, and with that the distribution that the
    token behind it was sampled from; off, it does nothing.

    What new weights read again stays as it was where something was sampled behind it already;
    `renew` forgets the rest.
    """

    def __init__(self, policy: Policy, wanted: bool) -> None:
        self._policy, self.wanted = policy, wanted
        self._sessions: dict[int, _Session] = {}

    @contextmanager
    def reading(self, sessions: np.ndarray, first: np.ndarray, count: np.ndarray) -> Iterator[None]:
        """Around the forward that reads ``count`` tokens of each session, from number ``first``."""
        if not self.wanted:
            yield
            return
        with self._policy.recorded_routes() as recording:
            yield
            rows = recording.take()
        self.add(sessions, first, count, rows)

    def add(
        self, sessions: np.ndarray, first: np.ndarray, count: np.ndarray, rows: np.ndarray
    ) -> None:
        """Take ``rows [n, layers, k]`` of ``count`` tokens of each session, from ``first`` on."""
        start = 0
        places = zip(sessions.tolist(), first.tolist(), count.tolist(), strict=True)
        for session, begin, length in places:
            own = self._sessions.setdefault(session, _Session())
            known = own.given + sum(map(len, own.parts))
            if begin + length > known:
                own.parts.append(rows[start + max(0, known - begin) : start + length])
            start += length

    def take(self, session: int) -> np.ndarray | None:
        """Rows ``[n, layers, k]`` of all tokens read since the last call; None if off."""
        if not self.wanted:
            return None
        own = self._sessions[session]
        rows = np.concatenate(own.parts)
        own.given, own.parts = own.given + len(rows), []
        return rows

    def renew(self, session: int) -> None:
        """Forget rows behind which nothing was sampled."""
        if session in self._sessions:
            self._sessions[session].parts = []

    def fork(self, sessions: Sequence[int]) -> None:
        """Let the others begin as the first."""
        if self.wanted:
            parts = self._sessions[sessions[0]].parts
            self._sessions |= {session: _Session(0, list(parts)) for session in sessions[1:]}

    def forget(self, session: int) -> None:
        """Drop a session's rows."""
        self._sessions.pop(session, None)

    def clear(self) -> None:
        """Drop all rows."""
        self._sessions.clear()
