"""Tools that are declared and called, beside the same tools in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.envs import Message, MessageEnv, Task, ToolCall, ToolEnv, check_env, make, tool
from farhorizon.envs.base import Step
from farhorizon.envs.expert import expert_messages
from farhorizon.envs.messages import declare_tools, opening, thinking_effort
from farhorizon.envs.types import Action


class Desk(ToolEnv):
    """Tools with every kind of argument."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.ran = []
        return (Message("user", "open"),), {}

    @tool
    def book(self, guest: str, nights: int = 1) -> str:
        """Book a room."""
        self.ran.append("book")
        return f"{guest!r} {nights!r}"

    @tool
    def price(self, factor: float, rounded: bool, *, tags: list[str], more: dict[str, Any]) -> str:
        return f"{factor} {rounded} {tags} {more}"

    @tool
    def say(self, *words: str) -> str:
        return " ".join(words)

    @tool
    def sum(self, *numbers: int) -> Step:
        return self.reply(str(sum(numbers)), reward=0.25)

    @tool
    def leave(self) -> Step:
        self.ran.append("leave")
        return self.finish(0.5)

    def secret(self) -> str:
        self.ran.append("secret")
        return "not a tool"

    def expert(self) -> str:
        return "leave" if self.ran else "book tea"

    success_threshold = 0.5


def calls(*made: ToolCall, faults: tuple[str, ...] = ()) -> Action:
    return Action(Message("assistant", "", calls=made), faults)


def desk() -> Desk:
    env = Desk()
    env.reset(seed=0)
    return env


def test_tools_are_declared_with_what_they_take() -> None:
    declared = {d["function"]["name"]: d["function"] for d in desk().declarations()}
    assert list(declared) == ["book", "leave", "price", "say", "sum"]
    assert declared["book"] == {
        "name": "book",
        "description": "Book a room.",
        "parameters": {
            "type": "object",
            "properties": {"guest": {"type": "string"}, "nights": {"type": "integer"}},
            "required": ["guest"],
        },
    }
    price = declared["price"]["parameters"]
    kinds = {name: about["type"] for name, about in price["properties"].items()}
    assert kinds == {"factor": "number", "rounded": "boolean", "tags": "array", "more": "object"}
    assert price["required"] == ["factor", "rounded", "tags", "more"]
    say = declared["say"]["parameters"]
    assert say["properties"] == {"words": {"type": "array", "items": {"type": "string"}}}
    assert say["required"] == [] and declared["leave"]["parameters"]["properties"] == {}
    json.dumps(desk().declarations(), allow_nan=False)


def test_each_call_gets_its_result() -> None:
    more = {"factor": 2, "rounded": True, "tags": ["a"], "more": {"b": None}}
    step = desk().step(
        calls(
            ToolCall("book", {"guest": "a <|close|> b"}),
            ToolCall("price", more),
            ToolCall("say", {"words": ["x", "y"]}),
            ToolCall("sum", {"numbers": [1, 2]}),
            ToolCall("sum", {}),
        )
    )
    assert step == (
        (
            Message("tool", "'a <|close|> b' 1", tool="book", index=1),
            Message("tool", "2 True ['a'] {'b': None}", tool="price", index=2),
            Message("tool", "x y", tool="say", index=3),
            Message("tool", "3", tool="sum", index=4),
            Message("tool", "0", tool="sum", index=5),
        ),
        *(0.5, False, False, {}),
    )


def test_nothing_is_called_after_the_end() -> None:
    env = desk()
    book = ToolCall("book", {"guest": "a"})
    shown, *rest = env.step(calls(book, ToolCall("leave"), book))
    assert shown == (Message("tool", "'a' 1", tool="book", index=1),)
    assert rest == [0.5, True, False, {}] and env.ran == ["book", "leave"]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (ToolCall("secret"), "1: no tool 'secret'"),
        (ToolCall("reset", {"seed": 1}), "1: no tool 'reset'"),
        (ToolCall("__init__"), "1: no tool '__init__'"),
        (ToolCall("book"), "1: book: argument guest is missing"),
        (ToolCall("book", {"guest": "a", "self": "b"}), "1: book: no argument 'self'"),
        (ToolCall("book", {"guest": 3}), "1: book: argument guest must be of type string"),
        (ToolCall("book", {"guest": "a", "nights": True}), "nights must be of type integer"),
        (ToolCall("book", {"guest": "a", "nights": 1.0}), "nights must be of type integer"),
        (ToolCall("sum", {"numbers": 3}), "1: sum: argument numbers must be of type array"),
        (ToolCall("sum", {"numbers": [3, "4"]}), "numbers must be of type integer"),
        (ToolCall("price", {"factor": float("nan")}), "factor must be of type number"),
        (ToolCall("book", "{raw"), "1: book: its arguments are no arguments by name"),
    ],
)
def test_a_call_that_does_not_fit_is_told_so(call: ToolCall, wrong: str) -> None:
    env = desk()
    (told, after), *rest = env.step(calls(call, ToolCall("book", {"guest": "b"})))
    assert rest == [0.0, False, False, {}] and env.ran == ["book"]
    assert told.content.startswith("invalid action (1: ") and wrong in told.content
    assert "; tools: book GUEST NIGHTS, leave, price" in told.content
    assert (told.role, told.tool, told.index) == ("tool", call.tool, 1)
    assert after == Message("tool", "'b' 1", tool="book", index=2)


