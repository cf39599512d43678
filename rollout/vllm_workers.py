"""The weights that vLLM's workers serve: of the one in this process, or of one process for each GPU
of an engine that is divided over several.

Each worker runs vLLM's loader on all tensors, which keeps its own part of them, and proves it.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..configs.errors import RunFailed
from ..policy.links import loopback_interface
from ..policy.weights import Bucket
from .memory import one_line
from .proof import Proof
from .shelf import Shelf, Shown

# What vLLM has to be told, so that this module is at work in each of several workers.
EXTENSION = f"{__name__}.WorkerExtension"
ENDING = 120.0  # seconds in which vLLM ends what is left of an engine


class ServedWeights:
    """What a ``worker`` of vLLM, which is in this process, serves."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: Any = worker.get_model()
        self._proof = Proof(self._model)

    def take(self, bucket: Bucket) -> Bucket:
        """As in `WeightEngine`."""
        return bucket

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """As in `WeightEngine`, without a look at names."""
        self._proof.load(self._loader(weights))

    def difference(self, weights: Mapping[str, torch.Tensor]) -> str | None:
        """As in `WeightEngine`."""
        return self._proof.difference(self._loader(weights))

    def temper(self, temperature: float | None) -> None:
        """From now on logits over ``temperature``: vLLM gives log-probs of prompts at 1, as it does
        again after None."""
        if temperature is None:
            del self._model.compute_logits
            return
        plain = self._model.compute_logits

        def tempered(*given: Any) -> torch.Tensor | None:
            logits = plain(*given)
            return None if logits is None else logits.float() / temperature

        self._model.compute_logits = tempered

    def heed_loss(self) -> None:
        """Without this worker there is no process that could heed it."""

    def _loader(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            try:
                self._worker.reload_weights(weights_iterator=iter(weights.items()))
            except BaseException:
                # Layers that wait for the rest of their tensors serve those of before again.
                config = importlib.import_module("vllm.config")
                reload = importlib.import_module("vllm.model_executor.model_loader.reload")
                with config.set_current_vllm_config(self._worker.vllm_config):
                    reload.finalize_layerwise_reload(
                        self._worker.get_model(), self._worker.vllm_config.model_config
                    )
                raise

        return run


class WorkerExtension:
    """What vLLM makes a part of the worker in each process of an engine, called `EXTENSION`."""

    _farhorizon: ServedWeights | None = None

    def farhorizon(self, task: str, what: str, sizes: str, given: Any) -> tuple[str | None, Any]:
        """Do a ``task`` of `ServedWeights`: what went wrong, and else what came of it. Raises
        nothing: vLLM would leave the answers of the other workers for the next call to find."""
        try:
            with one_line(what, sizes):
                if self._farhorizon is None:
                    self._farhorizon = ServedWeights(self)
                opened = given.open() if isinstance(given, Shown) else given
                return None, getattr(self._farhorizon, task)(opened)
        except Exception as error:
            return str(error), None


class Workers:
    """What all workers of vLLM's ``executor`` serve, each in a process of its own; they take their
    tensors from memory of this one. ``sizes`` are the settings that say what they need.

    A worker that ends takes this process with it, for others to see and to start it again.
    """

    def __init__(self, executor: Any, sizes: str) -> None:
        self._executor, self._sizes, self._shelf = executor, sizes, Shelf()
        executor.register_failure_callback(_end)

    def take(self, bucket: Bucket) -> Bucket:
        """As in `WeightEngine`: on the host, where all workers read it."""
        return Bucket(bucket.first, bucket.count, self._shelf.put(bucket.payload))

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """As in `WeightEngine`, without a look at names; RunFailed if one of them fails."""
        with self._shelf.shown(weights) as shown:
            self._ask("load", "loading weights", shown)

    def difference(self, weights: Mapping[str, torch.Tensor]) -> str | None:
        """As in `WeightEngine`; it says which worker is the first one that differs."""
        with self._shelf.shown(weights) as shown:
            found: Sequence[str | None] = self._ask("difference", "comparing weights", shown)
        for number, one in enumerate(found):
            if one is not None:
                return f"worker {number} of {len(found)}: {one}"
        return None

    def temper(self, temperature: float | None) -> None:
        """As in `ServedWeights`."""
        self._ask("temper", "scoring", temperature)

    def heed_loss(self) -> None:
        """After a failure: where that is the end of a worker, wait for the end of this process, so
        that nobody takes it for anything else."""
        if self._executor.is_failed:
            time.sleep(ENDING)

    def _ask(self, task: str, what: str, given: Any) -> list[Any]:
        answers: list[tuple[str | None, Any]] = self._executor.collective_rpc(
            "farhorizon", args=(task, what, self._sizes, given)
        )
        for number, (failure, _) in enumerate(answers):
            if failure is not None:
                raise RunFailed(f"worker {number} of {len(answers)}: {failure}")
        return [answer for _, answer in answers]


def _end() -> None:
    print("vllm: a worker has ended, and its engine with it", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Processes that start in the block talk to each other where only this machine can."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, loopback_interface()))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
