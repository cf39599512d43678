"""The grammar of messages: renderings by hand, its inverse, and what a policy may get wrong."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

import pytest

from farhorizon.envs.messages import (
    conversation,
    declare_tools,
    response_format,
    thinking_effort,
    tool_results,
)
from farhorizon.envs.types import Message, ToolCall
from farhorizon.policy.xtml import (
    Piece,
    message_pieces,
    prompt_pieces,
    read_messages,
    read_reply,
)

CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOT]")
CALL = ToolCall("find", {"query": 'a & "b"', "limit": 3, "deep": True})
ASSISTANT = Message("assistant", "Looking.", thinking="Where?", calls=(CALL,))
HEADER = '<|open|>message role="assistant"<|sep|>'
THINK = "<|open|>think<|sep|>Where?<|close|>think<|sep|>"
RESPONSE = "<|open|>response<|sep|>Looking.<|close|>response<|sep|>"
TOOLS = (
    '<|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>'
    '<|open|>argument key="query" type="string"<|sep|>a & "b"<|close|>argument<|sep|>'
    '<|open|>argument key="limit" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|open|>argument key="deep" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
END = "<|close|>message<|sep|><|end_of_msg|>"


def shown(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def split(text: str) -> list[Piece]:
    """Pieces of a rendering in which every control token is one."""
    pieces, text_so_far = [], ""
    while text:
        token = next((token for token in CONTROL if text.startswith(token)), None)
        if token is None:
            text_so_far, text = text_so_far + text[0], text[1:]
            continue
        pieces += [Piece(text_so_far), Piece(token, True)]
        text_so_far, text = "", text[len(token) :]
    return [*pieces, Piece(text_so_far)]


def test_an_assistant_message_is_rendered_channel_by_channel() -> None:
    assert shown(message_pieces(ASSISTANT)) == HEADER + THINK + RESPONSE + TOOLS + END
    assert shown(message_pieces(ASSISTANT, thinking=False)) == HEADER + RESPONSE + TOOLS + END
    silent = "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>hi<|close|>response"
    assert shown(message_pieces(Message("assistant", "hi"))) == f"{HEADER}{silent}<|sep|>{END}"


def test_other_messages_have_their_attributes_in_the_header() -> None:
    def header(message: Message) -> str:
        return shown(message_pieces(message)).partition("<|sep|>")[0].removeprefix("<|open|>")

    assert header(Message("user", "x")) == 'message role="user"'
    assert header(Message("user", "x", name='A&"B')) == 'message role="user" name="A&amp;&quot;B"'
    assert header(Message("tool", "x", tool="f", index=2)) == (
        'message role="tool" tool="f" index="2"'
    )
    assert header(Message("tool", "x")) == 'message role="tool"'
    assert header(thinking_effort("low")) == 'message role="system" type="thinking-effort"'
    assert shown(message_pieces(Message("user", "x"))) == (
        '<|open|>message role="user"<|sep|>x<|close|>message<|sep|><|end_of_msg|>'
    )


def test_each_part_of_an_attribute_is_a_piece_of_its_own() -> None:
    pieces = message_pieces(Message("user", "hello"))
    assert [piece.text for piece in pieces] == [
        *("<|open|>", "message", " role", '="', "user", '"', "<|sep|>"),
        *("hello", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>"),
    ]
    assert [piece.text for piece in pieces if piece.control] == [
        *("<|open|>", "<|sep|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("", "string", ""),
        ("3", "string", "3"),
        (3, "number", "3"),
        (-0.5, "number", "-0.5"),
        (False, "boolean", "false"),
        (None, "null", "null"),
        ({"b": [1, "x"], "a": {}}, "object", '{"b": [1, "x"], "a": {}}'),
        (["\u00e9", None], "array", '["\u00e9", null]'),
    ],
)
def test_arguments_are_typed(value: object, kind: str, text: str) -> None:
    message = Message("assistant", "", calls=(ToolCall("f", {"k": value}),))
    pieces = message_pieces(message)
    expected = f'<|open|>argument key="k" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
    assert expected in shown(pieces)
    assert read_messages(pieces) == [message]


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, {1, 2}, b"x"])
def test_an_argument_that_is_no_json_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="call f: argument k: "):
        message_pieces(Message("assistant", "", calls=(ToolCall("f", {"k": value}),)))


def test_names_that_are_no_text_are_refused_by_name() -> None:
    refused: list[tuple[Any, str]] = [
        ({"k": {1: "a"}}, "argument k: an object in it has a name that is no string"),
        ({"k": [{"a": {None: 1}}]}, "argument k: an object in it has a name that is no string"),
        ({1: "a"}, "argument 1: its name is no string"),
    ]
    for arguments, fault in refused:
        with pytest.raises(ValueError, match=f"^call f: {fault}"):
            message_pieces(Message("assistant", "", calls=(ToolCall("f", arguments),)))


def test_arguments_are_kept_as_they_are_read() -> None:
    given = MappingProxyType({"a": (1, (2, [3])), "b": MappingProxyType({"c": ()})})
    call = ToolCall("f", given)
    assert call.arguments == {"a": [1, [2, [3]]], "b": {"c": []}}
    message = Message("assistant", "", calls=(call,))
    assert read_messages(message_pieces(message)) == [message]
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="call f: argument k: maximum recursion"):
        message_pieces(Message("assistant", "", calls=(ToolCall("f", {"k": deep}),)))


def test_what_a_policy_would_write_is_trained_and_nothing_else() -> None:
    raw = Message("assistant", "ok", thinking="hm", calls=(ToolCall("f", "{broken"), CALL))
    given = [piece.text for piece in message_pieces(raw) if not piece.trained]
    header = ["<|open|>", "message", " role", '="', "assistant", '"', "<|sep|>"]
    block = ["<|open|>", "json", " type", '="', "object", '"', "<|sep|>", "{broken"]
    assert given == [*header, *block, "<|close|>", "json", "<|sep|>"]
    for message in (Message("user", "x"), thinking_effort("max"), *tool_results([CALL], ["y"])):
        assert not any(piece.trained for piece in message_pieces(message))
    assert not any(piece.trained for piece in prompt_pieces())


def test_a_call_of_nothing_is_not_handed_on() -> None:
    """No result could say that it is the answer to it."""
    nameless = TOOLS.replace('tool="find"', 'tool=""')
    reply = read_reply(
        split(f"{THINK}{RESPONSE}{nameless}{END}".removeprefix("<|open|>think<|sep|>"))
    )
    assert reply == (
        Message("assistant", "Looking.", thinking="Where?"),
        ("a call names no tool",),
    )


def test_the_prompt_is_how_an_assistant_message_begins() -> None:
    prompt = [piece[:2] for piece in prompt_pieces()]
    assert prompt == [piece[:2] for piece in message_pieces(ASSISTANT)][: len(prompt)]
    assert shown(prompt_pieces()) == f"{HEADER}<|open|>think<|sep|>"
    assert shown(prompt_pieces(thinking=False)) == f"{HEADER}<|open|>response<|sep|>"


def test_a_request_is_in_the_published_order() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "\u00e9"}}]
    request = conversation(
        [Message("user", "go")],
        tools=tools,
        effort="high",
        choice="required",
        response=response_format({"type": "object", "a": 1}),
    )
    assert [(m.role, m.type) for m in request] == [
        ("system", "tool-declare"),
        ("system", "thinking-effort"),
        ("user", ""),
        ("system", "tool-choice"),
        ("system", "response-format"),
    ]
    # Compact, keys sorted, not escaped.
    declared = '[{"function":{"description":"\u00e9","name":"f"},"type":"function"}]'
    assert request[0].content.endswith(f"\n\n```json\n{declared}\n```")
    assert request[1].content.endswith("\nNow the system is invoked with `thinking_effort=high`.")
    assert request[4].content.endswith('schema:\n```json\n{"a":1,"type":"object"}\n```')
    added = declare_tools(tools, added=True).content
    assert added.endswith(f"for the extended tools.\n\n```json\n{declared}\n```")
    assert read_messages([p for m in request for p in message_pieces(m)]) == request
    with pytest.raises(ValueError, match="none of low, medium, high, max"):
        thinking_effort("very")  # pyright: ignore[reportArgumentType]


def random_text(rng: random.Random) -> str:
    parts = [
        *CONTROL,
        "&amp;",
        "&",
        '"',
        '="',
        " role",
        "message",
        "think",
        "\n",
        " ",
        "\u4f60",
        "",
    ]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(6)))


def random_value(rng: random.Random, depth: int = 2) -> object:
    plain = [random_text(rng), rng.randrange(-9, 10**20), rng.random(), True, False, None]
    if depth == 0 or rng.random() < 0.7:
        return rng.choice(plain)
    if rng.random() < 0.5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.randrange(3))}


def random_message(rng: random.Random) -> Message:
    text = random_text(rng)
    role = rng.choice(["system", "user", "assistant", "tool"])
    if role == "tool":
        return Message("tool", text, tool=random_text(rng) or "f", index=rng.randrange(1, 20))
    if role == "system":
        return Message("system", text, type=random_text(rng))
    if role == "user":
        return Message("user", text, name=random_text(rng))
    calls = tuple(
        ToolCall(
            random_text(rng),
            {random_text(rng): random_value(rng) for _ in range(rng.randrange(4))}
            if rng.random() < 0.9
            else random_text(rng),
        )
        for _ in range(rng.randrange(3))
    )
    return Message("assistant", text, random_text(rng), thinking=random_text(rng), calls=calls)


def test_reading_inverts_rendering_whatever_the_texts_say() -> None:
    rng = random.Random(0)
    for _ in range(300):
        messages = [random_message(rng) for _ in range(rng.randrange(4))]
        assert read_messages([p for m in messages for p in message_pieces(m)]) == messages


def test_a_reply_is_read_after_the_prompt() -> None:
    sampled = message_pieces(ASSISTANT)[len(prompt_pieces()) :]
    assert read_reply(sampled) == (ASSISTANT, ())
    plain = Message("assistant", "hi")
    for thinking in (True, False):
        sampled = message_pieces(plain, thinking)[len(prompt_pieces(thinking)) :]
        assert read_reply(sampled, thinking) == (plain, ())


def call(arguments: str, attributes: str = 'tool="find" index="1"') -> str:
    tools = f"<|open|>tools<|sep|><|open|>call {attributes}<|sep|>{arguments}"
    return f"{THINK[20:]}{RESPONSE}{tools}<|close|>call<|sep|><|close|>tools<|sep|>{END}"


LIMIT = '<|open|>argument key="limit" type="number"<|sep|>{}<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    ("sampled", "fault"),
    [
        ("", "think: not closed"),
        (f"Where?{RESPONSE}{END}", "response: inside the text of think"),
        (f"Where?<|close|>think<|sep|>{END}", "response: missing"),
        (f"{THINK[20:]}{RESPONSE}{RESPONSE}{END}", "response: no channel that can stand here"),
        (f"{THINK[20:]}{RESPONSE}", "message: not closed"),
        (f"{THINK[20:]}{RESPONSE}<|close|>message<|sep|>", "no <|end_of_msg|>"),
        (f"{THINK[20:]}{RESPONSE} \n{END}", "text outside of a channel: ' \\n'"),
        (f"{THINK[20:]}{RESPONSE}{END}more", "text outside of a message: 'more'"),
        (f"{THINK[20:]}{RESPONSE}{END}{HEADER}", "it goes on after the end of the message"),
        (f"[EOT]{THINK[20:]}{RESPONSE}{END}", "[EOT] where none can stand"),
        (f"{THINK[20:]}<|open|>response x<|sep|>Looking.{END}", "malformed tag 'response x'"),
        (f"{THINK[20:]}{RESPONSE}<|open|>", "<|open|> without <|sep|>"),
        (f"{THINK[20:]}{RESPONSE}<|open|>tools<|sep|><|close|>tools<|sep|>{END}", "tools: no call"),
        (call(LIMIT.format("3"), 'tool="find"'), "call 1: without tool or index"),
        (call(LIMIT.format("3"), 'tool="find" index="2"'), "call 1: has index '2'"),
        (call(LIMIT.format("3 apples")), "call 1: argument 'limit': '3 apples' is not JSON"),
        (call(LIMIT.format("NaN")), "call 1: argument 'limit': 'NaN' is not JSON"),
        (call(LIMIT.format("1e999")), "call 1: argument 'limit': '1e999' is not JSON"),
        (call(LIMIT.format('"\\ud800"')), "call 1: argument 'limit': '\"\\\\ud800\"' is not JSON"),
        (call(LIMIT.format("[" * 100_000)), f"call 1: argument 'limit': '{'[' * 40}' is not JSON"),
        (call(LIMIT.format("true")), "call 1: argument 'limit': 'true' is not of type number"),
        (call(LIMIT.format("[EOT]3")), "[EOT] where none can stand"),
        (call(LIMIT.format("3") * 2), "call 1: argument 'limit' twice"),
        (call('<|open|>argument key="limit" type="number"<|sep|>3'), "argument: not closed"),
        (call("limit=3"), "call 1: holds something that is no argument"),
    ],
)
def test_a_malformed_reply_is_reported_and_its_call_is_not_made(sampled: str, fault: str) -> None:
    message, faults = read_reply(split(sampled))
    assert fault in faults
    assert message.calls == ()
    with pytest.raises(ValueError):
        read_messages([*prompt_pieces(), *split(sampled)])


def test_what_can_be_read_of_a_malformed_reply_is_read() -> None:
    cut = f"{THINK[20:]}<|open|>response<|sep|>Look"
    assert read_reply(split(cut)).message == Message("assistant", "Look", thinking="Where?")
    second = f'{TOOLS.removesuffix("<|close|>tools<|sep|>")}<|open|>call tool="find" ind'
    reply = read_reply(split(THINK[20:] + RESPONSE + second))
    assert reply.message == ASSISTANT and reply.faults


def test_any_sequence_of_pieces_is_read_without_an_error() -> None:
    rng = random.Random(0)
    words = [*CONTROL, "message", "think", "response", "tools", "call", 'call tool="f" index="1"']
    for _ in range(500):
        chosen = [rng.choice(words) for _ in range(rng.randrange(30))]
        message, _ = read_reply([Piece(word, word in CONTROL) for word in chosen])
        assert message.role == "assistant"
    deep = [Piece("<|open|>", True), Piece("call"), Piece("<|sep|>", True)] * 5000
    assert read_reply(deep).message == Message("assistant", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "thinking": "x"},
        {"role": "user", "calls": (CALL,)},
        {"role": "assistant", "tool": "f", "index": 1},
        {"role": "tool", "tool": "f"},
        {"role": "tool", "index": 1},
        {"role": "user", "type": "tool-declare"},
        {"role": "tool", "name": "x"},
    ],
)
def test_fields_of_other_roles_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError):
        Message(content="", **fields)


@pytest.mark.parametrize("content", [None, 3, b"x"])
def test_a_content_that_is_no_text_is_refused(content: Any) -> None:
    with pytest.raises(TypeError, match=r"content, .* are strings"):
        Message("user", content)