def test_of_a_malformed_message_nothing_is_done() -> None:
    env = desk()
    fault = "call 1: argument 'guest': 'x' is not JSON" + "." * 400
    for said in (
        calls(ToolCall("book", {"guest": "a"}), faults=(fault,)),
        Action(Message("assistant", "leave"), (fault,)),
    ):
        (told,), *rest = env.step(said)
        assert rest == [0.0, False, False, {}] and env.ran == []
        assert told.content.startswith("invalid action (call 1: argument 'guest'")
        assert len(told.content) < 450 and (told.tool, told.index) == ("", 0)


def test_a_response_without_calls_is_words() -> None:
    env = desk()
    assert env.step(Action(Message("assistant", "book a 3")))[0] == (Message("tool", "'a' 3"),)
    assert env.step("sum 1 2")[0] == (Message("tool", "3"),)
    for wrong in ("book a b", "sum 1 x", "book a 1 2", "book a true", "price 1 true", "sum NaN"):
        assert env.step(wrong)[0][0].content.startswith("invalid action; tools: book")
    assert env.step("sum " + "[" * 10**5)[0][0].content.startswith("invalid action; tools")


def test_the_expert_is_heard_calling() -> None:
    played = list(expert_messages(desk(), Task("t", 0), calls=True, effort="low"))
    assert played == [
        declare_tools(desk().declarations()),
        thinking_effort("low"),
        Message("user", "open"),
        Message("assistant", "", calls=(ToolCall("book", {"guest": "tea"}),)),
        Message("tool", "'tea' 1", tool="book", index=1),
        Message("assistant", "", calls=(ToolCall("leave"),)),
    ]
    assert [m.content for m in expert_messages(desk(), Task("t", 0))] == [
        *("open", "book tea", "'tea' 1", "leave"),
    ]
    env = desk()
    assert env.as_calls("no such") == "no such" and env.as_calls("say a  b") == ""
    spoken = env.as_calls("say a  b")
    assert isinstance(spoken, Action)
    assert spoken.message.calls == (ToolCall("say", {"words": ["a", "b"]}),)
    assert env.as_calls(spoken) is spoken


def test_an_environment_that_declares_for_itself_is_taken_at_its_word() -> None:
    own, user = declare_tools([{"name": "own"}]), Message("user", "go")
    other, effort = declare_tools([{"name": "other"}]), thinking_effort("max")
    tools = [{"name": "other"}]
    assert opening((own, user), tools, "max") == (own, effort, user)
    assert opening((user, own), tools) == (user, own)
    assert opening((user,), tools, "max") == (other, effort, user)
    assert opening((effort, user), (), "low") == (effort, user)
    assert opening((user,)) == (user,)


def test_the_checker_plays_tools_both_ways() -> None:
    check_env(Desk())
    check_env(make("archive-v0"))

    class Deaf(Desk):
        """Reads words by itself, so that calls say nothing to it."""

        def step(self, action: str) -> Step:
            return self.finish(0.5) if action == "leave" else super().step(f"{action}")

    class Strict(Desk):
        def on_invalid(self, action: str) -> Step:
            raise KeyError(action)

    with pytest.raises(UserError, match=r"check_env Deaf: .*its tools gave other rewards"):
        check_env(Deaf())
    with pytest.raises(UserError, match=r"check_env Strict: step\(.* raised KeyError"):
        check_env(Strict())


def test_archive_is_played_with_calls() -> None:
    env = make("archive-v0", pages=2)
    assert isinstance(env, MessageEnv)
    played = list(expert_messages(env, Task("t", 0), calls=True))
    made = [message.calls[0] for message in played if message.role == "assistant"]
    assert [call.tool for call in made][::3] == ["next", "answer"]
    assert all(message.content == "" for message in played if message.role == "assistant")
    env.reset(seed=0)
    assert env.step(calls(ToolCall("answer"), faults=("not closed",)))[1:3] == (0.0, True)


def test_declarations_are_those_after_reset_and_are_checked() -> None:
    class Late(Desk):
        """Declares something else once it is under way."""

        def declarations(self) -> list[dict[str, Any]]:
            return [{"name": "late" if self.ran else "early"}]

    first, *_ = expert_messages(Late(), Task("t", 0), calls=True)
    assert "early" in first.content and "late" not in first.content

    class Broken(Desk):
        def declarations(self) -> list[dict[str, Any]]:
            return [{"name": {1}}]

    with pytest.raises(UserError, match=r"^check_env Broken: declarations must return JSON"):
        check_env(Broken())

    class Mute(Desk):
        def as_calls(self, action: str) -> str:
            raise KeyError(action)

    with pytest.raises(UserError, match=r"^check_env Mute: as_calls\('book tea'\) raised KeyError"):
        check_env(Mute())


def test_numbers_that_no_float_holds_do_not_fit() -> None:
    env = Desk()
    env.reset(seed=0)
    arguments = {"factor": 10**400, "rounded": True, "tags": [], "more": {}}
    call = Action(Message("assistant", "", calls=(ToolCall("price", arguments),)))
    (told,), *_ = env.step(call)
    assert "argument factor must be of type number" in told.content


def test_an_annotation_that_is_no_type_of_json_is_refused() -> None:
    def find(self: Any, limit: int | None = None) -> str:
        """Find."""
        return str(limit)

    with pytest.raises(UserError, match=r"^tool .*find: limit: .int \| None. = None must be "):
        type("Odd", (ToolEnv,), {"find": tool(find)})
