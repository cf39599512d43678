"""What stock vLLM gives of a checkpoint folder beside rollout: log-probs and routes of prompts, and
how fast it decodes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configs.errors import RunFailed
from .vllm import BATCHED_TOKENS, import_vllm

TIMED_BATCHED_TOKENS = 16384  # of a step where decode is timed: fewer steps that prefill as well


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
    vllm = import_vllm()
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
        self._vllm = import_vllm()
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
