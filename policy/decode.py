"""Decode steps on a GPU: one token of many sequences, replayed from a CUDA graph.

A step reads and changes the rows of a `DecodeState` where they lie, draws the next tokens, and
leaves what the step after it needs on the device: the host gives sequences once, starts steps, and
reads what they drew whenever it likes. Shapes depend on the number of sequences alone. A step is
captured once for every such number (a bucket, which fewer sequences may fill in part).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels.sampling import advance_
from ..kernels.sampling import draw_tokens as draw_tokens
from ..kernels.sampling import stream_points as stream_points
from .attention import GatedMLA
from .joint import is_plain, lay_together, together
from .kda import KimiDeltaAttention
from .model import Policy
from .moe import DenseMLP, LatentMoE
from .packing import Packing
from .routing import route_dtype
from .state import DecodeState, PlacedState

Tensor = torch.Tensor

STOP_SETS = 16  # that the table of stop tokens has room for, or a multiple
WIDE, NARROW = 2, 6  # columns of `StepInputs` of 8 and of 4 bytes


def takes_steps(policy: Policy) -> bool:
    """Whether `Steps` serve, and wait for nothing: 16-bit numbers on a GPU, and KDA layers of sizes
    and with a gate that a kernel takes."""
    if policy.device.type != "cuda" or policy.dtype not in (torch.bfloat16, torch.float16):
        return False
    from ..kernels.kda.fused import HEAD_SIZES

    sizes = (policy.config.linear_attn_config or {})["head_dim"] in HEAD_SIZES
    return sizes and bool(policy.config.gate_lower_bound)


@torch.inference_mode(False)  # weights outlive it
@torch.no_grad()
def lay_out(policy: Policy) -> None:
    """Move weights that one product can use to one place; they stay the parameters they are."""
    for module in policy.modules():
        groups: list[list[Any]] = []
        if isinstance(module, KimiDeltaAttention):
            groups.append(list(module.convolutions()))
        if isinstance(module, KimiDeltaAttention | GatedMLA | LatentMoE | DenseMLP):
            parts: tuple[Any, ...] = module.projections()
            if all(map(is_plain, parts)):
                groups.append([part.weight for part in parts])
        for weights in groups:  # those of a shared expert lie with its layer's
            if len(weights) > 1 and together(weights) is None:
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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Sequences of steps, columns of one buffer, tensors or numpy arrays [B].

    ``temperature`` fp64 and ``keys`` int64, the 64 bits of `sampler.stream_key`; int32: the token
    ``ids`` to be read, ``places`` in the state (-1 none), ``past`` tokens there, ``position`` in
    its trajectory of the token that is drawn, how many are ``left`` to draw, and the ``stop`` set.
    """

    temperature: Any
    keys: Any
    ids: Any
    places: Any
    past: Any
    position: Any
    left: Any
    stop: Any

    @classmethod
    def of(cls, buffer: Tensor, size: int) -> StepInputs:
        """Views of a buffer of bytes."""
        wide = buffer[: 8 * WIDE * size]
        narrow = buffer[8 * WIDE * size :].view(torch.int32).view(NARROW, size)
        temperature, keys = wide.view(torch.float64).view(WIDE, size)
        return cls(temperature, keys.view(torch.int64), *narrow)


class Steps:
    """Captured decode steps of one policy and state.

    ``stops`` uint8 [S, V] on the device marks the tokens of each stop set. With ``record`` the
    routes of a step are kept. Weights may change where they lie; `stale` says whether anything has
    been moved, after which these steps must not run. On a CPU they run without graphs.
    """

    def __init__(
        self, policy: Policy, state: DecodeState, stops: Tensor, record: bool = False
    ) -> None:
        self.policy, self.state, self.stops, self.record = policy, state, stops, record
        self._graphs: dict[int, CapturedSteps] = {}
        self.on_gpu = policy.device.type == "cuda"
        # of all graphs: they never run at once
        self.pool: Any = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self._memory = self._addresses()

    def _addresses(self) -> list[int]:
        weights = (*self.policy.parameters(), *self.policy.buffers())
        caches = (t for layer in self.state.layers for t in layer.tensors())
        return [t.data_ptr() for t in (*weights, *caches, self.stops)]

    def stale(self) -> bool:
        """Whether weights, state or stop sets lie elsewhere than when these steps were made."""
        return self._addresses() != self._memory

    @torch.inference_mode()
    def captured(self, count: int) -> CapturedSteps:
        """The steps of the bucket of ``count`` sequences."""
        size = bucket_of(count)
        if size not in self._graphs:
            self._graphs[size] = CapturedSteps(self, size)
        return self._graphs[size]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on its way to the host: `wait` gives fp64 [n, 2], tokens and log-probs, and
    routes ``[n, layers, k]`` if they are recorded, else None."""

    result: Tensor
    routes: Tensor | None
    done: torch.cuda.Event | None
    count: int

    def wait(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Both are overwritten when two more steps are started."""
        if self.done is not None:
            self.done.synchronize()
        routes = None if self.routes is None else self.routes[: self.count].numpy()
        return self.result[: self.count].numpy(), routes


