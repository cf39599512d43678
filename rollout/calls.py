"""Calls into environments: faults become data, none takes for ever, slow ones run side by side."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, get_ident
from typing import Any, get_args

import numpy as np

from ..configs.errors import UserError, place_of
from ..envs.base import MessageEnv, check_declared
from ..envs.messages import opening
from ..envs.registry import EnvBuildError
from ..envs.types import LARGEST_REWARD, Effort, Message, Role, Task

_SLOW_MEAN_S = 0.002  # a kind of call with a larger mean goes to the threads,
_SLOW_TOTAL_S = 0.1  # once that has cost this much
_MAX_THREADS = 64
_ROLES = get_args(Role)
_LINE = 500  # characters of a message; the trace has all of it


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as text, so that no foreign object has to be pickled or printed again.

    ``place`` is the line of the user's code, as `place_of` gives it.
    """

    kind: str
    message: str
    place: str
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
        place = place_of(traceback.walk_tb(error.__traceback__))
        return cls(type(error).__name__, message, place, trace)

    @property
    def line(self) -> str:
        """All of it but the trace, on one line that is not too long."""
        return f"{self.kind}: {' '.join(self.message[:_LINE].split())}{self.place}"

    def __str__(self) -> str:
        return f"{self.line}\n{self.trace}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: a value, or the fault it ended in.

    A call that was given up still has its environment: nobody else may touch it, not even to
    close it.
    """

    value: Any
    fault: Fault | None
    seconds: float
    given_up: bool = False


@dataclass(eq=False, slots=True)
class _Call:
    """A call in a thread; ``over`` when its outcome is in, be it that it was given up."""

    tag: Any
    kind: str
    call: Callable[[], Any]
    env: MessageEnv | None
    started: float = 0.0
    thread: int = 0
    seconds: float = 0.0
    over: Event = field(default_factory=Event)
    given_up: bool = False


class EnvCalls:
    """Runs calls and hands out their outcomes in the order in which they end.

    Calls of a kind (reset, step, close) are waited for, one after another in one thread, until
    the kind proves slow; from then on they run in threads side by side. What was learned lasts as
    long as the object. Calls of one environment must not overlap; they may come from different
    threads. Any exception becomes a `Fault`, but a `UserError` is a mistake of the user and stays
    one.

    A call that takes more than ``timeout_s`` is a fault too. Its thread is given up, another one
    takes its place; should it ever return, it closes the environment.
    """

    def __init__(self, threads: int, timeout_s: float) -> None:
        self.seconds = 0.0  # spent in calls, over all threads
        self.timeout_s = timeout_s
        self._max_threads, self._threads = min(threads, _MAX_THREADS), 0
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._in_turn: SimpleQueue[_Call | None] | None = None  # calls that are waited for
        self._started: deque[_Call] = deque()  # calls side by side, in the order of their start
        self._ending = Lock()  # a call ends or is given up, never both
        self._done: SimpleQueue[tuple[Any, Outcome | UserError]] = SimpleQueue()
        self._running = 0  # submitted and not yet handed out
        self._waited: dict[str, tuple[int, float]] = {}  # kind -> calls, seconds of the scheduler
        self._threaded: set[str] = set()

    def submit(
        self, tag: Any, kind: str, call: Callable[[], Any], env: MessageEnv | None = None
    ) -> None:
        """Start a call of ``env`` (None: it builds one); `ready` gives its outcome with ``tag``."""
        self._running += 1
        asked = _Call(tag, kind, call, env)
        if kind in self._threaded:
            self._queue.put(asked)
            if self._threads < min(self._max_threads, self._running):
                self._add_thread()
            return
        # The way into a thread and back does not count: a busy machine must not make a kind slow.
        # Nor does the first call: it may fill caches that all later ones use.
        seconds = self._wait_for(asked)
        count, total = self._waited.get(kind, (-1, 0.0))
        total += seconds if count >= 0 else 0.0
        self._waited[kind] = count + 1, total
        if total > max(_SLOW_TOTAL_S, (count + 1) * _SLOW_MEAN_S):
            self._threaded.add(kind)

    def ready(self, wait: bool) -> list[tuple[Any, Outcome]]:
        """Outcomes that have come in; with ``wait`` at least one. Raises the user's mistakes."""
        out = []
        while (ended := self._next(wait and not out)) is not None:
            tag, outcome = ended
            if isinstance(outcome, UserError):
                raise outcome
            self.seconds += outcome.seconds
            out.append((tag, outcome))
        return out

    def drain(self) -> list[tuple[Any, Outcome]]:
        """Wait for all calls; outcomes that nobody took, without raising."""
        out = []
        while self._running and (ended := self._next(True)) is not None:
            tag, outcome = ended
            if isinstance(outcome, Outcome):
                out.append((tag, outcome))
        return out

    def shutdown(self) -> None:
        """End the threads."""
        for _ in range(self._threads):
            self._queue.put(None)
        if self._in_turn is not None:
            self._in_turn.put(None)

    def _next(self, wait: bool) -> tuple[Any, Outcome | UserError] | None:
        while True:
            self._give_up_late_calls()
            try:
                ended = self._done.get(block=wait, timeout=min(1.0, self.timeout_s / 4))
            except Empty:
                if wait:
                    continue
                return None
            self._running -= 1
            return ended

    def _add_thread(self) -> None:
        self._threads += 1
        self._start_thread(self._queue)

    def _start_thread(self, queue: SimpleQueue[_Call | None]) -> None:
        Thread(target=self._work, args=(queue,), name="env", daemon=True).start()

    def _work(self, queue: SimpleQueue[_Call | None]) -> None:
        while (call := queue.get()) is not None:
            call.thread, call.started = get_ident(), time.monotonic()
            if queue is self._queue:
                self._started.append(call)
            self._run(call)
            if call.given_up:  # another thread has taken this one's place
                return

    def _wait_for(self, call: _Call) -> float:
        if self._in_turn is None:
            self._in_turn = SimpleQueue()
            self._start_thread(self._in_turn)
        self._in_turn.put(call)
        if not call.over.wait(self.timeout_s) and self._give_up(call):
            self._in_turn = None
        return call.seconds

    def _run(self, call: _Call) -> None:
        outcome = self._outcome(call.call)
        call.seconds = _seconds(outcome)
        with self._ending:
            if not call.given_up:
                self._done.put((call.tag, outcome))
                call.over.set()
                return
        env = call.env
        if env is None and isinstance(outcome, Outcome) and isinstance(outcome.value, tuple):
            env = outcome.value[0]
        if env is not None and call.kind != "close":
            with suppress(BaseException):
                env.close()

    def _give_up_late_calls(self) -> None:
        while self._started:
            call = self._started[0]
            if not call.over.is_set():
                if time.monotonic() - call.started < self.timeout_s:
                    return
                if self._give_up(call):
                    self._threads -= 1
                    self._add_thread()
            self._started.popleft()

    def _give_up(self, call: _Call) -> bool:
        """Make a call a fault if it is still running."""
        frame = sys._current_frames().get(call.thread)
        fault = Fault(
            "EnvTimeout",
            f"{call.kind} took more than rollout.env_timeout_s={self.timeout_s:g}",
            place_of(reversed(list(traceback.walk_stack(frame)))) if frame is not None else "",
            "".join(traceback.format_stack(frame)) if frame is not None else "",
        )
        with self._ending:
            if call.over.is_set():
                return False
            call.given_up = True
            call.over.set()
        self._threaded.add(call.kind)
        self._done.put((call.tag, Outcome(None, fault, self.timeout_s, given_up=True)))
        return True

    def _outcome(self, call: Callable[[], Any]) -> Outcome | UserError:
        start = time.perf_counter()
        value, fault = None, None
        try:
            value = call()
        except BaseException as error:  # fault boundary: environments may raise SystemExit too
            if isinstance(error, UserError) and not isinstance(error, EnvBuildError):
                return error
            fault = Fault.of(error)
        return Outcome(value, fault, time.perf_counter() - start)


