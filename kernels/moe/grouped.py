"""The experts on the GPU: launches, and autograd around them.

Nothing here waits for the GPU: how many rows an expert has is known there alone, and memory and
grids are as large as they can be at most. Tiles do not depend on the number of tokens: a token has
the same bits in any company.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

from ..device import is_hopper, launch, on_device_of, processors
from ..once import once_differentiable
from .gluon_rows import rows_hopper_kernel
from .gluon_weights import weights_hopper_kernel
from .layout import TILE, Layout, layout_of
from .triton_experts import (
    combine_kernel,
    gate_up_kernel,
    inner_grad_kernel,
    rows_kernel,
    weights_kernel,
)

COMBINE_BLOCK = 1024  # columns of a program
PLAIN_TILE = (128, 64, 64)  # columns of a tile that is summed alone, or in pairs, and terms at once
UNIT = 128  # the kernels for Hopper want widths in these
MODES = {"out": 0, "pair": 0, "kept": 1, "inner": 1, "gradient": 2}
# Columns of a tile, stages, and tiles on their way out of each half; measured on an H200 with 128
# and with 896 experts. Three results, or matrices whose tiles lie across, want room for another
# tile on its way out more than a fourth stage.
HOPPER = {
    "kept": (256, 3, 2),  # gate and up, which the backward pass needs, and the activation
    "inner": (256, 4, 1),  # the activation alone
    "out": (256, 4, 1),
    "pair": (256, 3, 2),  # two matrices one after the other: the gradient of the inputs
    "gradient": (128, 4, 3),  # of gate and up
    "left": (256, 4, 1),  # the gradient of w2
    "right": (256, 3, 2),  # and those of w1 and w3
}
ROW_REGISTERS, WEIGHT_REGISTERS = 216, 208  # of a multiplying thread
Tensor = torch.Tensor
Bounds = tuple[float, float] | None


def takes_hopper(x: Tensor, inner: int) -> bool:
    """Whether the kernels for Hopper serve rows of ``x`` and experts of this width."""
    return is_hopper(x.device) and x.shape[1] % UNIT == 0 and inner % UNIT == 0


@lru_cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    kind = bfloat16 if dtype == torch.bfloat16 else float16
    return NVMMASharedLayout.get_default_for([rows, columns], kind)


def shared(x: Tensor, rows: int, columns: int) -> SharedDescriptor:
    """All leading dimensions of ``x`` as one, copied in blocks through shared memory."""
    x = x.view(-1, x.shape[-1])
    kind = shared_layout(rows, columns, x.dtype)
    return SharedDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], kind)


def rows_on_hopper(
    mode: str,
    left: Tensor,
    matrices: tuple[Tensor, Tensor],
    turned: bool,
    layout: Layout,
    out: Tensor,
    before: Tensor | None = None,
    grad: tuple[Tensor, Tensor, Tensor] | None = None,
    bounds: Bounds = None,
) -> None:
    """A product of the rows of ``left``, which are those of tokens unless it is plain."""
    columns, stages, room = HOPPER[mode]
    plain, glu = MODES[mode] == 0, MODES[mode] == 1
    n, terms = matrices[0].shape[1:] if turned else matrices[0].shape[:0:-1]
    d_before, weights, partial = grad or (None, None, None)
    box = (128 if glu else columns, 64) if turned else (64, columns)
    across = -(-n // (128 if glu else columns))
    tiles = len(layout.tile_expert) * across
    launch(rows_hopper_kernel)[(min(tiles, processors(left.device)),)](
        shared(left, TILE, 64) if plain else None,
        *(left, left.stride(0), layout.token),
        *(shared(w, *box) for w in matrices),
        *(None if x is None else shared(x, 64, 128) for x in (out, before, d_before)),
        *(layout.source, weights, partial, layout.tile_expert, layout.starts),
        len(matrices[0]),
        N=n,
        K=terms,
        BN=columns,
        STAGES=stages,
        ROOM=room,
        MODE=MODES[mode],
        TURNED=turned,
        PARTS=2 if mode == "pair" else 1,
        SAVE=before is not None,
        BOUND=bounds and bounds[0],
        UP_BOUND=bounds and bounds[1],
        REGISTERS=ROW_REGISTERS,
        num_warps=4,
    )


def gate_up(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    before: Tensor | None,
    inner: Tensor,
    layout: Layout,
    bounds: Bounds,
) -> None:
    """``inner [rows, I]``, and ``before [rows, 2 I]`` if wanted, of the tokens ``x [T, D]``."""
    num_experts, width, terms = w1.shape
    if takes_hopper(x, width):
        mode = "inner" if before is None else "kept"
        rows_on_hopper(mode, x, (w1, w3), True, layout, inner, before, None, bounds)
        return
    _, columns, step = PLAIN_TILE
    launch(gate_up_kernel)[(len(layout.tile_expert) * -(-width // columns),)](
        *(x, x.stride(0), layout.token, w1, w3, before, inner, layout.tile_expert),
        E=num_experts,
        I=width,
        D=terms,
        BM=TILE,
        BN=columns,
        BK=step,
        SAVE=before is not None,
        BOUND=bounds and bounds[0],
        UP_BOUND=bounds and bounds[1],
        num_warps=8,
    )


def product(
    left: Tensor, matrices: tuple[Tensor, Tensor], turned: bool, out: Tensor, layout: Layout
) -> None:
    """``out [rows, N]`` as `rows_kernel` has it; two parts if there are two matrices."""
    inner, parts = matrices[0].shape[2 if turned else 1], 1 if matrices[0] is matrices[1] else 2
    if takes_hopper(out, inner):
        mode = "out" if parts == 1 else "pair"
        rows_on_hopper(mode, left, matrices, turned, layout, out)
        return
    columns, _, step = PLAIN_TILE
    launch(rows_kernel)[(len(layout.tile_expert) * -(-out.shape[1] // columns),)](
        *(left, *matrices, out, layout.tile_expert),
        E=len(matrices[0]),
        N=out.shape[1],
        K=inner,
        PARTS=parts,
        TURNED=turned,
        BM=TILE,
        BN=columns,
        BK=step,
        num_warps=8,
    )


def inner_grad(
    d_out: Tensor,
    w2: Tensor,
    before: Tensor,
    weights: Tensor,
    layout: Layout,
    bounds: Bounds,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of ``before``, inner activations times their weights, and the gradients of the
    weights ``[T, k]``."""
    num_experts, terms, width = w2.shape
    d_before, inner = torch.empty_like(before), before.new_empty(len(before), width)
    hopper = takes_hopper(d_out, width)
    columns = HOPPER["gradient"][0] if hopper else PLAIN_TILE[1]
    partial = weights.new_empty(*weights.shape, -(-width // columns), dtype=torch.float32)
    if hopper:
        grad = (d_before, weights, partial)
        rows_on_hopper("gradient", d_out, (w2, w2), False, layout, inner, before, grad, bounds)
    else:
        launch(inner_grad_kernel)[(len(layout.tile_expert) * partial.shape[2],)](
            *(d_out, d_out.stride(0), layout.token, w2, before, d_before, inner),
            *(layout.source, weights, partial, layout.tile_expert),
            E=num_experts,
            I=width,
            D=terms,
            BM=TILE,
            BN=columns,
            BK=PLAIN_TILE[2],
            BOUND=bounds and bounds[0],
            UP_BOUND=bounds and bounds[1],
            num_warps=8,
        )
    return d_before, inner, partial.sum(2)


def weight_grad(left: Tensor, right: Tensor, gathered: str, out: Tensor, layout: Layout) -> None:
    """``out [parts, E, M / parts, N]`` as `weights_kernel` has it; the ``gathered`` factor, "left"
    or "right", has the rows of tokens."""
    parts, num_experts, height, n = out.shape
    m = parts * height
    on_left = gathered == "left"
    x = left if on_left else right
    if is_hopper(x.device) and height % UNIT == 0 and n % UNIT == 0:
        columns, stages, room = HOPPER[gathered]
        tiles = num_experts * (m // TILE) * -(-n // columns)
        launch(weights_hopper_kernel)[(min(tiles, processors(x.device)),)](
            None if on_left else shared(left, 64, 64),
            shared(right, 64, columns) if on_left else None,
            *(x, x.stride(0), layout.token, shared(out, 64, 128)),
            *(layout.starts, layout.sizes, num_experts),
            M=m,
            N=n,
            PARTS=parts,
            STAGES=stages,
            ROOM=room,
            LEFT=on_left,
            REGISTERS=WEIGHT_REGISTERS,
            num_warps=4,
        )
        return
    columns, rows, step = PLAIN_TILE
    launch(weights_kernel)[(num_experts * -(-m // rows) * -(-n // columns),)](
        *(left, left.stride(0), right, right.stride(0), layout.token, out),
        *(layout.starts, layout.sizes),
        E=num_experts,
        M=m,
        N=n,
        PARTS=parts,
        BM=rows,
        BN=columns,
        BK=step,
        LEFT=on_left,
        num_warps=8,
    )


def combine(rows: Tensor, weights: Tensor | None, k: int, layout: Layout, out: Tensor) -> None:
    """``out [T, D]``: of every token the sum of its ``k`` rows, in order, times their weights."""
    tokens, width = out.shape
    block = min(COMBINE_BLOCK, 1 << (width - 1).bit_length())
    launch(combine_kernel)[(tokens, -(-width // block))](
        *(rows, layout.place, weights, out),
        D=width,
        K=k,
        BLOCK=block,
        WEIGHTED=weights is not None,
    )


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of it, that rows are copied from."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class GroupedExperts(torch.autograd.Function):
    """`grouped_experts` on the GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        experts: Tensor,
        weights: Tensor,
        bounds: Bounds,
        save: bool,
    ) -> Tensor:
        x, w1, w2, w3 = map(aligned, (x, w1, w2, w3))
        weights, (num_experts, width, _) = weights.contiguous(), w1.shape
        out = x.new_empty(x.shape)
        if not experts.numel():
            ctx.save_for_backward(x, w1, w2, w3, weights)
            return out.zero_()
        layout = layout_of(experts.contiguous(), num_experts)
        rows = len(layout.source)
        before = x.new_empty(rows, 2 * width) if save else None
        inner, routed = x.new_empty(rows, width), x.new_empty(rows, x.shape[1])
        with on_device_of(x):
            gate_up(x, w1, w3, before, inner, layout, bounds)
            product(inner, (w2, w2), True, routed, layout)
            combine(routed, weights, experts.shape[1], layout, out)
        if save:
            ctx.save_for_backward(x, w1, w2, w3, weights, before, *layout)
            ctx.bounds = bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, w1, w2, w3, weights, *kept = ctx.saved_tensors
        if not kept:
            zeros = (torch.zeros_like(one) for one in (x, w1, w2, w3))
            return (*zeros, None, torch.zeros_like(weights), None, None)
        before, *rest = kept
        layout, d_out, k = Layout(*rest), aligned(upstream[0]), weights.shape[1]
        of_x, of_w1, of_w2, of_w3, _, of_weights, *_ = ctx.needs_input_grad
        dx = d_w1 = d_w2 = d_w3 = None
        with on_device_of(x):
            d_before, inner, d_weights = inner_grad(d_out, w2, before, weights, layout, ctx.bounds)
            if of_w2:
                d_w2 = torch.empty_like(w2)
                weight_grad(d_out, inner, "left", d_w2[None], layout)
            del inner
            if of_w1 or of_w3:
                both = w1.new_empty(2, *w1.shape)
                weight_grad(d_before, x, "right", both, layout)
                d_w1, d_w3 = both
            if of_x:
                routed, dx = x.new_empty(len(before), x.shape[1]), torch.empty_like(x)
                product(d_before, (w1, w3), False, routed, layout)
                combine(routed, None, k, layout, dx)
        d_weights = d_weights.to(weights.dtype) if of_weights else None
        return dx, d_w1, d_w2, d_w3, None, d_weights, None, None
