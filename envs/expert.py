"""An environment's own expert plays: what demonstrations, `check_env` and ``play`` are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ..configs.errors import UserError, foreign_code
from .base import MessageEnv, succeeded
from .messages import Tools, opening, said
from .types import Effort, Message, Task


class Demonstrator(Protocol):
    """An environment with an expert."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Sequence[Message], dict[str, Any]]: ...

    def step(
        self, action: str, /
    ) -> tuple[Sequence[Message], float, bool, bool, dict[str, Any]]: ...

    def expert(self) -> str: ...

    def declarations(self) -> Tools: ...

    def as_calls(self, action: str) -> str: ...


class Turn(NamedTuple):
    """What the expert was shown, what it said, and what came back."""

    shown: Sequence[Message]
    action: str
    reply: Sequence[Message]
    reward: float
    terminated: bool
    truncated: bool


def expert_turns(
    env: Demonstrator, task: Task, calls: bool = False, effort: Effort | None = None
) -> Iterator[Turn]:
    """The expert's episode of ``task``, the one that a rollout plays, turn by turn to its end;
    with ``calls`` as a policy plays it whose chat format has tool calls, which are declared at the
    start, where ``effort`` is said as well."""
    name = type(env).__name__
    with foreign_code(f"env: reset of {name}"):
        messages, _ = env.reset(seed=task.seed, options={"task": task})
    with foreign_code(f"env: declarations of {name}"):
        shown = opening(tuple(messages), env.declarations() if calls else (), effort)
    ended = False
    while not ended:
        with foreign_code(f"env: expert of {name}"):
            action = env.expert()
        if not isinstance(action, str):
            raise UserError(f"env: expert of {name} must return a text, got {action!r:.80}")
        if calls:
            with foreign_code(f"env: as_calls of {name}"):
                action = env.as_calls(action)
        with foreign_code(f"env: step of {name}"):
            reply, reward, terminated, truncated, _ = env.step(action)
            reward = float(reward)
        if not math.isfinite(reward):
            raise UserError(f"env: step of {name} gave the reward {reward}, no finite number")
        yield Turn(shown, action, reply, reward, terminated, truncated)
        shown, ended = reply, terminated or truncated


def expert_messages(
    env: MessageEnv, task: Task, calls: bool = False, effort: Effort | None = None
) -> Iterator[Message]:
    """The messages of `expert_turns` as a rollout would see them: nothing follows the action that
    ends the episode. With ``calls`` tools are declared and called; ``effort`` is said at the start.
    Raises `UserError` after one that is no success."""
    rewards: list[float] = []
    terminated = False
    for turn in expert_turns(env, task, calls, effort):
        yield from turn.shown
        yield said(turn.action)
        rewards.append(turn.reward)
        terminated = turn.terminated
    if not succeeded(rewards, env.success_threshold, terminated):
        raise UserError(
            f"env: its expert fails on task {task.id}, seed {task.seed} (reward "
            f"{sum(rewards):g}, success needs {env.success_threshold:g}); demonstrations must be "
            "correct"
        )
