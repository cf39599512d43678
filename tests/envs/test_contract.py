"""The base classes, the contract checker, and gymnasium's own checker."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from farhorizon.configs.errors import UserError
from farhorizon.envs import Message, MessageEnv, Task, ToolEnv, check_env, make, tool
from farhorizon.envs.base import MessageSpace
from farhorizon.envs.echo import WORDS, Echo


class Shop(ToolEnv):
    """Tools of every kind."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return (Message("user", "open"),), {}

    @tool
    def buy(self, item: str, count: str = "1") -> str:
        return f"{count} {item}"

    @tool
    def say(self, *words: str) -> str:
        return " ".join(words)

    @tool
    def leave(self) -> Any:
        return self.finish(1.0)

    def secret(self) -> str:
        return "not a tool"


def shown(env: MessageEnv, action: str) -> str:
    (message,), reward, terminated, truncated, info = env.step(action)
    assert (message.role, reward, terminated, truncated, info) == ("tool", 0.0, False, False, {})
    return message.content


def test_text_tools() -> None:
    env = Shop()
    env.reset(seed=0)
    assert shown(env, " buy  tea ") == "1 tea"
    assert shown(env, "buy tea 2") == "2 tea"
    assert shown(env, "say") == ""
    assert shown(env, "say a b c") == "a b c"
    for invalid in ("", "buy", "buy a b c", "secret", "_tools", "reset", "__init__", "Buy tea"):
        assert shown(env, invalid).startswith("invalid action; tools: buy ITEM COUNT, leave")
    assert env.step("leave") == ((), 1.0, True, False, {})
    check_env(env)


def test_a_task_seeds_the_episode() -> None:
    env = Echo(turns=8)
    task = Task("echo-v0/train/3", 3)
    by_seed = env.reset(seed=3)[0], env.expert(), list(env._words)
    by_task = env.reset(options={"task": task})[0], env.expert(), list(env._words)
    assert by_seed == by_task
    assert env.task is task


def test_echo_episode() -> None:
    env = Echo(turns=2)
    env.reset(seed=0)
    first = env.expert()
    assert first.strip() in WORDS
    assert env.step(first)[1:] == (0.0, False, False, {})
    assert env.step(env.expert()) == ((), 1.0, True, False, {})
    env.reset(seed=0)
    assert env.step("else") == ((), 0.0, True, False, {})
    with pytest.raises(UserError, match="turns"):
        Echo(turns=0)


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [("echo-v0", {}), ("archive-v0", {}), ("archive-v0", {"style": "full", "pages": 3})],
)
def test_built_in_environments_keep_both_contracts(id: str, kwargs: dict[str, Any]) -> None:
    check_env(make(id, **kwargs))
    gymnasium_check(make(id, **kwargs), skip_render_check=True)


def test_message_space() -> None:
    space = MessageSpace()
    space.seed(0)
    assert space.contains(space.sample())
    assert () in space and (Message("tool", ""),) in space
    assert [Message("tool", "")] not in space and ("text",) not in space


def breaks(**overrides: Any) -> MessageEnv:
    """An `Echo` of one turn with some of its methods replaced."""
    return type("Broken", (Echo,), overrides)(turns=1)


def returns(*result: Any) -> Any:
    return lambda self, *args, **kwargs: result


def raises(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise KeyError("two\nlines")


def unseeded(self: Any, *, seed: int | None = None, options: Any = None) -> Any:
    self._words, self._turn, self.count = ["a"], 0, getattr(self, "count", 0) + 1
    return (Message("user", str(self.count)),), {}


def with_history(self: Any, action: str) -> Any:
    self.history = (*getattr(self, "history", self.reset(seed=0)[0]), Message("tool", "x"))
    return self.history, 0.0, False, False, {}


OPEN = (Message("user", "go"),)
NEW = (Message("tool", "x"),)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"reset": returns(OPEN)}, "reset must return"),
        ({"reset": returns("text", {})}, "reset must return a tuple of messages, not str"),
        ({"reset": returns((), {})}, "no message"),
        ({"reset": returns(OPEN, None)}, "info of type NoneType"),
        ({"reset": returns((Message("bot", "x"),), {})}, "wrong role"),  # type: ignore[arg-type]
        ({"reset": raises}, "reset raised KeyError: 'two"),
        ({"reset": unseeded}, "two different episodes"),
        ({"step": returns(NEW, 0.0, False, {})}, "step must return"),
        ({"step": returns(NEW, "1.0", True, False, {})}, "reward of type str"),
        ({"step": returns(NEW, None, True, False, {})}, "reward of type NoneType"),
        ({"step": returns(NEW, math.nan, True, False, {})}, "reward nan"),
        ({"step": returns(NEW, -1e16, True, False, {})}, r"reward -1e\+16"),
        ({"step": returns(NEW, 10**400, True, False, {})}, "reward 1000"),
        ({"step": returns(NEW, 1.0, 1, False, {})}, "terminated of type int"),
        ({"step": returns((), 0.0, False, False, {})}, "no message though"),
        ({"step": returns((Message("assistant", "x"),), 0, True, False, {})}, "assistant"),
        ({"step": returns(NEW, 0.0, True, False, {})}, "expert reached 0 .* is 1"),
        ({"step": returns(NEW, 0.0, False, False, {})}, "had not finished after max_steps=20"),
        ({"step": with_history}, "whole history"),
        ({"step": raises}, "raised KeyError"),
        ({"close": raises}, "close raised KeyError"),
    ],
)
def test_the_checker_names_every_breach(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^check_env Broken: .*{said}") as error:
        check_env(breaks(**overrides), max_steps=20)
    assert "\n" not in str(error.value)


class Moody(Echo):
    """Says another kind of the same task each time."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.kind += "x"
        return super().reset(seed=seed, options=options)


def test_what_a_task_says_of_itself_is_checked_and_part_of_the_episode() -> None:
    check_env(breaks(kind="hard", budget=7))
    with pytest.raises(UserError, match=r"^environment Broken: kind must be text, got 3 \(int\)$"):
        check_env(breaks(kind=3))
    with pytest.raises(UserError, match=r"^environment Broken: budget must be a whole number"):
        check_env(breaks(budget=0))
    with pytest.raises(UserError, match="two different episodes"):
        check_env(Moody())


@pytest.mark.parametrize("one", [1, True, np.float32(1), np.bool_(True), np.array(1.0)])
def test_the_checker_accepts_every_number(one: Any) -> None:
    check_env(breaks(step=returns((), one, np.bool_(True), False, {})))


def test_the_checker_refuses_what_is_no_environment() -> None:
    with pytest.raises(UserError, match="check_env object: it is no MessageEnv"):
        check_env(object())  # type: ignore[arg-type]


def test_environments_do_without_torch() -> None:
    code = "import sys, farhorizon.envs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"False\n"
