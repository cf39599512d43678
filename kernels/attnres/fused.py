"""The mixture over depth on the GPU: autograd around its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device import is_hopper, launch, on_device_of, processors
from ..once import once_differentiable
from .gluon_mix import mix_hopper_kernel
from .gluon_mix_backward import mix_backward_hopper_kernel
from .held import holders, unheld
from .plans import (
    BACKWARD_RESIDENT,
    backward_plan,
    forward_plan,
    forward_tile,
    rows_each,
    tile_of,
)
from .triton_mix import finish_kernel, mix_backward_kernel, mix_kernel

GROUP, BACKWARD_GROUP = 4, 3  # sources that are reduced at once, the latter with one sum more
HELD = 144  # bytes of a row's sources that a thread holds on the way back, else it reloads them
ROWS, BACKWARD_ROWS = 8, 32  # of a program at most; the latter have one partial sum
SHARES, COLUMNS, STAGES = 64, 32, 4  # tiles of the sum over partial sums

Tensor = torch.Tensor


class Mix(torch.autograd.Function):
    """The mixture, the sum of the last source and ``update``, and the other sources once more.

    Later users of a source are to take it from here: its gradient then comes with theirs in it,
    and this one's is added in place, if the gradient is what another mixture has just made and
    nobody else holds.
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
        out, summed, stats = walk_forward(sources, update, query, norm, next_norm, eps, True)
        ctx.save_for_backward(query, norm, next_norm, stats, *blocks, summed)
        ctx.kinds = (partial.dtype, None if update is None else update.dtype)
        ctx.set_materialize_grads(False)
        ctx.ours = {}  # by output: gradients that were made for this alone
        ctx.unheld = unheld()
        ctx.makers = [b.grad_fn if isinstance(b.grad_fn, type(ctx)) else None for b in blocks]
        ctx.places = [b.output_nr for b in blocks]
        return out, summed, *blocks

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_out: Tensor | None, d_summed: Tensor | None, *d_blocks: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, norm, next_norm, stats, *sources = ctx.saved_tensors
        held = holders(d_blocks)
        free = [h == ctx.unheld and ctx.ours.get(2 + i) is d_blocks[i] for i, h in enumerate(held)]
        ctx.ours = {}
        given = [lined_up(t) for t in sources]
        carried = [None if d is None else lined_up(d) for d in (*d_blocks, d_summed)]
        results = [
            d if own and d is not None else torch.empty_like(v)
            for own, d, v in zip((*free, False), carried, given, strict=True)
        ]
        if d_out is None:
            d_out = torch.zeros_like(given[-1])
        d_weights = walk_back(
            given, lined_up(d_out), carried, results, query, norm, next_norm, stats
        )
        for maker, place, result in zip(ctx.makers, ctx.places, results, strict=False):
            if maker is not None:
                maker.ours[place] = result
        kind, update_kind = ctx.kinds
        d_update = None if update_kind is None else results[-1].to(update_kind)
        return *d_weights, d_update, None, *results[:-1], results[-1].to(kind)


def walk_forward(
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    norm: Tensor,
    next_norm: Tensor | None,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The mixture, the last source with ``update``, and what the way back needs, if to ``save``."""
    given = tuple(lined_up(t) for t in sources)
    summed = given[-1]
    if update is not None:
        update = lined_up(update)
        summed = torch.empty_like(summed, dtype=torch.promote_types(summed.dtype, update.dtype))
    out = torch.empty_like(given[0])
    width = out.shape[-1]
    rows = out.numel() // width
    count = len(given)
    stats = out.new_empty(rows, 2 * count + 1, dtype=torch.float32) if save else None
    if rows:
        tensors = (
            *(given, summed if update is None else update, summed),
            *(query, norm, norm if next_norm is None else next_norm),
            *(out, out if stats is None else stats),
        )
        start = start_forward_on_hopper if is_hopper(out.device) else start_forward
        with on_device_of(out):
            start(tensors, rows, eps, update is not None, next_norm is not None, save)
    return out, summed, stats


def start_forward(
    tensors: tuple[Any, ...], rows: int, eps: float, updated: bool, normed: bool, save: bool
) -> None:
    """Launch the plain kernel."""
    out = tensors[6]
    each = rows_each(rows, ROWS)
    launch(mix_kernel)[(-(-rows // each),)](
        *(*tensors, rows, each, eps),
        M=len(tensors[0]),
        GROUP=GROUP,
        UPDATE=updated,
        NORM=normed,
        SAVE=save,
        **forward_tile(out.shape[-1]),
        FAST=out.is_cuda,
    )


def start_forward_on_hopper(
    tensors: tuple[Any, ...], rows: int, eps: float, updated: bool, normed: bool, save: bool
) -> None:
    """Launch the kernel for Hopper where it fits."""
    given, *others = tensors
    out = others[5]
    alike = all_alike(out, *given, *others[:2])
    plan = forward_plan(out.shape[-1], len(given), updated) if alike else None
    if plan is None:
        return start_forward(tensors, rows, eps, updated, normed, save)
    constants = {"M": len(given), "UPDATE": updated, "NORM": normed, "SAVE": save, **plan[0]}
    programs = plan[1] * processors(out.device)
    launch(mix_hopper_kernel)[(min(rows, programs),)](*tensors, rows, eps, **constants)
    return None


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
    plan = backward_plan(width, len(sources)) if is_hopper(d_out.device) else None
    if plan is not None and all_alike(d_out, *sources, *carried):
        constants, programs = plan
        kernel, numbers = mix_backward_hopper_kernel, (rows,)
        shares = min(rows, programs * processors(d_out.device))
    else:
        constants = tile_of(width, BACKWARD_RESIDENT)
        each = rows_each(rows, BACKWARD_ROWS)
        kernel, numbers, shares = mix_backward_kernel, (rows, each), -(-rows // each)
        elements = constants["BT"] * constants["BE"] // (32 * constants["num_warps"])
        held = sum(t.element_size() for t in sources) * elements <= HELD
        constants |= {"GROUP": BACKWARD_GROUP, "HELD": held, "FAST": d_out.is_cuda}
    partial = stats.new_empty(2, shares, width)
    d_query, d_norm = torch.empty_like(query), torch.empty_like(norm)
    d_next = None if next_norm is None else torch.empty_like(next_norm)
    with on_device_of(d_out):
        if rows:
            launch(kernel)[(shares,)](
                *(tuple(sources), d_out),
                tuple(v if d is None else d for d, v in zip(carried, sources, strict=True)),
                *(tuple(results), query, norm, norm if next_norm is None else next_norm),
                *(stats, partial[0], partial[1], *numbers),
                CARRIED=tuple(d is not None for d in carried),
                M=len(sources),
                NORM=next_norm is not None,
                **constants,
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


def lined_up(x: Tensor) -> Tensor:
    """``x`` as the kernels load it, rows one after another and 16 bytes at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def all_alike(first: Tensor, *others: Tensor | None) -> bool:
    """Whether all hold numbers of the same 16-bit type."""
    kind = first.dtype
    return kind.itemsize == 2 and all(x is None or x.dtype == kind for x in others)


def mix_fused(
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    norm: Tensor,
    next_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """`Mix` of what `farhorizon.kernels.attnres` takes."""
    query, norm = query.contiguous(), norm.contiguous()
    next_norm = None if next_norm is None else next_norm.contiguous()
    tensors = (*sources, update, query, norm, next_norm)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return Mix.apply(query, norm, next_norm, update, eps, *sources)
    out, summed, _ = walk_forward(sources, update, query, norm, next_norm, eps, False)
    return out, summed, *sources[:-1]
