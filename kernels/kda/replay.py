"""Decoding that repeats the chunked form: the current chunk is computed again for each new token.

What is carried is the state at the last boundary between chunks, counted from the sequence's own
start, and the inputs since then. The recurrence rounds otherwise than the chunks that a policy is
trained with; here both do the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ..device import on_device_of, takes_kernels
from ..precision import as_given
from .chunk import CHUNK, chunk_kda_torch
from .naive import check_inputs, prepare, query_scale, sequence_bounds

NAMES = ("q", "k", "v", "g", "beta")

Tensor = torch.Tensor


@dataclass(slots=True)
class ReplayState:
    """What `replay_kda` remembers of N sequences, all of it changed in place.

    ``boundary`` fp32 or wider [N, H, K, V]: the state where the current chunk starts. ``rows``: q,
    k, v, g and beta ``[N, size, H, .]`` of the tokens since then. ``lengths`` int64 [N] counts all
    tokens. ``stretch`` where the kernels cut long sequences (`segments`): the state that entered
    the current stretch, its map [N, H, K, K], transposed, and what it drives from a zero state, up
    to the boundary.
    """

    boundary: Tensor
    lengths: Tensor
    rows: tuple[Tensor, ...]
    stretch: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def start(
        cls,
        initial: Tensor,
        *,
        dtype: torch.dtype | None = None,
        lower_bound: float | None = -5.0,
    ) -> ReplayState:
        """The state before any token, from ``initial [N, H, K, V]``, which is not changed; for
        inputs of ``dtype`` on its device, with the ``lower_bound`` of the gate."""
        if initial.dim() != 4:
            raise ValueError(f"initial must be [N, H, K, V], got shape {tuple(initial.shape)}")
        count, heads, width, values = initial.shape
        wide = torch.float64 if initial.dtype == torch.float64 else torch.float32
        boundary = initial.to(wide, copy=True, memory_format=torch.contiguous_format)
        size, few = CHUNK, False
        if lower_bound and takes_kernels(initial.new_empty(0, dtype=dtype)):
            from .fused import check_heads
            from .segments import MOST_HEADS
            from .tables import chunk_size

            check_heads(width, values)
            size, few = chunk_size(lower_bound), heads <= MOST_HEADS

        def room(*shape: int) -> Tensor:
            return initial.new_zeros(count, size, heads, *shape, dtype=dtype)

        rows = (room(width), room(width), room(values), room(width), room())
        stretch = None
        if few:
            maps = torch.eye(width, device=initial.device).repeat(count, heads, 1, 1)
            stretch = (boundary.clone(), maps, torch.zeros_like(boundary))
        lengths = torch.zeros(count, dtype=torch.long, device=initial.device)
        return cls(boundary, lengths, rows, stretch)

    @property
    def size(self) -> int:
        """Tokens a chunk."""
        return self.rows[0].shape[1]

    def tensors(self) -> list[Tensor]:
        return [self.boundary, self.lengths, *self.rows, *(self.stretch or ())]

    def _like(self, tensors: Sequence[Tensor]) -> ReplayState:
        boundary, lengths, *rest = tensors
        rows, stretch = tuple(rest[: len(NAMES)]), rest[len(NAMES) :]
        return ReplayState(boundary, lengths, rows, (*stretch,) if stretch else None)  # type: ignore[arg-type]

    def select(self, index: Tensor) -> ReplayState:
        """A copy of the rows ``index`` [M]; repeated rows fork a sequence."""
        return self._like([x.index_select(0, index) for x in self.tensors()])

    def put(self, index: Tensor, other: ReplayState) -> None:
        """Overwrite the rows ``index`` with those of ``other``."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.index_copy_(0, index, theirs)

    @staticmethod
    def cat(parts: Sequence[ReplayState]) -> ReplayState:
        """The rows of several states, in order."""
        columns = zip(*(p.tensors() for p in parts), strict=True)
        return parts[0]._like([torch.cat(column) for column in columns])


