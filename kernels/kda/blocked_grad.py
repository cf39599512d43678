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

from .blocks import Block, Factors, Group, Inputs, Options, factors, give, take
from .chunk import CHUNK


class Kept(NamedTuple):
    """What the forward pass keeps of a block."""

    state: Tensor  # [n, K, V] S
    u: Tensor  # [n, CHUNK, V]
    inverse: Tensor  # [n, CHUNK, CHUNK] M


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
        chain = _Chain(group, d_state)
        for block in reversed(group.blocks):
            f, saved = factors(given, block, options), next(left)
            back = _scan(f, saved, take(d_out, block), chain, block, options.scale)
            d_q, d_k, d_gate = _inside(f, saved, back, given.sums, options.norm)
            for target, x, factor in (
                (targets[0], d_q, f.q_norm),
                (targets[1], d_k, f.k_norm),
                (targets[2], back.both[:, :CHUNK], -1.0),
                (targets[3], d_gate, given.rate),
            ):
                if target is not None:
                    give(target, x, factor, block)
            if targets[4] is not None:
                give(targets[4], _d_beta(given, f, saved, back.z, block, options), 1.0, block)
            for total, x in zip(slopes, (d_gate, d_gate * f.logit), strict=True):
                total += x.unflatten(0, (-1, heads)).sum(0)
        chain.close(d_state)
    d_x, d_log = slopes.sum(2)
    ends = [None if x is None else x[:tokens] for x in targets]
    if ends[4] is not None:
        ends[4] = ends[4][..., 0]
    return *ends, d_log.sum(1), (d_x * given.rate[:, 0]).flatten(), d_state


class _Back(NamedTuple):
    """What the scan of one block leaves to the rest of it."""

    both: Tensor  # [n, 2 CHUNK, V] -dV, then dO times the scale
    z: Tensor  # [n, CHUNK, V]
    reads: Tensor  # [n, CHUNK, CHUNK] P over the scale
    d_leaving: Tensor  # [n, K, V] dS'


def _scan(
    f: Factors, kept: Kept, d_out: Tensor, chain: _Chain, block: Block, scale: float
) -> _Back:
    chunks, heads, _, value = d_out.shape
    sizes = [n * heads for n in block.sizes]
    both = f.k.new_empty(len(f.k), 2 * CHUNK, value)
    torch.mul(d_out, scale, out=both.view(chunks, heads, -1, value)[:, :, CHUNK:])
    if block.empty is not None:  # its rows in a tensor of 2 CHUNK rows, lower half
        both.view(-1, value).index_fill_(0, block.empty + (block.empty // CHUNK + 1) * CHUNK, 0)
    reads = torch.bmm(f.both[:, CHUNK:], f.shrunk.mT).tril_()
    d_u = torch.bmm(reads.mT, both[:, CHUNK:])
    z = torch.empty_like(d_u)
    d_leaving = torch.empty_like(kept.state)
    tensors = (d_u, f.k_out, kept.inverse.mT, z, -f.beta, both, f.both.mT, f.total.mT, d_leaving)
    parts = list(zip(*(x.split(sizes) for x in tensors), strict=True))
    for d_u_, k_out_, solve_, z_, beta_, both_, reads_, total_, place in reversed(parts):
        chain.enter(place)
        torch.bmm(solve_, d_u_.baddbmm_(k_out_, place), out=z_)
        torch.mul(z_, beta_, out=both_[:, :CHUNK])
        chain.step(total_, reads_, both_)
    return _Back(both, z, reads, d_leaving)


class _Chain:
    """Gradients of the states of a group, the last chunk position first; see `blocked`."""

    def __init__(self, group: Group, d_final: Tensor) -> None:
        self.order, self.heads = group.order, d_final.shape[1]
        self.before = d_final.index_select(0, group.order).flatten(0, 1)
        self.state = self.before[:0]

    def enter(self, place: Tensor) -> None:
        """Fills ``place``: what the next position passed on, then the ends of sequences."""
        going = len(self.state)
        place[:going].copy_(self.state)
        if len(place) > going:
            place[going:].copy_(self.before[going : len(place)])
        self.place = place

    def step(self, total: Tensor, reads: Tensor, both: Tensor) -> None:
        self.state = (self.place * total).baddbmm_(reads, both)

    def close(self, d_state: Tensor) -> None:
        """The gradients of the states that entered the first position, into ``d_state``."""
        done = self.order[: len(self.state) // self.heads]
        d_state.index_copy_(0, done, self.state.unflatten(0, (-1, self.heads)))


def _inside(
    f: Factors, kept: Kept, back: _Back, sums: Tensor, norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and k over their norms, and of the logit of the gate over its rate."""
    pairs = torch.bmm(back.both, kept.u.mT)  # dL', then dP
    own = pairs[:, CHUNK:].diagonal(dim1=1, dim2=2)[..., None].clone()
    pairs.unflatten(1, (2, CHUNK)).tril_(-1)
    d_both = torch.bmm(back.both, kept.state.mT).baddbmm_(pairs, f.shrunk)
    d_shrunk = torch.bmm(kept.u, back.d_leaving.mT).mul_(f.total)
    d_total = torch.mul(kept.state, back.d_leaving).sum(2).mul_(f.total[:, 0])
    d_total += torch.mul(f.shrunk, d_shrunk).sum(1)
    d_shrunk.baddbmm_(pairs.mT, f.both)
    slope = f.both * d_both
    from_k, from_q = slope[:, :CHUNK], slope[:, CHUNK:]
    shrinking = f.shrunk * d_shrunk
    d_decay = torch.add(from_k, from_q).sub_(shrinking)
    d_decay[:, -1] += d_total
    d_k = torch.mul(d_both[:, :CHUNK], f.grown).add_(d_shrunk.div_(f.grown)).addcmul_(f.q, own)
    d_q = torch.mul(d_both[:, CHUNK:], f.grown).addcmul_(f.k, own)
    if norm:
        same = own * back.reads.diagonal(dim1=1, dim2=2)[..., None]
        d_q.addcmul_(f.q, from_q.sum(2, keepdim=True).add_(same), value=-1)
        d_k.addcmul_(f.k, shrinking.add_(from_k).sum(2, keepdim=True).add_(same), value=-1)
    d_gate = torch.bmm(sums.mT.expand(len(f.gate), -1, -1), d_decay)
    return d_q, d_k, torch.ops.aten.sigmoid_backward(d_gate, f.gate)


def _d_beta(
    given: Inputs, f: Factors, kept: Kept, z: Tensor, block: Block, options: Options
) -> Tensor:
    """``[n, CHUNK, 1]``."""
    if options.sigmoid:
        return (z * kept.u).sum(2, keepdim=True).mul_(1 - f.beta)
    keys = f.both[:, :CHUNK]
    error = take(given.v, block).flatten(0, 1).baddbmm(keys, kept.state, alpha=-1)
    error.baddbmm_(torch.bmm(keys, f.shrunk.mT).tril_(-1), kept.u, alpha=-1)
    return (z * error).sum(2, keepdim=True)
