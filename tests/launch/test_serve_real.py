"""vLLM's own server on a policy of ours, on the CPU in fp32."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from farhorizon.envs.types import Message
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import ChatFormat, tokenizer_sha256, train_tokenizer

VLLM = Path(__file__).parents[2] / ".venv-vllm" / "bin"  # made by launch/vllm-env.sh
CONTEXT, WORDS = 96, [" red", " green", " blue"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm: bash launch/vllm-env.sh"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KDA layers and one of latent attention, with weights that prefer something."""
    tokenizer = train_tokenizer([], 288, WORDS)
    torch.manual_seed(0)
    config = PolicyConfig.tiny(vocab_size=288, hidden_size=64, num_hidden_layers=4)
    policy = Policy(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.5)
    stage = StageRecord(CONTEXT, (CONTEXT,), 0, tokenizer_sha256(tokenizer))
    place = tmp_path_factory.mktemp("served") / "mine"
    return save_checkpoint(place, policy, config, tokenizer, stage)


class Server:
    """A running server, and how it is asked."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address, self.log = f"http://127.0.0.1:{port}", log
        settings = ["vllm.dtype=float32", "vllm.eager=true", "vllm.memory=0.3", "concurrency=4"]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [VLLM / "farhorizon", "serve", folder, f"port={port}", *settings],
                env=os.environ | own | {"CUDA_VISIBLE_DEVICES": ""},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 300
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.5)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps({"model": "mine"} | body).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/v1/{path}", data, head)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(folder, tmp_path_factory.mktemp("log") / "server.txt")
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def greedy(policy: Policy, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """The most likely tokens one by one, and their log-probs, by whole forwards."""
    known, logprobs = list(ids), []
    for _ in range(count):
        with torch.no_grad():
            logits = policy(torch.tensor([known]), last_only=True).logits[0].double()
        known.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[known[-1]]))
    return known[len(ids) :], logprobs


def given(tokens: list[str]) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in tokens]


def test_completions_are_those_of_our_own_forward(server: Server, folder: Path) -> None:
    policy = load_checkpoint(folder).policy
    prompts = [[*range(10, 10 + length)] for length in (5, 40, 17, 70)]

    def ask(prompt: list[int]) -> Any:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 0}
        extra = {"return_tokens_as_token_ids": True, "ignore_eos": True}
        return server.ask("completions", body | extra)["choices"][0]

    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(ask, prompts))
    for prompt, one in zip(prompts, found, strict=True):
        tokens, logprobs = greedy(policy, prompt, 20)
        assert given(one["logprobs"]["tokens"]) == tokens
        assert one["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert one["finish_reason"] == "length"


def test_a_chat_is_the_one_of_training(server: Server, folder: Path) -> None:
    loaded = load_checkpoint(folder)
    chat = ChatFormat(loaded.tokenizer)
    ids = [*chat.render(Message("user", " red <|end_of_msg|>")), *chat.prompt()]
    body = {
        "messages": [{"role": "user", "content": " red <|end_of_msg|>"}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
    }
    answer = server.ask("chat/completions", body)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    tokens, logprobs = greedy(loaded.policy, ids, 8)
    content = answer["choices"][0]["logprobs"]["content"]
    count = len(content)
    assert given([one["token"] for one in content]) == tokens[:count]
    assert [one["logprob"] for one in content] == pytest.approx(logprobs[:count], abs=1e-4)
    (end,) = chat.stop_token_ids
    stopped = server.ask("chat/completions", body | {"logit_bias": {str(end): 100}})
    choice = stopped["choices"][0]
    assert (choice["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 1)
    assert choice["message"]["content"] in ("", None)
    (model,) = server.ask("models")["data"]
    assert (model["id"], model["max_model_len"]) == ("mine", CONTEXT)


def test_what_is_asked_wrongly_is_told(server: Server) -> None:
    longer = {"prompt": [*range(100)], "max_tokens": 4}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    called = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "none"}
    for path, body, told in (
        ("completions", longer, str(CONTEXT)),
        ("chat/completions", called, "brief chat style"),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.ask(path, body)
        assert caught.value.code == 400 and told in caught.value.read().decode()


def test_sigint_ends_it_and_leaves_no_process(server: Server) -> None:
    assert "--tokenizer-mode farhorizon" in server.text.splitlines()[0]
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=60) == 0
    assert psutil.wait_procs(children, timeout=20)[1] == []
