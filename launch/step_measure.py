"""What ``farhorizon bench step`` measures; it needs torch, Triton and transformers alone.

A step is forward and backward of one micro-batch under bf16 autocast over fp32 parameters, with
routing statistics, the optimizer step and the new routing thresholds. Time is between two events on
the GPU around it; a figure is the median of steps after warm-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ..configs.errors import RunFailed
from ..policy import Policy, PolicyConfig
from ..policy.count import count_parameters
from ..policy.routing import Routes

PEAK_FLOPS = 790e12  # of bf16 products on an H200, measured
WARM_UP = 3
# Relative difference of the gradient from that of the same policy in fp32, over all parameters.
ALLOWED_GRADIENT = 0.05
CHECKED_LENGTHS = (200, 1, 311, 4113)  # the last one for what long sequences take


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed documents: ``ids [1, T]``, their ``edges [N + 1]`` on the CPU, and of every token that
    has one before it the ``rows [R]`` that predict it and itself, ``targets [R]``."""

    ids: torch.Tensor
    edges: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return self.edges.diff().tolist()


@dataclass(frozen=True, slots=True)
class Measured:
    """A side's median milliseconds a step, its peak of memory in bytes, and its last loss."""

    name: str
    milliseconds: float
    peak: int
    loss: float


def draw_batch(vocab: int, lengths: Sequence[int], seed: int, device: str) -> Batch:
    """Random tokens of documents of ``lengths``."""
    gen = torch.Generator().manual_seed(seed)
    edges = [0, *accumulate(lengths)]
    ids = torch.randint(vocab, (edges[-1],), generator=gen)
    rows = torch.cat([torch.arange(a, b - 1) for a, b in pairwise(edges)])
    targets = ids[rows + 1]
    ids, rows, targets = (x.to(device) for x in (ids, rows, targets))
    return Batch(ids[None], torch.tensor(edges), rows, targets)


def build_policy(config: PolicyConfig, seed: int, device: str) -> Policy:
    """An untrained policy whose mixtures over depth are not plain averages."""
    torch.manual_seed(seed)
    with torch.device(device):
        policy = Policy(config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "res_proj" in name:
                parameter.normal_(0, config.hidden_size**-0.5)
    return policy


def model_flops(config: PolicyConfig, lengths: Sequence[int]) -> float:
    """Of a step: 6 for each active parameter and token, and those of causal attention."""
    layers = sum(config.is_mla(i) for i in range(config.num_hidden_layers))
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    pairs = sum(length * length / 2 for length in lengths)
    attention = 3 * 2 * pairs * width * config.num_attention_heads * layers
    return 6 * count_parameters(config).active * sum(lengths) + attention


def utilisation(config: PolicyConfig, lengths: Sequence[int], milliseconds: float) -> float:
    """Share of `PEAK_FLOPS` that the step's own operations are."""
    return model_flops(config, lengths) / (milliseconds / 1e3 * PEAK_FLOPS)


class OurSide:
    """A step of the policy; each call is one, and gives the loss."""

    name = "farhorizon"

    def __init__(self, policy: Policy, batch: Batch, lr: float = 1e-6) -> None:
        self.policy, self.batch = policy, batch
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, fused=True)

    def forward(self) -> torch.Tensor:
        batch = self.batch
        with (
            self.policy.routing_statistics(),
            torch.autocast(batch.ids.device.type, torch.bfloat16),
        ):
            out = self.policy(batch.ids, batch.edges, rows=batch.rows, targets=batch.targets)
        return -out.logprobs.mean()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.policy.update_thresholds()

    def __call__(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.finish()
        return loss.detach()


def time_steps(step: Callable[[], torch.Tensor], repeats: int) -> tuple[float, int, float]:
    """Median milliseconds, peak bytes and the last loss of ``repeats`` steps after warm-up.
    RunFailed where the loss is not finite, before a time is taken."""
    loss = torch.zeros(())
    for _ in range(WARM_UP):
        loss = step()
    check_loss(float(loss))
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return statistics.median(times), torch.cuda.max_memory_allocated(), float(loss)


def check_loss(loss: float) -> None:
    """RunFailed where it is not finite."""
    if not -1e30 < loss < 1e30:
        raise RunFailed(f"the loss of a step is {loss}; nothing is told of its speed")


def measure(name: str, step: Callable[[], torch.Tensor], repeats: int) -> Measured:
    """As `time_steps`, of the side of this name."""
    milliseconds, peak, loss = time_steps(step, repeats)
    check_loss(loss)
    return Measured(name, milliseconds, peak, loss)


def small_config(config: PolicyConfig) -> PolicyConfig:
    """The same parts at sizes that a check in fp32 takes a moment for: head sizes stay."""
    linear = dict(config.linear_attn_config or {})
    linear |= {"num_heads": 2, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    fields: dict[str, Any] = {
        **config.to_dict(),
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 128,
        "linear_attn_config": linear,
    }
    if config.q_lora_rank is not None:
        fields["q_lora_rank"] = 128
    if config.routed_expert_hidden_size is not None:
        fields["routed_expert_hidden_size"] = 128
    return PolicyConfig.from_dict(fields)


def gradient_error(
    config: PolicyConfig,
    seed: int,
    checkpointing: str,
    device: str,
    lengths: Sequence[int] = CHECKED_LENGTHS,
) -> float:
    """Relative difference of the bf16 gradient from the one in fp32 on the same routes."""
    policy = build_policy(config, seed, device)
    batch = draw_batch(config.vocab_size, lengths, seed, device)

    def gradient(narrow: bool) -> torch.Tensor:
        policy.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=narrow):
            out = policy(batch.ids, batch.edges, rows=batch.rows, targets=batch.targets)
        (-out.logprobs.mean()).backward()
        found = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        return torch.cat(found).double()

    with policy.recorded_routes() as recording:
        exact = gradient(narrow=False)
        routes = Routes(recording.take(), np.ones(sum(lengths), np.bool_))
    policy.checkpointing = checkpointing
    with policy.replayed_routes(routes):
        rounded = gradient(narrow=True)
    if rounded.shape != exact.shape:
        return float("nan")
    return float((rounded - exact).norm() / exact.norm())
