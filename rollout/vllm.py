"""Stock vLLM on a checkpoint folder: an engine for rollout, the log-probs and routes it gives of a
prompt, and how fast it decodes."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configs.errors import RunFailed, UserError, last_line
from ..policy.shards import stored_manifest
from ..policy.weights import WeightManifest
from .requests import Answer, Request
from .types import FinishReason

BATCHED_TOKENS = 8192  # of a prefill step: longer prompts go on from the states of the last one
TIMED_BATCHED_TOKENS = 16384  # the same where decode steps are timed: fewer that prefill as well
# Kernels that need packages which its wheel does not bring everywhere. They are for several GPUs,
# and for sampling from a part of the distribution.
_UNUSED = ("VLLM_KIMI_K3_GEMM_AR", "VLLM_ENABLE_GEMM_RS", "VLLM_USE_FLASHINFER_SAMPLER")


def _import() -> Any:
    """The package; UserError without it."""
    for name in _UNUSED:
        os.environ.setdefault(name, "0")
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(f"vllm cannot be imported here ({error}); see launch/vllm-env.sh") from None


@dataclass(frozen=True, slots=True)
class Served:
    """One sequence: a prompt and what was sampled behind it.

    ``token_ids`` int64 [T], the first ``prompt`` of them given; ``logprobs`` fp32 [T - 1] of every
    token but the first; ``routes`` [T - 1, layers, k] of every token but the last, in which layers
    without experts hold zeros.
    """

    token_ids: np.ndarray
    prompt: int
    logprobs: np.ndarray
    routes: np.ndarray


def serve(
    folder: str | Path, prompts: Sequence[np.ndarray], sampled: int, seed: int
) -> list[Served]:
    """Prefill ``prompts`` and sample ``sampled`` tokens behind each, at temperature 1 in bf16.

    UserError without vLLM, RunFailed if it gives no routes.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine shares this process and GPU
    vllm = _import()
    longest = max(map(len, prompts)) + sampled
    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=longest + 1,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=BATCHED_TOKENS,
        gpu_memory_utilization=0.4,
        enable_prefix_caching=True,  # vLLM gives no routes without it
        enable_return_routed_experts=True,
        seed=seed,
    )
    params = vllm.SamplingParams(
        max_tokens=sampled,
        temperature=1.0,
        logprobs=0,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
        seed=seed,
    )
    asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    given = engine.generate(asked, params, use_tqdm=False)
    served = [read_output(output) for output in given]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return served


def read_output(output: Any) -> Served:
    """One ``RequestOutput`` of vLLM."""
    completion = output.outputs[0]
    prompt, sampled = list(output.prompt_token_ids), list(completion.token_ids)
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    token_ids = np.array(prompt + sampled)
    logprobs = [
        entry[token].logprob for entry, token in zip(entries, token_ids[1:].tolist(), strict=True)
    ]
    routes = completion.routed_experts
    if routes is None or len(routes) != len(token_ids) - 1:
        found = "none" if routes is None else f"those of {len(routes)}"
        raise RunFailed(f"vllm: routes of {len(token_ids) - 1} tokens wanted, got {found}")
    return Served(token_ids, len(prompt), np.array(logprobs, np.float32), np.asarray(routes))


@dataclass(frozen=True, slots=True)
class Decoded:
    """A run of `DecodeEngine`: its seconds, and of the first sequence the sampled ``token_ids``
    int64 [T] with their ``logprobs`` fp32 [T], None where none were asked for."""

    seconds: float
    token_ids: np.ndarray
    logprobs: np.ndarray | None


