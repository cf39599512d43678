"""SiTU-GLU experts on routed tokens (K3 report 2.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..device import takes_kernels
from ..once import once_differentiable
from ..precision import widen
from .situ import situ_glu

DENSE_ELEMENTS = 1024  # tokens x experts below which all experts run in one batched product


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

    ``x [T, D]``, ``w1, w3 [E, I, D]``, ``w2 [E, D, I]``, ``experts [T, k]`` below E, ``weights [T,
    k]`` -> ``[T, D]``. ``activation`` holds SiTU's two bounds; None is SwiGLU. Differentiable in
    all but ``experts``, once on a GPU. ValueError for matrices of another type than x, and for
    shapes that do not fit.

    16-bit numbers on a GPU run in kernels that never wait for it: what they keep for the backward
    pass are the inputs and what the activation is made of, and a token has the same bits in any
    company. Elsewhere ``dense`` runs all experts on all tokens; None does so for few tokens without
    gradients. It rounds differently.
    """
    _check(x, w1, w2, w3, experts, weights)
    num_experts, tokens, k = len(w1), len(x), experts.shape[1]
    if takes_kernels(x) and not dense:
        from .grouped import GroupedExperts

        inputs = (x, w1, w2, w3, experts, weights)
        save = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
        return GroupedExperts.apply(*inputs, activation, save)  # type: ignore[no-any-return]
    if dense is None:
        dense = not torch.is_grad_enabled() and tokens * num_experts <= DENSE_ELEMENTS
    if dense:
        shared = x.expand(num_experts, tokens, x.shape[1])
        inner = _activate(
            torch.bmm(shared, w1.transpose(1, 2)), torch.bmm(shared, w3.transpose(1, 2)), activation
        )
        every = torch.bmm(inner, w2.transpose(1, 2))  # [E, T, D]
        chosen = every[experts, torch.arange(tokens, device=x.device)[:, None]]
    else:
        order, place, sizes = expert_order(experts, num_experts)
        routed = _Dispatch.apply(x, order // k, place).split(sizes.tolist())
        outputs = [
            F.linear(_activate(F.linear(rows, a), F.linear(rows, c), activation), b)
            for rows, a, b, c in zip(routed, w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
        ]
        return _Combine.apply(torch.cat(outputs), weights, order, place)
    return torch.bmm(weights.to(chosen.dtype)[:, None], chosen)[:, 0]


def _check(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    if x.dim() != 2 or w1.dim() != 3 or experts.dim() != 2:
        raise ValueError(
            "x must be [T, D], w1 [E, I, D] and experts [T, k], got "
            f"{list(x.shape)}, {list(w1.shape)} and {list(experts.shape)}"
        )
    count, inner, width = len(w1), w1.shape[1], x.shape[1]
    for name, w, shape in (
        ("w1", w1, (count, inner, width)),
        ("w2", w2, (count, width, inner)),
        ("w3", w3, (count, inner, width)),
    ):
        if w.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} as x, got {w.dtype}")
        if w.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(w.shape)}")
    if len(experts) != len(x) or weights.shape != experts.shape:
        raise ValueError(
            f"experts and weights must be [{len(x)}, k] as the tokens, got "
            f"{list(experts.shape)} and {list(weights.shape)}"
        )


def in_expert_order(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    outputs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`grouped_experts` by a function that computes the experts, wherever they are.

    ``outputs`` gets rows ``[T k, D]`` in the order of their experts, their weights ``[T k, 1]`` and
    how many rows each expert has, int64 ``[E]``; it gives as many rows times their weights, of
    which nothing is kept.
    """
    order, place, sizes = expert_order(experts, num_experts)
    source = order // experts.shape[1]
    rows = _Dispatch.apply(x, source, place)
    return _Collect.apply(outputs(rows, weights.reshape(-1, 1)[order], sizes), source, place)


def expert_order(
    experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routes ``[T k]`` in the order of their experts, the place ``[T, k]`` of each, and how many an
    expert has, ``[E]``."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    places = torch.arange(len(order), device=flat.device)
    back = torch.empty_like(order).scatter_(0, order, places)
    return order, back.view(experts.shape), torch.bincount(flat, minlength=num_experts)


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
        return _summed(upstream[0], ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The way back of `_Dispatch`: of every token the sum of its rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, source: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(source)
        return _summed(rows, place)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return upstream[0].index_select(0, ctx.saved_tensors[0]), None, None


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


def _summed(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """``sum_j rows[place[t, j]]``, in order and in fp32 or wider."""
    first, *others = place.unbind(1)
    out = widen(rows.index_select(0, first))
    for other in others:
        out += rows.index_select(0, other)
    return out.to(rows.dtype)


def _activate(
    gate: torch.Tensor, up: torch.Tensor, activation: tuple[float, float] | None
) -> torch.Tensor:
    return F.silu(gate) * up if activation is None else situ_glu(gate, up, *activation)
