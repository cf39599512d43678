"""Norms of the gradient: of all, and of each part of the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..policy.attention import GatedMLA
from ..policy.kda import KimiDeltaAttention
from ..policy.moe import LatentMoE, Router
from .divided import Divided

_KINDS: list[tuple[type[nn.Module], str]] = [
    (LatentMoE, "experts"),  # with their latent projections and the shared ones
    (Router, "router"),
    (KimiDeltaAttention, "kda"),
    (GatedMLA, "mla"),
]


def parts_of(policy: nn.Module) -> dict[str, str]:
    """The part that each parameter belongs to, by name: ``kda``, ``mla``, ``router``, ``experts``,
    ``attn_res`` (the mixture over depth) or ``rest``."""
    parts = {name: "rest" for name, _ in policy.named_parameters()}
    for name in parts:
        if name.split(".")[-2:-1] and name.split(".")[-2].endswith(("_res_norm", "_res_proj")):
            parts[name] = "attn_res"
    for kind, part in _KINDS:  # a router lies within the experts' module, and comes after it
        for name, module in policy.named_modules():
            if isinstance(module, kind):
                parts |= {f"{name}.{own}": part for own, _ in module.named_parameters()}
    return parts


def grad_norm(
    engine: Any, stage: int, parameters: Mapping[str, nn.Parameter], divided: Divided
) -> float:
    """Norm of the reduced gradient in DeepSpeed's ``engine``, alike on every rank; inf or nan if
    anything in it is. A collective under ZeRO, and for parameters that are ``divided``."""
    if stage == 0:
        found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        gradients = [*found.values()]
        if divided.names:
            norms = torch.stack([g.norm() for g in gradients]).double()
            return float(divided.pooled([*found], norms.square()).sum().sqrt())
        return float(torch.nn.utils.get_total_norm(gradients, foreach=True))
    optimizer = engine.optimizer
    if stage == 3:
        groups = torch.stack([norm.float() for norm in optimizer._get_norm_groups()])
        # DeepSpeed reports a norm that is not finite as -1
        return float(groups.norm()) if bool((groups >= 0).all()) else math.inf
    norm = float(optimizer.scaled_global_norm())
    return norm if norm >= 0 else math.inf


def part_norms(
    engine: Any,
    stage: int,
    parameters: Mapping[str, nn.Parameter],
    parts: Mapping[str, str],
    divided: Divided,
    reduce: Callable[[Sequence[Tensor]], None],
) -> dict[str, float]:
    """Norm of the reduced gradient of each part, alike on every rank; under ZeRO ``reduce`` sums
    over ranks, a collective, and so are parameters that are ``divided``."""
    names = sorted(set(parts.values()))
    known: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    pieces = list(_pieces(engine, stage, parameters))
    sums = torch.zeros(len(names), dtype=torch.float64, device=engine.device)
    if pieces:
        norms = torch.stack([gradient.norm() for _, gradient in pieces]).double()
        own = [known[parameter] for parameter, _ in pieces]
        index = torch.tensor([names.index(parts[name]) for name in own], device=norms.device)
        squares = norms.square() if stage > 0 else divided.pooled(own, norms.square())
        sums.index_add_(0, index, squares.to(sums.device))
    if stage > 0:
        reduce([sums])
    return dict(zip(names, sums.sqrt().tolist(), strict=True))


def _pieces(
    engine: Any, stage: int, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters that this rank holds gradients of, with what it holds."""
    if stage == 0:
        yield from ((p, p.grad) for p in parameters.values() if p.grad is not None)
        return
    zero = engine.optimizer
    groups = zero.fp16_groups if stage == 3 else zero.params_in_partition
    for number, members in enumerate(groups):
        # not strict: padding at the end of a group belongs to none
        yield from zip(members, zero.averaged_gradients[number], strict=False)
