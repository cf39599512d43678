"""`replay_kda` on the GPU: the passes of `forward` over tables that are made on the device.

How far each sequence has come is known on the device alone, so that a CUDA graph can hold a step.
Every sequence therefore has a room of rows that depends only on the number of its new tokens: one
that holds them after the longest partial chunk there can be. A chunk of a room that is not reached
has no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from . import segments
from .forward import prepare_chunks, scan, workspace
from .replay import ReplayState
from .tables import Options, Prepared, kept_for_graphs

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Rooms:
    """Rooms of the sequences, one after the other, in tokens; all int64 on the device.

    ``start`` [N] of the rooms and ``added`` [N], their new tokens; ``row`` [T] and ``place`` [T]:
    sequence of a new token, and its row if nothing came before; ``chunks`` [count, 2]: sequence of
    a chunk, and its first row from the start of the room. ``last`` [N]: the last chunk in a room,
    counted like that. ``most``: new tokens of a sequence at most.
    """

    start: Tensor
    added: Tensor
    row: Tensor
    place: Tensor
    chunks: Tensor
    last: Tensor
    most: int

    @property
    def single(self) -> bool:
        """Whether every room is one chunk: at most one new token."""
        return self.most <= 1


def rooms(bounds: tuple[int, ...], size: int, device: torch.device) -> Rooms:
    """The rooms for the new tokens between ``bounds``."""
    return kept_for_graphs(_rooms(bounds, size, device), device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _rooms(bounds: tuple[int, ...], size: int, device: torch.device) -> Rooms:
    edges = torch.tensor(bounds)
    added = edges.diff()
    number = torch.arange(len(added))
    counts = (added + 2 * size - 2) // size
    first = counts.cumsum(0) - counts
    row = torch.repeat_interleave(number, added)
    place = (first * size - edges[:-1])[row] + torch.arange(bounds[-1])
    owner = torch.repeat_interleave(number, counts)
    offset = (torch.arange(len(owner)) - first[owner]) * size
    chunks = torch.stack([owner, offset], 1)
    found = (first * size, added, row, place, chunks, (counts - 1) * size)
    return Rooms(*(x.to(device) for x in found), most=int(added.max()))


def replay_chunks(
    inputs: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, Tensor | None],
    state: ReplayState,
    options: Options,
) -> Tensor:
    """Outputs ``[T, H, V]`` of packed ``inputs`` ``[T, H, .]``, T > 0."""
    size = options.size
    room = rooms(options.bounds, size, inputs[2].device)
    filled = state.lengths % size
    total = filled + room.added
    at = room.place + filled[room.row]
    held = [x.flatten(0, 1) for x in state.rows]
    if room.single:
        rows = held
    else:
        cached = _lines(room.start, size)
        rows = [
            x.new_empty(len(room.chunks) * size, *x.shape[1:]).index_copy_(0, cached, x)
            for x in held
        ]
    for given, x in zip(rows, inputs, strict=True):
        given.index_copy_(0, at, x)
    q, k, v, g, beta = rows
    owner, offset = room.chunks.unbind(1)
    left = (total[owner] - offset).clamp(0, size)
    table = torch.stack([room.start[owner] + offset, left], 1).int()
    prepared = workspace(q, len(table), size)
    a_log, dt_bias = (None if x is None else x.contiguous() for x in parameters)
    given = (q, k, v, g, beta)
    prepare_chunks(given, (a_log, dt_bias), options, prepared, table, range(len(table)))
    out = v.new_empty(v.shape)
    whole = total // size * size
    if room.single:
        _advance(prepared, v, out, state, room, (total, whole))
    else:
        _advance(prepared, v, out, state, room, (whole, whole))
        rest = _sequences(room, whole, total, size)
        scan(prepared, v, (out, None, None), rest, state.boundary, None)
        tail = _lines(room.start + torch.minimum(whole, room.last), size)
        for kept, x in zip(held, rows, strict=True):
            torch.index_select(x, 0, tail, out=kept)
    state.lengths.add_(room.added)
    return out.index_select(0, at)


def _advance(
    prepared: Prepared,
    v: Tensor,
    out: Tensor,
    state: ReplayState,
    room: Rooms,
    ends: tuple[Tensor, Tensor],
) -> None:
    """State passes from the boundary, to ``out`` up to the first of ``ends`` [N] and to the state
    up to the second, a boundary; where a stretch ends, the next one starts."""
    size, stop = state.size, ends[0]
    kept = (out, None, None)
    if state.stretch is None:
        table = _sequences(room, torch.zeros_like(stop), stop, size)
        scan(prepared, v, kept, table, state.boundary, state.boundary, whole=True)
        return
    entering, maps, driven = state.stretch
    span = segments.SPLIT_TOKENS
    cut = span - (state.lengths - state.lengths % size) % span
    reach = (room.most + size - 1) // size * size
    begin = torch.zeros_like(stop)
    for _ in range(1 + -(-(reach - size) // span)):
        end, full = (torch.minimum(x, cut) for x in ends)
        table = _sequences(room, begin, end, size)
        scan(prepared, v, kept, table, state.boundary, state.boundary, whole=True)
        table = _sequences(room, begin, full, size)
        scan(prepared, v, None, table, maps, maps, driven=False, whole=True)
        scan(prepared, v, None, table, driven, driven, whole=True)
        reached = (full == cut) & (begin < full)
        segments.chain_where(reached, state.boundary, entering, maps, driven)
        begin, cut = end, cut + span


def _sequences(room: Rooms, begin: Tensor, end: Tensor, size: int) -> Tensor:
    """The table (as in `tables.Tables`) of the tokens from ``begin`` to ``end`` of each room."""
    start = room.start + begin
    number = torch.arange(len(start), device=start.device)
    return torch.stack([number, start // size, start, end - begin], 1).int()


def _lines(starts: Tensor, size: int) -> Tensor:
    """``size`` numbers from each of ``starts``."""
    return (starts[:, None] + torch.arange(size, device=starts.device)).flatten()
