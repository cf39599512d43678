"""A package in miniature in the place of vLLM: its calls, around the model of `fake_engine`.

What sleeps holds NaN, and nothing may be computed before all is awake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .fake_engine import Model, logits

PARTS = ("weights", "kv_cache")


class Served(Model):
    def compute_logits(self, given: Tensor) -> Tensor:
        return given


class Worker:
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.model = Served()
        self.model.load_weights(weights)

    def get_model(self) -> Served:
        return self.model

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(dict(weights_iterator))


class LLMEngine:
    """Greedy: a token depends on all before it and on the weights that are served. ``calls`` are
    those that concern sleep; ``room`` of the GPU is what others leave."""

    weights: Mapping[str, Tensor] = {}  # of the checkpoint that the next one is made for

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.worker = Worker(self.weights)
        queues: dict[str, Any] = {"running": [], "waiting": deque(), "requests": {}}
        self.scheduler = SimpleNamespace(**queues, max_num_running_reqs=arguments.max_num_seqs)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.calls: list[Any] = []
        self.room = True
        self._kept: dict[str, Tensor] | None = None  # on the host
        self._asleep: set[str] = set()
        self._found: set[tuple[str, tuple[int, ...]]] = set()  # states in the cache of prefixes
        self._version = ""

    @classmethod
    def from_engine_args(cls, arguments: SimpleNamespace) -> LLMEngine:
        return cls(arguments)

    def collective_rpc(self, call: Callable[[Worker], Any]) -> list[Any]:
        return [call(self.worker)]

    def set_weight_version(self, version: str) -> None:
        self._version = version

    def add_request(self, name: str, prompt: Mapping[str, Any], params: SimpleNamespace) -> str:
        request = SimpleNamespace(name=name, params=params, tokens=[], scores=[], **prompt)
        request.num_computed_tokens = request.num_output_tokens = 0
        request.versions = []
        self.scheduler.requests[name] = request
        self.scheduler.waiting.append(request)
        return name

    def abort_request(self, names: Iterable[str], internal: bool) -> None:
        for name in names:
            gone = self.scheduler.requests.pop(name)
            for queue in (self.scheduler.running, self.scheduler.waiting):
                if gone in queue:
                    queue.remove(gone)

    def step(self) -> list[SimpleNamespace]:
        assert not self._asleep, "computed while it sleeps"
        self.scheduler.running += self.scheduler.waiting
        self.scheduler.waiting.clear()
        return [self._one(request) for request in list(self.scheduler.running)]

    def _one(self, request: SimpleNamespace) -> SimpleNamespace:
        ids = [*request.prompt_token_ids, *request.tokens]
        if not request.tokens:
            known = (request.cache_salt, tuple(request.prompt_token_ids))
            request.cached = len(ids) - 1 if known in self._found else 0
            self._found.add(known)
        model = self.worker.model
        said = model.compute_logits(logits(model.served(), torch.tensor(ids))).log_softmax(-1)
        request.tokens.append(int(said[-1].argmax()))
        request.scores.append(float(said[-1].max()))
        request.versions.append(self._version)
        request.num_computed_tokens, request.num_output_tokens = len(ids), len(request.tokens)
        finished = len(request.tokens) == request.params.max_tokens
        if finished:
            self.abort_request([request.name], internal=True)
        spans = [
            SimpleNamespace(version=version, start=n, end=n + 1)
            for n, version in enumerate(request.versions)
        ]
        completion = SimpleNamespace(
            token_ids=request.tokens,
            logprobs=[
                {t: SimpleNamespace(logprob=s)}
                for t, s in zip(request.tokens, request.scores, strict=True)
            ],
            finish_reason="length" if finished else None,
            weight_versions=spans,
            routed_experts=None,
        )
        told = [None] + [
            {t: SimpleNamespace(logprob=float(row[t]))}
            for row, t in zip(said, ids[1:], strict=False)
        ]
        return SimpleNamespace(
            request_id=request.name,
            finished=finished,
            outputs=[completion],
            num_cached_tokens=request.cached,
            prompt_logprobs=told,
        )

    def sleep(self, level: int, mode: str) -> None:
        assert self.arguments.enable_sleep_mode
        assert level == 1 and mode == "keep"
        self.calls.append("sleep")
        self.scheduler.waiting.extend(self.scheduler.running)
        self.scheduler.running.clear()
        self._found.clear()
        state = self.worker.model.state_dict()
        if "weights" not in self._asleep:
            self._kept = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in state.values():
                tensor.fill_(torch.nan)
        self._asleep = set(PARTS)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)
        if not self.room:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:139")
        assert self._asleep.issuperset(tags)
        if "weights" in tags and self._kept is not None:
            for name, tensor in self.worker.model.state_dict().items():
                tensor.copy_(self._kept[name])
        self._asleep -= set(tags)


def package(weights: Mapping[str, Tensor]) -> dict[str, ModuleType]:
    """The modules to import, of an engine for a checkpoint of these weights."""
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    own = type("LLMEngine", (LLMEngine,), {"weights": weights})
    vars(vllm).update(EngineArgs=SimpleNamespace, SamplingParams=SimpleNamespace, LLMEngine=own)
    vars(params).update(RequestOutputKind=SimpleNamespace(CUMULATIVE=0, FINAL_ONLY=1))
    return {"vllm": vllm, "vllm.sampling_params": params}
