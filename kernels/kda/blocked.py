"""Chunked KDA on a CPU with a bounded gate: from raw inputs, in blocks, with its own gradient.

With G the inclusive cumulative log decay inside a chunk of 16 tokens, S the state that enters it,
    Kt = K e^G   Qt = s Q e^G   Kh = K e^(G_C - G)   L_ij = beta_i <Kt_i, K_j e^-G_j>  (i > j)
    P_ij = <Qt_i, K_j e^-G_j>  (i >= j)              M = (I + L)^-1
    U = M diag(beta) (V - Kt S)     O = Qt S + P U     S' = diag(e^G_C) S + Kh^T U
(Kimi K3 report 2.1.2, the product with S not taken apart). Kt S, U and S' go chunk position by
chunk position, everything else block by block. The bound -5 keeps e^-G below e^80, which fp32
holds. The code multiplies by the scale s last. `blocked_grad` is the backward pass; it has the
inputs, S, U and M, and computes the rest again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocked_grad import Kept, blocked_gradients
from .blocks import Block, Factors, Group, Inputs, Options, factors, give, take
from .chunk import CHUNK


def chunk_kda_blocked(
    rows: tuple[Tensor, ...],
    a_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[tokens, H, V]`` in v's dtype and final states ``[N, H, K, V]`` of raw inputs.

    ``rows``: ``q, k [tokens, H, K]``, ``v [tokens, H, V]``, the logit of the decay ``[tokens, H,
    K]``, ``beta [tokens, H]``.
    """
    inputs = (*rows, a_log, dt_bias, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Blocked.apply(*inputs, options)
    return _forward(Inputs.of(rows, a_log, dt_bias, options), initial_state, options, None)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *rows, a_log, dt_bias, initial, options = arguments
        kept: list[Kept] = []
        given = Inputs.of(tuple(rows), a_log, dt_bias, options)
        out, final = _forward(given, initial, options, kept)
        ctx.options = options
        ctx.state_dtype = None if initial is None else initial.dtype
        ctx.save_for_backward(*rows, a_log, dt_bias, *(x for block in kept for x in block))
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *rows, a_log, dt_bias = ctx.saved_tensors[:7]
        given = Inputs.of(tuple(rows), a_log, dt_bias, ctx.options)
        kept = [Kept(*ctx.saved_tensors[i : i + 3]) for i in range(7, len(ctx.saved_tensors), 3)]
        wanted = ctx.needs_input_grad[:8]
        *found, d_state = blocked_gradients(given, kept, *grads, wanted, ctx.options)
        dtypes = (*(x.dtype for x in (*rows, a_log, dt_bias)), ctx.state_dtype)
        return *(
            x.to(dtype) if x is not None and want else None
            for x, dtype, want in zip((*found, d_state), dtypes, wanted, strict=True)
        ), None


def _forward(
    given: Inputs, initial: Tensor | None, options: Options, kept: list[Kept] | None
) -> tuple[Tensor, Tensor]:
    """Outputs and final states; what the backward pass needs of each block goes to ``kept``."""
    tokens, heads, value = given.v.shape
    if initial is None:
        width = given.q.shape[-1]
        final = given.sums.new_zeros(len(options.bounds) - 1, heads, width, value)
    else:
        final = initial.to(given.sums.dtype, copy=True)
    out = given.v.new_empty(tokens + 1, heads, value)
    eye = torch.eye(CHUNK, dtype=final.dtype)
    for group in given.groups(options):
        chain = _Chain(group, final, kept is not None)
        first = 0
        for block in group.blocks:
            f = factors(given, block, options)
            pairs = torch.bmm(f.both, f.shrunk.transpose(1, 2))
            lower = pairs[:, :CHUNK] * f.beta  # on and above the diagonal nothing is read
            identity = eye.expand_as(lower)
            inverse = torch.linalg.solve_triangular(
                lower, identity, upper=False, unitriangular=True
            )
            reads, u = _scan(f, take(given.v, block), inverse * f.beta.mT, chain, block)
            o = torch.baddbmm(
                reads, pairs[:, CHUNK:].tril(), u, beta=options.scale, alpha=options.scale
            )
            give(out, o, 1.0, block)
            if kept is not None:
                kept.append(Kept(chain.kept[first : first + len(u)], u, inverse))
                first += len(u)
    return out[:tokens], final


def _scan(
    f: Factors, v: Tensor, solve: Tensor, chain: _Chain, block: Block
) -> tuple[Tensor, Tensor]:
    """``Q e^G S`` and U of a block; ``solve`` is M diag(beta)."""
    heads, value = v.shape[1], v.shape[-1]
    sizes = [n * heads for n in block.sizes]
    found = solve.new_empty(len(solve), 2 * CHUNK, value)  # (Kt, Q e^G) S
    u = solve.new_empty(len(solve), CHUNK, value)
    tensors = (f.both, found, solve, u, f.total.mT, f.k_out.mT)
    parts = zip(v.split(list(block.sizes)), *(x.split(sizes) for x in tensors), strict=True)
    for v_, both_, found_, solve_, u_, total_, k_out_ in parts:
        torch.bmm(both_, chain.state, out=found_)
        error = v_ - found_.unflatten(0, (-1, heads))[:, :, :CHUNK]
        torch.bmm(solve_, error.reshape(u_.shape), out=u_)
        chain.step(total_, k_out_, u_)
    return found[:, CHUNK:], u


class _Chain:
    """States that enter the chunk positions of a group, one position after the other.

    The state that leaves the last chunk of a sequence goes to ``final``. ``kept`` holds all of
    them [chunks * H, K, V], positions outermost; without ``keep`` there are two places in turn.
    """

    def __init__(self, group: Group, final: Tensor, keep: bool) -> None:
        self.order, self.final = group.order, final
        self.heads, *shape = final.shape[1:]
        sizes = [n * self.heads for block in group.blocks for n in block.sizes]
        if keep:
            self.kept = final.new_empty(sum(sizes), *shape)
            self.places = iter(self.kept.split(sizes))
        else:
            pair = final.new_empty(2, max(sizes, default=0), *shape)
            self.places = iter([pair[i % 2, :n] for i, n in enumerate(sizes)])
        before = final.index_select(0, group.order).flatten(0, 1)
        self.state = next(self.places, before[:0])
        self.state.copy_(before[: len(self.state)])

    def step(self, total: Tensor, k_out: Tensor, u: Tensor) -> None:
        """The next state: the last one times ``total [n, K, 1]``, plus ``k_out [n, K, CHUNK] u``."""
        state, place = self.state, next(self.places, self.state[:0])
        going, count = len(place), len(state)
        if going == count:
            torch.mul(state, total, out=place).baddbmm_(k_out, u)
        else:
            leaving = (state * total).baddbmm_(k_out, u)
            place.copy_(leaving[:going])
            done = self.order[going // self.heads : count // self.heads]
            self.final.index_copy_(0, done, leaving[going:].unflatten(0, (-1, self.heads)))
        self.state = place
