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

from .blocks import Block, Factors, Inputs, Options, Tiles, factors, give, take
from .chunk import CHUNK


class Kept(NamedTuple):
    """What the forward pass keeps of a block."""

    state: Tensor  # [n, K, V] S
    u: Tensor  # [n, CHUNK, V]
    solve: Tensor  # [n, CHUNK, CHUNK] -M diag(beta)


def blocked_gradients(
    given: Inputs,
    kept: Sequence[Kept],
    d_out: Tensor | None,
    d_final: Tensor | None,
    wanted: Sequence[bool],
    options: Options,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``q, k, v, z, beta, A_log, dt_bias`` and of the initial state; the last three in
    the wide dtype. What is not ``wanted`` may be None or hold anything."""
    tokens, heads, value = given.v.shape
    width = given.q.shape[-1]
    rows = (*given[:4], given.beta[..., None])
    targets = [
        x.new_empty(tokens + 1, *x.shape[1:]) if want else None
        for x, want in zip(rows, wanted, strict=False)
    ]
    if d_out is None:
        d_out = torch.zeros_like(given.v)
    wide = given.sums
    shape = (len(options.bounds) - 1, heads, width, value)
    d_state = wide.new_zeros(shape) if d_final is None else d_final.to(wide.dtype, copy=True)
    slopes = wide.new_zeros(2, heads, CHUNK, width)  # of x and log x, x = rate (z + bias)
    left = iter(reversed(kept))
    for group in reversed(given.groups(options)):
        ends = d_state.index_select(0, group.order).flatten(0, 1)
        state = ends[:0]
        for block in reversed(group.blocks):
            (tiles, f), saved = factors(given, block, options), next(left)
            d_read = take(d_out, block)
            back, state = _scan(tiles, saved, d_read, state, ends, block, options.scale)
            if targets[2] is not None:
                give(targets[2], back.both[:, :CHUNK], -1.0, block)
            if targets[4] is not None:
                d_beta = _d_beta(given, tiles, saved, back, block, options)
                give(targets[4], d_beta, 1.0, block)
            d_q, d_k, d_gate = _inside(tiles, f, saved, back, given.sums, options.norm)
            for target, x, factor in zip(
                (targets[0], targets[1], targets[3]),
                (d_q, d_k, d_gate),
                (1.0, f.k_norm, given.rate),
                strict=True,
            ):
                if target is not None:
                    give(target, x, factor, block)
            d_gate = d_gate.view(-1, heads, CHUNK, width)
            slopes[0] += d_gate.sum(0)
            slopes[1] += d_gate.mul_(take(given.z, block).add_(given.bias)).sum(0)
        d_state.index_copy_(0, group.order[: len(state) // heads], state.view(-1, *shape[1:]))
    d_x, d_log = slopes.sum(2) * given.rate[:, 0]
    ends = [None if x is None else x[:tokens] for x in targets]
    if ends[4] is not None:
        ends[4] = ends[4][..., 0]
    return *ends, d_log.sum(1), d_x.flatten(), d_state


class _Back(NamedTuple):
    """What the scan of one block leaves to the rest of it."""

    both: Tensor  # [n, 2 CHUNK, V] -dV, then dO times the scale and the norm of q
    d_u: Tensor  # [n, CHUNK, V]
    reads: Tensor  # [n, CHUNK, CHUNK] P
    d_leaving: Tensor  # [n, K, V] dS'


def _scan(
    tiles: Tiles,
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
    heads, value = d_out.shape[1], d_out.shape[-1]
    sizes = [n * heads for n in block.sizes]
    both = tiles.shrunk.new_empty(*d_out.shape[:2], 2 * CHUNK, value)
    torch.mul(d_out, tiles.q_norm * scale, out=both[:, :, CHUNK:])
    if block.empty is not None:  # rows of CHUNK to those of the lower half of 2 CHUNK
        both.view(-1, value).index_fill_(0, block.empty + (block.empty // CHUNK + 1) * CHUNK, 0)
    both = both.view(-1, 2 * CHUNK, value)
    reads = torch.bmm(tiles.both[:, CHUNK:], tiles.shrunk.mT).tril_()
    d_u = torch.bmm(reads.mT, both[:, CHUNK:])
    d_leaving = torch.empty_like(kept.state)
    places = d_leaving.split(sizes)
    places[-1][: len(state)].copy_(state)
    k_out = tiles.shrunk * tiles.total
    tensors = (d_u, k_out, kept.solve.mT, both, tiles.both.mT, tiles.total.mT)
    parts = list(zip(*(x.split(sizes) for x in tensors), strict=True))
    going = len(state)
    for i in reversed(range(len(sizes))):
        d_u_, k_out_, solve, both_, reads_, total = parts[i]
        place, size = places[i], sizes[i]
        if going < size:
            place[going:].copy_(ends[going:size])
        torch.bmm(solve, d_u_.baddbmm_(k_out_, place), out=both_[:, :CHUNK])
        state = places[i - 1][:size] if i else torch.empty_like(place)
        torch.mul(place, total, out=state).baddbmm_(reads_, both_)
        going = size
    return _Back(both, d_u, reads, d_leaving), state


def _inside(
    tiles: Tiles, f: Factors, kept: Kept, back: _Back, sums: Tensor, norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, of k over its norm, and of the logit of the gate over its rate."""
    pairs = torch.bmm(back.both, kept.u.mT)  # dL', then dP
    own = pairs[:, CHUNK:].diagonal(dim1=1, dim2=2)[..., None].clone()
    pairs.view(-1, 2, CHUNK, CHUNK).tril_(-1)
    d_both = torch.bmm(back.both, kept.state.mT).baddbmm_(pairs, tiles.shrunk)
    d_shrunk = torch.bmm(kept.u, back.d_leaving.mT).mul_(tiles.total)
    d_total = torch.mul(kept.state, back.d_leaving).sum(2).mul_(tiles.total[:, 0])
    d_total += torch.mul(tiles.shrunk, d_shrunk).sum(1)
    d_shrunk.baddbmm_(pairs.mT, tiles.both)
    slope, shrinking = tiles.both * d_both, tiles.shrunk * d_shrunk
    d_decay = torch.add(slope[:, :CHUNK], slope[:, CHUNK:]).sub_(shrinking)
    d_decay[:, -1] += d_total
    d_gate = torch.bmm(sums.mT.expand(len(f.gate), -1, -1), d_decay)
    q = f.q
    d_q = torch.mul(d_both[:, CHUNK:], f.grown).addcmul_(f.k, own)
    d_k = torch.mul(d_both[:, :CHUNK], f.grown).addcdiv_(d_shrunk, f.grown)
    d_k.view(q.shape).addcmul_(q, own.view(*q.shape[:3], 1))
    if norm:
        same = own * back.reads.diagonal(dim1=1, dim2=2)[..., None]
        along = slope.sum(2, keepdim=True).view(-1, 2, CHUNK, 1)
        q_part = (along[:, 1] + same).view(*q.shape[:3], 1) * tiles.q_norm**2
        d_q.view(q.shape).addcmul_(q, q_part, value=-1)
        k_part = shrinking.sum(2, keepdim=True).add_(along[:, 0]).add_(same)
        d_k.addcmul_(f.k, k_part, value=-1)
    return d_q, d_k, torch.ops.aten.sigmoid_backward(d_gate, f.gate)


def _d_beta(
    given: Inputs, tiles: Tiles, kept: Kept, back: _Back, block: Block, options: Options
) -> Tensor:
    """``[n, CHUNK, 1]``."""
    d_v = back.both[:, :CHUNK]  # negative
    if options.sigmoid:  # dV = beta Z; beta rounds to 0 only where its gradient does
        least = torch.finfo(tiles.beta.dtype).tiny
        part = (tiles.beta - 1).div_(tiles.beta.clamp(min=least))
        return (d_v * kept.u).sum(2, keepdim=True).mul_(part)
    keys = tiles.both[:, :CHUNK]
    lower = torch.bmm(keys, tiles.shrunk.mT).tril_(-1)
    z = torch.baddbmm(back.d_u, lower.mT, d_v)
    error = take(given.v, block).reshape(z.shape).baddbmm(keys, kept.state, alpha=-1)
    return (z * error.baddbmm_(lower, kept.u, alpha=-1)).sum(2, keepdim=True)
