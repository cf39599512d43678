"""Grouped experts that ``farhorizon bench moe`` sets side by side: ours and its peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..configs.errors import UserError
from ..kernels.moe import grouped_experts, naive_situ_glu, situ_glu

OURS = "farhorizon"
LIGER = "liger"
PEERS = ("torch", LIGER)
SITU = (4.0, 25.0)

Tensor = torch.Tensor
Bounds = tuple[float, float] | None


class Inputs(NamedTuple):
    """The arguments of `grouped_experts`, or these `joined`."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor
    experts: Tensor
    weights: Tensor

    def joined(self) -> Inputs:
        """With ``w1`` and ``w3`` as one ``w1 [E, 2 I, D]``, and an empty ``w3``."""
        return self._replace(w1=torch.cat([self.w1, self.w3], 1), w3=self.w3[:, :0])

    def leaves(self) -> Inputs:
        """The same with gradients."""
        taken = (one.detach().requires_grad_(one.is_floating_point()) for one in self)
        return Inputs(*taken)

    def trained(self) -> list[Tensor]:
        return [one for one in self if one.is_floating_point() and one.numel()]


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation; ``captured`` says whether a CUDA graph can hold it, ``joined`` whether
    it takes inputs that are."""

    name: str
    call: Callable[[Inputs, Bounds], Tensor]
    captured: bool = True
    joined: bool = False


def activated(gate: Tensor, up: Tensor, bounds: Bounds) -> Tensor:
    if bounds is None:
        return F.silu(gate) * up
    act = naive_situ_glu if gate.dtype == torch.float64 else situ_glu
    return act(gate, up, *bounds)


def ours(given: Inputs, bounds: Bounds) -> Tensor:
    return grouped_experts(*given, bounds)


def grouped_mm(given: Inputs, bounds: Bounds) -> Tensor:
    """The same in torch: its grouped products, and a copy of every route's token."""
    x, w1, w2, w3, experts, weights = given
    tokens, k = experts.shape
    order = experts.flatten().argsort(stable=True)
    ends = torch.searchsorted(
        experts.flatten()[order], torch.arange(len(w1), device=x.device), right=True
    ).int()
    rows = x.index_select(0, order // k)
    gate = F.grouped_mm(rows, w1.transpose(1, 2), offs=ends)
    up = F.grouped_mm(rows, w3.transpose(1, 2), offs=ends)
    routed = F.grouped_mm(activated(gate, up, bounds), w2.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    every = routed.index_select(0, back).view(tokens, k, -1)
    return torch.bmm(weights.to(every.dtype)[:, None], every)[:, 0]


def check_peers(names: Sequence[str], activation: str) -> None:
    """UserError for a name that no peer has, and for an activation that a peer has not."""
    for name in names:
        if name not in PEERS:
            raise UserError(f"peers: {name!r} is none; known: {', '.join(PEERS)}, or [] for none")
    if LIGER in names and activation != "swiglu":
        raise UserError("peers: liger has SwiGLU alone: add activation=swiglu, or leave it out")


def find_sides(names: Sequence[str]) -> list[Side]:
    """Ours, and those of the named peers that are installed; a line says which are not."""
    sides = [Side(OURS, ours)]
    for name in dict.fromkeys(names):
        if name == "torch":
            sides.append(Side("torch grouped_mm", grouped_mm))
        elif importlib.util.find_spec("liger_kernel") is None:
            print("liger_kernel is not installed: left out")
        else:
            # it asks the GPU for a count
            sides.append(Side(LIGER, liger(), captured=False, joined=True))
    return sides


def liger() -> Callable[[Inputs, Bounds], Tensor]:
    from liger_kernel.ops.fused_moe import (  # pyright: ignore[reportMissingImports]
        LigerFusedMoEFunction,
    )

    def call(given: Inputs, bounds: Bounds) -> Tensor:
        x, both, w2, _, experts, weights = given
        return LigerFusedMoEFunction.apply(x, both, w2, experts.int(), weights)

    return call
