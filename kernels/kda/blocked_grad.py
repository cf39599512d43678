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

from .blocks import Block, BlockOptions, Factors, Inputs, Source, by_head, clear, factors
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
    grads: tuple[Tensor | None, ...],
    wanted: Sequence[bool],
    options: BlockOptions,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``q, k, v, z, beta, A_log, dt_bias`` and of the initial state, in fp32 or wider,
    from those of the outputs and final states; None for a row that is not ``wanted``."""
    d_out, d_final = grads
    width, value = given.q.rows.shape[1], given.v.rows.shape[1]
    heads, wide = len(given.rate), given.sums
    shape = (len(options.bounds) - 1, heads, width, value)
    d_state = wide.new_zeros(shape) if d_final is None else d_final.to(wide.dtype, copy=True)
    if d_out is None:
        d_out = wide.new_zeros(1, heads, value).expand(options.bounds[-1], -1, -1)
    source = Source.of(d_out, given.plan, given.indices)
    n = len(given.beta)
    d_both, d_z = (wide.new_empty(n, rows, width) for rows in (2 * CHUNK, CHUNK))
    d_v, d_beta = (wide.new_empty(n, CHUNK, size) for size in (value, 1))
    slopes = wide.new_zeros(2, heads, CHUNK, width)  # of z, and of its logarithm with the bias
    left = iter(reversed(kept))
    for group in reversed(given.plan.groups):
        ends = d_state.index_select(0, group.order).flatten(0, 1)
        state = ends[:0]
        for block in reversed(group.blocks):
            span, saved = block.span, next(left)
            f = factors(given, block, saved.norms, options)
            d_read = source.take(block)
            back, state = _scan(f, saved, d_read, state, ends, block, options.scale)
            torch.div(back.both[:, :CHUNK], -f.norms[0], out=d_v[span])
            pairs = torch.bmm(back.both, saved.u.mT)  # dL', then dP
            if options.sigmoid:
                torch.div(_diagonal(pairs[:, :CHUNK]), f.norms[0], out=d_beta[span])
            else:
                d_beta[span] = _d_beta(f, saved, back, given.v.take(block))
            d_gate = _inside(f, saved, back, pairs, given.sums, d_both[span], options.norm)
            found = torch.mul(by_head(d_gate, given), given.rate, out=by_head(d_z[span], given))
            slopes[0] += found.sum(0)
            slopes[1] += by_head(f.z, given).mul_(found).sum(0)
        d_state.index_copy_(0, group.order[: len(state) // heads], state.view(-1, *shape[1:]))
    if options.sigmoid:  # a beta whose square rounds to 0 has no gradient
        beta = given.beta
        d_beta.mul_(beta - 1).div_(beta.clamp(min=torch.finfo(beta.dtype).tiny))
    place = given.plan.place
    k_place = place + place // CHUNK * CHUNK  # among rows of k and q in turn

    sources = ((d_both, k_place + CHUNK), (d_both, k_place), (d_v, place), (d_z, place))
    found = [
        x.view(-1, x.shape[-1]).index_select(0, at).view(-1, heads, x.shape[-1]) if want else None
        for (x, at), want in zip(sources, wanted, strict=False)
    ]
    d_bias, d_rate = slopes.sum(2)
    d_strength = d_beta.flatten()[place].view(-1, heads)
    return *found, d_strength, d_rate.sum(1), d_bias.flatten(), d_state


class _Back(NamedTuple):
    """What the scan of one block leaves to the rest of it."""

    both: Tensor  # [n, 2 CHUNK, V] -dV r, then dO times the scale and the norm of q
    d_u: Tensor  # [n, CHUNK, V]
    reads: Tensor  # [n, CHUNK, CHUNK] P over its norm
    d_leaving: Tensor  # [n, K, V] dS'


def _scan(
    f: Factors,
    kept: Kept,
    d_read: Tensor,
    state: Tensor,
    ends: Tensor,
    block: Block,
    scale: float,
) -> tuple[_Back, Tensor]:
    """The block backwards, and the gradient of the state that enters it.

    ``state`` is the gradient of the states that enter the next block, ``ends`` of final states.
    """
    heads, value = len(d_read) // sum(block.sizes), d_read.shape[-1]
    sizes = [n * heads for n in block.sizes]
    clear(d_read, block)
    both = d_read.new_empty(len(d_read), 2 * CHUNK, value)
    torch.mul(d_read, f.norms[1] * scale, out=both[:, CHUNK:])
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


def _binary_size(pairs: Tensor, total: Tensor) -> Tensor | None:
    """A power of two near the largest of each ``pairs [n, 2 CHUNK, CHUNK]``, ``[n, 1, 1]``, and 1
    where their products with e^G and e^-G stay in the range of fp32 as they are; None if all do.

    Of each chunk alone, so that it does not matter which share a block. It is at least 2^-60: what
    else is divided by it must not overflow.
    """
    peak = pairs.abs().flatten(1).amax(1)
    least = total.amin((1, 2))
    fits = (peak * least > 2.0**-112) & (peak < least * 2.0**110) | (peak == 0)
    if fits.all():
        return None
    peak.clamp_(2.0**-60, 2.0**100)
    return (peak / peak.frexp().mantissa).masked_fill(fits, 1.0)[:, None, None]


def _diagonal(x: Tensor) -> Tensor:
    """``[n, CHUNK, CHUNK]`` -> ``[n, CHUNK, 1]``, a view."""
    return x.diagonal(dim1=1, dim2=2)[..., None]


def _inside(
    f: Factors,
    kept: Kept,
    back: _Back,
    pairs: Tensor,
    sums: Tensor,
    d_both: Tensor,
    norm: bool,
) -> Tensor:
    """Gradients of k and q into ``d_both [n, 2 CHUNK, K]``; of the gate's logit over its rate.

    ``pairs`` is dL' and dP, whole; it and ``back`` are used up.
    """
    n, width = len(f.gate), f.gate.shape[-1]
    own = _diagonal(pairs[:, CHUNK:]).clone()
    pairs.view(n, 2, CHUNK, CHUNK).tril_(-1)
    size = _binary_size(pairs, f.total)
    if size is not None:
        for x in (own, pairs, back.both, back.d_leaving):
            x.div_(size)
    torch.bmm(back.both, kept.state.mT, out=d_both).baddbmm_(pairs, f.shrunk)
    d_shrunk = torch.bmm(kept.u, back.d_leaving.mT).mul_(f.total)
    d_total = torch.mul(kept.state, back.d_leaving).sum(2).mul_(f.total[:, 0])
    d_total += torch.mul(f.shrunk, d_shrunk).sum(1)
    d_shrunk.baddbmm_(pairs.mT, f.tiles)
    slope, shrinking = f.tiles * d_both, f.shrunk * d_shrunk
    d_decay = torch.add(slope[:, :CHUNK], slope[:, CHUNK:]).sub_(shrinking)
    d_decay[:, -1] += d_total
    d_gate = torch.bmm(sums.mT.expand(n, -1, -1), d_decay)
    d_gate = torch.ops.aten.sigmoid_backward(d_gate, f.gate)
    by_kind = d_both.view(n, 2, CHUNK, width).mul_(f.grown[:, None])
    by_kind[:, 0].addcdiv_(d_shrunk.mul_(f.norms[0]), f.grown)
    cross = own * f.norms[0]
    by_kind[:, 0].addcmul_(f.both[1], cross)
    by_kind[:, 1].addcmul_(f.both[0], cross)
    if norm:
        along = slope.sum(2).view(n, 2, CHUNK, 1)
        along[:, 0] += shrinking.sum(2, keepdim=True)
        same = _diagonal(back.reads)
        along.addcmul_(own[:, None], same[:, None]).mul_(f.norms.square().transpose(0, 1))
        by_kind.addcmul_(f.both.transpose(0, 1), along, value=-1)
    if size is not None:
        for x in (d_gate, d_both):
            x.mul_(size)
    return d_gate


def _d_beta(f: Factors, kept: Kept, back: _Back, v: Tensor) -> Tensor:
    """<Z, R>, ``[n, CHUNK, 1]``: where beta may be 0, it cannot be had from dV and U."""
    keys = f.tiles[:, :CHUNK]
    lower = torch.bmm(keys, f.shrunk.mT).tril_(-1)
    z = torch.baddbmm(back.d_u, lower.mT, back.both[:, :CHUNK])
    read = torch.bmm(keys, kept.state).baddbmm_(lower, kept.u).mul_(f.norms[0])
    return (z * (v - read)).sum(2, keepdim=True)
