"""The expert's episode and what counts as a success."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.envs import Message, MessageEnv, Task, check_env
from farhorizon.envs.base import Observation, Step, succeeded
from farhorizon.envs.expert import expert_messages, expert_turns


@pytest.mark.parametrize(
    ("rewards", "threshold", "terminated", "success"),
    [
        ([1.0], 1.0, True, True),
        ([0.5], 1.0, True, False),
        ([0.1] * 10, 1.0, True, True),  # 0.9999999999999999 as floats add up
        ([float(np.float32(0.7))], 0.7, True, True),  # 0.69999999 as float64
        ([-0.1] * 10, -1.0, True, True),
        ([0.999], 1.0, True, False),
        ([1.0, 0.0], 1.0, False, True),  # cut off, but what it earned is enough
        ([0.0], 0.0, True, True),
        ([0.0], 0.0, False, False),
        ([-0.1], -1.0, False, False),
        ([], -5.0, False, False),
        ([], 1.0, False, False),
        ([math.nan], 1.0, True, False),
        ([math.nan, 2.0], -1.0, True, False),
        ([1e308, 1e308], 1.0, True, True),
        ([1e308], math.inf, True, False),
        ([-1e308], -math.inf, True, True),
    ],
)
def test_success(
    rewards: Sequence[float], threshold: float, terminated: bool, success: bool
) -> None:
    assert succeeded(rewards, threshold, terminated) is success


class Count(MessageEnv):
    """Shows the first message of its task ``turns`` times; each turn earns ``reward``."""

    turns: ClassVar[int] = 2
    reward: ClassVar[float] = 0.5

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.left = self.turns
        text = self.task.messages[0].content if self.task and self.task.messages else "no task"
        return (Message("user", text),), {}

    def expert(self) -> str:
        return f"{self.left} left"

    def step(self, action: str) -> Step:
        self.left -= 1
        return self.reply("yes", reward=self.reward, terminated=self.left == 0)


TASK = Task("t/4", 4, (Message("user", "the task"),))


def test_the_expert_plays_the_task_and_nothing_follows_its_last_action() -> None:
    assert list(expert_messages(Count(), TASK)) == [
        Message("user", "the task"),
        Message("assistant", "2 left"),
        Message("tool", "yes"),
        Message("assistant", "1 left"),
    ]
    last = list(expert_turns(Count(), TASK))[-1]
    assert last.shown == last.reply == (Message("tool", "yes"),)
    assert last[3:] == (0.5, True, False)


def test_a_failing_expert_is_no_demonstration() -> None:
    class Strict(Count):
        success_threshold: ClassVar[float] = 3.0

    message = r"expert fails on task t/4, seed 4 \(reward 1, success needs 3\)"
    with pytest.raises(UserError, match=message):
        list(expert_messages(Strict(), TASK))


def test_an_expert_of_tenths_succeeds() -> None:
    class Tenths(Count):
        turns: ClassVar[int] = 10
        reward: ClassVar[float] = 0.1

    assert len(list(expert_messages(Tenths(), TASK))) == 20
    check_env(Tenths())


def test_a_reward_that_is_no_finite_number_is_refused() -> None:
    class Odd(Count):
        reward: ClassVar[float] = math.nan

    with pytest.raises(UserError, match=r"^env: step of Odd gave the reward nan, no finite numb"):
        list(expert_messages(Odd(), TASK))
    with pytest.raises(UserError, match=r"^check_env Odd: step returned the reward nan$"):
        check_env(Odd())


@pytest.mark.parametrize("method", ["reset", "expert", "step"])
def test_an_environment_that_raises_is_told_with_its_place(method: str) -> None:
    class Odd(Count):
        pass

    def fails(*arguments: object, **keywords: object) -> None:
        raise KeyError("no")

    setattr(Odd, method, fails)
    message = rf"^env: {method} of Odd failed with KeyError: 'no' \(test_expert\.py, line \d+\)$"
    with pytest.raises(RunFailed, match=message):
        list(expert_messages(Odd(), TASK))
    with pytest.raises(UserError, match=rf"^check_env Odd: {method}.* raised KeyError: 'no'$"):
        check_env(Odd())


def test_an_expert_that_says_nothing_is_told() -> None:
    class Odd(Count):
        def expert(self) -> Any:
            return None

    with pytest.raises(UserError, match=r"^env: expert of Odd must return a text, got None$"):
        list(expert_messages(Odd(), TASK))
    with pytest.raises(UserError, match=r"^check_env Odd: expert returned a NoneType, not a text"):
        check_env(Odd())
