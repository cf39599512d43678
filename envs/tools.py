"""Environments whose actions are tools, named in words or called as the chat format has it."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ..configs.errors import UserError
from .base import MessageEnv, Step
from .messages import said
from .types import Action, Message, ToolCall

_Method = TypeVar("_Method", bound=Callable[..., Any])

_KINDS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
_MOST_SHOWN = 300  # characters of what was wrong, which holds text of the policy's own


def tool(method: _Method) -> _Method:
    """Mark a public method of a `ToolEnv` as a tool.

    Parameters are strings unless they are annotated as ``int``, ``float``, ``bool``, ``list`` or
    ``dict``; the docstring tells the policy what it does.
    """
    method.__is_tool__ = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True, slots=True)
class _Tool:
    """A method and what may be given to it."""

    name: str
    doc: str
    signature: inspect.Signature  # without self

    @classmethod
    def of(cls, name: str, method: Callable[..., Any]) -> _Tool:
        signature = inspect.signature(method)
        own = list(signature.parameters.values())[1:]
        for parameter in own:
            if _annotated(parameter) is None and parameter.kind is not parameter.VAR_KEYWORD:
                kinds = ", ".join(_KINDS)
                raise UserError(f"tool {method.__qualname__}: {parameter} must be one of {kinds}")
        return cls(name, inspect.getdoc(method) or "", signature.replace(parameters=own))

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """All that a call can name, ``**others`` are not."""
        parameters = self.signature.parameters.items()
        return {name: p for name, p in parameters if p.kind is not p.VAR_KEYWORD}

    def declaration(self) -> dict[str, Any]:
        """The tool as a JSON schema."""
        properties: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            one = {"type": _kind(parameter)}
            several = parameter.kind is parameter.VAR_POSITIONAL
            properties[name] = {"type": "array", "items": one} if several else one
        required = [name for name, p in self.parameters.items() if _required(p)]
        schema = {"type": "object", "properties": properties, "required": required}
        about = {"name": self.name, "description": self.doc, "parameters": schema}
        return {"type": "function", "function": about}

    def of_words(self, words: Sequence[str]) -> dict[str, Any]:
        """Arguments by name; ValueError where there is no place for a word."""
        left = list(words)
        arguments: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments[name] = [_read(word, _kind(parameter)) for word in left]
                left = []
            elif parameter.kind is not parameter.KEYWORD_ONLY and left:
                arguments[name] = _read(left.pop(0), _kind(parameter))
        if left:
            raise ValueError(f"{len(left)} words too many")
        return arguments

    def bound(self, arguments: Mapping[str, Any] | str) -> inspect.BoundArguments:
        """The arguments as the method takes them; ValueError where they do not fit."""
        if isinstance(arguments, str):
            raise ValueError("its arguments are no arguments by name")
        parameters = self.parameters
        for name in arguments:
            if name not in parameters:
                raise ValueError(f"no argument {name[:40]!r}")
        given: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name not in arguments:
                if _required(parameter):
                    raise ValueError(f"argument {name} is missing")
                continue
            value, kind = arguments[name], _kind(parameter)
            if parameter.kind is not parameter.VAR_POSITIONAL:
                given[name] = _checked(name, value, kind)
                continue
            items = _checked(name, value, "array")
            given[name] = tuple(_checked(name, item, kind) for item in items)
        bound = inspect.BoundArguments(self.signature, given)  # type: ignore[arg-type]
        bound.apply_defaults()
        return bound


class ToolEnv(MessageEnv):
    """An environment whose actions are calls of its methods marked with `tool`.

    In a chat format that has tool calls the tools are declared to the policy, and each call is
    answered by a result of its own. In one that has none, and for a response without calls, an
    action is ``name arg1 arg2 ...``. A tool returns a string (shown as a tool message, reward 0)
    or a whole `Step`; ``*words`` takes any number. What is no right call goes to `on_invalid`.
    """

    _tools: ClassVar[dict[str, _Tool]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tools = {
            name: _Tool.of(name, member)
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if getattr(member, "__is_tool__", False) and not name.startswith("_")
        }

    @classmethod
    def usage(cls) -> tuple[str, ...]:
        """One line per tool, e.g. ``note NAME SOURCE``."""
        return tuple(
            " ".join([name, *(parameter.upper() for parameter in tool.signature.parameters)])
            for name, tool in cls._tools.items()
        )

    def declarations(self) -> list[dict[str, Any]]:
        return [tool.declaration() for tool in self._tools.values()]

    def as_calls(self, action: str) -> str:
        if isinstance(action, Action):
            return action
        try:
            call = self._of_words(action)
        except ValueError:
            return action
        return Action(Message("assistant", "", calls=(call,)))

    def step(self, action: str) -> Step:
        if isinstance(action, Action) and action.faults:
            return self.on_invalid(action)  # of a message that is half right nothing is done
        calls = said(action).calls
        if not calls:
            try:
                return self._run(self._of_words(action))
            except _Misfit:
                return self.on_invalid(action)
        shown: list[Message] = []
        total: Any = 0.0
        terminated = truncated = False
        info: dict[str, Any] = {}
        for number, call in enumerate(calls, 1):
            try:
                messages, reward, terminated, truncated, more = self._run(call)
            except _Misfit as error:
                wrong = Action(Message("assistant", "", calls=(call,)), (f"{number}: {error}",))
                messages, reward, terminated, truncated, more = self.on_invalid(wrong)
            shown += [_answering(message, call, number) for message in messages]
            total = reward if number == 1 else total + reward
            info |= more
            if terminated or truncated:
                break
        return tuple(shown), total, terminated, truncated, info

    def on_invalid(self, action: str) -> Step:
        """Called for what is no right call, of which nothing was done; by default the policy is
        told what is wrong and what the tools are, and it goes on.

        ``action`` is an `Action` with its ``faults`` where the chat format has tool calls.
        """
        faults = "; ".join(action.faults) if isinstance(action, Action) else ""
        if len(faults) > _MOST_SHOWN:
            faults = f"{faults[:_MOST_SHOWN]}..."
        wrong = f"invalid action ({faults})" if faults else "invalid action"
        return self.reply(f"{wrong}; tools: {', '.join(self.usage())}")

    def _of_words(self, action: str) -> ToolCall:
        name, *words = action.split() or [""]
        tool = self._tools.get(name)
        if tool is None:
            raise _Misfit(f"no tool {name[:40]!r}")
        try:
            arguments = tool.of_words(words)
            tool.bound(arguments)
        except ValueError as error:
            raise _Misfit(f"{name}: {error}") from None
        return ToolCall(name, arguments)

    def _run(self, call: ToolCall) -> Step:
        """The step that a call is; `_Misfit` before anything is done."""
        tool = self._tools.get(call.tool)
        if tool is None:
            raise _Misfit(f"no tool {call.tool[:40]!r}")
        try:
            bound = tool.bound(call.arguments)
        except ValueError as error:
            raise _Misfit(f"{call.tool}: {error}") from None
        result = getattr(self, call.tool)(*bound.args, **bound.kwargs)
        return self.reply(result) if isinstance(result, str) else result


class _Misfit(ValueError):
    """A call that names no tool, or whose arguments do not fit."""


def _answering(message: Message, call: ToolCall, number: int) -> Message:
    """A tool's message as the result of the call of that number."""
    if message.role != "tool" or message.tool or not call.tool:
        return message
    return replace(message, tool=call.tool, index=number)


def _annotated(parameter: inspect.Parameter) -> str | None:
    """The JSON type that a parameter is annotated with, None for what has none."""
    annotation: Any = parameter.annotation
    if annotation is parameter.empty:
        return "string"
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return _KINDS.get(name.partition("[")[0])


def _kind(parameter: inspect.Parameter) -> str:
    """The JSON type of a parameter of a tool; of ``*words`` that of each."""
    found = _annotated(parameter)
    assert found is not None, parameter
    return found


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


def _read(word: str, kind: str) -> Any:
    if kind == "string":
        return word
    try:
        return json.loads(word)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _checked(name: str, value: Any, kind: str) -> Any:
    right = isinstance(value, _TYPES[kind]) and (kind == "boolean") == isinstance(value, bool)
    if right and kind == "number":
        try:
            right = math.isfinite(value)
        except OverflowError:  # an integer that no float holds
            right = False
    if not right:
        raise ValueError(f"argument {name} must be of type {kind}")
    return value
