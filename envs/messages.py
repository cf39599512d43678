"""System messages with a fixed wording, which the published format knows by their type.

``conversation`` puts them around the messages of a request in the published order. A tool
declaration is an ordinary message: an environment may show one in ``reset`` or in a later step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np

from .types import IMAGE_PLACEHOLDER, Action, Effort, Image, Message, Role, ToolCall, escaped

Tools = Sequence[Mapping[str, Any]]
ToolChoice = Literal["auto", "none", "required"]

_DECLARED = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_ADDED = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = {
    "none": "You MUST NOT call any tools in the next message.",
    "required": "You MUST call tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)


def declare_tools(tools: Tools, added: bool = False) -> Message:
    """The tools that may be called, as JSON schemas; ``added``: besides those declared before."""
    text = _ADDED if added else _DECLARED
    return Message("system", f"{text}{_fenced(list(tools))}", type="tool-declare")


def thinking_effort(effort: Effort) -> Message:
    """How much to think."""
    if effort not in ("low", "medium", "high", "max"):
        raise ValueError(f"thinking effort {effort!r} is none of low, medium, high, max")
    return Message("system", _EFFORT.format(effort), type="thinking-effort")


def tool_choice(choice: Literal["none", "required"]) -> Message:
    """Whether the next message must or must not call tools."""
    if choice not in _CHOICE:
        raise ValueError(f"tool choice {choice!r} is none of none, required")
    text = f"The system is invoked with `tool_choice={choice}`.\n{_CHOICE[choice]}"
    return Message("system", text, type="tool-choice")


def response_format(schema: Mapping[str, Any] | None = None) -> Message:
    """The next response must be a JSON object; with ``schema``, one that fits it."""
    kind = "json_object" if schema is None else "json_schema"
    text = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if schema is not None:
        text += f"\nThe JSON data must match the following schema:\n{_fenced(schema)}"
    return Message("system", text, type="response-format")


def conversation(
    messages: Iterable[Message],
    *,
    tools: Tools = (),
    effort: Effort | None = None,
    choice: ToolChoice = "auto",
    response: Message | None = None,
) -> list[Message]:
    """A whole request: tools and effort before ``messages``, options of the next message after.

    ``response`` is what `response_format` made.
    """
    before = [declare_tools(tools)] if tools else []
    before += [thinking_effort(effort)] if effort is not None else []
    after = [tool_choice(choice)] if choice != "auto" else []
    after += [response] if response is not None else []
    return [*before, *messages, *after]


def opening(
    messages: Sequence[Message], tools: Tools = (), effort: Effort | None = None
) -> tuple[Message, ...]:
    """The first messages of an episode in the published order: declarations of tools, effort, and
    what else the environment shows.

    An environment that declares tools or says an effort itself is taken at its word.
    """
    kinds = {message.type for message in messages}
    own = 0
    while own < len(messages) and messages[own].type == "tool-declare":
        own += 1
    declared = (declare_tools(tools),) if tools and "tool-declare" not in kinds else ()
    guide: tuple[Message, ...] = ()
    if effort is not None and "thinking-effort" not in kinds:
        guide = (thinking_effort(effort),)
    return (*declared, *messages[:own], *guide, *messages[own:])


def shown(role: Role, *parts: str | Image | np.ndarray) -> Message:
    """A message of texts and images in their order, e.g. ``shown("user", pixels, " Which?")``.

    Arrays are uint8 [height, width, 3]. A text beside an image that reads like its placeholder is
    kept apart from it by a backslash in the content, which the policy does not see.
    """
    images = tuple(
        part if isinstance(part, Image) else Image(part)
        for part in parts
        if not isinstance(part, str)
    )
    if not images:
        return Message(role, "".join(part for part in parts if isinstance(part, str)))
    content = ""
    for is_text, some in groupby(parts, lambda part: isinstance(part, str)):
        both = [part if isinstance(part, str) else IMAGE_PLACEHOLDER for part in some]
        content += escaped("".join(both)) if is_text else "".join(both)
    return Message(role, content, images=images)


def said(action: str) -> Message:
    """The whole message behind the ``action`` of a step, thoughts and tool calls included."""
    return action.message if isinstance(action, Action) else Message("assistant", action)


def tool_results(calls: Sequence[ToolCall], answers: Sequence[str]) -> tuple[Message, ...]:
    """One tool message for each of ``calls``, in their order."""
    return tuple(
        Message("tool", answer, tool=call.tool, index=number)
        for number, (call, answer) in enumerate(zip(calls, answers, strict=True), 1)
    )


def _fenced(value: Any) -> str:
    """Compact JSON with sorted keys, so that equal declarations are equal tokens."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"```json\n{text}\n```"