class CapturedSteps:
    """The graph of a step of ``size`` sequences, and where it finds its inputs: one buffer, which
    one copy fills."""

    def __init__(self, steps: Steps, size: int) -> None:
        # not the steps, which hold this: what they hold goes away with them, not with a collection
        self.policy, self.state = steps.policy, steps.state
        self.stops, self.record = steps.stops, steps.record
        self.on_gpu, self.size, self.count = steps.on_gpu, size, 0
        device = steps.policy.device
        buffer = torch.zeros((8 * WIDE + 4 * NARROW) * size, dtype=torch.uint8, device=device)
        given = self._host_copy(buffer)
        given.zero_()
        self._buffer, self._given = buffer, given
        self.inputs = StepInputs.of(buffer, size)
        host = StepInputs.of(given, size)
        self._host = {name: getattr(host, name).numpy() for name in StepInputs.__slots__}
        self._copied = torch.cuda.Event() if steps.on_gpu else None
        self.inputs.places.fill_(-1)  # no row changes before the first step
        self._graph = torch.cuda.CUDAGraph() if steps.on_gpu else None
        self.logits, self.result, self.routes = self._captured(steps.pool)
        self._out = [self._host_copy(self.result) for _ in range(2)]
        self._out_routes = [
            self._host_copy(self.routes) for _ in range(2) if self.routes is not None
        ]
        self._turn = 0

    def _captured(self, pool: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        device = self.policy.device
        if self._graph is None:
            return self.eager()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.eager()
        torch.cuda.current_stream(device).wait_stream(stream)
        # weights may be on their way in another thread
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            return self.eager()

    def _host_copy(self, source: Tensor) -> Tensor:
        """Room on the host that copies need not wait for."""
        room = torch.empty(source.shape, dtype=source.dtype)
        return room.pin_memory() if self.on_gpu else room

    def eager(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The captured step: logits ``[B, V]``, tokens and log-probs fp64 [B, 2], routes."""
        x = self.inputs
        routers = self.policy.routers() if self.record else []
        with self.policy.recorded_routes() if self.record else nullcontext():
            logits = decode_logits(self.policy, x.ids, self.state, x.places, x.past)
            taken = [torch.cat(router.recorded or []) for router in routers]
        drawn = draw_tokens(logits, x.temperature, stream_points(x.keys, x.position))
        rest = (x.ids, x.places, x.past, x.position, x.left, x.stop)
        advance_(drawn, self.stops, *rest)
        routes = torch.stack(taken, 1).to(route_dtype(routers[0])) if taken else None
        return logits, drawn, routes

    def give(self, inputs: StepInputs) -> None:
        """Take sequences ``[n]``, numpy arrays; they go on by themselves from there."""
        if self._copied is not None:
            self._copied.synchronize()  # what was given before has left the host
        self.count = len(inputs.ids)
        self._host["places"].fill(-1)
        for name, column in self._host.items():
            column[: self.count] = getattr(inputs, name)
        self._buffer.copy_(self._given, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def inputs_copy(self) -> Tensor:
        """What the next step is going to read, for `restore`."""
        return self._buffer.clone()

    def restore(self, inputs: Tensor) -> None:
        """Let the next step read what `inputs_copy` gave."""
        self._buffer.copy_(inputs)

    def replay(self) -> None:
        """Run a step."""
        if self._graph is not None:
            self._graph.replay()
            return
        for kept, new in zip((self.logits, self.result, self.routes), self.eager(), strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)

    def start(self) -> Drawn:
        """Run a step whose results are copied to the host; of the last two they are to be had."""
        self.replay()
        self._turn ^= 1
        result = self._out[self._turn].copy_(self.result, non_blocking=True)
        routes = None
        if self.routes is not None:
            routes = self._out_routes[self._turn].copy_(self.routes, non_blocking=True)
        done = torch.cuda.Event() if self.on_gpu else None
        if done is not None:
            done.record()
        return Drawn(result, routes, done, self.count)


@torch.inference_mode()
def stop_table(num_sets: int, vocab_size: int, device: torch.device) -> Tensor:
    """Room for ``num_sets`` or more sets of stop tokens, all of them empty."""
    rows = -(-max(1, num_sets) // STOP_SETS) * STOP_SETS
    return torch.zeros(rows, vocab_size, dtype=torch.uint8, device=device)


def bucket_of(count: int) -> int:
    """The size of the step that ``count`` sequences run in: a power of two, or half way to it."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 8 and count <= power * 3 // 4 else power
