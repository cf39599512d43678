"""Calls into environments: what runs in turn, what side by side, how long anything may take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, get_ident
from typing import Any

import numpy as np
import pytest

from farhorizon.configs.schema import RolloutConfig
from farhorizon.envs.registry import EnvBuildError
from farhorizon.envs.types import StopReason, Task
from farhorizon.rollout.calls import EnvCalls, Fault, answer
from farhorizon.rollout.episode import run_groups

from ..fakes import ScriptedEnv, ScriptedGenerator, WordChat


@pytest.fixture
def calls() -> Iterator[EnvCalls]:
    made = EnvCalls(threads=4, timeout_s=0.5)
    yield made
    made.shutdown()


@pytest.fixture
def release() -> Iterator[Event]:
    """Ends what hangs, at the latest when the test does."""
    event = Event()
    yield event
    event.set()


def in_turn(calls: EnvCalls, work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Values of calls that wait for each other."""
    out = []
    for one in work:
        calls.submit(None, "step", one)
        out += [outcome.value for _, outcome in calls.ready(wait=True)]
    return out


def test_quick_calls_end_in_turn_in_one_thread(calls: EnvCalls) -> None:
    """Their outcomes are there when `submit` returns, so the order never depends on timing."""
    for number in range(40):
        calls.submit(number, ("reset", "step", "close")[number % 3], get_ident)
    ended = calls.ready(wait=False)
    assert [number for number, _ in ended] == list(range(40))
    (thread,) = {outcome.value for _, outcome in ended}
    assert thread != get_ident()


def test_one_slow_first_call_is_no_proof(calls: EnvCalls) -> None:
    waits = [0.12, *[0.0] * 30]
    threads = in_turn(calls, [lambda w=wait: (time.sleep(w), get_ident())[1] for wait in waits])
    assert set(threads) == {threads[0]}


def test_quick_calls_that_turn_slow_run_side_by_side(calls: EnvCalls) -> None:
    in_turn(calls, [lambda: None] * 20)
    in_turn(calls, [lambda: time.sleep(0.06)] * 2)
    start = time.perf_counter()
    for number in range(4):
        calls.submit(number, "step", lambda: time.sleep(0.2))
    assert time.perf_counter() - start < 0.1


def test_a_quick_kind_has_a_limit_too(calls: EnvCalls, release: Event) -> None:
    """The hundredth call hangs: it ends as a fault, and calls of every kind go on."""
    in_turn(calls, [lambda: None] * 99)
    calls.submit("late", "step", release.wait)
    ((_, late),) = calls.ready(wait=False)
    assert late.given_up and late.fault is not None
    assert str(late.fault).startswith("EnvTimeout: step took more than rollout.env_timeout_s=0.5\n")
    assert "wait" in late.fault.trace  # where it hangs
    for kind in ("close", "step"):
        calls.submit(kind, kind, lambda: 5)
        ((_, outcome),) = calls.ready(wait=True)
        assert outcome.value == 5 and outcome.fault is None


def test_calls_that_hang_end_as_faults_and_hold_up_nothing(calls: EnvCalls, release: Event) -> None:
    """More of them than there are threads: the call behind them still has its turn."""
    for number in range(9):
        calls.submit(number, "step", release.wait)
    calls.submit("good", "step", lambda: 5)
    outcomes = {}
    while len(outcomes) < 10:
        outcomes |= dict(calls.ready(wait=True))
    assert outcomes["good"].value == 5 and outcomes["good"].fault is None
    for number in range(9):
        fault = outcomes[number].fault
        assert str(fault).startswith("EnvTimeout: step took more than rollout.env_timeout_s=0.5\n")
        assert outcomes[number].given_up
    assert "wait" in outcomes[8].fault.trace  # where it hangs


class Hanging(ScriptedEnv):
    """Waits in the given step (0 is reset) until it is released."""

    hang_at: int
    release: Event

    def reset(self, **kwargs: Any) -> Any:
        if self.hang_at == 0:
            self.release.wait()
        return super().reset(**kwargs)

    def step(self, action: str) -> Any:
        if self.hang_at == 1 + len(self.actions):
            self.release.wait()
        return super().step(action)


@pytest.mark.parametrize("hang_at", [0, 2, 100])
def test_an_environment_that_hangs_is_retried_then_masked(hang_at: int, release: Event) -> None:
    """C21. Nobody closes an environment under a call; the late call does it itself, once."""
    ScriptedEnv.built = ScriptedEnv.closed = Hanging.built = Hanging.closed = 0
    made: list[ScriptedEnv] = []
    replies = ["x"] * max(1, hang_at - 1)

    def build() -> ScriptedEnv:
        made.append((Hanging if len(made) in (0, 2, 3) else ScriptedEnv)("go", replies))
        return made[-1]

    Hanging.hang_at, Hanging.release = hang_at, release
    groups, stats = run_groups(
        ScriptedGenerator([[2, 0]] * (1 + len(replies))),
        [Task("first", 0), Task("second", 1)],
        1,
        build,
        WordChat(["go", "x"]),
        RolloutConfig(env_timeout_s=0.5, env_retries=1, concurrency=1, max_turns=100),
        1024,
    )
    first, second = (group.trajectories[0] for group in groups)
    assert first.reward == 1.0 and first.stop is StopReason.TERMINATED
    assert second.reward is None and second.stop is StopReason.ERROR
    assert second.error is not None and second.error.startswith("EnvTimeout: ")
    assert (stats.env_errors, stats.errors) == (3, 1)
    assert Hanging.closed == 0 and ScriptedEnv.closed == 1
    release.set()
    deadline = time.monotonic() + 5
    while Hanging.closed < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Hanging.closed == Hanging.built == 3


@pytest.mark.parametrize("flag", ["False", None, 0, np.array([True])])
def test_a_flag_that_is_no_bool_is_a_fault(flag: object) -> None:
    """``bool("False")`` is True: the episode would end as if it had been asked to."""

    class Odd(ScriptedEnv):
        def step(self, action: str) -> Any:
            return (), 1.0, flag, False, {}

    with pytest.raises(TypeError, match=r"^step returned terminated of type \w+, not bool$"):
        answer(Odd(), "x")
    assert answer(ScriptedEnv(), "x") == ((), 1.0, True, False)


def test_a_constructor_that_fails_later_on_is_a_fault(calls: EnvCalls) -> None:
    """It worked when the run started, so this is no mistake in the config."""

    def build() -> None:
        raise EnvBuildError("env.id 'box' cannot be built: OSError: no space left")

    calls.submit(None, "reset", build)
    ((_, outcome),) = calls.ready(wait=True)
    assert str(outcome.fault).startswith("EnvBuildError: env.id 'box' cannot be built: OSError")


def test_a_fault_names_the_line_of_the_users_code() -> None:
    """Not one of a library that it called, however deep that broke."""
    line = test_a_fault_names_the_line_of_the_users_code.__code__.co_firstlineno
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    fault = Fault.of(caught.value)
    assert fault.line.startswith("JSONDecodeError: Expecting property name")
    assert fault.line.endswith(f" (test_calls.py, line {line + 4})")
    assert str(fault).splitlines()[:2] == [fault.line, "Traceback (most recent call last):"]
