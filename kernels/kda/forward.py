"""The forward passes of chunked KDA on the GPU.

The second pass of one sequence walks over its chunks in turn and leaves part of the GPU idle. It is
cut into pieces: the first pass of a piece runs beside the second pass of the piece before. The
state goes from piece to piece in fp32, as it does from chunk to chunk, so that the pieces change no
bit of the result. The pieces follow from how long either pass takes, on the SMs that it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from ..device import is_hopper, launch, processors
from .descriptors import rows_of, shared, shared_blocks
from .gluon_prep import prep_hopper_kernel
from .gluon_scan import scan_hopper_kernel
from .gluon_stretch import stretch_hopper_kernel
from .segments import segments
from .tables import Options, Piece, Prepared, piece_edges, pieces, tables
from .triton_prep import prep_kernel
from .triton_scan import scan_kernel

PREP_PRECISION = "bf16x3"  # of the products of q and k: bf16 alone costs a third in accuracy
PREP_REGISTERS = 96  # five programs share an SM
VALUE_BLOCK = 64
# With so few registers a thread, a state pass and a first pass, or two state passes, share an SM.
SCAN_REGISTERS = 128
STRETCH_REGISTERS, MAP_REGISTERS = 168, 152  # one program an SM
STAGES, ALONE_STAGES = 3, 6  # chunks in shared memory
SHARED_PIECES, MOST_PIECES = 2, 8  # of a sequence, where both passes share SMs and where not
# So many chunks, each of one head, pass first passes on a whole GPU while a state pass takes one.
PACE = 39.0

Tensor = torch.Tensor
Blocks = dict[str, list[Any]]  # descriptors that the pieces of a sequence share


class Results(NamedTuple):
    """What the forward passes leave: outputs, final states [N, H, K, V], and for the backward
    passes U, the states entering chunks, and the maps of `segments`."""

    prepared: Prepared
    out: Tensor
    last: Tensor | None
    written: Tensor | None
    states: Tensor | None
    maps: Tensor | None


def forward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    initial: Tensor | None,
    final: bool,
    save: bool,
    options: Options,
) -> Results:
    """Both passes; ``inputs`` are ``q, k, v, g, beta``, ``parameters`` A_log and dt_bias."""
    q, _, v, _, _ = inputs
    placed = tables(options.bounds, options.size, v.device)
    prepared = workspace(q, len(placed.chunks), options.size)
    heads, count, size, width = prepared.kt.shape
    tokens, _, values = v.shape
    work = prepared.kt
    out = v.new_empty(tokens, heads, values)
    written = work.new_empty(heads, count, size, values) if save else None
    states = work.new_empty(heads, count, values, width) if save else None
    kept = (out, written, states)
    sequences = placed.sequences

    def edges(rows: int, columns: int = values) -> Tensor:
        return work.new_empty(rows, heads, width, columns, dtype=torch.float32)

    cut = segments(options.bounds, heads, size, v.device)
    maps = None
    if cut is not None:
        prepare_chunks(inputs, parameters, options, prepared, placed.chunks, range(count))
        rows = len(cut.sequences)
        maps, driven = edges(rows, width), edges(rows)
        # The backward pass starts from the other end, and needs the maps of these stretches too.
        stretch(prepared, v, cut.split if save else cut.before, maps, driven)
        ends = edges(rows) if final else None
        scan(prepared, v, kept, cut.sequences, cut.entering(maps, driven, initial), ends)
        last = None if ends is None else ends.index_select(0, cut.last)
    elif (parts := overlapping(options, heads, values, v.device)) is not None:
        last = edges(1) if final else None
        overlapped(inputs, parameters, options, prepared, placed.chunks, parts, kept, initial, last)
    else:
        prepare_chunks(inputs, parameters, options, prepared, placed.chunks, range(count))
        last = edges(len(sequences)) if final else None
        scan(prepared, v, kept, sequences, initial, last)
    return Results(prepared, out, last, written, states, maps if save else None)


def overlapped(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    options: Options,
    prepared: Prepared,
    table: Tensor,
    parts: list[Piece],
    kept: tuple[Tensor, Tensor | None, Tensor | None],
    initial: Tensor | None,
    last: Tensor | None,
) -> None:
    """Both passes over the only sequence, piece by piece on two streams."""
    v = inputs[2]
    heads, _, _, width = prepared.kt.shape
    ahead, behind = torch.cuda.current_stream(v.device), side_stream(v.device)
    carried = v.new_empty(len(parts) - 1, 1, heads, width, v.shape[2], dtype=torch.float32)
    edges = [initial, *carried, last]
    blocks: Blocks = {}
    for number, part in enumerate(parts):
        prepare_chunks(inputs, parameters, options, prepared, table, part.chunks, blocks)
        behind.wait_stream(ahead)
        with torch.cuda.stream(behind):
            passed = edges[number], edges[number + 1]
            scan(prepared, v, kept, part.sequences, *passed, blocks=blocks)
    ahead.wait_stream(behind)


def overlapping(
    options: Options, heads: int, values: int, device: torch.device
) -> list[Piece] | None:
    """Pieces of the only sequence whose passes overlap; None where there is nothing to gain.

    A state pass of few programs keeps their SMs for itself (`chunks_ahead`): the piece that comes
    next is as long as what the first pass has done by then on the others. Of more programs, it
    shares all SMs with the first pass, and pieces are two halves.
    """
    if not is_hopper(device) or len(options.bounds) != 2:
        return None
    programs = heads * (values // min(values, VALUE_BLOCK))
    fall, most = 1.0, SHARED_PIECES
    if chunks_ahead(programs, device) > STAGES:
        fall = min(1.0, PACE / heads * (1 - programs / processors(device)))
        most = MOST_PIECES
    if len(piece_edges(options.bounds, options.size, fall, most)) == 2:
        return None
    return pieces(options.bounds, options.size, fall, most, device)


def chunks_ahead(programs: int, device: torch.device) -> int:
    """Chunks that a state pass of so many programs copies ahead. With `STAGES` two share an SM; on
    half of the SMs or fewer each takes one, which hides more of what its copies wait for."""
    return ALONE_STAGES if 2 * programs <= processors(device) else STAGES


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where second passes run beside first passes, ahead of them."""
    return torch.cuda.Stream(device, priority=-1)


