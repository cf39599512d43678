"""What the passes of chunked KDA on the GPU share: where chunks lie, options, workspaces."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import upload

T = TypeVar("T")

# Tokens that a piece of a sequence has to have, so that it is worth its launches.
FIRST_PIECE, LAST_PIECE = 3072, 1280


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the chunks of packed sequences lie, on the device.

    ``chunks`` [count, 2]: first token, tokens. ``sequences`` [N, 4]: number, first chunk, first
    token, tokens; longest first, so that the last programs to run are short.
    """

    chunks: torch.Tensor
    sequences: torch.Tensor


_captured: list[object] = []  # a CUDA graph reads its tables as long as it lives


def kept_for_graphs(found: T, device: torch.device) -> T:
    """``found`` itself, kept for good if a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(found)
    return found


def tables(bounds: tuple[int, ...], size: int, device: torch.device) -> Tables:
    """The tables for chunks of ``size`` tokens of sequences that start and end at ``bounds``."""
    return kept_for_graphs(_tables(bounds, size, device), device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _tables(bounds: tuple[int, ...], size: int, device: torch.device) -> Tables:
    edges = torch.tensor(bounds, dtype=torch.int64)
    lengths = edges.diff()
    counts = (lengths + size - 1) // size
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    offset = (torch.arange(int(first[-1])) - first[row]) * size
    chunks = torch.stack([edges[row] + offset, (lengths[row] - offset).clamp(max=size)], 1)
    order = torch.argsort(counts, descending=True, stable=True)
    sequences = torch.stack([order, first[order], edges[order], lengths[order]], 1)
    return Tables(upload(chunks.int(), device), upload(sequences.int(), device))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some chunks of a single sequence; ``sequences`` [1, 4] as in `Tables`, of these alone."""

    chunks: range
    sequences: torch.Tensor


def piece_edges(bounds: tuple[int, ...], size: int, fall: float, most: int) -> list[int]:
    """Chunks at the edges of as many pieces of the only sequence between ``bounds`` as are long
    enough, at most ``most`` of them, each ``fall``, at most 1, times as long as the one before."""
    start, end = bounds
    shares = [1.0]
    for parts in range(2, most + 1):
        found = [fall**part for part in range(parts)]
        tokens = (end - start) / sum(found)
        if tokens < FIRST_PIECE or tokens * found[-1] < LAST_PIECE:
            break
        shares = [x / sum(found) for x in found]
    count = -(-(end - start) // size)
    return [0, *(round(count * x) for x in itertools.accumulate(shares))]


def pieces(
    bounds: tuple[int, ...], size: int, fall: float, most: int, device: torch.device
) -> list[Piece]:
    """The only sequence between ``bounds``, in the pieces of `piece_edges`."""
    return kept_for_graphs(_pieces(bounds, size, fall, most, device), device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _pieces(
    bounds: tuple[int, ...], size: int, fall: float, most: int, device: torch.device
) -> list[Piece]:
    start, end = bounds
    found: list[Piece] = []
    for first, after in itertools.pairwise(piece_edges(bounds, size, fall, most)):
        begin, stop = start + first * size, min(start + after * size, end)
        row = torch.tensor([[0, first, begin, stop - begin]], dtype=torch.int32)
        found.append(Piece(range(first, after), upload(row, device)))
    return found


def chunk_size(bound: float) -> int:
    """Tokens a chunk: the most whose whole decay spans less than 2^234 at the bound, which leaves
    bf16 its full precision for the factors at either end."""
    return 32 if bound >= -5.05 else 16


@dataclass(frozen=True, slots=True)
class Options:
    """What does not change within one call."""

    bounds: tuple[int, ...]
    scale: float
    bound: float
    norm: bool
    gate: bool
    sigmoid: bool

    @property
    def size(self) -> int:
        """Tokens a chunk."""
        return chunk_size(self.bound)

    @property
    def anchor(self) -> int:
        """Half of that span, rounded up, in powers of two."""
        return math.ceil(-self.bound * self.size / math.log(2) / 2)


def blocks(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """All leading dimensions of ``x`` as one, read in blocks of ``rows`` by ``columns``."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, columns])


class Prepared(NamedTuple):
    """Output of the first pass, ``[H, chunks, ...]`` each."""

    kt: torch.Tensor
    qt: torch.Tensor
    kh: torch.Tensor
    inv: torch.Tensor
    att: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor

    def descriptors(self) -> list[TensorDescriptor]:
        """The five matrices as blocks of one chunk."""
        matrices = (self.kt, self.qt, self.kh, self.inv, self.att)
        return [blocks(x, x.shape[2], x.shape[3]) for x in matrices]
