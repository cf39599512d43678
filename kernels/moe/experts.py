"""SiTU-GLU experts on routed tokens (K3 report 2.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..precision import widen

DENSE_ELEMENTS = 1024  # tokens x experts below which all experts run in one batched product


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0
) -> torch.Tensor:
    """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``, fp32 inside.

    Bounded by ``beta * linear_beta`` for any input; the result has gate's dtype.
    """
    a, b = widen(gate), widen(up)
    out = (beta * torch.tanh(a / beta) * torch.sigmoid(a)) * (
        linear_beta * torch.tanh(b / linear_beta)
    )
    return out.to(gate.dtype)


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
        dense = not torch.is_grad_enabled() and tokens * num_experts <= DENSE_ELEMENTS
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
        sizes = torch.bincount(flat, minlength=num_experts).tolist()
        routed = x.index_select(0, order // k).split(sizes)
        outputs = [
            F.linear(_activate(F.linear(rows, a), F.linear(rows, c), activation), b)
            for rows, a, b, c in zip(routed, w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
        ]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        chosen = torch.cat(outputs).index_select(0, back).view(tokens, k, -1)
    return torch.bmm(weights.to(chosen.dtype)[:, None], chosen)[:, 0]


def _activate(
    gate: torch.Tensor, up: torch.Tensor, activation: tuple[float, float] | None
) -> torch.Tensor:
    return F.silu(gate) * up if activation is None else situ_glu(gate, up, *activation)
