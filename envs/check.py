"""Does an environment keep the contract? Run it before training on an environment of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from ..configs.errors import UserError
from .base import (
    MessageEnv,
    Observation,
    Step,
    check_declared,
    checked_threshold,
    succeeded,
)
from .expert import expert_turns
from .messages import Tools, declare_tools
from .types import LARGEST_REWARD, Action, Message, Role, Task, ToolCall

ODD_TEXTS = ("", "   ", "\x00 \u2603", "no_such_tool a b c", "word " * 2000)
ODD_CALLS = (
    Action(Message("assistant", ""), ("call 1: not closed",)),
    Action(Message("assistant", "", calls=(ToolCall("no_such_tool", {"a": [None]}),))),
    Action(Message("assistant", "", calls=(ToolCall("step", {"action": "x"}), ToolCall("", "{")))),
)
DEFAULT_TASKS = tuple(Task(f"check/{seed}", seed) for seed in range(3))
_ROLES = get_args(Role)


def check_env(
    env: MessageEnv, *, tasks: Sequence[Task] = DEFAULT_TASKS, max_steps: int = 1000
) -> None:
    """Play short episodes and close ``env``; the first breach is a one-line `UserError`.

    Checked: threshold, kind and budget, the types of what ``reset`` and ``step`` return, that only
    new messages are returned, that a task and its seed fix the episode, that odd text is answered
    and not raised, that ``expert``, if there is one, succeeds within ``max_steps``, that declared
    tools do when they are called what they do in words, and that ``close`` may be called twice.
    ``tasks`` is for environments that read a task's messages or metadata.
    """
    if not isinstance(env, MessageEnv):
        raise UserError(
            f"check_env {type(env).__name__}: it is no MessageEnv; subclass "
            "farhorizon.envs.MessageEnv"
        )
    checker = _Checker(env, checked_threshold(env))
    for task in tasks:
        actions = _expert_actions(checker, task, max_steps) if env.has_expert() else ODD_TEXTS
        if checker.play(task, actions) != checker.play(task, actions):
            checker.fail(f"seed {task.seed} and the same actions gave two different episodes")
        if checker.declarations():
            checker.compare_calls(task, actions)
    for action in ODD_TEXTS + (ODD_CALLS if checker.declarations() else ()):
        checker.play(tasks[0], [action])
    for _ in range(2):
        try:
            env.close()
        except Exception as error:
            checker.fail(f"close raised {type(error).__name__}: {error}; it must work twice")


class _Checker:
    """The environment with a check of all that it returns; every failure names its class."""

    def __init__(self, env: MessageEnv, success_threshold: float) -> None:
        self.env, self.success_threshold = env, success_threshold
        self.seen: Observation = ()  # in this episode so far

    def failure(self, what: str) -> UserError:
        return UserError(f"check_env {type(self.env).__name__}: {' '.join(what.split())}")

    def fail(self, what: str) -> None:
        raise self.failure(what)

    def play(self, task: Task, actions: Sequence[str]) -> list[Any]:
        """Reset, then act until the episode or the actions end; everything that came back."""
        opening = self.reset(seed=task.seed, options={"task": task})[0]
        record: list[Any] = [(opening, self.env.kind, self.env.budget)]
        for action in actions:
            observation, reward, terminated, truncated, _ = self.step(action)
            record.append((observation, reward, terminated or truncated))
            if terminated or truncated:
                break
        return record

    def compare_calls(self, task: Task, actions: Sequence[str]) -> None:
        """Tools that are called must do what the same words do."""
        in_words = self.play(task, actions)
        called = self.play(task, [self.as_calls(action) for action in actions])
        if [step[1:] for step in in_words[1:]] != [step[1:] for step in called[1:]]:
            self.fail(
                f"seed {task.seed}: its tools gave other rewards, or another end, when they were "
                "called than in words; let step of ToolEnv read the action"
            )

    def declarations(self) -> Tools:
        try:
            tools = self.env.declarations()
            if tools:
                declare_tools(tools)
        except Exception as error:
            what = f"declarations must return JSON schemas: {type(error).__name__}: {error}"
            raise self.failure(what) from error
        return tools

    def as_calls(self, action: str) -> str:
        try:
            called = self.env.as_calls(action)
        except Exception as error:
            what = f"as_calls({action[:40]!r}) raised {type(error).__name__}: {error}"
            raise self.failure(what) from error
        if not isinstance(called, str):
            self.fail(f"as_calls returned a {type(called).__name__}, not a text")
        return called

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        try:
            result = self.env.reset(seed=seed, options=options)
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
        check_declared(self.env)
        self.seen = observation
        return observation, info

    def expert(self) -> str:
        try:
            action = self.env.expert()
        except Exception as error:
            raise self.failure(f"expert raised {type(error).__name__}: {error}") from error
        if not isinstance(action, str):
            self.fail(f"expert returned a {type(action).__name__}, not a text")
        return action

    def step(self, action: str) -> Step:
        try:
            result = self.env.step(action)
        except Exception as error:
            what = f"step({action[:40]!r}) raised {type(error).__name__}: {error}"
            raise self.failure(what) from error
        if not (isinstance(result, tuple) and len(result) == 5):
            self.fail("step must return (messages, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = result
        self.messages("step", observation)
        if any(message.role == "assistant" for message in observation):
            self.fail("step returned an assistant message; the policy speaks for itself")
        seen = self.seen
        if len(observation) > len(seen) and observation[: len(seen)] == seen:
            self.fail("step returned the whole history; return only the new messages")
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                self.fail(f"step returned {flag} of type {type(value).__name__}, not bool")
        if not isinstance(info, dict):
            self.fail(f"step returned info of type {type(info).__name__}, not dict")
        if not (terminated or truncated or observation):
            self.fail("step returned no message though the episode goes on")
        self.seen += observation
        return observation, self.reward(reward), bool(terminated), bool(truncated), info

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
        if not abs(reward) <= LARGEST_REWARD:
            self.fail(f"step returned the reward {reward}")
        return float(reward)


def _expert_actions(checker: _Checker, task: Task, max_steps: int) -> list[str]:
    """Play the expert to the end and return what it did."""
    actions: list[str] = []
    rewards: list[float] = []
    terminated = False
    for turn in expert_turns(checker, task):
        actions.append(turn.action)
        rewards.append(turn.reward)
        terminated = turn.terminated
        if len(actions) == max_steps and not (terminated or turn.truncated):
            checker.fail(
                f"the expert had not finished after max_steps={max_steps}, seed {task.seed}"
            )
    if not succeeded(rewards, checker.success_threshold, terminated):
        checker.fail(
            f"the expert reached {sum(rewards):g} with seed {task.seed}, but success_threshold is "
            f"{checker.success_threshold:g}"
        )
    return actions
