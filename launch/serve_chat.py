"""What vLLM's processes load of this project by themselves, through the entry point
``vllm.general_plugins``: how a policy of ours hears a chat.

A request for a chat becomes the token ids that `ChatFormat` makes in training, and no template
writes them as text that has to be encoded again.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from ..configs.schema import ChatConfig
from ..envs.messages import conversation as whole_request
from ..envs.types import Message, ToolCall
from ..policy.chat import ChatFormat, chat_of
from ..policy.records import read_stage
from ..policy.tokenizer import load_tokenizer

MODE = "farhorizon"  # of vLLM's --tokenizer-mode
ARCHITECTURE, CPU_POLICY = "KimiLinearForCausalLM", "farhorizon.rollout.vllm_cpu:CpuPolicy"


def register() -> None:
    """Tell this process of vLLM; safe to call twice."""
    tokenizers = importlib.import_module("vllm.tokenizers.registry").TokenizerRegistry
    renderers = importlib.import_module("vllm.renderers.registry").RENDERER_REGISTRY
    if MODE not in tokenizers.tokenizers:
        tokenizers.register(MODE, __name__, Loader.__name__)
        # The renderer that leaves everything to `apply_chat_template`.
        renderers.register(MODE, "vllm.renderers.deepseek_v32", "DeepseekV32Renderer")
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        models = importlib.import_module("vllm.model_executor.models").ModelRegistry
        models.register_model(ARCHITECTURE, CPU_POLICY)


class ServedTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a checkpoint, which renders chats as its policy was trained on them."""

    chat: ChatFormat

    @classmethod
    def from_pretrained(cls, folder: str | Path, *_: Any, **__: Any) -> ServedTokenizer:
        """Of a checkpoint folder; UserError as `load_tokenizer`."""
        own = load_tokenizer(folder)
        own.__class__ = cls
        assert isinstance(own, cls)
        own.chat = chat_of(own, read_stage(folder), ChatConfig())
        return own

    def apply_chat_template(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, conversation: Any, tools: Any = None, **options: Any
    ) -> list[int]:
        """Ids of a whole request, up to where the policy answers.

        ``conversation``, with texts for contents, and ``tools`` are those of OpenAI's API; of
        ``options`` only ``reasoning_effort`` is looked at. UserError for what the policy's chat
        format does not have.
        """
        chat, effort = self.chat, options.get("reasoning_effort") or self.chat.effort
        if tools and not chat.calls:
            raise UserError("tools: the policy speaks the brief chat style, which has none")
        if options.get("continue_final_message"):
            raise UserError(
                "continue_final_message: a message of this policy is never gone on with"
            )
        said = read_messages(conversation)
        if chat.calls:
            schemas = [dict(tool) for tool in tools or ()]
            said = whole_request(said, tools=schemas, effort=None if effort == "none" else effort)
        return [*chat.render_reply(said), *chat.prompt()]


class Loader:
    """What vLLM makes a `ServedTokenizer` with."""

    @staticmethod
    def from_pretrained(folder: str | Path, *_: Any, **__: Any) -> Any:
        """One that has what vLLM asks tokenizers for, beside what transformers has."""
        cached = importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer
        return cached(ServedTokenizer.from_pretrained(folder))


def read_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages of OpenAI's API with texts for contents; UserError for others."""
    read: list[Message] = []
    calls: dict[str, tuple[str, int]] = {}  # of the last assistant, by id
    for number, one in enumerate(given, 1):
        role, content = str(one["role"]), one.get("content") or ""
        role = "system" if role == "developer" else role
        if not isinstance(content, str):
            raise UserError(f"message {number}: its content is no text")
        if role == "assistant":
            own = list(one.get("tool_calls") or ())
            thoughts = str(one.get("reasoning") or one.get("reasoning_content") or "")
            made = tuple(_call(call["function"]) for call in own)
            read.append(Message("assistant", content, thinking=thoughts, calls=made))
            names = [(str(call.get("id")), call["function"]["name"]) for call in own]
            calls = {key: (name, index) for index, (key, name) in enumerate(names, 1)}
        elif role == "tool":
            tool, index = calls.get(str(one.get("tool_call_id")), ("", 0))
            read.append(Message("tool", content, tool=tool, index=index))
        elif role == "user" or role == "system":
            read.append(Message(role, content, name=str(one.get("name") or "")))
        else:
            raise UserError(
                f"message {number}: role {role} is none of system, user, assistant, tool"
            )
    return read


def _call(function: Mapping[str, Any]) -> ToolCall:
    given = function.get("arguments") or {}
    if isinstance(given, Mapping):
        return ToolCall(function["name"], given)
    try:
        read = json.loads(given)
    except ValueError:
        read = None
    return ToolCall(function["name"], read if isinstance(read, dict) else str(given))
