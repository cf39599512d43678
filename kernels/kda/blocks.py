"""Chunks of 16 tokens in blocks that stay in the cache, for the forms of KDA on a CPU.

A CPU pays for memory more than for arithmetic: a pass over a tensor that has left the cache costs
several passes over one that has not. So the work goes block by block, every block through all of
its steps. A block is a few chunk positions of some sequences, so many that one of its tensors
stays below `BLOCK` elements; what is worth no memory is computed again in the backward pass.

Inside a block a tensor is ``[chunks, H, CHUNK, .]``, also seen as ``[chunks * H, CHUNK, .]``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import widen
from .chunk import CHUNK

BLOCK = 1 << 16  # elements of one tensor: fewer cost more calls than they save misses (2 MB cache)


class Rows(NamedTuple):
    """Where the rows of some chunks are among the tokens.

    ``source`` [chunks * CHUNK] is the token of each row, ``home`` the row of an output of
    ``tokens + 1`` rows that takes it. An empty row reads the last token of its sequence, so that
    it holds nothing of another one, and writes the row behind the last token. ``empty`` are the
    rows of ``[chunks * H * CHUNK]`` that are empty, None if there are none.
    """

    source: Tensor
    home: Tensor
    empty: Tensor | None


class Block(NamedTuple):
    """Consecutive chunk positions of a group, ``sizes`` chunks at each and ``after`` at the next;
    ``span`` is where its chunks and heads are among those of the group."""

    rows: Rows
    sizes: tuple[int, ...]
    after: int
    span: slice


class Group(NamedTuple):
    """Sequences ``order``, longest first, that are scanned side by side, and their blocks."""

    order: Tensor
    rows: Rows
    blocks: tuple[Block, ...]


@lru_cache(maxsize=4)  # as `chunk_table`
@torch.inference_mode(False)
def plan(bounds: tuple[int, ...], heads: int, width: int) -> tuple[Group, ...]:
    """Groups of the sequences at ``bounds`` (flattened token offsets) that have tokens, with
    ``width`` elements a token and head."""
    edges = torch.tensor(bounds)
    chunks = (edges.diff() + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)[: int((chunks > 0).sum())]
    limit = max(1, BLOCK // (CHUNK * heads * width))  # chunks in a block
    return tuple(
        _group(edges, chunks, part, heads, limit) for part in order.split(limit) if len(part)
    )


def _group(edges: Tensor, chunks: Tensor, order: Tensor, heads: int, limit: int) -> Group:
    ranks = torch.arange(len(order))
    active = [int((chunks[order] > c).sum()) for c in range(int(chunks[order[0]]))]
    rank = torch.cat([ranks[:n] for n in active])
    position = torch.arange(len(active)).repeat_interleave(torch.tensor(active))
    token = (edges[order[rank]] + position * CHUNK)[:, None] + torch.arange(CHUNK)
    end = edges[order[rank] + 1][:, None]
    past = token >= end
    source, home = torch.where(past, end - 1, token), token.masked_fill(past, int(edges[-1]))

    def rows(first: int, last: int) -> Rows:
        empty = past[first:last, None].expand(-1, heads, -1).flatten().nonzero().flatten()
        where = (x[first:last].flatten() for x in (source, home))
        return Rows(*where, empty if len(empty) else None)

    blocks, first = [], 0
    while active:
        count = max(1, int((torch.tensor(active).cumsum(0) <= limit).sum()))
        sizes, active = tuple(active[:count]), active[count:]
        last = first + sum(sizes)
        span = slice(first * heads, last * heads)
        blocks.append(Block(rows(first, last), sizes, active[0] if active else 0, span))
        first = last
    return Group(order, rows(0, first), tuple(blocks))


class Options(NamedTuple):
    """What a call fixes besides its tensors."""

    bounds: tuple[int, ...]
    scale: float
    lower_bound: float
    norm: bool
    sigmoid: bool


class Inputs(NamedTuple):
    """What the caller gave, and what of the parameters every block needs, in the wide dtype."""

    q: Tensor  # [tokens, H, K]
    k: Tensor
    v: Tensor  # [tokens, H, V]
    z: Tensor  # [tokens, H, K] logit of the decay
    beta: Tensor  # [tokens, H]
    rate: Tensor  # [H, 1, 1] e^A_log
    bias: Tensor  # [H, K]
    sums: (
        Tensor  # [CHUNK, CHUNK] turns the gates of a chunk into G: the lower bound, up to each row
    )

    @staticmethod
    def of(rows: tuple[Tensor, ...], a_log: Tensor, dt_bias: Tensor, options: Options) -> Inputs:
        dtype = widen(rows[0][:0]).dtype
        heads = len(a_log)
        return Inputs(
            *rows,
            a_log.to(dtype).exp().view(heads, 1, 1),
            dt_bias.to(dtype).view(heads, -1),
            torch.full((CHUNK, CHUNK), options.lower_bound, dtype=dtype).tril_(),
        )

    def groups(self, options: Options) -> tuple[Group, ...]:
        _, heads, width = self.q.shape
        return plan(options.bounds, heads, max(width, self.v.shape[-1]))


class Factors(NamedTuple):
    """What both passes need of the n chunks and heads of a block; letters as in `blocked`."""

    z: Tensor  # [chunks * CHUNK, H, K] and the bias
    both: Tensor  # [chunks, H, 2, CHUNK, K] k, then q as given
    norms: Tensor  # [chunks, H, 2, CHUNK, 1] what norms them
    gate: Tensor  # [n, CHUNK, K]
    grown: Tensor  # [n, CHUNK, K] e^G
    total: Tensor  # [n, 1, K] e^G_C
    tiles: Tensor  # [n, 2 CHUNK, K] ``both`` times e^G
    shrunk: Tensor  # [n, CHUNK, K] K e^-G


def factors(given: Inputs, rows: Rows, norms: Tensor | None, options: Options) -> Factors:
    _, heads, width = given.q.shape
    both = given.bias.new_empty(2, len(rows.source), heads, width)
    for place, x in zip(both, (given.k, given.q), strict=True):
        if x.dtype == both.dtype:
            torch.index_select(x, 0, rows.source, out=place)
        else:
            place.copy_(x.index_select(0, rows.source))
    both = both.view(2, -1, CHUNK, heads, width).permute(1, 3, 0, 2, 4)
    if norms is None and options.norm:
        norms = torch.linalg.vector_norm(both, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
    elif norms is None:
        norms = both.new_ones(*both.shape[:-1], 1)
    z = widen(given.z.index_select(0, rows.source)).add_(given.bias)
    gate = both.new_empty(both.shape[0], heads, CHUNK, width)
    torch.mul(by_chunk(z), given.rate, out=gate).sigmoid_()
    gate = clear(gate.view(-1, CHUNK, width), rows)  # an empty row does not decay
    grown = torch.bmm(given.sums.expand(len(gate), -1, -1), gate).exp_()
    tiles = torch.empty_like(both, memory_format=torch.contiguous_format)
    by_head = (both.shape[0], heads, CHUNK, width)
    torch.mul(both, grown.view(by_head)[:, :, None], out=tiles)
    shrunk = torch.empty_like(grown)
    torch.mul(both[:, :, 0], norms[:, :, 0], out=shrunk.view(by_head)).div_(grown.view(by_head))
    total = grown[:, -1:].contiguous()
    return Factors(z, both, norms, gate, grown, total, tiles.view(-1, 2 * CHUNK, width), shrunk)


def strengths(given: Inputs, rows: Rows, options: Options) -> Tensor:
    """Beta of a whole group, ``[n, CHUNK, 1]``; an empty row does not write."""
    beta = widen(given.beta.index_select(0, rows.source))
    beta = by_chunk(beta.sigmoid_() if options.sigmoid else beta).contiguous()
    return clear(beta.view(-1, CHUNK, 1), rows)


def clear(x: Tensor, rows: Rows) -> Tensor:
    """Zeros in the empty rows of ``x [n, CHUNK, .]``, in place."""
    if rows.empty is not None:
        x.view(-1, x.shape[-1]).index_fill_(0, rows.empty, 0)
    return x


def by_chunk(x: Tensor) -> Tensor:
    """``[chunks * CHUNK, H, ...]`` seen as ``[chunks, H, CHUNK, ...]``."""
    return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)


def give(target: Tensor, x: Tensor, factor: Tensor | float, rows: Rows) -> Tensor:
    """Writes ``x [n, CHUNK, .]`` times ``factor [chunks, H, CHUNK, .]`` into ``target [tokens + 1,
    H, .]`` and returns the product, ``[chunks * CHUNK, H, .]``."""
    heads, size = target.shape[1:]
    flat = x.new_empty(len(rows.home), heads, size)
    torch.mul(x.unflatten(0, (-1, heads)), factor, out=by_chunk(flat))
    target.index_copy_(0, rows.home, flat.to(target.dtype))
    return flat
