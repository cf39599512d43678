"""How several sequences lie in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ..kernels.device import upload

KEPT_TOKENS = 1 << 14  # packings up to this size, such as those of decode steps, are kept


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
    _groups: list[tuple[torch.Tensor, Packing]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

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
        return upload(torch.tensor(self.bounds[1:]), self.row.device) - 1

    def by_length(self) -> list[tuple[torch.Tensor, Packing]]:
        """Groups of sequences of similar length, as token indices and packings of their own.

        Padding inside a group is less than half of it, however lengths are mixed.
        """
        if not self._groups:
            self._groups.extend(_by_length(self.bounds, self.row.device))
        return self._groups

    def _padded(self) -> torch.Tensor:
        return self.row * self.longest + self.offset

    @staticmethod
    def of(bounds: tuple[int, ...], device: torch.device) -> Packing:
        """The packing of sequences that start and end at ``bounds``; none may be empty."""
        # A packing lives as long as the forward that it is passed through: those of training
        # batches never come again, and would only hold memory of the device.
        small = not bounds or bounds[-1] <= KEPT_TOKENS
        return _kept(bounds, device) if small else _packing(bounds, device)


# What is kept may first be needed in inference mode, and later in training.
@torch.inference_mode(False)
def _packing(bounds: tuple[int, ...], device: torch.device) -> Packing:
    edges = torch.tensor(bounds)
    lengths = edges[1:] - edges[:-1]
    if len(lengths) == 0 or bounds[0] != 0 or int(lengths.min()) < 1:
        raise ValueError(f"cu_seqlens must start at 0 and rise, got {list(bounds[:8])}")
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offset = torch.arange(bounds[-1]) - edges[:-1][row]
    return Packing(
        bounds,
        upload(row, device),
        upload(offset, device),
        int(lengths.max()),
        bool((lengths == lengths[0]).all()),
    )


_kept = lru_cache(maxsize=32)(_packing)


@torch.inference_mode(False)
def _by_length(bounds: tuple[int, ...], device: torch.device) -> list[tuple[torch.Tensor, Packing]]:
    edges = torch.tensor(bounds)
    order = torch.argsort(edges.diff(), descending=True, stable=True).tolist()
    groups: list[list[int]] = []
    for n in order:
        length = bounds[n + 1] - bounds[n]
        if not groups or 2 * length <= bounds[groups[-1][0] + 1] - bounds[groups[-1][0]]:
            groups.append([])
        groups[-1].append(n)
    made: list[tuple[torch.Tensor, Packing]] = []
    for group in groups:
        tokens = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in group])
        lengths = torch.tensor([0, *(bounds[n + 1] - bounds[n] for n in group)])
        made.append((upload(tokens, device), _packing(tuple(lengths.cumsum(0).tolist()), device)))
    return made
