"""The mixture over depth on the GPU: autograd around its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..device import launch, on_device_of
from .triton_mix import finish_kernel, mix_backward_kernel, mix_kernel

LINE = 8  # adjacent elements that a thread loads at once, 16 bytes of bf16
# Forward, where a row is short: half of the warps for a row, so that more rows are on their way.
SHORT, SHORT_LINE, SHORT_RESIDENT = 4096, 16, 16
WARPS = 16  # of a program, which takes whole rows, at most
GROUP, BACKWARD_GROUP = 4, 3  # sources that are reduced at once, the latter with one sum more
HELD = 144  # bytes of a row's sources that a thread holds on the way back, else it reloads them
PROGRAMS = 1024  # in which rows are spread before a program gets a second one
ROWS, BACKWARD_ROWS = 8, 32  # of a program at most; the latter have one partial sum
RESIDENT, BACKWARD_RESIDENT = 24, 16  # warps of an SM that registers must suffice for
SHARES, COLUMNS, STAGES = 64, 32, 4  # tiles of the sum over partial sums

Tensor = torch.Tensor


class Mix(torch.autograd.Function):
    """The mixture, the sum of the last source and ``update``, and the other sources once more.

    Later users of a source are to take it from here: its gradient then comes with theirs in it,
    and this one's is added in place, if the gradient is what another mixture has just made.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        norm: Tensor,
        next_norm: Tensor | None,
        update: Tensor | None,
        eps: float,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        *blocks, partial = sources
        summed = partial
        if update is not None:
            kind = torch.promote_types(partial.dtype, update.dtype)
            summed = torch.empty(partial.shape, dtype=kind, device=partial.device)
        out = torch.empty(partial.shape, dtype=sources[0].dtype, device=partial.device)
        width = partial.shape[-1]
        rows = partial.numel() // width
        stats = partial.new_empty(rows, 2 * len(sources) + 1, dtype=torch.float32)
        each = rows_each(rows, ROWS)
        if rows:
            given = tuple(t.contiguous() for t in sources)
            with on_device_of(partial):
                launch(mix_kernel)[(-(-rows // each),)](
                    *(given, given[-1] if update is None else update.contiguous(), summed),
                    *(query, norm, norm if next_norm is None else next_norm),
                    *(out, stats, rows, each, eps),
                    M=len(sources),
                    GROUP=GROUP,
                    UPDATE=update is not None,
                    NORM=next_norm is not None,
                    **forward_tile(width),
                    FAST=partial.is_cuda,
                )
        ctx.save_for_backward(query, norm, next_norm, stats, *blocks, summed)
        ctx.kinds = (partial.dtype, None if update is None else update.dtype)
        ctx.set_materialize_grads(False)
        ctx.ours = {}  # by output: gradients that were made for this alone
        ctx.makers = [b.grad_fn if isinstance(b.grad_fn, type(ctx)) else None for b in blocks]
        ctx.places = [b.output_nr for b in blocks]
        return out, summed, *blocks

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor | None, d_summed: Tensor | None, *d_blocks: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, norm, next_norm, stats, *sources = ctx.saved_tensors
        ours, ctx.ours = ctx.ours, {}
        given = [t.contiguous() for t in sources]
        carried = [None if d is None else d.contiguous() for d in (*d_blocks, d_summed)]
        results = [
            d if d is not None and ours.get(2 + i) is d else torch.empty_like(v)
            for i, (d, v) in enumerate(zip(carried, given, strict=True))
        ]
        if d_out is None:
            d_out = torch.zeros_like(given[-1])
        d_weights = walk_back(
            given, d_out.contiguous(), carried, results, query, norm, next_norm, stats
        )
        for maker, place, result in zip(ctx.makers, ctx.places, results, strict=False):
            if maker is not None:
                maker.ours[place] = result
        kind, update_kind = ctx.kinds
        d_update = None if update_kind is None else results[-1].to(update_kind)
        return *d_weights, d_update, None, *results[:-1], results[-1].to(kind)


def walk_back(
    sources: Sequence[Tensor],
    d_out: Tensor,
    carried: Sequence[Tensor | None],
    results: Sequence[Tensor],
    query: Tensor,
    norm: Tensor,
    next_norm: Tensor | None,
    stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fill ``results``; gradients of the three weights."""
    width, rows = d_out.shape[-1], stats.shape[0]
    tile = tile_of(width, BACKWARD_RESIDENT)
    each = rows_each(rows, BACKWARD_ROWS)
    shares = -(-rows // each)
    partial = stats.new_empty(2, shares, width)
    d_query, d_norm = torch.empty_like(query), torch.empty_like(norm)
    d_next = None if next_norm is None else torch.empty_like(next_norm)
    threads = 32 * tile["num_warps"]
    held = sum(t.element_size() for t in sources) * tile["BT"] * tile["BE"] // threads
    with on_device_of(d_out):
        if rows:
            launch(mix_backward_kernel)[(shares,)](
                *(tuple(sources), d_out),
                tuple(v if d is None else d for d, v in zip(carried, sources, strict=True)),
                *(tuple(results), query, norm, norm if next_norm is None else next_norm),
                *(stats, partial[0], partial[1], rows, each),
                CARRIED=tuple(d is not None for d in carried),
                M=len(sources),
                GROUP=BACKWARD_GROUP,
                HELD=held <= HELD,
                NORM=next_norm is not None,
                **tile,
                FAST=d_out.is_cuda,
            )
        launch(finish_kernel)[(-(-width // COLUMNS),)](
            *(partial[0], partial[1], query, norm, d_query, d_norm),
            *(d_norm if d_next is None else d_next, shares),
            D=width,
            BS=SHARES,
            BD=COLUMNS,
            STAGES=STAGES,
            NORM=next_norm is not None,
        )
    return d_query, d_norm, d_next


def rows_each(rows: int, most: int) -> int:
    """Rows of a program: depends on nothing but their number, as the partial sums do on it."""
    return max(1, min(most, rows // PROGRAMS))


def forward_tile(width: int) -> dict[str, int]:
    if width <= SHORT:
        return tile_of(width, SHORT_RESIDENT, SHORT_LINE)
    return tile_of(width, RESIDENT)


def tile_of(width: int, resident: int, line: int = LINE) -> dict[str, int]:
    """The tile of a row, and how many registers its programs may use for ``resident`` warps."""
    padded = max(line, 1 << (width - 1).bit_length())
    warps = min(WARPS, max(1, padded // (32 * line)))
    registers = 65536 // (32 * max(warps, resident // warps * warps))
    return {
        "D": width,
        "BT": padded // line,
        "BE": line,
        "num_warps": warps,
        "maxnreg": min(255, registers // 8 * 8),
    }


def mix_fused(
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    norm: Tensor,
    next_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """`Mix` of what `farhorizon.kernels.attnres` takes."""
    weights = [None if w is None else w.contiguous() for w in (query, norm, next_norm)]
    return Mix.apply(*weights, update, eps, *sources)
