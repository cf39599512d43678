"""The server's command, what it refuses, and the chats that its tokenizer hears."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import ServeConfig, VllmConfig
from farhorizon.envs.messages import conversation, tool_results
from farhorizon.envs.types import Message, ToolCall
from farhorizon.launch.cli import main
from farhorizon.launch.serve import server_command
from farhorizon.launch.serve_chat import ServedTokenizer, read_messages
from farhorizon.policy.tokenizer import ChatFormat, load_tokenizer
from farhorizon.policy.value import VALUE_PREFIX, ValueHead, write_value_head

CHAT = [{"role": "user", "content": " red <|end_of_msg|>"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
CALLED = [
    {"role": "developer", "content": "be short"},
    {"role": "user", "content": "What was it?", "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I look.",
        "tool_calls": [
            {"id": "a", "function": {"name": "search", "arguments": '{"query": "R&D", "n": 2}'}},
            {"id": "b", "function": {"name": "search", "arguments": {"query": "x"}}},
            {"id": "c", "function": {"name": "search", "arguments": "[1"}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": "two"},
    {"role": "tool", "tool_call_id": "a", "content": "one"},
]


def test_the_command_serves_the_context_of_the_checkpoint(checkpoint: Path) -> None:
    command = server_command(str(checkpoint), ServeConfig())
    line = str(command)
    assert command.arguments[0] == sys.executable and "-P" in command.arguments
    assert f"serve {checkpoint} --host 127.0.0.1 --port 8000 --served-model-name echo" in line
    for part in ("--max-model-len 64", "--dtype bfloat16", "--tokenizer-mode farhorizon"):
        assert part in line
    assert "--enable-prefix-caching" in line and "trust" not in line and "eager" not in line
    alone = ServeConfig(vllm=VllmConfig(dtype="float32"))
    kept = "--enable" if torch.cuda.is_available() else "--no-enable"
    assert f"{kept}-prefix-caching" in str(server_command(str(checkpoint), alone))
    assert command.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert (
        command.environment["VLLM_NO_USAGE_STATS"] == command.environment["HF_HUB_OFFLINE"] == "1"
    )
    config = ServeConfig(
        port=80,
        name="mine",
        context=32,
        tensor_parallel=2,
        vllm=VllmConfig(dtype="float32", eager=True, memory=0.5),
        flags=("--reasoning-parser=kimi",),
    )
    line = str(server_command(str(checkpoint), config))
    for part in (
        "--port 80 --served-model-name mine",
        "--max-model-len 32 --dtype float32 --gpu-memory-utilization 0.5",
        "--tensor-parallel-size 2",
        "enable-prefix-caching --enforce-eager --reasoning-parser=kimi",
    ):
        assert part in line
    longer = replace(config, context=128, allow_longer_context=True)
    assert "--max-model-len 128" in str(server_command(str(checkpoint), longer))


def test_what_cannot_be_served_is_refused_by_name(
    checkpoint: Path, seeing_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^context=65 is longer than the 64 tokens"):
        server_command(str(checkpoint), ServeConfig(context=65))
    with pytest.raises(UserError, match="seeing: has a vision tower, which farhorizon serve does"):
        server_command(str(seeing_checkpoint), ServeConfig())
    with pytest.raises(UserError, match=r"nowhere: no such folder$"):
        server_command(str(tmp_path / "nowhere"), ServeConfig())
    valued = shutil.copytree(checkpoint, tmp_path / "valued")
    write_value_head(valued, ValueHead(32).state_dict(prefix=VALUE_PREFIX), 32)
    with pytest.raises(UserError, match=r"valued: value\.safetensors is a value head, which vLLM"):
        server_command(str(valued), ServeConfig())
    other = shutil.copytree(checkpoint, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError, match=r"other/config\.json"):
        server_command(str(other), ServeConfig())
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"torn/model\.safetensors"):
        server_command(str(torn), ServeConfig())


def test_a_dry_run_prints_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(checkpoint), "dry_run=true", "port=81"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and " --port 81 " in out
    assert main(["serve", str(checkpoint), "port=0"]) == 2
    assert "port=0 must be between 1 and 65535" in capsys.readouterr().err
    assert main(["serve", str(checkpoint), "vllm.sleep=true", "dry_run=true"]) == 2
    assert "vllm.sleep=true would have no effect: no learner shares" in capsys.readouterr().err
    assert main(["serve", str(checkpoint), "vllm.tensor_parallel=2"]) == 2
    assert "a server has its own, tensor_parallel" in capsys.readouterr().err
    assert main(["serve", str(checkpoint)]) == 2  # the learner's environment has no vllm
    told = "farhorizon serve: vllm is not installed here; see launch/vllm-env.sh"
    assert told in capsys.readouterr().err


def test_a_chat_is_what_the_policy_was_trained_on(checkpoint: Path) -> None:
    served = ServedTokenizer.from_pretrained(checkpoint)
    chat = ChatFormat(load_tokenizer(checkpoint))
    meant = [*chat.render(Message("user", " red <|end_of_msg|>")), *chat.prompt()]
    assert served.apply_chat_template(CHAT) == meant
    assert meant.count(chat.stop_token_ids[0]) == 1  # nothing in a text can end a message
    assert served.apply_chat_template(conversation=CHAT, messages=None) == meant
    with pytest.raises(UserError, match=r"^tools: the policy speaks the brief chat style"):
        served.apply_chat_template(CHAT, tools=TOOLS)
    with pytest.raises(UserError, match=r"^continue_final_message"):
        served.apply_chat_template(CHAT, continue_final_message=True)
    assert served.encode(" red") == load_tokenizer(checkpoint).encode(" red")


def test_tools_and_thoughts_of_the_full_style(seeing_checkpoint: Path) -> None:
    served = ServedTokenizer.from_pretrained(seeing_checkpoint)
    calls = (
        ToolCall("search", {"query": "R&D", "n": 2}),
        ToolCall("search", {"query": "x"}),
        ToolCall("search", "[1"),
    )
    first, second, _ = tool_results(calls, ["one", "two", ""])
    said = [
        Message("system", "be short"),
        Message("user", "What was it?", name="ann"),
        Message("assistant", "", thinking="I look.", calls=calls),
        *(second, first),
    ]
    assert read_messages(CALLED) == said
    chat = ChatFormat(load_tokenizer(seeing_checkpoint))
    whole = conversation(said, tools=TOOLS, effort="low")
    meant = [*chat.render_reply(whole), *chat.prompt()]
    assert served.apply_chat_template(CALLED, tools=TOOLS, reasoning_effort="low") == meant
    plain = [*chat.render_reply(said), *chat.prompt()]
    assert served.apply_chat_template(CALLED, reasoning_effort="none") == plain
    for wrong, told in (
        ({"role": "judge", "content": "x"}, "message 1: role judge is none of"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 1: its content is no text"),
    ):
        with pytest.raises(UserError, match=told):
            read_messages([wrong])
