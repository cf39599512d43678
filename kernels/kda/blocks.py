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

BLOCK = 1 << 15  # elements of one tensor: about 15 are alive, in a cache of 2 MB


class Block(NamedTuple):
    """Consecutive chunk positions of a group, ``sizes`` chunks at each and ``after`` at the next.

    ``source`` [chunks * CHUNK] is the token of each row, ``home`` the row of an output of
    ``tokens + 1`` rows that takes it. An empty row reads the last token of its sequence, so that
    it holds nothing of another one, and writes the row behind the last token. ``empty`` are the
    rows of ``[chunks * H * CHUNK]`` that are empty, None if there are none.
    """

    source: Tensor
    home: Tensor
    empty: Tensor | None
    sizes: tuple[int, ...]
    after: int


class Group(NamedTuple):
    """Sequences ``order``, longest first, that are scanned side by side, and their blocks."""

    order: Tensor
    blocks: tuple[Block, ...]


@lru_cache(maxsize=4)  # as `chunk_table`
@torch.inference_mode(False)
def plan(bounds: tuple[int, ...], heads: int, width: int) -> tuple[Group, ...]:
    """Groups of the sequences at ``bounds`` (flattened token offsets) with ``width`` elements a
    token and head."""
    edges = torch.tensor(bounds)
    chunks = (edges.diff() + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)
    limit = max(1, BLOCK // (CHUNK * heads * width))  # chunks in a block
    return tuple(
        Group(part, tuple(_blocks(edges, chunks, part, heads, limit)))
        for part in order.split(limit)
    )


def _blocks(
    edges: Tensor, chunks: Tensor, order: Tensor, heads: int, limit: int
) -> list[Block]:
    longest = int(chunks[order[0]])
    active = (chunks[order] > torch.arange(longest)[:, None]).sum(1).tolist()
    parts: list[list[int]] = []
    for count in active:
        if not parts or sum(parts[-1]) + count > limit:
            parts.append([])
        parts[-1].append(count)
    blocks, first = [], 0
    inside = torch.arange(CHUNK)
    for sizes in parts:
        rank = torch.cat([torch.arange(n) for n in sizes])
        position = torch.arange(first, first + len(sizes)).repeat_interleave(torch.tensor(sizes))
        first += len(sizes)
        start, end = edges[order[rank]], edges[order[rank] + 1]
        token = (start + position * CHUNK)[:, None] + inside
        past = token >= end[:, None]
        empty = past[:, None].expand(-1, heads, -1).flatten().nonzero().flatten()
        blocks.append(
            Block(
                torch.where(past, end[:, None] - 1, token).flatten(),
                token.masked_fill(past, int(edges[-1])).flatten(),
                empty if len(empty) else None,
                tuple(sizes),
                int((chunks[order] > first).sum()),
            )
        )
    return blocks


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
    bias: Tensor  # [H, 1, K]
    sums: Tensor  # [CHUNK, CHUNK] turns the gates of a chunk into G: the lower bound, up to each row

    @staticmethod
    def of(rows: tuple[Tensor, ...], a_log: Tensor, dt_bias: Tensor, options: Options) -> Inputs:
        dtype = widen(rows[0][:0]).dtype
        heads = len(a_log)
        return Inputs(
            *rows,
            a_log.to(dtype).exp().view(heads, 1, 1),
            dt_bias.to(dtype).view(heads, 1, -1),
            torch.full((CHUNK, CHUNK), options.lower_bound, dtype=dtype).tril_(),
        )

    def groups(self, options: Options) -> tuple[Group, ...]:
        _, heads, width = self.q.shape
        return plan(options.bounds, heads, max(width, self.v.shape[-1]))


class Tiles(NamedTuple):
    """What the scan needs of the n chunks and heads of a block; letters as in `blocked`."""

    both: Tensor  # [n, 2 CHUNK, K] Kt, then Qt
    shrunk: Tensor  # [n, CHUNK, K] K e^-G
    total: Tensor  # [n, 1, K] e^G_C
    beta: Tensor  # [n, CHUNK, 1]
    q_norm: Tensor | float  # [chunks, H, CHUNK, 1] what norms a row of q


class Factors(NamedTuple):
    """What the gradients need besides."""

    q: Tensor  # [chunks, H, CHUNK, K] as given
    k: Tensor  # [n, CHUNK, K] normed
    k_norm: Tensor | float  # [chunks, H, CHUNK, 1]
    gate: Tensor  # [n, CHUNK, K]
    grown: Tensor  # [n, CHUNK, K] e^G


def factors(given: Inputs, block: Block, options: Options) -> tuple[Tiles, Factors]:
    gate = _wide_rows(take(given.z, block).add_(given.bias), given.rate).sigmoid_()
    beta = take(given.beta[..., None], block)
    beta = (beta.sigmoid_() if options.sigmoid else beta).contiguous().view(-1, CHUNK, 1)
    if block.empty is not None:
        for x in (gate, beta):  # an empty row neither decays nor writes
            x.view(-1, x.shape[-1]).index_fill_(0, block.empty, 0)
    grown = torch.bmm(given.sums.expand(len(gate), -1, -1), gate).exp_()
    q = take(given.q, block)
    chunks, heads, _, width = q.shape
    both = gate.new_empty(chunks, heads, 2 * CHUNK, width)
    torch.mul(q, grown.view(q.shape), out=both[:, :, CHUNK:])
    both = both.view(-1, 2 * CHUNK, width)
    raw = take(given.k, block)
    q_norm, k_norm = (_norm(q), _norm(raw)) if options.norm else (1.0, 1.0)
    k = _wide_rows(raw, k_norm)
    torch.mul(k, grown, out=both[:, :CHUNK])
    shrunk, total = k / grown, grown[:, -1:].contiguous()
    return Tiles(both, shrunk, total, beta, q_norm), Factors(q, k, k_norm, gate, grown)


def _wide_rows(rows: Tensor, factor: Tensor | float) -> Tensor:
    """``[chunks, H, CHUNK, .]`` of any strides, times a factor, as ``[chunks * H, CHUNK, .]``."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return torch.mul(rows, factor, out=out).view(-1, *rows.shape[2:])


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()


def take(x: Tensor, block: Block) -> Tensor:
    """Rows of ``x [tokens, H, .]`` in fp32 or wider, seen as ``[chunks, H, CHUNK, .]``."""
    rows = widen(x.index_select(0, block.source))
    return rows.view(-1, CHUNK, *rows.shape[1:]).transpose(1, 2)


def give(target: Tensor, rows: Tensor, factor: Tensor | float, block: Block) -> None:
    """Rows ``[chunks * H, CHUNK, .]`` times ``factor [chunks, H, CHUNK, .]`` into ``target
    [tokens + 1, H, .]``."""
    heads, size = target.shape[1:]
    flat = rows.new_empty(len(block.home), heads, size)
    chunks = flat.view(-1, CHUNK, heads, size).transpose(1, 2)
    torch.mul(rows.unflatten(0, (-1, heads)), factor, out=chunks)
    target.index_copy_(0, block.home, flat.to(target.dtype))
