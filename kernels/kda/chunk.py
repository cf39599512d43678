"""Kimi Delta Attention in chunks of 16 tokens, plain torch, for any device and float type.

Inside a chunk with inclusive cumulative decay G and incoming state S (Kimi K3 report 2.1.2):
    L_ij = beta_i <k_i e^(G_i - G_j), k_j> (i > j)      P_ij = <q_i e^(G_i - G_j), k_j> (i >= j)
    [W | U0] = (I + L)^-1 diag(beta) [K e^G | V]        U = U0 - W S
    O = (Q e^G) S + P U                                 S' = diag(e^G_C) S + (K e^(G_C - G))^T U
Everything but S' is one batched product over all chunks; with A = diag(e^G_C) - Kh^T W and
B = Kh^T U0 the remaining scan is S' = A S + B, a single product per chunk position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

CHUNK = 16  # 16 steps of the bound -5 span e^80, which fp32 still holds
HALF = 2.0**58  # about e^40: shared by the factors of a product, so that gradients stay in range
LOWEST = -1e30  # for a log decay of -inf: nothing is left of a state either way


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where each token of each head goes, longest sequences first, chunk position outermost.

    ``place`` [tokens * H] is the row of token t and head h (index ``t * H + h``) in the layout
    ``[chunks, H, CHUNK]``; ``source`` is its inverse, None where chunks have empty rows, which
    then hold zeros. ``active`` counts the sequences that reach each chunk position; ``order`` [N]
    sorts the sequences by length and ``inverse`` undoes it.
    """

    place: torch.Tensor
    source: torch.Tensor | None
    num_chunks: int
    active: tuple[int, ...]
    order: torch.Tensor
    inverse: torch.Tensor