def _seconds(outcome: Outcome | UserError) -> float:
    return outcome.seconds if isinstance(outcome, Outcome) else 0.0


def build(
    factory: Callable[[], MessageEnv],
    task: Task,
    calls: bool = False,
    effort: Effort | None = None,
) -> tuple[MessageEnv, tuple[Message, ...]]:
    """A fresh environment, reset for the task, and its opening messages; for a policy that
    ``calls`` its tools with their declarations, and with the effort that it is asked for."""
    env = factory()
    try:
        messages, _ = env.reset(seed=task.seed, options={"task": task})
        check_declared(env)
        tools = env.declarations() if calls else ()
        return env, opening(checked_messages(messages), tools, effort)
    except BaseException:
        with suppress(Exception):
            env.close()
        raise


def answer(env: MessageEnv, text: str) -> tuple[tuple[Message, ...], Any, bool, bool]:
    """One step: new messages, the raw reward, terminated, truncated."""
    messages, reward, terminated, truncated, _ = env.step(text)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):  # bool("False") would be True
            raise TypeError(f"step returned {name} of type {type(flag).__name__}, not bool")
    return checked_messages(messages), reward, bool(terminated), bool(truncated)


def checked_messages(value: Any) -> tuple[Message, ...]:
    """What an environment returned as messages; TypeError or ValueError if it is something else."""
    messages = tuple(value)
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"environments return Message objects, got {type(message).__name__}")
        if message.role not in _ROLES:
            raise ValueError(f"message role {message.role!r} is none of {', '.join(_ROLES)}")
        message.content.encode()  # lone surrogates have no UTF-8
    return messages


def number(reward: Any, env: MessageEnv | None) -> float | None:
    """The reward as a float, None if it is missing, not finite or beyond `LARGEST_REWARD`."""
    if reward is None:
        return None
    try:
        if isinstance(reward, str | bytes) or getattr(reward, "ndim", 0) != 0:
            raise TypeError
        value = float(reward)
    except OverflowError:
        return None
    except Exception:  # the object's own conversion may raise anything
        raise UserError(
            f"environment {type(env).__name__}: the reward must be a number, got {shown(reward)}"
        ) from None
    return value if abs(value) <= LARGEST_REWARD else None


def shown(value: Any) -> str:
    """A foreign value for people, on one line, not too long; never raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "a value"
    return f"{text[:80]} ({type(value).__name__})"
