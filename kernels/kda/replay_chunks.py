"""`replay_kda` on the GPU: the passes of `forward` over tables that are made on the device.

How far each sequence has come is known on the device alone, so that a CUDA graph can hold a step.
A step computes one chunk of each sequence, in the rows that the state keeps. For other numbers of
new tokens a sequence has a room of rows that holds them after the longest partial chunk there can
be; a chunk of it that they do not reach has no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..device import launch
from . import segments
from .forward import prepare_chunks, scan, workspace
from .fused import check_decay
from .replay import ReplayState
from .tables import Options, Prepared, kept_for_graphs
from .triton_replay import enter_kernel

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
    a_log, dt_bias = (None if x is None else x.contiguous() for x in parameters)
    check_decay(inputs[3], options)
    each = options.bounds == tuple(range(len(state.lengths) + 1))
    return (_step if each else _pieces)(inputs, (a_log, dt_bias), state, options)


def _step(
    inputs: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, Tensor | None],
    state: ReplayState,
    options: Options,
) -> Tensor:
    """`replay_chunks` of one token a sequence, where it lies in the state's own rows."""
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:4]] + [inputs[4]]
    count, heads, width = given[0].shape
    size, values = options.size, given[2].shape[2]
    shapes = ((count, 2), (count, 4), (count, 4), (count,), (count,))
    chunks, sequences, ends, reached, places = (
        state.lengths.new_empty(shape, dtype=torch.int32) for shape in shapes
    )
    launch(enter_kernel)[(count, heads)](
        *(*given, *state.rows, state.lengths),
        *(chunks, sequences, ends, reached, places),
        *(segments.SPLIT_TOKENS, heads),
        *(x.stride(0) for x in given),
        *(x.stride(1) for x in given),
        K=width,
        V=values,
        C=size,
        num_warps=1,
    )
    q, k, v, g, beta = (x.flatten(0, 1) for x in state.rows)
    prepared = workspace(q, count, size)
    prepare_chunks((q, k, v, g, beta), parameters, options, prepared, chunks, range(count))
    out = torch.empty_like(v)
    _advance(prepared, v, out, state, (sequences, ends), reached)
    state.lengths.add_(1)
    return out.index_select(0, places)


def _pieces(
    inputs: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, Tensor | None],
    state: ReplayState,
    options: Options,
) -> Tensor:
    """`replay_chunks` of any numbers of tokens."""
    size, span = options.size, segments.SPLIT_TOKENS
    room = rooms(options.bounds, size, inputs[2].device)
    filled = state.lengths % size
    total = filled + room.added
    at = room.place + filled[room.row]
    held = [x.flatten(0, 1) for x in state.rows]
    cached = _lines(room.start, size)
    rows = [x.new_empty(len(room.chunks) * size, *x.shape[1:]) for x in held]
    for space, before, x in zip(rows, held, inputs, strict=True):
        space.index_copy_(0, cached, before).index_copy_(0, at, x)
    q, k, v, g, beta = rows
    owner, offset = room.chunks.unbind(1)
    left = (total[owner] - offset).clamp(0, size)
    chunks = torch.stack([room.start[owner] + offset, left], 1).int()
    prepared = workspace(q, len(chunks), size)
    prepare_chunks((q, k, v, g, beta), parameters, options, prepared, chunks, range(len(chunks)))
    out = torch.empty_like(v)
    whole = total // size * size
    begin = torch.zeros_like(whole)
    cut = span - (state.lengths - filled) % span
    reach = (room.most + size - 1) // size * size
    for _ in range(1 if state.stretch is None else 1 + -(-(reach - size) // span)):
        end = whole if state.stretch is None else torch.minimum(whole, cut)
        table = _sequences(room, begin, end, size)
        _advance(prepared, v, out, state, (table, table), (end == cut) & (begin < end))
        begin, cut = end, cut + span
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
    tables: tuple[Tensor, Tensor],
    reached: Tensor,
) -> None:
    """State passes from the boundary, to ``out`` over the first of ``tables`` and to the state over
    whole chunks, those of the second; the next stretch starts where one's end is ``reached``."""
    sequences, ends = tables
    kept = (out, None, None)
    scan(prepared, v, kept, sequences, state.boundary, state.boundary, whole=True)
    if state.stretch is not None:
        entering, maps, driven = state.stretch
        scan(prepared, v, None, ends, maps, maps, driven=False, whole=True)
        scan(prepared, v, None, ends, driven, driven, whole=True)
        segments.chain_where(reached, state.boundary, entering, maps, driven)


def _sequences(room: Rooms, begin: Tensor, end: Tensor, size: int) -> Tensor:
    """The table (as in `tables.Tables`) of the tokens from ``begin`` to ``end`` of each room."""
    start = room.start + begin
    number = torch.arange(len(start), device=start.device)
    return torch.stack([number, start // size, start, end - begin], 1).int()


def _lines(starts: Tensor, size: int) -> Tensor:
    """``size`` numbers from each of ``starts``."""
    return (starts[:, None] + torch.arange(size, device=starts.device)).flatten()
