"""An engine of requests in miniature, whose tokens are drawn without any policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farhorizon.rollout.requests import Answer, Request
from farhorizon.rollout.types import Completion, FinishReason, Generator


class HashEngine:
    """Draws tokens from a request's seed and their index; has states of all it was given. With
    ``routed`` a token's route is its id, and ``lost`` rows of an answer are missing."""

    def __init__(
        self, limit: int = 64, logprob: float = -1.0, routed: bool = False, lost: int = 0
    ) -> None:
        self.limit, self.logprob, self.routed, self.lost = limit, logprob, routed, lost
        self.number = 0
        self.requests: list[Request] = []
        self._running: dict[int, tuple[Request, list[int], list[int], int]] = {}
        self._known: dict[str, list[list[int]]] = {}

    def add(self, request: Request) -> None:
        assert request.session not in self._running
        self.requests.append(request)
        ids = request.token_ids.tolist()
        hits = [
            sum(1 for _ in _common(ids[:-1], known)) for known in self._known.get(request.salt, [])
        ]
        self._running[request.session] = (request, [], [], max(hits, default=0))

    def step(self) -> tuple[list[int], list[Answer]]:
        begun: list[int] = []
        answers: list[Answer] = []
        for session, (request, tokens, versions, cached) in list(self._running.items()):
            self._known.setdefault(request.salt, []).append([*request.token_ids.tolist(), *tokens])
            tokens.append(int(np.random.default_rng((request.seed, len(tokens))).integers(50)))
            versions.append(self.number)
            stop = tokens[-1] in request.params.stop_token_ids
            if not stop and len(tokens) < request.params.max_tokens:
                begun += [session] if request.leads else []
                continue
            del self._running[session]
            reason = FinishReason.STOP if stop else FinishReason.LENGTH
            logprobs = np.full(len(tokens), self.logprob, np.float32)
            drawn, by = np.array(tokens, np.int32), np.array(versions, np.int32)
            routes = self._routes(request, tokens) if self.routed else None
            answers.append(Answer(session, drawn, logprobs, by, reason, cached, routes))
        return begun, answers

    def _routes(self, request: Request, tokens: Sequence[int]) -> np.ndarray:
        read = [*request.token_ids.tolist(), *tokens][request.routed : -1]
        return np.array(read, np.uint8).reshape(-1, 1, 1)[self.lost :]

    def prefilling(self) -> list[int]:
        return [session for session, (_, tokens, *_) in self._running.items() if not tokens]

    def abort(self, sessions: Sequence[int]) -> int:
        return sum(len(self._running.pop(session)[1]) for session in sessions)

    def set_version(self, number: int) -> None:
        self.number = number

    def sleep(self) -> None:
        self._known.clear()


def _common(left: Sequence[int], right: Sequence[int]):
    for a, b in zip(left, right, strict=False):
        if a != b:
            return
        yield a


def play(generator: Generator) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while generator.busy:
        found |= dict(generator.step())
    return found
