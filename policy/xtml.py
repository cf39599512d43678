"""The XTML chat format: messages as nested elements of control tokens and plain text.

An element is ``<|open|>tag key="value"<|sep|> body <|close|>tag<|sep|>``. A message is the element
``message``, followed by ``<|end_of_msg|>``; the body of an assistant's message is the elements
``think`` (only if the policy thinks; even if empty), ``response`` and, where tools are called,
``tools`` with one ``call`` each, which holds an ``argument`` each.

This file knows pieces of text and which of them are control tokens, and no tokenizer: each piece
is encoded alone, as the published renderer does, and what is text can never become a control
token. Where it differs from that renderer: tool results without a call they answer have no
attributes (the renderer refuses them), white space is kept where the renderer drops thoughts that
are nothing else, and a long text is one piece where the published tokenizer cuts it after 400,000
characters and after 25,000 without white space. An image has one placeholder token here, and in
what `chat` makes of it as many as it takes rows; messages with images cannot be read back, as
pixels are not in tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast, get_args

from ..envs.types import IMAGE_PLACEHOLDER, Message, Role, ToolCall, unescaped

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
ROLES: tuple[str, ...] = get_args(Role)
WORDS = (
    *("message", "think", "response", "tools", "call", "argument", "json", *ROLES),
    *(" role", " name", " type", " tool", " index", " key", '="'),
    *("string", "number", "boolean", "null", "object", "array"),
)
"""What tags and attributes are written with."""

_MAX_DEPTH = 8  # twice of what a message needs; what a policy opens beyond is not followed
_HEADER = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')
_ENTITIES = {"&amp;": "&", "&quot;": '"'}
_ENTITY = re.compile("&(?:amp|quot);")
_INDEX = re.compile("(?:[1-9][0-9]{0,17})?")
_FIELDS = {"name", "type", "tool"}


class Piece(NamedTuple):
    """Text that is encoded alone, or one control token; ``trained`` if a policy would write it."""

    text: str
    control: bool = False
    trained: bool = True


class Reply(NamedTuple):
    """What a policy said, and what was malformed about it.

    A call with a fault is not in ``message``: nobody should run half of it.
    """

    message: Message
    faults: tuple[str, ...]


def message_pieces(message: Message, thinking: bool = True) -> list[Piece]:
    """A whole message. Of an assistant's, all after the header is trained, but not raw JSON.

    Without ``thinking`` an assistant's thoughts are left out. Raises ValueError for arguments of
    calls that are no JSON values.
    """
    attributes = [("role", message.role)]
    attributes += [("name", message.name)] if message.name else []
    attributes += [("type", message.type)] if message.type else []
    if message.tool:
        attributes += [("tool", message.tool), ("index", str(message.index))]
    header = _given(_open("message", *attributes))
    end = [*_close("message"), Piece(END_OF_MESSAGE, True)]
    if message.role != "assistant":
        return [*header, *_given([*_content(message), *end])]
    thoughts = _element("think", message.thinking) if thinking else []
    tools = _tools(message.calls) if message.calls else []
    return [*header, *thoughts, *_element("response", message.content), *tools, *end]


def prompt_pieces(thinking: bool = True) -> list[Piece]:
    """The start of an assistant's message, up to where the policy goes on."""
    channel = "think" if thinking else "response"
    return _given([*_open("message", ("role", "assistant")), *_open(channel)])


def read_messages(pieces: Iterable[Piece], thinking: bool = True) -> list[Message]:
    """The messages that `message_pieces` wrote; ValueError names what is malformed."""
    faults: list[str] = []
    messages = [_message(element, thinking, faults) for element in _elements(pieces, faults)]
    if faults:
        raise ValueError("; ".join(faults))
    return messages


def read_reply(sampled: Iterable[Piece], thinking: bool = True) -> Reply:
    """What a policy wrote after the prompt, read as far as it goes."""
    faults: list[str] = []
    first, *others = _elements([*prompt_pieces(thinking), *sampled], faults)
    if others:
        faults.append("it goes on after the end of the message")
    message = _message(first, thinking, faults)
    named = tuple(call for call in message.calls if call.tool)
    if len(named) < len(message.calls):  # no result could be the answer to it
        faults.append("a call names no tool")
    return Reply(replace(message, calls=named), tuple(faults))


def _content(message: Message) -> list[Piece]:
    """Text and, where it holds placeholders of them, images with the size that they came in."""
    if not message.images:
        return [Piece(message.content)]
    first, *rest = map(unescaped, message.content.split(IMAGE_PLACEHOLDER))
    pieces = [Piece(first)]
    for image, text in zip(message.images, rest, strict=True):
        height, width = image.pixels.shape[:2]
        pieces += [Piece(MEDIA_BEGIN, True), Piece(f"image {width}x{height}")]
        pieces += [Piece(MEDIA_CONTENT, True), Piece(MEDIA_PAD, True), Piece(MEDIA_END, True)]
        pieces += [Piece(text)]
    return pieces


