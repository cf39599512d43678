"""A very small environment for tests and first steps: repeat the word that is shown."""

from __future__ import annotations

from typing import Any

from ..configs.errors import UserError
from .base import MessageEnv, Observation, Step
from .types import Message

WORDS = ("red", "green", "blue", "black")


class Echo(MessageEnv):
    """Each of ``turns`` turns shows a word; the reward 1 comes at the end if all were repeated."""

    def __init__(self, turns: int = 3) -> None:
        if turns < 1:
            raise UserError(f"echo-v0: turns must be at least 1, got {turns}")
        self.turns = turns
        self._words: list[str] = []
        self._turn = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._words = [str(w) for w in self.np_random.choice(WORDS, size=self.turns)]
        self._turn = 0
        return (Message("user", f" {self._words[0]}"),), {}

    def step(self, action: str) -> Step:
        if action.strip() != self._words[self._turn]:
            return self.finish(0.0)
        self._turn += 1
        if self._turn == self.turns:
            return self.finish(1.0)
        return self.reply(f" {self._words[self._turn]}")

    def expert(self) -> str:
        return f" {self._words[self._turn]}"
