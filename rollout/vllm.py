"""Stock vLLM on a checkpoint folder, as an engine for rollout."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configs.errors import RunFailed, UserError, last_line
from ..policy import PolicyConfig
from ..policy.records import CONFIG_FILE, read_json
from ..policy.shards import stored_manifest
from ..policy.weights import Bucket, WeightManifest
from .memory import one_line
from .requests import Answer, Request
from .types import FinishReason
from .vllm_workers import EXTENSION, ServedWeights, Workers, on_loopback

BATCHED_TOKENS = 8192  # of a prefill step: longer prompts go on from the states of the last one
# Kernels that need packages which its wheel does not bring everywhere. They are for several GPUs,
# and for sampling from a part of the distribution.
UNUSED = ("VLLM_KIMI_K3_GEMM_AR", "VLLM_ENABLE_GEMM_RS", "VLLM_USE_FLASHINFER_SAMPLER")
# vLLM reports what it runs to a public server unless told not to.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
WEIGHTS, CACHES = "weights", "kv_cache"  # as vLLM calls what sleeps


def check_installed(wanted: str = "rollout.engine=vllm") -> None:
    """UserError where there is no vLLM; it is not imported."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"{wanted}: vllm is not installed here; see launch/vllm-env.sh")


def import_vllm() -> Any:
    """The package, which keeps what it runs to itself; UserError without it."""
    os.environ.update(QUIET)
    for name in UNUSED:
        os.environ.setdefault(name, "0")
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(f"vllm cannot be imported here ({error}); see launch/vllm-env.sh") from None


