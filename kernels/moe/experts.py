"""SiTU-GLU experts on routed tokens (K3 report 2.3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..precision import widen
from .situ import situ_glu

DENSE_ELEMENTS = 1024  # tokens x experts below which all experts run in one batched product
DENSE_TOKENS = 512  # up to which they do so on a GPU, which then does not wait for their loads


def naive_experts(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    activation: tuple[float, float] | None,
) -> torch.Tensor:
    """`grouped_experts` token by token: the specification."""
    rows = []
    for t in range(len(x)):
        parts = [
            weights[t, j].to(x.dtype) * (w2[e] @ _activate(w1[e] @ x[t], w3[e] @ x[t], activation))
            for j, e in enumerate(experts[t].tolist())
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows) if rows else x


def grouped_experts(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    activation: tuple[float, float] | None,
    dense: bool | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's experts, in the order of its routes.

    ``x [T, D]``, ``w1, w3 [E, I, D]``, ``w2 [E, D, I]``, ``experts [T, k]``, ``weights [T, k]`` ->
    ``[T, D]``. ``activation`` holds SiTU's two bounds; None is SwiGLU. ``dense`` runs all
    experts on all tokens; None does so for few tokens without gradients. It rounds differently.
    """
    num_experts, tokens, k = len(w1), len(x), experts.shape[1]
    if dense is None:
        few = tokens * num_experts <= DENSE_ELEMENTS or (x.is_cuda and tokens <= DENSE_TOKENS)
        dense = few and not torch.is_grad_enabled()
    if dense:
        shared = x.expand(num_experts, tokens, x.shape[1])
        inner = _activate(
            torch.bmm(shared, w1.transpose(1, 2)), torch.bmm(shared, w3.transpose(1, 2)), activation
        )
        every = torch.bmm(inner, w2.transpose(1, 2))  # [E, T, D]
        chosen = every[experts, torch.arange(tokens, device=x.device)[:, None]]
    else:
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        sizes = torch.bincount(flat, minlength=num_experts).tolist()
        routed = _Dispatch.apply(x, order // k, back.view(tokens, k)).split(sizes)
        outputs = [
            F.linear(_activate(F.linear(rows, a), F.linear(rows, c), activation), b)
            for rows, a, b, c in zip(routed, w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
        ]
        return _Combine.apply(torch.cat(outputs), weights, order, back.view(tokens, k))
    return torch.bmm(weights.to(chosen.dtype)[:, None], chosen)[:, 0]


class _Dispatch(torch.autograd.Function):
    """Rows of ``x [T, D]`` in the order of their experts: row i is token ``source [T k]`` i. The
    gradient gathers from ``place [T, k]``, in the order of the routes, and adds nothing at random.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        first, *others = ctx.saved_tensors[0].unbind(1)
        dx = widen(upstream[0].index_select(0, first))
        for place in others:
            dx += upstream[0].index_select(0, place)
        return dx.to(upstream[0].dtype), None, None


class _Combine(torch.autograd.Function):
    """``sum_j weights[t, j] outputs[place[t, j]]`` of ``outputs [T k, D]`` in the order of their
    experts, where row i belongs to the flattened route ``order [T k]`` i."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        place: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(outputs, weights, order, place)
        mixed = widen(weights.to(outputs.dtype))
        first, *others = place.unbind(1)
        out = mixed[:, :1] * widen(outputs.index_select(0, first))
        for j, other in enumerate(others, 1):
            out.addcmul_(widen(outputs.index_select(0, other)), mixed[:, j : j + 1])
        return out.to(outputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        outputs, weights, order, place = ctx.saved_tensors
        scales = weights.to(outputs.dtype).flatten().index_select(0, order)
        pull = upstream[0].index_select(0, order // place.shape[1])
        along = (pull * outputs).sum(-1, dtype=weights.dtype)
        return pull.mul_(scales[:, None]), along[place], None, None


def _activate(
    gate: torch.Tensor, up: torch.Tensor, activation: tuple[float, float] | None
) -> torch.Tensor:
    return F.silu(gate) * up if activation is None else situ_glu(gate, up, *activation)
