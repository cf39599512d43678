"""The environment contract: messages in, text out, in gymnasium's reset/step form."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from ..configs.errors import UserError
from .types import Message, Role, Task

Observation = tuple[Message, ...]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]

_ROUNDING = 1e-6  # relative; what is lost where rewards add up, float32 ones included


class MessageSpace(spaces.Space[Observation]):
    """All tuples of `Message`; the observation space of every `MessageEnv`."""

    def __init__(self) -> None:
        super().__init__()

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        """One short user message of random letters."""
        letters = self.np_random.choice(list(string.ascii_lowercase), size=8)
        return (Message("user", "".join(letters)),)

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(isinstance(m, Message) for m in x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpace)

    def __repr__(self) -> str:
        return "MessageSpace()"


class MessageEnv(gymnasium.Env[Observation, str]):
    """Base of all environments; they know messages, never tokens.

    A subclass implements `reset` (calling ``super().reset(seed=seed, options=options)`` first,
    which seeds ``self.np_random`` and sets ``self.task``) and `step`. Both return only the NEW
    messages. An episode is a success when its total reward reaches ``success_threshold``:
    `succeeded`. With ``shows_images`` messages may hold images; the policy then needs, and builds,
    its vision tower.

    ``kind`` and ``budget`` say of the episode, after `reset`, what sort of task it is (a domain, a
    level of effort), by which a run picks teachers and scales budgets, and how many tokens the
    policy may sample; training takes -1 for the reward of a longer one. None is no limit.
    """

    success_threshold: ClassVar[float] = 1.0
    shows_images: ClassVar[bool] = False
    kind: str = ""
    budget: int | None = None

    observation_space = MessageSpace()
    action_space = spaces.Text(max_length=256, min_length=0, charset=string.printable)
    task: Task | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode; ``options={"task": Task(...)}`` names the problem to solve.

        Without ``seed`` the task's seed is used, and without both the generator goes on.
        """
        self.task = (options or {}).get("task")
        if seed is None and self.task is not None:
            seed = self.task.seed
        super().reset(seed=seed)
        return (), {}

    def step(self, action: str) -> Step:
        """Answer the policy's text."""
        raise NotImplementedError

    def expert(self) -> str:
        """The right next action in the current state, for demonstrations and checks; optional."""
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    def declarations(self) -> Sequence[Mapping[str, Any]]:
        """The tools that a policy may call, as JSON schemas; shown to it before the opening
        messages of an episode where its chat format has tool calls."""
        return ()

    def as_calls(self, action: str) -> str:
        """The expert's action as a policy says it whose chat format has tool calls."""
        return action

    @classmethod
    def has_expert(cls) -> bool:
        """Whether the class offers `expert`."""
        return cls.expert is not MessageEnv.expert

    def reply(
        self,
        content: str,
        *,
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
        role: Role = "tool",
    ) -> Step:
        """The step result that shows one message."""
        return (Message(role, content),), reward, terminated, truncated, {}

    def finish(self, reward: float) -> Step:
        """The step result that ends the episode without a further message."""
        return (), reward, True, False, {}

    def draw_key(self) -> int:
        """A 63-bit integer from ``self.np_random``: the identity of a generated episode."""
        return int(self.np_random.integers(2**63 - 1, dtype=np.int64))


def succeeded(rewards: Sequence[float], threshold: float, terminated: bool) -> bool:
    """Whether an episode's rewards reach the threshold; ten times 0.1 reaches 1.

    Where doing nothing is enough (a threshold of 0 or less), only an episode that the environment
    finished can be a success. One without a turn is none, and none that earned NaN.
    """
    reached = sum(rewards) >= threshold - _ROUNDING * abs(threshold)
    return reached and (terminated or threshold > 0)


def checked_threshold(env: MessageEnv) -> float:
    """The total reward that makes an episode a success; UserError if it is no number."""
    threshold: Any = env.success_threshold
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or math.isnan(threshold):
        raise UserError(
            f"environment {type(env).__name__}: success_threshold must be a number, got "
            f"{threshold!r:.80} ({type(threshold).__name__})"
        )
    return threshold


def check_declared(env: MessageEnv) -> None:
    """UserError if what an environment says of its episode is not what `MessageEnv` wants."""
    checked_threshold(env)
    kind: Any = env.kind
    budget: Any = env.budget
    if not isinstance(kind, str):
        raise UserError(
            f"environment {type(env).__name__}: kind must be text, got {kind!r:.80} "
            f"({type(kind).__name__})"
        )
    whole = isinstance(budget, int | np.integer) and not isinstance(budget, bool)
    if budget is not None and not (whole and budget >= 1):
        raise UserError(
            f"environment {type(env).__name__}: budget must be a whole number of at least 1, or "
            f"None, got {budget!r:.80} ({type(budget).__name__})"
        )
