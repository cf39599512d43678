"""The forward passes of chunked KDA on the GPU.

The second pass of one sequence walks over its chunks in turn and leaves part of the GPU idle. It is
cut into pieces: the first pass of a piece runs beside the second pass of the piece before. The
state goes from piece to piece in fp32, as it does from chunk to chunk, so that the pieces change no
bit of the result.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .descriptors import is_hopper, launch, rows_of, shared, shared_blocks
from .gluon_prep import prep_hopper_kernel
from .gluon_scan import scan_hopper_kernel
from .tables import Options, Prepared, pieces, tables
from .triton_prep import prep_kernel
from .triton_scan import scan_kernel

PREP_PRECISION = "bf16x3"  # of the products of q and k: bf16 alone costs a third in accuracy
PREP_REGISTERS = 96  # five programs share an SM
VALUE_BLOCK = 64
PIECE_TOKENS, MOST_PIECES = 3072, 8
# With so few registers a thread, a state pass and a first pass, or two state passes, share an SM.
SCAN_REGISTERS = 128

Tensor = torch.Tensor


def forward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    initial: Tensor | None,
    final: bool,
    save: bool,
    options: Options,
) -> tuple[Prepared, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What the first pass wrote, outputs, final states, and with ``save`` U and chunk states.

    ``inputs`` are ``q, k, v, g, beta``, ``parameters`` A_log and dt_bias.
    """
    q, _, v, _, _ = inputs
    prepared = workspace(q, options)
    heads, count, size, width = prepared.kt.shape
    tokens, _, values = v.shape
    work = prepared.kt
    out = v.new_empty(tokens, heads, values)
    written = work.new_empty(heads, count, size, values) if save else None
    states = work.new_empty(heads, count, values, width) if save else None
    sequences = tables(options.bounds, size, v.device).sequences
    edge = (len(sequences), heads, width, values)
    results = (out, written, states)

    def last_states(wanted: bool) -> Tensor | None:
        return work.new_empty(edge, dtype=torch.float32) if wanted else None

    parts = 1
    if is_hopper(v.device) and len(sequences) == 1:
        parts = max(1, min(MOST_PIECES, tokens // PIECE_TOKENS))
    if parts == 1:
        prepare_chunks(inputs, parameters, options, prepared, range(count))
        last = last_states(final)
        scan(prepared, v, results, sequences, initial, last)
        return prepared, out, last, written, states
    ahead, behind = torch.cuda.current_stream(v.device), side_stream(v.device)
    cuts = pieces(options.bounds, size, parts, v.device)
    state = initial
    for cut in cuts:
        prepare_chunks(inputs, parameters, options, prepared, cut.chunks)
        behind.wait_stream(ahead)
        last = last_states(final or cut is not cuts[-1])
        with torch.cuda.stream(behind):
            scan(prepared, v, results, cut.sequences, state, last)
        state = last
    ahead.wait_stream(behind)
    return prepared, out, state, written, states


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where second passes run beside first passes, ahead of them."""
    return torch.cuda.Stream(device, priority=-1)


def workspace(q: Tensor, options: Options) -> Prepared:
    """Room for what the first pass writes."""
    _, heads, width = q.shape
    size = options.size
    count = len(tables(options.bounds, size, q.device).chunks)
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
    chunks: range,
) -> None:
    """First pass over some chunks, into ``out``."""
    q, k, _, g, beta = inputs
    heads, count, size, width = out.kt.shape
    table = tables(options.bounds, size, q.device).chunks
    modes = {"NORM": options.norm, "GATE": options.gate, "SIGMOID": options.sigmoid}
    narrow = all(x.dtype == torch.bfloat16 for x in (q, k, g))
    if width == 128 and size == 32 and options.norm and is_hopper(q.device) and narrow:
        launch(prep_hopper_kernel)[(len(chunks), heads)](
            *(rows_of(x, size, width // 2) for x in (q, k, g)),
            *(shared(x.view(-1, width), size, width // 2) for x in (out.kt, out.qt, out.kh)),
            *(shared(x.view(-1, size), size, size) for x in (out.inv, out.att)),
            beta,
            *parameters,
            table,
            out.decay,
            out.beta,
            out.q_norm,
            out.k_norm,
            options.scale,
            options.bound,
            chunks.start,
            count,
            *(x.stride(1) for x in (q, k, g)),
            *beta.stride(),
            K=width,
            C=size,
            ANCHOR=options.anchor,
            **modes,
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
        out.kt,
        out.qt,
        out.kh,
        out.inv,
        out.att,
        out.decay,
        out.beta,
        out.q_norm,
        out.k_norm,
        options.scale,
        options.bound,
        chunks.start,
        count,
        *(x.stride(0) for x in (q, k, g, beta)),
        *(x.stride(1) for x in (q, k, g, beta)),
        K=width,
        C=size,
        PIECE=min(width, 64),
        ANCHOR=options.anchor,
        **modes,
        PRECISION="ieee" if wide else PREP_PRECISION,
        num_warps=2,
    )


def scan(
    prepared: Prepared,
    v: Tensor,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    sequences: Tensor,
    initial: Tensor | None,
    last: Tensor | None,
) -> None:
    """Second pass over ``sequences`` [N, 4]: ``results`` are outputs, U and the states entering
    chunks, the last two only where they are kept; ``last`` takes the final states."""
    out, written, states = results
    heads, count, size, width = prepared.kt.shape
    values = v.shape[2]
    block = min(values, VALUE_BLOCK)
    grid = (len(sequences) * heads, values // block)
    shape = {"K": width, "V": values, "BV": block, "C": size}
    save = states is not None
    modes = {"INITIAL": initial is not None, "FINAL": last is not None, "SAVE": save}
    if width == values == 128 and size == 32 and is_hopper(v.device) and v.dtype == torch.bfloat16:
        launch(scan_hopper_kernel)[grid](
            *shared_blocks(prepared),
            rows_of(v, size, block),
            shared(states.view(-1, width), block, width) if states is not None else None,
            out,
            initial,
            last,
            written,
            sequences,
            count,
            heads,
            v.stride(1),
            **shape,
            **modes,
            STAGES=3,
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
        **shape,
        **modes,
        num_warps=4,
        num_stages=3,
    )