class VllmEngine:
    """`RequestEngine` and `WeightEngine` of vLLM in this process, on the GPU or, in fp32, on the
    CPU. With ``tensor_parallel`` above 1 its weights and caches are divided over as many GPUs, each
    of which has a process of its own.

    ``memory`` is the share of the device's memory that weights, states and caches may take,
    ``concurrency`` how many sequences run together. Answers have the routes of ``routed_layers``,
    the indices of those with experts; by itself none. One that ``sleeps`` can give its memory to
    others for a while. UserError without vLLM, and where it keeps no routes; RunFailed if it does
    not start. vLLM for CPUs hides packed matrices: of those log-probs alone tell what is served.
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
        tensor_parallel: int = 1,
        routed_layers: Sequence[int] = (),
        sleeps: bool = False,
    ) -> None:
        # Weights change between two steps, so that nobody else may make any, nor begin one early.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # how long is for the run to say
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # threads are the actor's
        self._vllm = import_vllm()
        self.limit = limit
        self._manifest = stored_manifest(Path(folder))
        self._ids: dict[int, str] = {}  # the engine's own, of running requests
        self._scored = 0
        self._asleep: frozenset[str] = frozenset()
        self._sizes = (
            f"rollout.vllm.memory={memory:g}, rollout.concurrency={concurrency} and context={limit}"
        )
        self._routed_layers = list(routed_layers)
        # vLLM copies KDA states with kernels for GPUs.
        kind = read_json(Path(folder) / CONFIG_FILE).get("model_type")
        caching = torch.cuda.is_available() or kind != PolicyConfig.model_type
        if routed_layers and not caching:
            raise UserError(
                "learner.replay=rollout needs routes, which vLLM does not record on a CPU; set "
                "learner.replay=learner, or rollout.engine=native"
            )
        arguments = self._vllm.EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=limit,
            max_num_seqs=concurrency + 1,  # the canary is read beside all that run
            max_num_batched_tokens=max(BATCHED_TOKENS, concurrency + 1),
            gpu_memory_utilization=memory,
            enable_prefix_caching=caching,
            enable_return_routed_experts=bool(routed_layers),
            enable_sleep_mode=sleeps,
            async_scheduling=False,
            logprobs_mode="processed_logprobs",  # at the temperature of sampling
            disable_log_stats=True,
            **(_divided(tensor_parallel) if tensor_parallel > 1 else {}),
        )
        try:
            with on_loopback() if tensor_parallel > 1 else nullcontext():
                self._engine: Any = self._vllm.LLMEngine.from_engine_args(arguments)
        except Exception as error:  # of several processes vLLM raises nothing more precise
            raise RunFailed(
                f"vllm does not start on {folder}: {last_line(error)} ({self._sizes} are its needs)"
            ) from error
        core: Any = self._engine.engine_core.engine_core
        self._scheduler: Any = core.scheduler
        self._weights: ServedWeights | Workers
        if tensor_parallel > 1:
            self._weights = Workers(core.model_executor, self._sizes)
        else:
            self._worker: Any = self._engine.collective_rpc(lambda worker: worker)[0]
            self._weights = ServedWeights(self._worker)

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
            routed_experts_prompt_start=request.routed,
        )
        prompt = {"prompt_token_ids": request.token_ids.tolist(), "cache_salt": request.salt}
        name = str(request.session)
        self._ids[request.session] = self._engine.add_request(name, prompt, params)

    def step(self) -> tuple[list[int], list[Answer]]:
        self._wake(WEIGHTS, CACHES)
        with self._told("a step"):
            outputs = self._engine.step()
        layers = self._routed_layers
        answers = [read_answer(output, layers) for output in outputs if output.finished]
        for answer in answers:
            del self._ids[answer.session]
        return [int(output.request_id) for output in outputs if not output.finished], answers

    def prefilling(self) -> list[int]:
        known = self._scheduler.requests
        return [one for one, name in self._ids.items() if known[name].num_output_tokens == 0]

    def abort(self, sessions: Sequence[int]) -> int:
        known = self._scheduler.requests
        names = [self._ids.pop(session) for session in sessions if session in self._ids]
        sampled = sum(known[name].num_output_tokens for name in names)
        self._engine.abort_request(names, internal=True)
        return sampled

    def set_version(self, number: int) -> None:
        self._engine.set_weight_version(str(number))

    def sleep(self) -> None:
        """As in `RequestEngine`: weights go to the host, so that they are there again whatever
        happens meanwhile; caches, and with them all states, are thrown away."""
        if WEIGHTS not in self._asleep:
            with self._told("falling asleep"):
                self._engine.sleep(level=1, mode="keep")
            self._asleep = frozenset((WEIGHTS, CACHES))

    def take(self, bucket: Bucket) -> Bucket:
        return self._weights.take(bucket)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """As in `WeightEngine`. vLLM by itself serves what it had where a tensor is missing.

        Wider numbers than those of the checkpoint are taken, narrower ones are not.
        """
        difference = self._manifest.difference(WeightManifest.of(weights).narrowed(self._manifest))
        if difference is not None:
            raise RunFailed(f"weight sync refused: {difference}")
        self._wake(WEIGHTS)
        with self._told("loading weights"):
            self._weights.load(weights)

    def difference(self, weights: Mapping[str, torch.Tensor]) -> str | None:
        self._wake(WEIGHTS)
        with self._told("comparing weights"):
            return self._weights.difference(weights)

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """As in `WeightEngine`, through prefill. RunFailed where the caches have no room."""
        self._wake(WEIGHTS, CACHES)
        self._scored += 1
        ids = [int(token) for token in token_ids]
        params = self._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": ids, "cache_salt": f"canary {self._scored}"}
        with (
            self._told("scoring"),
            self._alone() as make_room,
            self._tempered(temperature),
        ):
            name = self._engine.add_request(f"canary {self._scored}", prompt, params)
            request = self._scheduler.requests[name]
            try:
                outputs: list[Any] = []
                while not any(output.finished for output in outputs):
                    done = request.num_computed_tokens
                    outputs = self._engine.step()
                    if not outputs and request.num_computed_tokens == done:
                        make_room()
            except BaseException:
                self._engine.abort_request([name], internal=True)
                raise
        entries = zip(outputs[0].prompt_logprobs[1:], ids[1:], strict=True)
        return np.array([entry[token].logprob for entry, token in entries], np.float32)

    def _wake(self, *parts: str) -> None:
        """Have these in memory again: weights as they were, caches with nothing in them."""
        parts = tuple(part for part in parts if part in self._asleep)
        if not parts:
            return
        try:
            self._engine.wake_up(list(parts))
        except RuntimeError as error:
            raise RunFailed(
                f"vllm: no room to wake up in ({last_line(error)}); lower rollout.vllm.memory, or "
                f"set sync.transport=objects ({self._sizes})"
            ) from error
        self._asleep = self._asleep.difference(parts)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Around what runs in vLLM, as `one_line`."""
        with one_line(what, self._sizes):
            try:
                yield
            except Exception:
                self._weights.heed_loss()
                raise

    @contextmanager
    def _alone(self) -> Iterator[Callable[[], None]]:
        """Take all requests out of the queues while the block runs; what it gives frees the caches
        of one of them, to be read again later."""
        scheduler = self._scheduler
        running, waiting = scheduler.running, scheduler.waiting
        own = type(waiting)()

        def make_room() -> None:
            if not running:
                raise RunFailed(f"vllm: no room for the canary; raise memory of {self._sizes}")
            scheduler.waiting = waiting
            scheduler._preempt_request(running.pop(), time.monotonic())
            scheduler.waiting = own

        if len(running) >= scheduler.max_num_running_reqs:
            make_room()
        scheduler.running, scheduler.waiting = [], own
        try:
            yield make_room
        finally:
            scheduler.running, scheduler.waiting = running, waiting

    @contextmanager
    def _tempered(self, temperature: float) -> Iterator[None]:
        """Score prompts at ``temperature`` in the block."""
        self._weights.temper(temperature)
        try:
            yield
        finally:
            self._weights.temper(None)


def _divided(size: int) -> dict[str, Any]:
    """Arguments of an engine over several GPUs. By itself vLLM would ask Ray for them, which has
    given them to this actor."""
    return {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": EXTENSION,
    }


def read_answer(output: Any, routed_layers: Sequence[int] = ()) -> Answer:
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
        _routes(completion.routed_experts, routed_layers) if routed_layers else None,
    )


def _routes(rows: np.ndarray | None, layers: Sequence[int]) -> np.ndarray:
    """Those of layers with experts, packed as in `Routes`; vLLM has zeros for the others."""
    if rows is None or rows.shape[1] <= max(layers):
        found = "none" if rows is None else f"those of {rows.shape[1]}"
        raise RunFailed(f"vllm: routes of {max(layers) + 1} layers wanted, got {found}")
    own = rows[:, list(layers)]
    return own if own.dtype == np.uint8 else own.astype(np.int16)