def _given(pieces: Iterable[Piece]) -> list[Piece]:
    return [piece._replace(trained=False) for piece in pieces]


def _open(tag: str, *attributes: tuple[str, str]) -> list[Piece]:
    pieces = [Piece(OPEN, True), Piece(tag)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        pieces += [Piece(f" {key}"), Piece('="'), Piece(escaped), Piece('"')]
    return [*pieces, Piece(SEPARATOR, True)]


def _close(tag: str) -> list[Piece]:
    return [Piece(CLOSE, True), Piece(tag), Piece(SEPARATOR, True)]


def _element(tag: str, text: str, *attributes: tuple[str, str]) -> list[Piece]:
    return [*_open(tag, *attributes), Piece(text), *_close(tag)]


def _tools(calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = _open("tools")
    for number, call in enumerate(calls, 1):
        pieces += _open("call", ("tool", call.tool), ("index", str(number)))
        if isinstance(call.arguments, str):
            pieces += _given(_element("json", call.arguments, ("type", "object")))
        else:
            for key, value in call.arguments.items():
                if not isinstance(cast(object, key), str):
                    raise ValueError(f"call {call.tool}: argument {key!r}: its name is no string")
                try:
                    kind, text = _kind(value), _text_of(value)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"call {call.tool}: argument {key}: {error}") from None
                pieces += _element("argument", text, ("key", key), ("type", kind))
        pieces += _close("call")
    return [*pieces, *_close("tools")]


def _kind(value: object) -> str:
    if value is None:
        return "null"
    # bool first: it is an int as well.
    kinds = {bool: "boolean", int | float: "number", str: "string", Mapping: "object"}
    for type_, kind in kinds.items():
        if isinstance(value, type_):
            return kind
    return "array"


def _text_of(value: object) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if json.loads(text) != value:  # names that are no text would come back as text
        raise ValueError("an object in it has a name that is no string")
    return text


def _value_of(text: str, kind: str) -> object:
    """Raises ValueError for what is no JSON value of that kind."""
    if kind == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:40]!r} is not JSON") from None
    if _kind(value) != kind:
        raise ValueError(f"{text[:40]!r} is not of type {kind}")
    return value


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: dict[str, str]
    children: list[_Element | str] = field(default_factory=list["_Element | str"])
    broken: bool = False  # itself or something in it