@lru_cache(maxsize=4)  # a large batch never comes again, and its tables are large
@torch.inference_mode(False)  # also where the first use is in inference mode: training may follow
def chunk_table(bounds: tuple[int, ...], heads: int, device: torch.device) -> ChunkTable:
    """The table of sequences that start and end at ``bounds`` (flattened token offsets)."""
    lengths = torch.tensor(bounds).diff()
    chunks = (lengths + CHUNK - 1) // CHUNK
    order = torch.argsort(chunks, descending=True, stable=True)
    rank = torch.argsort(order)
    last = int(chunks.max()) if len(chunks) else 0
    active = tuple(int((chunks > c).sum()) for c in range(last))
    first = torch.tensor([0, *active]).cumsum(0)  # index of the first chunk at each position
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offset = torch.arange(bounds[-1]) - torch.tensor(bounds)[row]
    chunk = first[offset // CHUNK] + rank[row]
    head = torch.arange(heads)
    place = ((chunk[:, None] * heads + head) * CHUNK + (offset % CHUNK)[:, None]).flatten()
    num_chunks = int(first[-1])
    full = len(place) == num_chunks * heads * CHUNK
    return ChunkTable(
        place.to(device),
        torch.argsort(place).to(device) if full else None,
        num_chunks,
        active,
        order.to(device),
        rank.to(device),
    )


class _Spread(torch.autograd.Function):
    """Token rows ``[tokens * H, W]`` to chunk rows ``[chunks * H * CHUNK, W]``; the gradient is
    a plain gather, since every token has one place."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, table: ChunkTable, size: int) -> torch.Tensor:
        ctx.table = table
        return _spread(rows, table, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.table.place), None, None


class _Collect(torch.autograd.Function):
    """Inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, table: ChunkTable) -> torch.Tensor:
        ctx.table, ctx.size = table, len(rows)
        return rows.index_select(0, table.place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _spread(grads[0], ctx.table, ctx.size), None


class _Exp(torch.autograd.Function):
    """e^x times a power of two; a product of three would have a gradient out of range inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        out = x.exp().mul_(factor)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return grads[0] * out, None


def _spread(rows: torch.Tensor, table: ChunkTable, size: int) -> torch.Tensor:
    if table.source is not None:
        return rows.index_select(0, table.source)
    return rows.new_zeros(size, rows.shape[1]).index_copy_(0, table.place, rows)


def chunk_kda_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    bounds: tuple[int, ...],
    bounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[tokens, H, V]`` and final states ``[N, H, K, V]`` of prepared inputs.

    ``q, k, g [tokens, H, K]``, ``v [tokens, H, V]``, ``beta [tokens, H]``, sequences at ``bounds``.
    ``bounded``: every decay is at least -5, so that one tile product serves a chunk; otherwise
    the decays are summed pair by pair.
    """
    heads, width, value = q.shape[1], q.shape[2], v.shape[2]
    table = chunk_table(bounds, heads, q.device)

    def spread(x: torch.Tensor) -> torch.Tensor:  # [chunks * H, CHUNK, .]
        rows = x.reshape(-1, x.shape[-1])
        size = table.num_chunks * heads * CHUNK
        return _Spread.apply(rows, table, size).view(-1, CHUNK, x.shape[-1])

    qc, kc, vc, bc = spread(q), spread(k), spread(v), spread(beta[..., None])
    steps = spread(g.clamp(min=LOWEST))
    decay = steps.cumsum(1)  # G
    total = decay[:, -1:]
    grown = decay.exp()
    k_in, q_in = kc * grown, qc * grown
    if bounded:
        rise, shrunk = _Exp.apply(decay, HALF), kc * _Exp.apply(-decay, 1 / HALF)
        k_out = shrunk * rise[:, -1:]
        lower, reads = (torch.bmm(x * rise, shrunk.transpose(1, 2)) for x in (kc, qc))
    else:
        # Sums of what lies between j and i, not differences of sums: those keep no digit of a slow
        # decay behind a fast one, nor of the gradient of a fast one.
        row = torch.arange(CHUNK, device=g.device)
        outside = (row[:, None] <= row)[..., None]  # of token m, from j on
        span = steps[:, :, None].masked_fill(outside, 0).cumsum(1).exp()  # [., CHUNK, CHUNK, K]
        k_out = kc * span[:, -1]
        lower, reads = (torch.einsum("bik,bijk,bjk->bij", x, span, kc) for x in (kc, qc))
    lower, reads = lower.tril(-1), reads.tril()
    solved = torch.linalg.solve_triangular(
        lower * bc, torch.cat([k_in, vc], -1) * bc, upper=False, unitriangular=True
    )
    w, u0 = solved.split([width, value], -1)
    k_out_t = k_out.transpose(1, 2)
    carry = torch.baddbmm(torch.diag_embed(total[:, 0].exp()), k_out_t, w, alpha=-1)  # A
    write = torch.bmm(k_out_t, u0)  # B
    incoming, final = _scan(carry, write, initial_state, table, heads)
    u = torch.baddbmm(u0, w, incoming, alpha=-1)
    out = torch.baddbmm(torch.bmm(q_in, incoming), reads, u)
    return _Collect.apply(out.view(-1, value), table).view(v.shape), final


def _scan(
    carry: torch.Tensor,
    write: torch.Tensor,
    initial_state: torch.Tensor | None,
    table: ChunkTable,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State entering every chunk ``[chunks * H, K, V]`` and the final states ``[N, H, K, V]``."""
    count = len(table.order)
    width, value = write.shape[-2:]
    if initial_state is None:
        state = write.new_zeros(count * heads, width, value)
    else:
        state = initial_state.to(write.dtype).index_select(0, table.order).flatten(0, 1)
    sizes = [n * heads for n in table.active]
    incoming, finals = [], []
    for a, b in zip(carry.split(sizes), write.split(sizes), strict=True):
        if len(state) > len(a):
            state, done = state.split([len(a), len(state) - len(a)])
            finals.append(done)
        incoming.append(state)
        state = torch.baddbmm(b, a, state)
    final = torch.cat([state, *reversed(finals)]).view(count, heads, width, value)
    entering = torch.cat(incoming) if incoming else state[:0]
    return entering, final.index_select(0, table.inverse)
