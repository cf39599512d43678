"""Backward pass of `blocked`: the same blocks, last chunk position first.

Given dO (times the scale) and the gradient dS' of the state that leaves a chunk (letters of
`blocked`; Z = M^T dU, R = V - Kt S - l U with L = diag(beta) l):
    dU = P^T dO + Kh dS'          dV = diag(beta) Z         dbeta_i = <Z_i, R_i>
    dP = tril(dO U^T)             dL' = -stril(dV U^T)      dS = Qt^T dO + diag(e^G_C) dS' - Kt^T dV
    D_q = dO S^T + dP K e^-G      D_k = -dV S^T + dL' K e^-G
    E = dP^T Qt + dL'^T Kt + e^G_C (U dS'^T)
    dQ = e^G D_q                  dK = e^G D_k + e^-G E     dG = Qt D_q + Kt D_k - K e^-G E
and dG of the last row gains e^G_C (rowsum(S dS') + colsum(K e^-G (U dS'^T))). The diagonal of P
has no decay: it is left out of D_q and E, and so of dG, and added to dQ and dK alone. Behind the
sigmoid of beta, <Z_i, R_i> (1 - beta_i) beta_i = (1 - beta_i) <Z_i, U_i>. The gradient through
the l2 norm takes <q, dQ> and <k, dK> from the sums of dG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import widen
from .blocks import Block, Factors, Inputs, Options, by_chunk, factors, give, strengths
from .chunk import CHUNK


class Kept(NamedTuple):
    """What the forward pass keeps of a block."""

    norms: Tensor  # as `Factors.norms`
    state: Tensor  # [n, K, V] S
    u: Tensor  # [n, CHUNK, V]
    solve: Tensor  # [n, CHUNK, CHUNK] -M diag(beta r), r the norm of k


def blocked_gradients(
    given: Inputs,
    kept: Sequence[Kept],
    d_out: Tensor | None,
    d_final: Tensor | None,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``q, k, v, z, beta, A_log, dt_bias`` and of the initial state; the last three in
    the wide dtype. What is not ``wanted`` may be None or hold anything."""
    tokens, heads, value = given.v.shape
    width = given.q.shape[-1]
    rows = (*given[:4], given.beta[..., None])
    targets = [x.new_empty(tokens + 1, *x.shape[1:]) for x in rows]
    if d_out is None:
        d_out = torch.zeros_like(given.v)
    wide = given.sums
    shape = (len(options.bounds) - 1, heads, width, value)
    d_state = wide.new_zeros(shape) if d_final is None else d_final.to(wide.dtype, copy=True)
    slopes = wide.new_zeros(2, heads, width)  # of z, and of its logarithm with the bias
    left = iter(reversed(kept))
    for group in reversed(given.groups(options)):
        betas = strengths(given, group.rows, options)
        d_betas = torch.empty_like(betas)
        ends = d_state.index_select(0, group.order).flatten(0, 1)
        state = ends[:0]
        for block in reversed(group.blocks):
            saved = next(left)
            f = factors(given, block.rows, saved.norms, options)
            back, state = _scan(f, saved, d_out, state, ends, block, options.scale)
            give(targets[2], back.both[:, :CHUNK], -1 / f.norms[:, :, 0], block.rows)
            _d_beta(given, f, saved, back, block, d_betas[block.span], options.sigmoid)
            d_both, d_gate = _inside(f, saved, back, given.sums, options.norm)
            give(targets[1], d_both[:, :CHUNK], 1.0, block.rows)
            give(targets[0], d_both[:, CHUNK:], 1.0, block.rows)
            d_z = give(targets[3], d_gate, given.rate, block.rows)
            slopes[0] += d_z.sum(0)
            slopes[1] += f.z.mul_(d_z).sum(0)
        if options.sigmoid:  # a beta that rounds to 0 has no gradient
            d_betas.mul_(betas - 1).div_(betas.clamp(min=torch.finfo(betas.dtype).tiny))
        give(targets[4], d_betas, 1.0, group.rows)
        d_state.index_copy_(0, group.order[: len(state) // heads], state.view(-1, *shape[1:]))
    d_q, d_k, d_v, d_z, d_beta = (x[:tokens] for x in targets)
    return d_q, d_k, d_v, d_z, d_beta[..., 0], slopes[1].sum(1), slopes[0].flatten(), d_state


class _Back(NamedTuple):
    """What the scan of one block leaves to the rest of it."""

    both: Tensor  # [n, 2 CHUNK, V] -dV r, then dO times the scale and the norm of q
    d_u: Tensor  # [n, CHUNK, V]
    reads: Tensor  # [n, CHUNK, CHUNK] P over its norm
    d_leaving: Tensor  # [n, K, V] dS'


def _scan(
    f: Factors,
    kept: Kept,
    d_out: Tensor,
    state: Tensor,
    ends: Tensor,
    block: Block,
    scale: float,
) -> tuple[_Back, Tensor]:
    """The block backwards, and the gradient of the state that enters it.

    ``state`` is the gradient of the states that enter the next block, ``ends`` of final states.
    """
    heads, value = d_out.shape[1:]
    sizes = [n * heads for n in block.sizes]
    both = f.shrunk.new_empty(len(f.shrunk), 2 * CHUNK, value)
    d_read = by_chunk(widen(d_out.index_select(0, block.rows.source)))
    place = both.view(-1, heads, 2 * CHUNK, value)[:, :, CHUNK:]
    torch.mul(d_read, f.norms[:, :, 1] * scale, out=place)
    empty = block.rows.empty
    if empty is not None:  # rows of CHUNK to those of the lower half of 2 CHUNK
        both.view(-1, value).index_fill_(0, empty + (empty // CHUNK + 1) * CHUNK, 0)
    reads = torch.bmm(f.tiles[:, CHUNK:], f.shrunk.mT).tril_()
    d_u = torch.bmm(reads.mT, both[:, CHUNK:])
    d_leaving = torch.empty_like(kept.state)
    places = d_leaving.split(sizes)
    places[-1][: len(state)].copy_(state)
    tensors = (d_u, f.shrunk * f.total, kept.solve.mT, both, f.tiles.mT, f.total.mT)
    parts = list(zip(*(x.split(sizes) for x in tensors), strict=True))
    going = len(state)
    for i in reversed(range(len(sizes))):
        d_u_, k_out, solve, both_, tiles, total = parts[i]
        place, size = places[i], sizes[i]
        if going < size:
            place[going:].copy_(ends[going:size])
        # a product written into every other half would go matrix by matrix
        both_[:, :CHUNK] = torch.bmm(solve, d_u_.baddbmm_(k_out, place))
        state = places[i - 1][:size] if i else torch.empty_like(place)
        torch.mul(place, total, out=state).baddbmm_(tiles, both_)
        going = size
    return _Back(both, d_u, reads, d_leaving), state


def _inside(f: Factors, kept: Kept, back: _Back, sums: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """Gradients of k and q ``[n, 2 CHUNK, K]``, and of the logit of the gate over its rate."""
    n, width = len(f.gate), f.gate.shape[-1]
    pairs = torch.bmm(back.both, kept.u.mT)  # dL', then dP
    own = pairs[:, CHUNK:].diagonal(dim1=1, dim2=2).clone()
    pairs.view(n, 2, CHUNK, CHUNK).tril_(-1)
    d_both = torch.bmm(back.both, kept.state.mT).baddbmm_(pairs, f.shrunk)
    d_shrunk = torch.bmm(kept.u, back.d_leaving.mT).mul_(f.total)
    d_total = torch.mul(kept.state, back.d_leaving).sum(2).mul_(f.total[:, 0])
    d_total += torch.mul(f.shrunk, d_shrunk).sum(1)
    d_shrunk.baddbmm_(pairs.mT, f.tiles)
    slope, shrinking = f.tiles * d_both, f.shrunk * d_shrunk
    d_decay = torch.add(slope[:, :CHUNK], slope[:, CHUNK:]).sub_(shrinking)
    d_decay[:, -1] += d_total
    d_gate = torch.bmm(sums.mT.expand(n, -1, -1), d_decay)
    d_gate = torch.ops.aten.sigmoid_backward(d_gate, f.gate)
    d_both.view(n, 2, CHUNK, width).mul_(f.grown[:, None])
    k_norm = f.norms[:, :, 0].reshape(n, CHUNK, 1)
    d_both[:, :CHUNK].addcdiv_(d_shrunk.mul_(k_norm), f.grown)
    by_head = d_both.view(*f.both.shape)
    cross = own.view(k_norm.shape).mul(k_norm).view(*f.both.shape[:2], CHUNK, 1)
    by_head[:, :, 0].addcmul_(f.both[:, :, 1], cross)
    by_head[:, :, 1].addcmul_(f.both[:, :, 0], cross)
    if norm:
        along = slope.sum(2)
        along[:, :CHUNK] += shrinking.sum(2)
        along = along.view(n, 2, CHUNK)
        along += own.mul_(back.reads.diagonal(dim1=1, dim2=2))[:, None]
        along = along.view(f.norms.shape).mul(f.norms.square())
        by_head.addcmul_(f.both, along, value=-1)
    return d_both, d_gate


def _d_beta(
    given: Inputs,
    f: Factors,
    kept: Kept,
    back: _Back,
    block: Block,
    out: Tensor,
    sigmoid: bool,
) -> None:
    """Into ``out [n, CHUNK, 1]``; behind a sigmoid over (1 - beta) / beta."""
    norm = f.norms[:, :, 0].reshape(out.shape)
    d_v = back.both[:, :CHUNK]  # of -V r
    if sigmoid:
        torch.sum(d_v * kept.u, 2, keepdim=True, out=out).div_(norm)
        return
    keys = f.tiles[:, :CHUNK]
    lower = torch.bmm(keys, f.shrunk.mT).tril_(-1)
    z = torch.baddbmm(back.d_u, lower.mT, d_v)
    read = torch.bmm(keys, kept.state).baddbmm_(lower, kept.u).mul_(norm)
    v = by_chunk(widen(given.v.index_select(0, block.rows.source))).reshape(z.shape)
    torch.sum(z * (v - read), 2, keepdim=True, out=out)