class _Builder:
    """Builds elements out of pieces, one message after the other, and goes on after faults."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        self.messages: list[_Element] = []
        self.open: list[_Element] = []
        self.ended = True
        self.tag: tuple[str, list[str]] | None = None  # what opened or closes, and its text so far

    def feed(self, piece: Piece) -> None:
        """Take the next piece."""
        if self.tag is not None:
            control, header = self.tag
            if not piece.control:
                header.append(piece.text)
                return
            self.tag = None
            if piece.text == SEPARATOR:
                (self.begin if control == OPEN else self.close)("".join(header))
                return
            self.fault(f"{control}{''.join(header)[:40]} without {SEPARATOR}")
        if not piece.control:
            self.text(piece.text)
        elif piece.text in (OPEN, CLOSE):
            self.tag = piece.text, []
        elif piece.text == END_OF_MESSAGE and not self.ended:
            self.end()
        else:
            self.fault(f"{piece.text} where none can stand")

    def finish(self) -> list[_Element]:
        """The messages, the last one as far as it goes."""
        if self.tag is not None:
            self.fault(f"{self.tag[0]}{''.join(self.tag[1])[:40]} without {SEPARATOR}")
        if not self.ended:
            self.end()
            self.fault(f"no {END_OF_MESSAGE}")
        return self.messages

    def fault(self, text: str) -> None:
        self.faults.append(text)
        for element in self.open:
            element.broken = True

    def begin(self, header: str) -> None:
        match = _HEADER.fullmatch(header)
        pairs = _ATTRIBUTE.findall(match[2]) if match else []
        attributes = {key: _ENTITY.sub(lambda m: _ENTITIES[m[0]], value) for key, value in pairs}
        element = _Element(match[1] if match else header, attributes)
        if match is None or len(attributes) < len(pairs):
            self.fault(f"malformed tag {header[:40]!r}")
            element.broken = True
        if len(self.open) >= _MAX_DEPTH:
            self.fault(f"{element.tag[:40]}: nested too deeply")
        elif self.open:
            self.open[-1].children.append(element)
            self.open.append(element)
        elif element.tag == "message" and self.ended:
            self.messages.append(element)
            self.open.append(element)
            self.ended = False
        else:
            self.fault(f"{element.tag[:40]}: outside of a message")

    def close(self, header: str) -> None:
        if not any(element.tag == header for element in self.open):
            self.fault(f"{header[:40]}: closed, but not open")
            return
        while self.open[-1].tag != header:
            self.fault(f"{self.open[-1].tag[:40]}: not closed")
            self.open.pop()
        self.open.pop()

    def text(self, text: str) -> None:
        if self.open and text:
            self.open[-1].children.append(text)
        elif text:
            self.fault(f"text outside of a message: {text[:40]!r}")

    def end(self) -> None:
        """The end of a message, whatever is open."""
        while self.open:
            self.fault(f"{self.open[-1].tag[:40]}: not closed")
            self.open.pop()
        self.ended = True


def _elements(pieces: Iterable[Piece], faults: list[str]) -> list[_Element]:
    """The message elements of ``pieces``."""
    builder = _Builder(faults)
    for piece in pieces:
        builder.feed(piece)
    return builder.finish()


def _message(element: _Element, thinking: bool, faults: list[str]) -> Message:
    attributes = dict(element.attributes)
    role = attributes.pop("role", "")
    if role not in ROLES:
        faults.append(f"message: no role {role[:40]!r}")
        role = "user"
    if role == "assistant":
        message = _assistant(element, thinking, faults)
    else:
        message = Message(cast(Role, role), _text(element, faults))
    index = attributes.pop("index", "")
    if not _INDEX.fullmatch(index) or "" in attributes.values() or attributes.keys() - _FIELDS:
        faults.append(f"message: wrong attributes {element.attributes}")
        return message
    try:
        return replace(message, **attributes, index=int(index or 0))
    except ValueError as error:
        faults.append(f"message: {error}")
        return message


def _assistant(element: _Element, thinking: bool, faults: list[str]) -> Message:
    wanted = ("think", "response", "tools") if thinking else ("response", "tools")
    channels: dict[str, _Element] = {}
    rest = list(wanted)
    for child in element.children:
        if isinstance(child, str):
            faults.append(f"text outside of a channel: {child[:40]!r}")
        elif child.tag not in rest or child.attributes:
            faults.append(f"{child.tag[:40]}: no channel that can stand here")
        else:
            channels[child.tag] = child
            del rest[: rest.index(child.tag) + 1]
    faults += [f"{tag}: missing" for tag in wanted[:-1] if tag not in channels]
    thoughts, response = (
        _text(channels[tag], faults) if tag in channels else "" for tag in ("think", "response")
    )
    calls = _calls(channels["tools"], faults) if "tools" in channels else ()
    return Message("assistant", response, thinking=thoughts, calls=tuple(calls))


def _calls(tools: _Element, faults: list[str]) -> Iterator[ToolCall]:
    """The calls without a fault."""
    number = 0
    for child in tools.children:
        if isinstance(child, str) or child.tag != "call":
            faults.append("tools: holds something that is no call")
            continue
        number += 1
        before = len(faults)
        if child.attributes.keys() != {"tool", "index"}:
            faults.append(f"call {number}: without tool or index")
        elif child.attributes["index"] != str(number):
            faults.append(f"call {number}: has index {child.attributes['index'][:40]!r}")
        arguments = _arguments(child, f"call {number}", faults)
        if len(faults) == before and not child.broken:
            yield ToolCall(child.attributes["tool"], arguments)
    if number == 0:
        faults.append("tools: no call")


def _arguments(call: _Element, where: str, faults: list[str]) -> dict[str, Any] | str:
    only = call.children[0] if len(call.children) == 1 else None
    if isinstance(only, _Element) and only.tag == "json":
        if only.attributes != {"type": "object"}:
            faults.append(f"{where}: json is not of type object")
        return _text(only, faults)
    arguments: dict[str, Any] = {}
    for child in call.children:
        if isinstance(child, str) or child.tag != "argument":
            faults.append(f"{where}: holds something that is no argument")
        elif child.attributes.keys() != {"key", "type"}:
            faults.append(f"{where}: an argument without key or type")
        elif child.attributes["key"] in arguments:
            faults.append(f"{where}: argument {child.attributes['key'][:40]!r} twice")
        else:
            key, kind = child.attributes["key"], child.attributes["type"]
            try:
                arguments[key] = _value_of(_text(child, faults), kind)
            except ValueError as error:
                faults.append(f"{where}: argument {key[:40]!r}: {error}")
    return arguments


def _text(element: _Element, faults: list[str]) -> str:
    faults += [
        f"{child.tag[:40]}: inside the text of {element.tag}"
        for child in element.children
        if not isinstance(child, str)
    ]
    return "".join(child for child in element.children if isinstance(child, str))
