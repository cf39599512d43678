"""Calls into environments: faults become data, quick calls run at once, slow ones in threads."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import current_thread, main_thread
from typing import Any

import numpy as np

from ..configs.errors import UserError
from ..envs.base import MessageEnv
from ..envs.types import Message, Task

_SLOW_MEAN_S = 0.002  # a kind of call with a larger mean goes to the threads,
_SLOW_TOTAL_S = 0.1  # once that has cost this much
_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as text, so that no foreign object has to be pickled or printed again."""

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Never raises, whatever the exception's own methods do."""
        try:
            message = str(error)
        except BaseException as inner:
            message = f"<message unavailable: str() raised {type(inner).__name__}>"
        try:
            trace = "".join(traceback.format_exception(error))
        except BaseException:
            trace = "<traceback unavailable>"
        return cls(type(error).__name__, message, trace)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.trace}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: a value, or the fault it ended in."""

    value: Any
    fault: Fault | None
    seconds: float


class EnvCalls:
    """Runs calls and hands out their outcomes in the order in which they end.

    A call that takes microseconds would lose more in a thread than it takes, so calls run at once
    until their kind (reset, step, close) proves slow; from then on that kind runs in threads.
    What was learned lasts as long as the object. Calls of one environment must not overlap; they
    may come from different threads. Any exception but the user's Ctrl-C becomes a `Fault`; a
    `UserError` is a mistake of the user and stays one.
    """

    def __init__(self, threads: int) -> None:
        self.seconds = 0.0  # spent in calls, over all threads
        self._pool = ThreadPoolExecutor(min(threads, _MAX_THREADS), thread_name_prefix="env")
        self._done: SimpleQueue[tuple[Any, Outcome | UserError]] = SimpleQueue()
        self._running = 0  # submitted and not yet handed out
        self._inline: dict[str, tuple[int, float]] = {}  # kind -> calls, seconds
        self._threaded: set[str] = set()

    def submit(self, tag: Any, kind: str, call: Callable[[], Any]) -> None:
        """Start a call; `ready` returns its outcome with ``tag``."""
        self._running += 1
        if kind in self._threaded:
            self._pool.submit(self._run, tag, call)
            return
        seconds = self._run(tag, call)
        # The first call does not count: it may fill caches that all later ones use.
        count, total = self._inline.get(kind, (-1, -seconds))
        count, total = self._inline[kind] = count + 1, total + seconds
        if total > max(_SLOW_TOTAL_S, count * _SLOW_MEAN_S):
            self._threaded.add(kind)

    def ready(self, wait: bool) -> list[tuple[Any, Outcome]]:
        """Outcomes that have come in; with ``wait`` at least one. Raises the user's mistakes."""
        out = []
        try:
            while True:
                tag, outcome = self._done.get(block=wait and not out)
                self._running -= 1
                if isinstance(outcome, UserError):
                    raise outcome
                self.seconds += outcome.seconds
                out.append((tag, outcome))
        except Empty:
            return out

    def drain(self) -> list[tuple[Any, Any]]:
        """Wait for all calls; tags and values of outcomes that nobody took, without raising."""
        out = []
        while self._running:
            tag, outcome = self._done.get()
            self._running -= 1
            out.append((tag, outcome.value if isinstance(outcome, Outcome) else None))
        return out

    def shutdown(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)

    def _run(self, tag: Any, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        value, fault = None, None
        try:
            value = call()
        except UserError as error:
            self._done.put((tag, error))
            return 0.0
        except BaseException as error:  # fault boundary: environments may raise SystemExit too
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                self._running -= 1
                raise
            fault = Fault.of(error)
        seconds = time.perf_counter() - start
        self._done.put((tag, Outcome(value, fault, seconds)))
        return seconds


def build(factory: Callable[[], MessageEnv], task: Task) -> tuple[MessageEnv, tuple[Message, ...]]:
    """A fresh environment, reset for the task, and its opening messages."""
    env = factory()
    try:
        messages, _ = env.reset(seed=task.seed, options={"task": task})
        return env, _messages(messages)
    except BaseException:
        with suppress(Exception):
            env.close()
        raise


def answer(env: MessageEnv, text: str) -> tuple[tuple[Message, ...], Any, bool, bool]:
    """One step: new messages, the raw reward, terminated, truncated."""
    messages, reward, terminated, truncated, _ = env.step(text)
    return _messages(messages), reward, bool(terminated), bool(truncated)


def _messages(value: Any) -> tuple[Message, ...]:
    messages = tuple(value)
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"environments return Message objects, got {type(message).__name__}")
    return messages


def number(reward: Any, env: MessageEnv | None) -> float | None:
    """The reward as a float, None if it is missing or not finite."""
    if reward is None:
        return None
    try:
        if isinstance(reward, str | bytes) or getattr(reward, "ndim", 0) != 0:
            raise TypeError
        value = float(reward)
    except (TypeError, ValueError):
        raise UserError(
            f"environment {type(env).__name__}: the reward must be a number, got "
            f"{reward!r} ({type(reward).__name__})"
        ) from None
    return value if np.isfinite(value) else None
