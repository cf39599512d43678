"""Decode steps on a GPU: one token of many sequences, replayed from a CUDA graph.

A step reads and changes the rows of a `DecodeState` where they lie, waits for nothing on the host,
and has shapes that depend on the number of sequences alone. It is captured once for every such
number (a bucket, which fewer sequences may fill in part) and memory of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .attention import GatedMLA
from .joint import is_plain, lay_together, together
from .kda import KimiDeltaAttention
from .model import Policy
from .moe import DenseMLP, LatentMoE
from .packing import Packing
from .state import DecodeState, PlacedState

Tensor = torch.Tensor
Finish = Callable[[Tensor, Tensor], Tensor]

NUMBERS = 2  # fp64 that a step takes for each sequence beside token, row and length


def takes_steps(policy: Policy) -> bool:
    """Whether `Steps` serve: on a GPU, not in fp64, and with a bounded gate."""
    narrow = policy.dtype != torch.float64
    return policy.device.type == "cuda" and narrow and policy.config.gate_lower_bound is not None


@torch.inference_mode(False)  # weights outlive it
@torch.no_grad()
def lay_out(policy: Policy) -> None:
    """Move weights that one product can use to one place; they stay the parameters they are."""
    for module in policy.modules():
        parts: tuple[nn.Module, ...] = ()
        if isinstance(module, KimiDeltaAttention):
            lay_together(module.convolutions())
            parts = module.projections()
        elif isinstance(module, GatedMLA | LatentMoE | DenseMLP):
            parts = module.projections()
        if len(parts) > 1 and all(map(is_plain, parts)):
            weights: list[Any] = [part.weight for part in parts]
            if together(weights) is None:  # those of a shared expert lie with its layer's
                lay_together(weights)


def decode_logits(
    policy: Policy, ids: Tensor, state: DecodeState, places: Tensor, past: Tensor
) -> Tensor:
    """Logits ``[B, V]`` behind one more token ``ids [B]`` of the sequences in rows ``places`` int32
    [B] of a state, which have ``past`` int32 [B] tokens; below 0 there is no sequence, and its
    logits mean nothing.

    Caches must have room. The state's ``lengths`` are not changed, all else of these rows is.
    """
    packing = Packing.of(tuple(range(len(ids) + 1)), ids.device)
    return policy.lm_head(policy.model(ids, packing, PlacedState(state, places, past)))  # type: ignore[arg-type]


class Steps:
    """Captured decode steps of one policy and state.

    ``finish`` makes of logits ``[B, V]`` and ``numbers`` fp64 [2, B] what a step returns, on the
    device, without waiting. Weights may change where they lie, nothing may be moved.
    """

    def __init__(self, policy: Policy, state: DecodeState, finish: Finish) -> None:
        self.policy, self.state, self._finish = policy, state, finish
        self._graphs: dict[int, _Captured] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()  # of all graphs: they never run at once

    @torch.inference_mode()
    def __call__(self, ids: Tensor, places: Tensor, past: Tensor, numbers: Tensor) -> Tensor:
        """One step of sequences ``[n]``, given on the CPU; its result ``[n, ...]`` on the device
        is overwritten by later steps."""
        count = len(ids)
        graph = self.captured(bucket_of(count))
        graph.give(ids, places, past, numbers)
        graph.replay()
        return graph.result[:count]

    def eager(self, graph: _Captured) -> Tensor:
        """The step that is captured, on the inputs of ``graph``."""
        logits = decode_logits(self.policy, graph.ids, self.state, graph.places, graph.past)
        return self._finish(logits, graph.numbers)

    def captured(self, size: int) -> _Captured:
        """The graph of a step of ``size`` sequences."""
        if size not in self._graphs:
            self._graphs[size] = _Captured(self, size)
        return self._graphs[size]


class _Captured:
    """The graph of a step of ``size`` sequences, and where it finds its inputs: one buffer, which
    one copy fills."""

    def __init__(self, steps: Steps, size: int) -> None:
        device = steps.policy.device
        self._bytes = torch.zeros((8 * NUMBERS + 12) * size, dtype=torch.uint8, device=device)
        self._given = torch.zeros_like(self._bytes, device="cpu").pin_memory()
        self.numbers, self.ids, self.places, self.past = _parts(self._bytes, size)
        self._numbers, self._ids, self._places, self._past = _parts(self._given, size)
        self.places.fill_(-1)  # no row changes before the first step
        self._copied = torch.cuda.Event()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                steps.eager(self)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # weights may be on their way in another thread
        with torch.cuda.graph(self.graph, pool=steps.pool, capture_error_mode="thread_local"):
            self.result = steps.eager(self)

    def give(self, ids: Tensor, places: Tensor, past: Tensor, numbers: Tensor) -> None:
        """Take the inputs of the next steps."""
        count = len(ids)
        self._copied.synchronize()  # what was given before has left the host
        self._places.fill_(-1)
        self._ids[:count], self._places[:count], self._past[:count] = ids, places, past
        self._numbers[:, :count] = numbers
        self._bytes.copy_(self._given, non_blocking=True)
        self._copied.record()

    def replay(self) -> None:
        """Run the step on what was given last."""
        self.graph.replay()


def _parts(buffer: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = buffer[: 8 * NUMBERS * size].view(torch.float64).view(NUMBERS, size)
    ids, places, past = buffer[8 * NUMBERS * size :].view(torch.int32).view(3, size)
    return numbers, ids, places, past


def bucket_of(count: int) -> int:
    """The size of the step that ``count`` sequences run in: a power of two, or half way to it."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 8 and count <= power * 3 // 4 else power