class DecodeEngine:
    """Stock vLLM that samples behind the same prompts again and again, in bf16 at temperature 1.

    Nothing of a run is left for the next one: prefixes are not kept. With CUDA graphs there is one
    of a step of all sequences, unless ``eager``. UserError without vLLM.
    """

    def __init__(
        self, folder: str | Path, prompts: Sequence[np.ndarray], tokens: int, eager: bool
    ) -> None:
        self._vllm = _import()
        self._asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        graphs = {"compilation_config": {"cudagraph_capture_sizes": [len(prompts)]}}
        self._engine = self._vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=eager,
            max_model_len=max(map(len, prompts)) + tokens + 1,
            max_num_seqs=len(prompts),
            max_num_batched_tokens=TIMED_BATCHED_TOKENS,
            gpu_memory_utilization=0.6,
            enable_prefix_caching=False,
            **({} if eager else graphs),
        )

    def run(self, tokens: int, logprobs: bool) -> Decoded:
        """Prefill all prompts and sample ``tokens`` behind each; RunFailed if it gives fewer."""
        params = self._vllm.SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            logprobs=0 if logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
        )
        start = time.perf_counter()
        given = self._engine.generate(self._asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        fewest = min(len(output.outputs[0].token_ids) for output in given)
        if fewest != tokens:
            raise RunFailed(f"vllm: {tokens} tokens wanted, got {fewest}")
        first = given[0].outputs[0]
        token_ids = np.array(first.token_ids)
        if not logprobs:
            return Decoded(seconds, token_ids, None)
        pairs = zip(first.logprobs, token_ids.tolist(), strict=True)
        found = np.array([entry[token].logprob for entry, token in pairs], np.float32)
        return Decoded(seconds, token_ids, found)


class VllmEngine:
    """`RequestEngine` of vLLM in this process, on the GPU or, in fp32, on the CPU.

    ``memory`` is the share of the device's memory that weights, states and caches may take,
    ``concurrency`` how many sequences are decoded together. UserError without vLLM, RunFailed if
    it does not start.
    """

    def __init__(
        self,
        folder: str | Path,
        limit: int,
        *,
        concurrency: int = 64,
        memory: float = 0.9,
        dtype: str = "bfloat16",
        eager: bool = False,
    ) -> None:
        # Weights change between two steps, so that nobody else may make any.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._vllm = _import()
        self.limit = limit
        self._manifest = stored_manifest(Path(folder))
        self._ids: dict[int, str] = {}  # the engine's own, of running requests
        arguments = self._vllm.EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=limit,
            max_num_seqs=concurrency,
            max_num_batched_tokens=max(BATCHED_TOKENS, concurrency),
            gpu_memory_utilization=memory,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # at the temperature of sampling
            disable_log_stats=True,
        )
        try:
            self._engine: Any = self._vllm.LLMEngine.from_engine_args(arguments)
        except (ValueError, RuntimeError) as error:
            raise RunFailed(
                f"vllm does not start on {folder}: {last_line(error)} (memory={memory}, "
                f"context={limit} and concurrency={concurrency} set what it needs)"
            ) from error

    def add(self, request: Request) -> None:
        kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
        params = self._vllm.SamplingParams(
            max_tokens=request.params.max_tokens,
            temperature=request.params.temperature,
            stop_token_ids=list(request.params.stop_token_ids),
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            output_kind=kinds.CUMULATIVE if request.leads else kinds.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request.token_ids.tolist(), "cache_salt": request.salt}
        name = str(request.session)
        self._ids[request.session] = self._engine.add_request(name, prompt, params)

    def step(self) -> tuple[list[int], list[Answer]]:
        outputs = self._engine.step()
        answers = [read_answer(output) for output in outputs if output.finished]
        for answer in answers:
            del self._ids[answer.session]
        return [int(output.request_id) for output in outputs if not output.finished], answers

    def abort(self, sessions: Sequence[int]) -> None:
        self._engine.abort_request([self._ids.pop(session) for session in sessions], internal=True)

    def set_version(self, number: int) -> None:
        self._engine.set_weight_version(str(number))

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put tensors in the place of those that are served, between two steps; what vLLM derives
        from them is made anew.

        RunFailed, and nothing is touched, unless they are those of the checkpoint folder by name,
        shape and dtype: vLLM itself leaves out what is missing, and serves what it has then.
        """
        difference = self._manifest.difference(WeightManifest.of(weights))
        if difference is not None:
            raise RunFailed(f"weight sync refused: {difference}")
        given = iter(weights.items())
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": given})


def read_answer(output: Any) -> Answer:
    """A finished ``RequestOutput`` of vLLM, whose versions are numbers."""
    completion = output.outputs[0]
    token_ids = np.array(completion.token_ids, np.int32)
    if completion.finish_reason not in ("stop", "length"):
        raise RunFailed(f"vllm: a request ended with {completion.finish_reason}")
    entries = zip(completion.logprobs, token_ids.tolist(), strict=True)
    logprobs = np.array([entry[token].logprob for entry, token in entries], np.float32)
    versions = np.full(len(token_ids), -1, np.int32)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise RunFailed("vllm: the weight version of some tokens is not known")
    return Answer(
        int(output.request_id),
        token_ids,
        logprobs,
        versions,
        FinishReason(completion.finish_reason),
        output.num_cached_tokens or 0,
    )