def workspace(q: Tensor, count: int, size: int) -> Prepared:
    """Room for what the first pass writes about ``count`` chunks of ``size`` tokens."""
    _, heads, width = q.shape
    work = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    return Prepared._make(
        (
            *q.new_empty(3, heads, count, size, width, dtype=work).unbind(),
            *q.new_empty(2, heads, count, size, size, dtype=work).unbind(),
            q.new_empty(heads, count, width, dtype=torch.float32),
            *q.new_empty(3, heads, count, size, dtype=torch.float32).unbind(),
        )
    )


def prepare_chunks(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    options: Options,
    out: Prepared,
    table: Tensor,
    chunks: range,
    blocks: Blocks | None = None,
) -> None:
    """First pass over some chunks of ``table`` [count, 2] (as in `tables.Tables`), into ``out``."""
    q, k, _, g, beta = inputs
    heads, count, size, width = out.kt.shape
    rows = (out.decay, out.beta, out.q_norm, out.k_norm)
    numbers = (options.scale, options.bound, chunks.start, count)
    constants = {
        "K": width,
        "C": size,
        "ANCHOR": options.anchor,
        "GATE": options.gate,
        "SIGMOID": options.sigmoid,
    }
    narrow = all(x.dtype == torch.bfloat16 for x in (q, k, g))
    if width == 128 and size == 32 and options.norm and is_hopper(q.device) and narrow:
        launch(prep_hopper_kernel)[(len(chunks) * heads,)](
            *once(blocks, "first", partial(prep_blocks, inputs, out)),
            beta,
            *parameters,
            table,
            *rows,
            *numbers,
            heads,
            *(x.stride(1) for x in (q, k, g)),
            *beta.stride(),
            **constants,
            num_warps=4,
            maxnreg=PREP_REGISTERS,
        )
        return
    wide = q.dtype == torch.float32
    launch(prep_kernel)[(len(chunks), heads)](
        q,
        k,
        g,
        beta,
        *parameters,
        table,
        *out,
        *numbers,
        *(x.stride(0) for x in (q, k, g, beta)),
        *(x.stride(1) for x in (q, k, g, beta)),
        PIECE=min(width, 64),
        NORM=options.norm,
        **constants,
        PRECISION="ieee" if wide else PREP_PRECISION,
        num_warps=2,
    )


def once(blocks: Blocks | None, name: str, make: Callable[[], list[Any]]) -> list[Any]:
    """``make()``, which ``blocks`` keep for the other pieces."""
    if blocks is None:
        return make()
    if name not in blocks:
        blocks[name] = make()
    return blocks[name]


