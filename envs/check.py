"""Does an environment keep the contract? Run it before training on an environment of your own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from ..configs.errors import UserError
from .base import MessageEnv, Observation, checked_threshold
from .types import Message, Role, Task

ODD_TEXTS = ("", "   ", "\x00 \u2603", "no_such_tool a b c", "word " * 2000)
DEFAULT_TASKS = tuple(Task(f"check/{seed}", seed) for seed in range(3))
_ROLES = get_args(Role)


def check_env(
    env: MessageEnv, *, tasks: Sequence[Task] = DEFAULT_TASKS, max_steps: int = 1000
) -> None:
    """Play short episodes and close ``env``; the first breach is a one-line `UserError`.

    Checked: the threshold, the types of what ``reset`` and ``step`` return, that only new messages
    are returned, that a task and its seed fix the episode, that odd text is answered and not
    raised, that ``expert``, if there is one, succeeds within ``max_steps``, and that ``close`` may
    be called twice. ``tasks`` is for environments that read a task's messages or metadata.
    """
    if not isinstance(env, MessageEnv):
        raise UserError(
            f"check_env {type(env).__name__}: it is no MessageEnv; subclass "
            "farhorizon.envs.MessageEnv"
        )
    checked_threshold(env)
    checker = _Checker(type(env).__name__)
    for task in tasks:
        actions = _expert_actions(checker, env, task, max_steps) if env.has_expert() else ODD_TEXTS
        if checker.play(env, task, actions) != checker.play(env, task, actions):
            checker.fail(f"seed {task.seed} and the same actions gave two different episodes")
    for text in ODD_TEXTS:
        checker.play(env, tasks[0], [text])
    for _ in range(2):
        try:
            env.close()
        except Exception as error:
            checker.fail(f"close raised {type(error).__name__}: {error}; it must work twice")


class _Checker:
    """The single checks; every failure names the environment's class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def failure(self, what: str) -> UserError:
        return UserError(f"check_env {self.name}: {' '.join(what.split())}")

    def fail(self, what: str) -> None:
        raise self.failure(what)

    def play(self, env: MessageEnv, task: Task, actions: Sequence[str]) -> list[Any]:
        """Reset, then act until the episode or the actions end; everything that came back."""
        seen = self.reset(env, task)
        record: list[Any] = [seen]
        for action in actions:
            observation, reward, over = self.step(env, action, seen)
            record.append((observation, reward, over))
            seen += observation
            if over:
                break
        return record

    def reset(self, env: MessageEnv, task: Task) -> Observation:
        try:
            result = env.reset(seed=task.seed, options={"task": task})
        except Exception as error:
            raise self.failure(f"reset raised {type(error).__name__}: {error}") from error
        if not (isinstance(result, tuple) and len(result) == 2):
            self.fail("reset must return (messages, info)")
        observation, info = result
        self.messages("reset", observation)
        if not observation:
            self.fail("reset returned no message")
        if not isinstance(info, dict):
            self.fail(f"reset returned info of type {type(info).__name__}, not dict")
        return observation

    def step(
        self, env: MessageEnv, action: str, seen: Observation
    ) -> tuple[Observation, float, bool]:
        try:
            result = env.step(action)
        except Exception as error:
            what = f"step({action[:40]!r}) raised {type(error).__name__}: {error}"
            raise self.failure(what) from error
        if not (isinstance(result, tuple) and len(result) == 5):
            self.fail("step must return (messages, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = result
        self.messages("step", observation)
        if any(message.role == "assistant" for message in observation):
            self.fail("step returned an assistant message; the policy speaks for itself")
        if len(observation) > len(seen) and observation[: len(seen)] == seen:
            self.fail("step returned the whole history; return only the new messages")
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                self.fail(f"step returned {flag} of type {type(value).__name__}, not bool")
        if not isinstance(info, dict):
            self.fail(f"step returned info of type {type(info).__name__}, not dict")
        over = bool(terminated or truncated)
        if not over and not observation:
            self.fail("step returned no message though the episode goes on")
        return observation, self.reward(reward), over

    def messages(self, where: str, observation: Any) -> None:
        if not isinstance(observation, tuple):
            self.fail(f"{where} must return a tuple of messages, not {type(observation).__name__}")
        for message in observation:
            if not isinstance(message, Message):
                self.fail(f"{where} returned a {type(message).__name__} among its messages")
            if message.role not in _ROLES or not isinstance(message.content, str):
                self.fail(f"{where} returned a message with a wrong role or content: {message!r}")

    def reward(self, reward: Any) -> float:
        if isinstance(reward, np.ndarray) and reward.ndim == 0:
            reward = reward.item()
        if not isinstance(reward, bool | int | float | np.bool_ | np.integer | np.floating):
            self.fail(f"step returned a reward of type {type(reward).__name__}, not a number")
        if not math.isfinite(float(reward)):
            self.fail(f"step returned the reward {reward}")
        return float(reward)


def _expert_actions(checker: _Checker, env: MessageEnv, task: Task, max_steps: int) -> list[str]:
    """Play the expert to the end and return what it did."""
    seen = checker.reset(env, task)
    actions: list[str] = []
    total, over = 0.0, False
    while not over:
        if len(actions) == max_steps:
            checker.fail(
                f"the expert had not finished after max_steps={max_steps}, seed {task.seed}"
            )
        actions.append(env.expert())
        observation, reward, over = checker.step(env, actions[-1], seen)
        seen += observation
        total += reward
    if total < (threshold := checked_threshold(env)):
        checker.fail(
            f"the expert reached {total:g} with seed {task.seed}, but success_threshold is "
            f"{threshold:g}"
        )
    return actions
