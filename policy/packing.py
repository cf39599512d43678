"""How several sequences lie in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences at ``bounds`` of a flattened token row.

    ``row`` [T] and ``offset`` [T] give each token's sequence and its position in the piece.
    """

    bounds: tuple[int, ...]
    row: torch.Tensor
    offset: torch.Tensor
    longest: int
    uniform: bool

    @property
    def num_sequences(self) -> int:
        return len(self.bounds) - 1

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, ...]`` -> ``[N, longest, ...]``, zeros behind the shorter sequences."""
        shape = (self.num_sequences, self.longest, *x.shape[1:])
        if self.uniform:
            return x.view(shape)
        flat = x.new_zeros(self.num_sequences * self.longest, *x.shape[1:])
        return flat.index_copy(0, self._padded(), x).view(shape)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Inverse of `pad`: ``[N, longest, ...]`` -> ``[T, ...]``."""
        flat = x.flatten(0, 1)
        return flat if self.uniform else flat.index_select(0, self._padded())

    def last(self) -> torch.Tensor:
        """Index of each sequence's last token, [N]."""
        return torch.tensor(self.bounds[1:], device=self.row.device) - 1

    def _padded(self) -> torch.Tensor:
        return self.row * self.longest + self.offset

    @staticmethod
    def of(bounds: tuple[int, ...], device: torch.device) -> Packing:
        """The packing of sequences that start and end at ``bounds``; none may be empty."""
        return _packing(bounds, device)


@lru_cache(maxsize=32)
def _packing(bounds: tuple[int, ...], device: torch.device) -> Packing:
    edges = torch.tensor(bounds)
    lengths = edges[1:] - edges[:-1]
    if len(lengths) == 0 or bounds[0] != 0 or int(lengths.min()) < 1:
        raise ValueError(f"cu_seqlens must start at 0 and rise, got {list(bounds[:8])}")
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offset = torch.arange(bounds[-1]) - edges[:-1][row]
    return Packing(
        bounds,
        row.to(device),
        offset.to(device),
        int(lengths.max()),
        bool((lengths == lengths[0]).all()),
    )
