"""A worker in miniature, one of several processes that have a part of the weights each, without
vLLM: what `test_vllm_workers` starts.

part_worker.py RANK COUNT      calls come on stdin and answers go to stdout, as `tell` writes them
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

from farhorizon.rollout.vllm_workers import WorkerExtension

# Of vLLM what a load that breaks off calls.
FAKES: dict[str, Any] = {
    "vllm.config": SimpleNamespace(set_current_vllm_config=lambda config: nullcontext()),
    "vllm.model_executor.model_loader.reload": SimpleNamespace(
        finalize_layerwise_reload=lambda model, config: None
    ),
}
ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "lm_head.weight")  # each has some of


def tell(pipe: IO[bytes], what: Any) -> None:
    """Write a message for the process at the other end, which trusts this one."""
    pickle.dump(what, pipe)
    pipe.flush()


class Part(nn.Module):
    """Serves its rows of some tensors, ``turned``, which is made from those of one, and the others
    whole."""

    def __init__(self, rank: int, count: int, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._rank, self._count = rank, count
        for name, shape in shapes.items():
            size = shape[0] // count if name in ROWS else shape[0]
            owner, _, last = name.rpartition(".")
            module = nn.Module()
            module.register_parameter(last, nn.Parameter(torch.zeros(size, *shape[1:]), False))
            self.add_module(owner, module)
        turned = self.get_parameter("v_proj.weight").T.clone()
        self.turned = nn.Parameter(turned, requires_grad=False)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.chunk(self._count)[self._rank] if name in ROWS else tensor

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], fault: str) -> None:
        for number, (name, tensor) in enumerate(weights):
            if fault == "broken" and number == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            if not (fault == "skipped" and name.endswith("e_score_correction_bias")):
                self.get_parameter(name).data.copy_(self.part(name, tensor))
        if fault != "derived":
            self.turned.data.copy_(self.get_parameter("v_proj.weight").T)

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return hidden if self._rank == 0 else None


class Worker(WorkerExtension):
    """What vLLM would have in this process."""

    vllm_config = SimpleNamespace(model_config=None)

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self._count = rank, count
        self._faults: list[str] = []

    def build(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Begin anew."""
        self._model = Part(self._rank, self._count, shapes)
        self._farhorizon = None

    def get_model(self) -> Part:
        return self._model

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        fault = self._faults.pop() if self._faults else ""
        old = self._model.turned.clone()
        self._model.load_weights(weights_iterator, fault)
        if fault == "stale":
            with torch.no_grad():
                self._model.turned.set_(old)  # type: ignore[arg-type]
        if fault == "rounded":
            gate: Any = self._model.get_submodule("gate")
            bias = gate.e_score_correction_bias
            gate.e_score_correction_bias = nn.Parameter(bias.bfloat16(), requires_grad=False)

    def spoil(self, rank: int, fault: str) -> None:
        """Go wrong in the next load, if this is the worker of that rank. A loader that leaves out a
        tensor does so when it compares as well."""
        times = 2 if fault in ("skipped", "derived") else 1
        self._faults = [fault] * times if rank == self._rank else []

    def served(self) -> dict[str, Any]:
        return {name: one.float().numpy() for name, one in self._model.named_parameters()}

    def logits(self) -> list[float] | None:
        found = self._model.compute_logits(torch.ones(2))
        return None if found is None else found.tolist()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints
    sys.modules.update(FAKES)
    worker = Worker(int(sys.argv[1]), int(sys.argv[2]))
    while True:
        try:
            method, given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        tell(answers, getattr(worker, method)(*given))


if __name__ == "__main__":
    main()
