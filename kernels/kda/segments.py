"""Long sequences of few heads, cut along time through the affine map of the state.

Over a stretch of tokens the state changes from S to A S + B. A is what the state pass makes of the
identity without values, B what it makes of a zero state: both for all stretches at once. Then the
states at the cuts follow one from another in a few small products, and the stretches run side by
side. Backward, dS before a stretch is A^T dS + B' in the same way. The cuts lie at fixed distances
from the sequence's start, whatever follows and whatever it is packed with: neither changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from ..device import launch
from .triton_chain import chain_kernel, restart_kernel

SPLIT_TOKENS = 32768  # counted from the sequence's own start
MOST_HEADS = 16
CHAIN_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of packed sequences, numbered in order.

    ``sequences`` [S, 4] and ``split`` (only the stretches of sequences that are cut) are tables as
    in `tables.Tables`; ``lines`` are the numbers of each sequence's stretches.
    """

    sequences: torch.Tensor
    split: torch.Tensor
    lines: tuple[range, ...]

    def entering(
        self, maps: torch.Tensor, driven: torch.Tensor, initial: torch.Tensor | None
    ) -> torch.Tensor:
        """States ``[S, H, K, V]`` at the start of the stretches; ``initial [N, H, K, V]``."""
        states = torch.zeros_like(driven)
        for row, line in enumerate(self.lines):
            if initial is not None:
                states[line.start] = initial[row]
            for number in line[:-1]:
                states[number + 1] = chained(maps[number], states[number], driven[number])
        return states

    def leaving(
        self, maps: torch.Tensor, driven: torch.Tensor, d_final: torch.Tensor | None
    ) -> torch.Tensor:
        """State gradients ``[S, H, K, V]`` at the stretches' ends; ``d_final [N, H, K, V]``."""
        grads = torch.zeros_like(driven)
        for row, line in enumerate(self.lines):
            if d_final is not None:
                grads[line[-1]] = d_final[row]
            for number in reversed(line[1:]):
                before = maps[number].transpose(1, 2)
                grads[number - 1] = chained(before, grads[number], driven[number])
        return grads


def chained(step: torch.Tensor, state: torch.Tensor, driven: torch.Tensor) -> torch.Tensor:
    """step state + driven ``[H, K, V]``, in fp64; ``step [H, K, K]`` may be transposed."""
    out = torch.empty_like(state)
    launch_chain(step, state, driven, out, None)
    return out


def chain_where(
    wanted: torch.Tensor,
    state: torch.Tensor,
    entering: torch.Tensor,
    maps: torch.Tensor,
    driven: torch.Tensor,
) -> None:
    """Start the next stretch of the sequences that are ``wanted`` [N], all in place.

    ``entering, driven [N, H, K, V]`` and ``maps [N, H, K, K]`` of the stretch that ends give
    ``state [N, H, K, V]``, and become those of an empty stretch that follows.
    """
    launch_chain(maps, entering, driven, state, wanted)
    count, heads, width, values = state.shape
    rows = min(width, CHAIN_BLOCK)
    launch(restart_kernel)[(count * heads, width // rows)](
        *(state, entering, maps, driven, wanted, heads), K=width, V=values, ROWS=rows
    )


def launch_chain(
    step: torch.Tensor,
    state: torch.Tensor,
    driven: torch.Tensor,
    out: torch.Tensor,
    wanted: torch.Tensor | None,
) -> None:
    """`triton_chain.chain_kernel` over all leading dimensions, the last of which is heads."""
    width, values = state.shape[-2:]
    rows, columns = min(width, CHAIN_BLOCK), min(values, CHAIN_BLOCK)
    lines = state.shape[:-2].numel()
    launch(chain_kernel)[(lines, width // rows, values // columns)](
        *(step, state, driven, out, wanted, state.shape[-3]),
        *step.stride()[-2:],
        K=width,
        V=values,
        ROWS=rows,
        COLUMNS=columns,
        SOME=wanted is not None,
    )


def segments(
    bounds: tuple[int, ...], heads: int, size: int, device: torch.device
) -> Segments | None:
    """How to cut the sequences between ``bounds``; None where none is long enough."""
    longest = max(end - start for start, end in pairwise(bounds))
    if heads > MOST_HEADS or longest <= SPLIT_TOKENS:
        return None
    return _segments(bounds, size, SPLIT_TOKENS, device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _segments(bounds: tuple[int, ...], size: int, span: int, device: torch.device) -> Segments:
    rows: list[tuple[int, int, int, int]] = []
    split: list[tuple[int, int, int, int]] = []
    lines: list[range] = []
    chunk = 0
    for start, end in pairwise(bounds):
        length = end - start
        here = [
            (len(rows) + i, chunk + cut // size, start + cut, min(span, length - cut))
            for i, cut in enumerate(range(0, max(length, 1), span))
        ]
        lines.append(range(len(rows), len(rows) + len(here)))
        rows += here
        split += here if len(here) > 1 else []
        chunk += -(-length // size)
    rows.sort(key=lambda row: -row[3])

    def table(found: list[tuple[int, int, int, int]]) -> torch.Tensor:
        return torch.tensor(found, dtype=torch.int32).to(device)

    return Segments(table(rows), table(split), tuple(lines))
