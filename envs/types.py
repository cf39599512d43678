"""What an environment exchanges with the rest of the system: messages, tasks and stop reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, cast

import numpy as np

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "medium", "high", "max"]
# Of a reward, up or down. fp32 holds more, but not the square of a gradient that it multiplies.
LARGEST_REWARD = 1e15


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy makes, e.g. ``ToolCall("search", {"query": "kda", "limit": 3})``.

    ``arguments`` are JSON values by name, kept as dicts and lists; a string is the raw text of a
    call whose arguments could not be read as a JSON object.
    """

    tool: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, str):
            object.__setattr__(self, "arguments", _as_json(self.arguments))


def _as_json(value: Any) -> Any:
    """A copy in which every mapping is a dict and every tuple a list. A policy may nest what it
    says more deeply than Python calls itself."""
    whole = [value]
    left: list[tuple[Any, Any]] = [(whole, 0)]
    while left:
        place, key = left.pop()
        inner = place[key]
        if isinstance(inner, Mapping):
            place[key] = copied = dict(cast(Mapping[Any, Any], inner))
            left += [(copied, name) for name in copied]
        elif isinstance(inner, list | tuple):
            place[key] = listed = list(cast(Sequence[Any], inner))
            left += [(listed, index) for index in range(len(listed))]
    return whole[0]


IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
"""Stands in the content of a message for each of its images."""

_LIKE_PLACEHOLDER = re.compile(r"(<\|kimi_image_placeholder)(\\*)(\|>)")


def escaped(text: str) -> str:
    """``text`` for the content of a message with images: no part of it stands for an image."""
    return _LIKE_PLACEHOLDER.sub(r"\1\2\\\3", text)


def unescaped(text: str) -> str:
    """The text that `escaped` was given."""
    return _LIKE_PLACEHOLDER.sub(lambda found: found[1] + found[2][1:] + found[3], text)


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture in a message: ``pixels`` uint8 [height, width, 3], red, green and blue.

    Images with the same pixels are equal. Raises ValueError for any other array.
    """

    pixels: np.ndarray

    def __post_init__(self) -> None:
        pixels: Any = self.pixels
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
            found = pixels.dtype if isinstance(pixels, np.ndarray) else type(pixels).__name__
            raise ValueError(f"an image needs a uint8 array, got {found}")
        if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
            raise ValueError(
                f"an image needs the shape [height, width, 3] with no side 0, got "
                f"{list(pixels.shape)}"
            )
        own = pixels.copy()  # environments may draw into the same array again
        own.flags.writeable = False
        object.__setattr__(self, "pixels", own)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and np.array_equal(self.pixels, other.pixels)

    def __hash__(self) -> int:
        return hash((self.pixels.shape, self.pixels.tobytes()))


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, e.g. ``Message("tool", "json dumps loads")``.

    What only some messages have: ``name`` of a speaker; ``type`` of a system message that
    `farhorizon.envs.messages` makes, such as a tool declaration; ``thinking`` and ``calls`` of an
    assistant; ``tool`` and ``index`` of a tool result, which is the answer to the call of that
    number (from 1) in the assistant message before it; ``images`` of all but an assistant, with an
    `IMAGE_PLACEHOLDER` in the content for each (`farhorizon.envs.messages.shown` writes it). Raises
    ValueError where they stand elsewhere.
    """

    role: Role
    content: str
    name: str = ""
    type: str = ""
    tool: str = ""
    index: int = 0
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        texts = (self.content, self.name, self.type, self.tool, self.thinking)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("content, name, type, tool and thinking of a message are strings")
        if (self.thinking or self.calls) and self.role != "assistant":
            raise ValueError(f"a {self.role} message has no thinking and no calls")
        if (self.tool or self.index) and self.role != "tool":
            raise ValueError(f"a {self.role} message has no tool and no index")
        if bool(self.tool) != (self.index > 0):
            raise ValueError("a tool result has both tool and index (1 or more), or neither")
        if self.type and self.role != "system":
            raise ValueError(f"a {self.role} message has no type")
        if self.name and self.role == "tool":
            raise ValueError("a tool message has no name")
        drawn = isinstance(self.images, tuple)
        if not (drawn and all(isinstance(image, Image) for image in self.images)):
            raise TypeError("images of a message are a tuple of what shown or Image make")
        if self.images and self.role == "assistant":
            raise ValueError("an assistant message has no images")
        places = self.content.count(IMAGE_PLACEHOLDER)
        if self.images and places != len(self.images):
            raise ValueError(f"the content has {places} placeholders for {len(self.images)} images")


class Action(str):
    """What the policy answers: the text of its response, and in ``message`` all that it said.

    ``faults`` are what was malformed; a malformed call is not in ``message``. The brief chat
    format has plain strings instead; `farhorizon.envs.messages.said` takes either.
    """

    __slots__ = ("faults", "message")
    message: Message
    faults: tuple[str, ...]

    def __new__(cls, message: Message, faults: tuple[str, ...] = ()) -> Action:
        self = super().__new__(cls, message.content)
        self.message, self.faults = message, faults
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.message, self.faults


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance; picklable, no tensors.

    ``id`` is unique within a run and names the group of siblings that solve it; ``seed`` is what
    ``env.reset`` gets. Data-set environments read ``messages`` and ``metadata``; generated ones
    need only the seed. Example: ``Task("archive-v0/train/17", 17)``.
    """

    id: str
    seed: int
    messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"  # the environment finished: its reward is final
    TURN_LIMIT = "turn_limit"  # the run's turn budget was used up
    CONTEXT_LIMIT = "context_limit"  # the next request would not fit the context
    ENV_TRUNCATED = "env_truncated"  # the environment gave up (time, its own budget)
    ERROR = "error"  # environment or sandbox fault: masked, never a reward of 0

    @property
    def status(self) -> Literal["terminated", "truncated", "error"]:
        """The gymnasium view of the reason."""
        if self is StopReason.TERMINATED:
            return "terminated"
        return "error" if self is StopReason.ERROR else "truncated"
