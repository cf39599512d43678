"""What ``farhorizon bench decode`` measures; it needs torch, Triton and transformers alone.

First steps are checked: a replayed graph against the same kernels started one by one, bit for bit,
and logits against forwards over whole sequences, in fp32 and in bf16. Weights are those of
`parity.random_policy`, for in an untrained policy a rounding error grows with every mixture over
depth until any two forwards in bf16 differ. Then steps are timed on caches of random numbers.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..configs.errors import RunFailed
from ..policy import DecodeState, Policy
from ..policy.decode import CapturedSteps, StepInputs, Steps, lay_out, stop_table
from ..policy.moe import Experts
from ..policy.state import KdaState, LatentCache

CHECKED_LENGTHS, CHECKED_STEPS = (5, 64, 130, 400, 1, 4200), 3  # one of several parts
# Relative error of logits beside fp32, and as many times that of one forward in bf16.
ALLOWED_LOGITS, ALLOWED_TIMES = 0.05, 1.5
SPREAD = 0.3  # of the numbers in the caches that are timed
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Checked:
    """Relative errors of logits beside fp32: of steps, and of a forward in bf16."""

    steps: float
    forward: float


@dataclass(frozen=True, slots=True)
class Timed:
    """Median milliseconds of a step on the device, and of steps that go on while the host reads
    what the one before drew; bytes that a step cannot but move, and those that its graph holds."""

    sequences: int
    context: int
    milliseconds: float
    with_host: float
    floor_bytes: int
    graph_bytes: int

    def share(self, speed: float) -> float:
        """Of the time, what moving these bytes takes at ``speed`` 1e9 bytes per second."""
        return self.floor_bytes / speed / 1e6 / self.milliseconds


def steps_of(policy: Policy, state: DecodeState) -> Steps:
    """Steps without any stop token."""
    return Steps(policy, state, stop_table(1, policy.config.vocab_size, policy.device))


def inputs(ids: Sequence[int], places: Sequence[int], past: Sequence[int], seed: int) -> StepInputs:
    """Sequences that draw at temperature 1 and never end."""
    count = len(ids)
    return StepInputs(
        temperature=np.ones(count),
        keys=np.arange(count, dtype=np.int64) + (seed << 20),
        ids=np.asarray(ids),
        places=np.asarray(places),
        past=np.asarray(past),
        position=np.asarray(past) + 1,
        left=np.full(count, 1 << 30),
        stop=np.zeros(count, np.int64),
    )


def contents(state: DecodeState) -> list[torch.Tensor]:
    """All tensors of a state."""
    return [t for layer in state.layers for t in layer.tensors()]


@torch.inference_mode()
def check_steps(policy: Policy, seed: int) -> Checked:
    """RunFailed if a replay has not the bits of its kernels, or logits are further from fp32 than
    allowed."""
    gen = torch.Generator().manual_seed(seed)
    vocab, device = policy.config.vocab_size, policy.device
    ids = [
        torch.randint(vocab, (n + CHECKED_STEPS,), generator=gen).to(device)
        for n in CHECKED_LENGTHS
    ]
    exact = copy.deepcopy(policy).float()
    truth = torch.cat([exact(x[None]).logits[0, -CHECKED_STEPS:] for x in ids]).double()
    del exact
    once = torch.cat([policy(x[None]).logits[0, -CHECKED_STEPS:] for x in ids]).double()
    lay_out(policy)
    count = len(ids)
    state = DecodeState.empty(policy.config, count + 2, device, policy.dtype)
    state.reserve(max(CHECKED_LENGTHS) + CHECKED_STEPS)
    places = torch.randperm(count + 2, generator=gen)[:count]
    for place, x in zip(places.to(device).split(1), ids, strict=True):
        part = state.lend(place)
        policy(x[None, :-CHECKED_STEPS], state=part)
        state.take_back(place, part)
    graph = steps_of(policy, state).captured(count)
    found: list[torch.Tensor] = []
    for t in range(CHECKED_STEPS):
        past = [n + t for n in CHECKED_LENGTHS]
        tokens = [int(x[n]) for x, n in zip(ids, past, strict=True)]
        graph.give(inputs(tokens, places.tolist(), past, seed))
        if t == 0:
            check_replay(graph, state)
            graph.give(inputs(tokens, places.tolist(), past, seed))
        graph.replay()
        found.append(graph.logits[:count].double())
    stepped = torch.stack(found, 1).flatten(0, 1)
    errors = [float((x - truth).norm() / truth.norm()) for x in (stepped, once)]
    if not errors[0] < min(ALLOWED_LOGITS, ALLOWED_TIMES * errors[1]):  # so that nan fails
        raise RunFailed(
            f"logits of decode steps are {errors[0]:.1%} off those in fp32, of a forward "
            f"{errors[1]:.1%}: nothing is measured"
        )
    return Checked(*errors)


def check_replay(graph: CapturedSteps, state: DecodeState) -> None:
    """RunFailed unless a replay and its kernels one by one do the same to the bit; the state is as
    before then."""
    before = [t.clone() for t in contents(state)]
    given = graph.inputs_copy()
    runs: list[list[torch.Tensor]] = []
    for replay in (True, False):
        for tensor, old in zip(contents(state), before, strict=True):
            tensor.copy_(old)
        graph.restore(given)
        if replay:
            graph.replay()
            drawn = graph.result
        else:
            drawn = graph.eager()[1]
        runs.append([drawn[: graph.count].clone(), *(t.clone() for t in contents(state))])
    for tensor, old in zip(contents(state), before, strict=True):
        tensor.copy_(old)
    if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
        raise RunFailed("a replayed decode step differs from its kernels one by one")


def experts_read(graph: CapturedSteps) -> list[int]:
    """How many experts of each layer with experts a step reads that its kernels run one by one."""
    if not graph.policy.routers():
        return []
    with graph.policy.recorded_routes() as recording:
        graph.eager()
    routes = recording.take()[: graph.count]
    return [len(np.unique(routes[:, layer])) for layer in range(routes.shape[1])]


def floor_bytes(policy: Policy, sequences: int, context: int, experts: Sequence[int]) -> int:
    """Bytes that a step moves at least: weights once, of ``experts`` of each layer so many, KDA
    states and tails there and back, latents once."""
    config = policy.config
    read = iter(experts)
    total = 0
    for module in policy.modules():
        some = next(read) / module.count if isinstance(module, Experts) else 1.0
        if module is not policy.model.embed_tokens:
            total += int(some * sum(p.nbytes for p in module.parameters(recurse=False)))
    for layer in DecodeState.empty(config, 1, "meta", policy.dtype).layers:
        if isinstance(layer, LatentCache):
            total += sequences * context * layer.latent.shape[2] * layer.latent.itemsize
        elif isinstance(layer, KdaState):
            total += sequences * 2 * (layer.recurrent.nbytes + layer.conv.nbytes)
    return total


@torch.inference_mode()
def time_steps(policy: Policy, sequences: int, context: int, repeats: int, seed: int) -> Timed:
    """Steps of so many sequences which have ``context`` tokens each."""
    lay_out(policy)
    state = DecodeState.empty(policy.config, sequences, policy.device, policy.dtype)
    state.reserve(context + WARM_UP + repeats + 1)
    for tensor in contents(state):
        tensor.normal_(0, SPREAD)
    before = torch.cuda.memory_allocated()
    graph = steps_of(policy, state).captured(sequences)
    held = torch.cuda.memory_allocated() - before
    random = np.random.default_rng(seed)
    ids = random.integers(policy.config.vocab_size, size=sequences)
    given = inputs(ids.tolist(), range(sequences), [context] * sequences, seed)
    times: list[float] = []
    graph.give(given)
    read = experts_read(graph)
    for _ in range(WARM_UP + repeats):
        graph.give(given)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    graph.give(given)
    waiting, moments = graph.start(), [0.0]
    for _ in range(WARM_UP + repeats):
        following = graph.start()
        drawn, _ = waiting.wait()
        moments.append(time.perf_counter())
        waiting = following
        if not np.isfinite(drawn).all():
            raise RunFailed("a decode step drew from logits that are not finite")
    waiting.wait()
    gaps = np.diff(moments[1 + WARM_UP :]) * 1e3
    return Timed(
        sequences,
        context,
        statistics.median(times[WARM_UP:]),
        float(np.median(gaps)),
        floor_bytes(policy, sequences, context, read),
        held,
    )
