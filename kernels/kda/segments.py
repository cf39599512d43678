"""Long sequences of few heads, cut along time through the affine map of the state.

Over a stretch of tokens the state changes from S to A S + B. A is what the state pass makes of the
identity without values, B what it makes of a zero state: both for all stretches at once. Then the
states at the cuts follow one from another in a few small products, and the stretches run side by
side. Backward, dS before a stretch is A^T dS + B' in the same way. The cuts lie at fixed distances
from the sequence's start, whatever follows and whatever it is packed with: neither changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from ..device import launch, upload
from .tables import kept_for_graphs
from .triton_chain import chain_kernel, restart_kernel, walk_kernel

SPLIT_TOKENS = 32768  # counted from the sequence's own start
MOST_HEADS = 16
CHAIN_BLOCK = 32
WALK_COLUMNS = 8  # a program; with them eight heads fill a GPU
WALK_ROWS = 32  # of a map, read ahead of their use


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of packed sequences, numbered in order; tables on the device.

    ``sequences`` [S, 4] and ``split`` (only the stretches of sequences that are cut) are as in
    `tables.Tables`; of ``split``, a cut follows those in ``before`` and precedes those in
    ``after``. ``first`` and ``last`` [N] are the numbers of each sequence's stretches at its ends,
    ``walks`` [M, 2] those of sequences that are cut.
    """

    sequences: torch.Tensor
    split: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    walks: torch.Tensor

    def entering(
        self, maps: torch.Tensor, driven: torch.Tensor, initial: torch.Tensor | None
    ) -> torch.Tensor:
        """States ``[S, H, K, V]`` at the start of the stretches; ``maps [S, H, K, K]`` are held
        transposed, ``initial [N, H, K, V]``. Of maps and driven states, those ``before`` cuts."""
        states = torch.zeros_like(driven)
        if initial is not None:
            states.index_copy_(0, self.first, initial)
        walk(maps, driven, states, self.walks, backward=False)
        return states

    def leaving(
        self, maps: torch.Tensor, driven: torch.Tensor, d_final: torch.Tensor | None
    ) -> torch.Tensor:
        """State gradients ``[S, H, K, V]`` at the stretches' ends; ``d_final [N, H, K, V]``. Of
        maps and driven gradients, those ``after`` cuts."""
        grads = torch.zeros_like(driven)
        if d_final is not None:
            grads.index_copy_(0, self.last, d_final)
        walk(maps.mT.contiguous(), driven, grads, self.walks, backward=True)
        return grads


def walk(
    steps: torch.Tensor,
    driven: torch.Tensor,
    states: torch.Tensor,
    walks: torch.Tensor,
    *,
    backward: bool,
) -> None:
    """`triton_chain.walk_kernel` along ``states [S, H, K, V]``, with ``driven`` of that shape and
    ``steps [S, H, K, K]``."""
    heads, width, values = states.shape[1:]
    columns = min(values, WALK_COLUMNS)
    grid = (len(walks) * heads, values // columns)
    held = driven.new_empty(*grid, 2, width, columns, dtype=torch.float64)
    launch(walk_kernel)[grid](
        *(steps, driven, states, held, walks, heads),
        K=width,
        V=values,
        COLUMNS=columns,
        ROWS=min(width, WALK_ROWS),
        BACKWARD=backward,
        num_warps=8,
    )


def chain_where(
    wanted: torch.Tensor,
    state: torch.Tensor,
    entering: torch.Tensor,
    maps: torch.Tensor,
    driven: torch.Tensor,
) -> None:
    """Start the next stretch of the sequences that are ``wanted`` [N], all in place.

    ``entering, driven [N, H, K, V]`` and ``maps [N, H, K, K]``, transposed, of the stretch that
    ends give ``state [N, H, K, V]``, and become those of an empty stretch that follows.
    """
    count, heads, width, values = state.shape
    rows, columns = min(width, CHAIN_BLOCK), min(values, CHAIN_BLOCK)
    launch(chain_kernel)[(count * heads, width // rows, values // columns)](
        *(maps, entering, driven, state, wanted, heads),
        K=width,
        V=values,
        ROWS=rows,
        COLUMNS=columns,
    )
    launch(restart_kernel)[(count * heads, width // rows)](
        *(state, entering, maps, driven, wanted, heads), K=width, V=values, ROWS=rows
    )


def segments(
    bounds: tuple[int, ...], heads: int, size: int, device: torch.device
) -> Segments | None:
    """How to cut the sequences between ``bounds``; None where none is long enough."""
    longest = max(end - start for start, end in pairwise(bounds))
    if heads > MOST_HEADS or longest <= SPLIT_TOKENS:
        return None
    return kept_for_graphs(_segments(bounds, size, SPLIT_TOKENS, device), device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _segments(bounds: tuple[int, ...], size: int, span: int, device: torch.device) -> Segments:
    rows: list[tuple[int, int, int, int]] = []
    before: list[tuple[int, int, int, int]] = []
    after: list[tuple[int, int, int, int]] = []
    split: list[tuple[int, int, int, int]] = []
    edges: list[tuple[int, int]] = []
    chunk = 0
    for start, end in pairwise(bounds):
        length = end - start
        here = [
            (len(rows) + i, chunk + cut // size, start + cut, min(span, length - cut))
            for i, cut in enumerate(range(0, max(length, 1), span))
        ]
        edges.append((here[0][0], here[-1][0]))
        rows += here
        before += here[:-1]
        after += here[1:]
        split += here if len(here) > 1 else []
        chunk += -(-length // size)
    rows.sort(key=lambda row: -row[3])

    def table(found: Sequence[Sequence[int]]) -> torch.Tensor:
        return upload(torch.tensor(found, dtype=torch.int32), device)

    first, last = upload(torch.tensor(edges).T.contiguous(), device)
    walks = table([edge for edge in edges if edge[0] < edge[1]])
    return Segments(table(rows), table(split), table(before), table(after), first, last, walks)
