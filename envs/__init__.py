"""Environments: the message contract, the registry and the built-in long-horizon tasks."""

from .archive import Archive
from .base import MessageEnv
from .check import check_env
from .echo import Echo
from .messages import declare_tools, said, shown, tool_results
from .registry import (
    make,
    make_config,
    register,
    registered,
    resolve_plugins,
    tasks,
)
from .tools import ToolEnv, tool
from .types import Image, Message, StopReason, Task, ToolCall

register("archive-v0", Archive)
register("echo-v0", Echo)

__all__ = [
    "Image",
    "Message",
    "MessageEnv",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolEnv",
    "check_env",
    "declare_tools",
    "make",
    "make_config",
    "register",
    "registered",
    "resolve_plugins",
    "said",
    "shown",
    "tasks",
    "tool",
    "tool_results",
]