def prep_blocks(inputs: tuple[Tensor, ...], out: Prepared) -> list[Any]:
    """What the first pass copies in blocks on Hopper."""
    q, k, _, g, _ = inputs
    _, _, size, width = out.kt.shape
    return [
        *(rows_of(x, size, width // 2) for x in (q, k, g)),
        *(shared(x.view(-1, width), size, width // 2) for x in (out.kt, out.qt, out.kh)),
        *(shared(x.view(-1, size), size, size) for x in (out.inv, out.att)),
    ]


def scan_blocks(prepared: Prepared, v: Tensor, states: Tensor | None, block: int) -> list[Any]:
    """What the second pass copies in blocks on Hopper."""
    width = prepared.kt.shape[3]
    entering = None if states is None else shared(states.view(-1, width), block, width)
    return [*shared_blocks(prepared), rows_of(v, prepared.kt.shape[2], block), entering]


def stretch(prepared: Prepared, v: Tensor, sequences: Tensor, maps: Tensor, driven: Tensor) -> None:
    """What becomes, over ``sequences`` [N, 4], of the identity without values, into ``maps [S, H,
    V, K]``, transposed, and of a zero state, into ``driven [S, H, K, V]``. None may be empty."""
    if not in_gluon(prepared, v):
        scan(prepared, v, None, sequences, None, maps, driven=False)
        scan(prepared, v, None, sequences, None, driven)
        return
    heads, count, size, width = prepared.kt.shape
    values = v.shape[2]
    launch(stretch_hopper_kernel)[(len(sequences) * heads * (values // VALUE_BLOCK),)](
        *shared_blocks(prepared),
        rows_of(v, size, VALUE_BLOCK),
        *(maps, driven, sequences, count, heads, v.stride(1)),
        K=width,
        V=values,
        BV=VALUE_BLOCK,
        C=size,
        STAGES=STAGES,
        MAP_REGISTERS=MAP_REGISTERS,
        num_warps=4,
        maxnreg=STRETCH_REGISTERS,
    )


def in_gluon(prepared: Prepared, v: Tensor) -> bool:
    """Whether the kernels for Hopper serve a state pass."""
    _, _, size, width = prepared.kt.shape
    narrow = v.dtype == torch.bfloat16
    return width == v.shape[2] == 128 and size == 32 and is_hopper(v.device) and narrow


def scan(
    prepared: Prepared,
    v: Tensor,
    kept: tuple[Tensor, Tensor | None, Tensor | None] | None,
    sequences: Tensor,
    initial: Tensor | None,
    last: Tensor | None,
    *,
    driven: bool = True,
    whole: bool = False,
    blocks: Blocks | None = None,
) -> None:
    """Second pass over ``sequences`` [N, 4], into ``kept`` (outputs; where they are wanted, U and
    the states entering chunks) and ``last`` (final states). Without ``driven`` all values are 0;
    ``initial`` and ``last`` are then maps, held transposed, ``[N, H, V, K]`` with as many values as
    ``last`` has. Without ``initial`` states begin as zero, maps as the identity. With ``whole``
    only sequences that end with a whole chunk have a final state, and ``last`` may be
    ``initial``."""
    out, written, states = kept or (None, None, None)
    heads, count, size, width = prepared.kt.shape
    values = v.shape[2] if driven or last is None else last.shape[3]
    block = min(values, VALUE_BLOCK)
    grid = (len(sequences) * heads, values // block)
    constants = {
        "K": width,
        "V": values,
        "BV": block,
        "C": size,
        "INITIAL": initial is not None,
        "FINAL": last is not None,
        "SAVE": states is not None,
        "DRIVEN": driven,
        "OUT": out is not None,
        "WHOLE": whole,
    }
    if in_gluon(prepared, v):
        launch(scan_hopper_kernel)[(grid[0] * grid[1],)](
            *once(blocks, "second", partial(scan_blocks, prepared, v, states, block)),
            out,
            initial,
            last,
            written,
            sequences,
            count,
            heads,
            v.stride(1),
            **constants,
            STAGES=chunks_ahead(grid[0] * grid[1], v.device),
            num_warps=4,
            maxnreg=SCAN_REGISTERS,
        )
        return
    launch(scan_kernel)[grid](
        *prepared.descriptors(),
        prepared.decay,
        prepared.beta,
        v,
        out,
        initial,
        last,
        written,
        states,
        sequences,
        count,
        heads,
        v.stride(0),
        v.stride(1),
        **constants,
        num_warps=4,
        num_stages=3,
    )
