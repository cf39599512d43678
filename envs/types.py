"""What an environment exchanges with the rest of the system: messages, tasks and stop reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, e.g. ``Message("tool", "json dumps loads")``."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance; picklable, no tensors.

    ``id`` is unique within a run and names the group of siblings that solve it; ``seed`` is what
    ``env.reset`` gets. Data-set environments read ``messages`` and ``metadata``; generated ones
    need only the seed. Example: ``Task("archive-v0/train/17", 17)``.
    """

    id: str
    seed: int
    messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"  # the environment finished: its reward is final
    TURN_LIMIT = "turn_limit"  # the run's turn budget was used up
    CONTEXT_LIMIT = "context_limit"  # the next request would not fit the context
    ENV_TRUNCATED = "env_truncated"  # the environment gave up (time, its own budget)
    ERROR = "error"  # environment or sandbox fault: masked, never a reward of 0

    @property
    def status(self) -> Literal["terminated", "truncated", "error"]:
        """The gymnasium view of the reason."""
        if self is StopReason.TERMINATED:
            return "terminated"
        return "error" if self is StopReason.ERROR else "truncated"
