"""Chunks of 16 tokens in blocks that stay in the cache, for the forms of KDA on a CPU.

A CPU pays for memory more than for arithmetic: a pass over a tensor that has left the cache costs
several passes over one that has not. So the work goes block by block, every block through all of
its steps. A block is a few chunk positions of some sequences, so many that one of its tensors
stays below `BLOCK` elements; what is worth no memory is computed again in the backward pass.

All chunks of all heads of a call are laid out as ``[chunks, H, CHUNK, .]``, group by group and in
a group position by position, and a block is a part of that, seen as ``[n, CHUNK, .]``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import widen
from .chunk import CHUNK

BLOCK = 3 << 15  # elements of one tensor: fewer cost more calls than they save misses (2 MB cache)


class Block(NamedTuple):
    """Consecutive chunk positions of a group, ``sizes`` chunks at each and ``after`` at the next;
    ``span`` is where its chunks and heads are among all, ``empty`` which of its rows hold no token,
    None if all do."""

    sizes: tuple[int, ...]
    after: int
    span: slice
    empty: Tensor | None


class Group(NamedTuple):
    """Sequences ``order``, longest first, that are scanned side by side, and their blocks."""

    order: Tensor
    blocks: tuple[Block, ...]


class Plan(NamedTuple):
    """Of each row ``[rows]`` its ``token`` and ``head``; of each token and head ``[tokens * H]``
    its row, ``place``. An empty row has the last token of its sequence, so that it holds nothing
    of another one."""

    groups: tuple[Group, ...]
    token: Tensor
    head: Tensor
    place: Tensor


@lru_cache(maxsize=1)  # all layers share it; that of a large batch is large
def plan(bounds: tuple[int, ...], heads: int, width: int) -> Plan:
    """The plan of sequences at ``bounds`` (flattened token offsets) with ``width`` elements a token
    and head. Sequences of no tokens are in no group."""
    with torch.inference_mode(False), torch.device("cpu"):  # whatever mode and device are set
        return _plan(bounds, heads, width)


def _plan(bounds: tuple[int, ...], heads: int, width: int) -> Plan:
    edges = torch.tensor(bounds)
    chunks = (edges.diff() + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)[: int((chunks > 0).sum())]
    limit = max(1, BLOCK // (CHUNK * heads * width))  # chunks in a block
    groups, tokens, ends, first = [], [order[:0]], [order[:0]], 0
    for part in order.split(limit) if len(order) else ():
        active = [int((chunks[part] > c).sum()) for c in range(int(chunks[part[0]]))]
        rank = torch.cat([torch.arange(n) for n in active])
        position = torch.arange(len(active)).repeat_interleave(torch.tensor(active))
        tokens.append(edges[part[rank]] + position * CHUNK)
        ends.append(edges[part[rank] + 1])
        groups.append((part, _cut(active, limit)))
    token = torch.cat(tokens)[:, None] + torch.arange(CHUNK)
    end = torch.cat(ends)[:, None]
    full = (token < end)[:, None].expand(-1, heads, -1)
    token = torch.minimum(token, end - 1)[:, None].expand_as(full).flatten()
    head = torch.arange(heads)[:, None].expand_as(full).flatten()
    held = full.flatten().nonzero().flatten()
    place = torch.empty_like(held)
    place[token[held] * heads + head[held]] = held
    done = []
    for part, cuts in groups:
        blocks = []
        for sizes, after in cuts:
            last = first + sum(sizes)
            empty = (~full[first:last]).flatten().nonzero().flatten()
            span = slice(first * heads, last * heads)
            blocks.append(Block(sizes, after, span, empty if len(empty) else None))
            first = last
        done.append(Group(part, tuple(blocks)))
    return Plan(tuple(done), token, head, place)


def _cut(active: list[int], limit: int) -> list[tuple[tuple[int, ...], int]]:
    """The chunks at each position in parts of at most ``limit``, each with what comes after it."""
    starts, total = [0], 0
    for i, count in enumerate(active):
        if total and total + count > limit:
            starts.append(i)
            total = 0
        total += count
    padded = [*active, 0]
    return [(tuple(active[a:b]), padded[b]) for a, b in pairwise([*starts, len(active)])]


class BlockOptions(NamedTuple):
    """What a call fixes besides its tensors."""

    bounds: tuple[int, ...]
    scale: float
    lower_bound: float
    norm: bool
    sigmoid: bool


class Source(NamedTuple):
    """An input ``[tokens, H, .]``: rows of its memory, and which of them the rows of a plan are."""

    rows: Tensor
    at: Tensor

    @staticmethod
    def of(x: Tensor, plan: Plan, known: dict[tuple[int, int], Tensor]) -> Source:
        """``known`` shares the index among inputs of the same strides."""
        tokens, heads, size = x.shape
        step, jump, unit = x.stride()
        if unit != 1 or step % size or jump % size:  # q, k and v side by side need no copy
            x = x.contiguous()
            step, jump = heads * size, size
        steps = (step // size, jump // size)
        if steps not in known:
            known[steps] = plan.token * steps[0] + plan.head * steps[1]
        count = (tokens - 1) * steps[0] + (heads - 1) * steps[1] + 1 if tokens else 0
        return Source(x.as_strided((count, size), (size, 1)), known[steps])

    def take(self, block: Block, out: Tensor | None = None) -> Tensor:
        """The rows of a block, ``[n, CHUNK, .]`` in fp32 or wider, in ``out`` if it is given."""
        index = self.at[block.span.start * CHUNK : block.span.stop * CHUNK]
        if out is not None and out.dtype == self.rows.dtype:
            torch.index_select(self.rows, 0, index, out=out.view(len(index), -1))
            return out
        rows = widen(self.rows.index_select(0, index)).view(-1, CHUNK, self.rows.shape[1])
        return rows if out is None else out.copy_(rows)


class Inputs(NamedTuple):
    """What the caller gave, laid out, and what of the parameters every block needs."""

    plan: Plan
    q: Source
    k: Source
    v: Source
    z: Source  # logit of the decay
    beta: Tensor  # [n, CHUNK, 1] of all blocks, behind the sigmoid
    rate: Tensor  # [H, 1, 1] e^A_log
    bias: Tensor  # [H, 1, K]
    sums: (
        Tensor  # [CHUNK, CHUNK] turns the gates of a chunk into G: the lower bound, up to each row
    )
    indices: dict[tuple[int, int], Tensor]  # as `Source.of` takes them

    @staticmethod
    def of(
        rows: tuple[Tensor, ...], a_log: Tensor, dt_bias: Tensor, options: BlockOptions
    ) -> Inputs:
        q, k, v, z, beta = rows
        heads, width = q.shape[1:]
        layout = plan(options.bounds, heads, max(width, v.shape[-1]))
        indices: dict[tuple[int, int], Tensor] = {}
        dtype = widen(q[:0]).dtype
        writes = Source.of(beta[..., None], layout, indices)
        strength = widen(writes.rows.index_select(0, writes.at)).view(-1, CHUNK, 1)
        if options.sigmoid:
            strength.sigmoid_()
        for group in layout.groups:
            for block in group.blocks:
                clear(strength[block.span], block)  # an empty row does not write
        at_q, at_k, at_v, at_z = (Source.of(x, layout, indices) for x in (q, k, v, z))
        return Inputs(
            layout,
            at_q,
            at_k,
            at_v,
            at_z,
            strength,
            a_log.to(dtype).exp().view(heads, 1, 1),
            dt_bias.to(dtype).view(heads, 1, width),
            torch.full((CHUNK, CHUNK), options.lower_bound, dtype=dtype, device="cpu").tril_(),
            indices,
        )


class Factors(NamedTuple):
    """What both passes need of the n chunks and heads of a block; letters as in `blocked`."""

    z: Tensor  # [n, CHUNK, K] and the bias
    both: Tensor  # [2, n, CHUNK, K] k, then q as given
    norms: Tensor  # [2, n, CHUNK, 1] what norms them
    gate: Tensor  # [n, CHUNK, K]
    grown: Tensor  # [n, CHUNK, K] e^G
    total: Tensor  # [n, 1, K] e^G_C
    tiles: Tensor  # [n, 2 CHUNK, K] ``both`` times e^G
    shrunk: Tensor  # [n, CHUNK, K] K e^-G


def factors(given: Inputs, block: Block, norms: Tensor | None, options: BlockOptions) -> Factors:
    n, width = block.span.stop - block.span.start, given.q.rows.shape[1]
    both = given.sums.new_empty(2, n, CHUNK, width)
    for x, place in zip((given.k, given.q), both, strict=True):
        x.take(block, place)
    if norms is None:
        norms = both.new_ones(2, n, CHUNK, 1)
        if options.norm:
            torch.linalg.vector_norm(both, dim=-1, keepdim=True, out=norms)
            norms.square_().add_(1e-6).rsqrt_()
    z = given.z.take(block)
    by_head(z, given).add_(given.bias)
    gate = (by_head(z, given) * given.rate).sigmoid_().view(z.shape)
    clear(gate, block)  # an empty row does not decay
    grown = torch.bmm(given.sums.expand(n, -1, -1), gate).exp_()
    tiles = z.new_empty(n, 2, CHUNK, width)
    for x, place in zip(both, tiles.unbind(1), strict=True):
        torch.mul(x, grown, out=place)  # of both at once, torch.compile would give other strides
    shrunk = (both[0] * norms[0]).div_(grown)
    total = grown[:, -1:].contiguous()
    return Factors(z, both, norms, gate, grown, total, tiles.view(n, 2 * CHUNK, width), shrunk)


def by_head(x: Tensor, given: Inputs) -> Tensor:
    """``[n, CHUNK, .]`` as ``[chunks, H, CHUNK, .]``."""
    return x.view(-1, len(given.rate), *x.shape[1:])


def clear(x: Tensor, block: Block) -> None:
    """Zeros in the empty rows of ``x [n, CHUNK, .]``."""
    if block.empty is not None:
        x.view(-1, x.shape[-1]).index_fill_(0, block.empty, 0)
