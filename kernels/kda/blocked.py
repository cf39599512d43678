"""Chunked KDA on a CPU with a bounded gate: from raw inputs, in blocks, with its own gradient.

With G the inclusive cumulative log decay inside a chunk of 16 tokens, S the state that enters it,
    Kt = K e^G   Qt = s Q e^G   Kh = K e^(G_C - G)   L_ij = beta_i <Kt_i, K_j e^-G_j>  (i > j)
    P_ij = <Qt_i, K_j e^-G_j>  (i >= j)              M = (I + L)^-1
    U = M diag(beta) (V - Kt S)     O = Qt S + P U     S' = diag(e^G_C) S + Kh^T U
(Kimi K3 report 2.1.2, the product with S not taken apart). Kt S, U and S' go chunk position by
chunk position, everything else block by block. The bound -5 keeps e^-G below e^80, which fp32
holds. The code applies s and the norm of q to the rows of O at last. `blocked_grad` is the backward
pass; it has the inputs, S, U and -M diag(beta), and computes the rest again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..once import once_differentiable
from ..precision import as_given
from .blocked_grad import Kept, blocked_gradients
from .blocks import Block, BlockOptions, Factors, Inputs, factors
from .chunk import CHUNK


def chunk_kda_blocked(
    rows: tuple[Tensor, ...],
    a_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    options: BlockOptions,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[tokens, H, V]`` in v's dtype and final states ``[N, H, K, V]`` of raw inputs.

    Autocast rounds nothing. There is no second derivative.

    ``rows``: ``q, k [tokens, H, K]``, ``v [tokens, H, V]``, the logit of the decay ``[tokens, H,
    K]``, ``beta [tokens, H]``.
    """
    inputs = (*rows, a_log, dt_bias, initial_state)
    with as_given(rows[2]):
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            return _Blocked.apply(*inputs, options)
        given = Inputs.of(rows, a_log, dt_bias, options)
        return _forward(given, rows[2], initial_state, options, None)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *rows, a_log, dt_bias, initial, options = arguments
        kept: list[Kept] = []
        given = Inputs.of(tuple(rows), a_log, dt_bias, options)
        out, final = _forward(given, rows[2], initial, options, kept)
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
        saved = ctx.saved_tensors  # once: checkpointing gives them only once
        *rows, a_log, dt_bias = saved[:7]
        given = Inputs.of(tuple(rows), a_log, dt_bias, ctx.options)
        kept = [Kept(*saved[i : i + 4]) for i in range(7, len(saved), 4)]
        wanted = ctx.needs_input_grad[:8]
        with as_given(rows[2]):
            found = blocked_gradients(given, kept, grads, wanted, ctx.options)
        dtypes = (*(x.dtype for x in (*rows, a_log, dt_bias)), ctx.state_dtype)
        return *(
            x.to(dtype) if x is not None and want else None
            for x, dtype, want in zip(found, dtypes, wanted, strict=True)
        ), None


def _forward(
    given: Inputs,
    v: Tensor,
    initial: Tensor | None,
    options: BlockOptions,
    kept: list[Kept] | None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states; what the backward pass needs of each block goes to ``kept``."""
    _, heads, value = v.shape
    if initial is None:
        count, width = len(options.bounds) - 1, given.q.rows.shape[1]
        final = given.sums.new_zeros(count, heads, width, value)
    else:
        final = initial.to(given.sums.dtype, copy=True)
    out = final.new_empty(len(given.beta), CHUNK, value)
    negative = -torch.eye(CHUNK, dtype=final.dtype, device=final.device)
    for group in given.plan.groups:
        state = final.index_select(0, group.order).flatten(0, 1)
        for block in group.blocks:
            f = factors(given, block, None, options)
            k_norm, q_norm = f.norms
            write = given.beta[block.span] * k_norm
            pairs = torch.bmm(f.tiles, f.shrunk.mT)
            lower = pairs[:, :CHUNK] * write  # on and above the diagonal nothing is read
            solve = torch.linalg.solve_triangular(
                lower, negative.expand_as(lower), upper=False, unitriangular=True
            ).mul_(write.mT)
            x = given.v.take(block).div_(k_norm)
            states, u, state = _scan(f, solve, x, state, final, group.order, block)
            o = torch.bmm(f.tiles[:, CHUNK:], states).baddbmm_(pairs[:, CHUNK:].tril(), u)
            torch.mul(o, q_norm * options.scale, out=out[block.span])
            if kept is not None:
                kept.append(Kept(f.norms, states, u, solve))
    out = out.view(-1, value).index_select(0, given.plan.place)
    return out.view(v.shape).to(v.dtype), final


def _scan(
    f: Factors,
    solve: Tensor,
    x: Tensor,
    state: Tensor,
    final: Tensor,
    order: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """S and U of a block, and the state that leaves it; uses up ``x`` and K e^-G.

    ``solve`` is -M diag(beta r), ``x`` V / r with the norms r of k; ``state`` enters the block (and
    more rows). What leaves the last chunk of a sequence goes to ``final``.
    """
    heads, width, value = final.shape[1:]
    counts = (*block.sizes, block.after)
    sizes = [n * heads for n in block.sizes]
    u = torch.empty_like(x)
    states = x.new_empty(len(x), width, value)
    places = states.split(sizes)
    places[0].copy_(state[: sizes[0]])
    k_out = f.shrunk.mul_(f.total)
    tensors = (f.tiles[:, :CHUNK], x, solve, u, f.total.mT, k_out.mT)
    parts = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
    for i, (k_in, x_, solve_, u_, total, k_out_) in enumerate(parts):
        torch.bmm(solve_, x_.baddbmm_(k_in, places[i], beta=-1), out=u_)
        going, more = counts[i + 1] * heads, i + 1 < len(places)
        onward = more and going == sizes[i]
        state = places[i + 1] if onward else torch.empty_like(places[i])
        torch.mul(places[i], total, out=state).baddbmm_(k_out_, u_)
        if going < sizes[i]:
            ends = state[going:].view(-1, heads, width, value)
            final.index_copy_(0, order[counts[i + 1] : counts[i]], ends)
            if more:
                places[i + 1].copy_(state[:going])
    return states, u, state