@torch.no_grad()
def replay_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: ReplayState,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    lower_bound: float | None = -5.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Outputs ``[B, T, H, V]`` of the next tokens of N sequences; updates ``state`` in place.

    Inputs as for `chunk_kda`: T tokens for each of B = N sequences, or one row with ``cu_seqlens
    [N + 1]``, where some may have none. Where `chunk_kda` runs in kernels of ours, every output has
    the bits that it has in one pass over the whole sequence from the initial state, whatever the
    pieces and the batch; elsewhere the torch form runs, and they are equal up to rounding. For
    inference: no gradient flows. In kernels nothing waits for the device, and a CUDA graph may hold
    a call that has run before. ValueError names an argument that does not fit the others or the
    state.
    """
    check_inputs(q, k, v, g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound)
    batch, length, _, width = q.shape
    bounds = tuple(sequence_bounds(batch, length, cu_seqlens))
    inputs = (q, k, v, g, beta)
    _check_state(inputs, bounds, state, "q" if cu_seqlens is None else "cu_seqlens")
    if bounds[-1] == 0:
        return torch.empty_like(v)
    if lower_bound and takes_kernels(v):
        from .replay_chunks import replay_chunks
        from .tables import Options

        options = Options(
            bounds,
            query_scale(scale, width),
            float(lower_bound),
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
        )
        _check_size(state, options.size)
        parameters = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
        flat = tuple(x.flatten(0, 1) for x in inputs)
        with on_device_of(v):
            return replay_chunks(flat, parameters, state, options).view(v.shape)
    _check_size(state, CHUNK)
    lengths = state.lengths.tolist()
    filled = [length % state.size for length in lengths]
    pieces = [  # of each sequence: what its chunk holds already, then what is new
        [
            part
            for n, (start, end) in enumerate(pairwise(bounds))
            for part in (kept[n, : filled[n]], x.flatten(0, 1)[start:end])
        ]
        for kept, x in zip(state.rows, inputs, strict=True)
    ]
    packed = [torch.cat(parts)[None] for parts in pieces]
    wide = prepare(
        *packed,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        lower_bound=lower_bound,
    )
    bounded = use_gate_in_kernel and lower_bound is not None and lower_bound >= -5.0
    added = [end - start for start, end in pairwise(bounds)]
    with as_given(v):
        out = _replay_torch(wide, packed, filled, added, state, bounded)
    return out.view(v.shape).to(v.dtype)


def _replay_torch(
    wide: Sequence[Tensor],
    packed: Sequence[Tensor],
    filled: Sequence[int],
    added: Sequence[int],
    state: ReplayState,
    bounded: bool,
) -> Tensor:
    """Outputs ``[T, H, V]`` of the ``added`` tokens that follow the ``filled`` ones in ``packed``;
    ``wide`` is what `prepare` made of it, ``[1, tokens, H, .]`` both."""
    totals = [a + b for a, b in zip(filled, added, strict=True)]
    edges = [0, *accumulate(totals)]
    middles = [a + n // state.size * state.size for a, n in zip(edges, totals, strict=False)]
    out = torch.empty_like(wide[2][0])
    for starts, ends in ((edges[:-1], middles), (middles, edges[1:])):
        index, limits = _ranges(starts, ends, out.device)
        if len(index):
            rows = [x[0, index] for x in wide]
            q, k, v, g, beta = rows
            found = chunk_kda_torch(q, k, v, g, beta, state.boundary, limits, bounded)
            out[index] = found[0]
            if ends is middles:
                state.boundary.copy_(found[1])
    for kept, x in zip(state.rows, packed, strict=True):
        for n, (start, end) in enumerate(zip(middles, edges[1:], strict=True)):
            kept[n, : end - start] = x[0, start:end]
    state.lengths.add_(torch.tensor(added, device=state.lengths.device))
    first = [a + n for a, n in zip(edges, filled, strict=False)]
    return out[_ranges(first, edges[1:], out.device)[0]]


def _ranges(
    starts: Sequence[int], ends: Sequence[int], device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """The numbers of all ranges one after the other, and where each range begins among them."""
    spans = list(zip(starts, ends, strict=True))
    index = torch.cat([torch.arange(a, b, device=device) for a, b in spans])
    return index, (0, *accumulate(b - a for a, b in spans))


def _check_state(
    inputs: Sequence[Tensor], bounds: tuple[int, ...], state: ReplayState, source: str
) -> None:
    """ValueError names the argument that does not fit what the state holds."""
    count = len(state.lengths)
    if len(bounds) - 1 != count:
        raise ValueError(f"{source} has {len(bounds) - 1} sequences, the state holds {count}")
    for name, x, kept in zip(NAMES, inputs, state.rows, strict=True):
        if x.shape[2:] != kept.shape[2:]:
            shapes = f"{tuple(x.shape[2:])} a token, the state holds {tuple(kept.shape[2:])}"
            raise ValueError(f"{name} has shape {shapes}")
        if x.dtype != kept.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, the state holds {kept.dtype}")


def _check_size(state: ReplayState, size: int) -> None:
    if state.size != size:
        raise ValueError(
            f"state has chunks of {state.size} tokens, these inputs need {size}: start it on their "
            "device, with their dtype and lower_bound"
        )
