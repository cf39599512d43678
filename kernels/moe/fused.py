"""The router and its statistics on the GPU: launches, and autograd around them.

The logits of all experts are written once, for up to `ELEMENTS` of them at a time. Tiles do not
depend on the number of tokens, nor do the sums: a token has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import is_hopper, launch, on_device_of, processors
from ..once import once_differentiable
from ..precision import as_given
from .gluon_histogram import count_hopper_kernel, load_hopper_kernel
from .histogram import (
    COARSE_BINS,
    FIRST,
    SHIFT,
    SIDE_BINS,
    WINDOW,
    Counts,
    QuantileHistogram,
)
from .layout import power_above
from .route import MOST_CHOICES
from .triton_histogram import count_kernel, load_kernel
from .triton_router import product_kernel, select_kernel

ELEMENTS = 1 << 25  # logits that exist at once: 128 MiB, of which a cache holds much
PART = torch.bfloat16  # of numbers in fp32, two of which stand for one
STEP, STAGES = 64, 3  # of the product: terms of a sum at once, and tiles on their way
FEW_ROWS = 1024  # of a product, which then takes small tiles
COLUMNS = 64  # in which `select_kernel` looks for large numbers
SELECT_REGISTERS = 64  # of a thread, so that an SM holds its 32 programs
COUNT_TILE = 32, 32
# Experts of a program, its warps, and tokens that a thread reads at once. A lane for each expert:
# none waits for another's bank, and a table of 160 KiB leaves room for one program of an SM.
HOPPER_EXPERTS, HOPPER_WARPS, HOPPER_DEPTH = 32, 32, 8
LOAD_ROUTES = 1024  # that are counted at once
LOAD_WARPS, LOAD_DEPTH = 32, 4  # on Hopper: of a program, and routes of a thread

Tensor = torch.Tensor


def parts_of(x: Tensor, dtype: torch.dtype, split: bool) -> Tensor:
    """``x [R, D]`` as rows that tiles are copied from: in ``dtype``, or ``split`` in two parts one
    below the other, which add up to it within 2^-16 of it; D is filled up to a multiple of 8."""
    if x.shape[1] % 8:
        x = F.pad(x, (0, -x.shape[1] % 8))
    if split:
        both = x.new_empty(2, *x.shape, dtype=dtype)
        both[0] = x
        both[1] = x - both[0]
        return both.view(-1, x.shape[1])
    x = x.to(dtype)
    apart, unit = x.stride()
    copied = unit == 1 and apart % 8 == 0 and apart >= x.shape[1] and x.data_ptr() % 16 == 0
    # `contiguous` would leave the stride of a single row as it is
    return x if copied else x.clone(memory_format=torch.contiguous_format)


def tile_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of the product, and its warps. They change no bit: every number
    is one sum in one order."""
    if rows <= FEW_ROWS:
        return 64, min(32, max(16, power_above(columns))), 4
    if columns <= 64:
        return 128, max(16, power_above(columns)), 4
    return 256, 128, 8


def product(x: Tensor, weight: Tensor, out: Tensor, terms: int = 1) -> None:
    """``out [R, N]`` as `product_kernel` has it, of the parts of both."""
    rows, columns = out.shape
    high, wide, warps = tile_of(rows, columns)
    tiles = -(-rows // high) * -(-columns // wide)
    with on_device_of(x):
        launch(product_kernel)[(min(tiles, processors(x.device)) if x.is_cuda else 1,)](
            TensorDescriptor.from_tensor(x, [high, STEP]),
            TensorDescriptor.from_tensor(weight, [wide, STEP]),
            *(out, rows, tiles),
            N=columns,
            D=x.shape[1],
            TERMS=terms,
            BM=high,
            BN=wide,
            BK=STEP,
            STAGES=STAGES,
            num_warps=warps,
        )


def select(
    values: Tensor,
    bias: Tensor,
    k: int,
    logits: bool,
    experts: Tensor,
    mixed: tuple[Tensor, Tensor] | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The cutoff ``[T]`` of `route` for contiguous ``values [T, E]``, which are scores, or
    ``logits`` of them; ``experts [T, k]`` int64 takes the choice, or what is ``given``. Into
    ``mixed``, both ``[T, k]`` fp32, go the scores of the experts and the mixing weights."""
    tokens, num_experts = values.shape
    padded = power_above(num_experts)
    columns = min(padded, max(COLUMNS, padded // 16))
    wanted = min(k + 1, num_experts)
    room = min(MOST_CHOICES, power_above(max(8, wanted * 3 // 2)))
    candidates = torch.empty(tokens, room, dtype=torch.int32, device=values.device)
    cutoff = torch.empty(tokens, dtype=torch.float32, device=values.device)
    routes, known = (given[0].contiguous(), given[1]) if given else (None, None)
    warps = max(1, padded // 1024)
    limits = {"maxnreg": SELECT_REGISTERS} if values.is_cuda and warps == 1 else {}
    if tokens:
        with on_device_of(values):
            launch(select_kernel)[(tokens,)](
                *(values, bias.float().contiguous(), routes, byte_mask(known)),
                *(candidates, experts, cutoff, *(mixed or (None, None))),
                E=num_experts,
                K=k,
                A=padded // columns,
                B=columns,
                C=room,
                S=power_above(k),
                LOGITS=logits,
                GIVEN=given is not None,
                MIX=mixed is not None,
                FAST=values.is_cuda,
                num_warps=warps,
                **limits,
            )
    return cutoff


def byte_mask(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.bool().contiguous().view(torch.uint8)


def count(
    histogram: QuantileHistogram,
    values: Tensor,
    cutoff: Tensor | None,
    valid: Tensor | None,
    logits: bool,
) -> None:
    """`QuantileHistogram.add` for contiguous ``values [T, E]``, scores or ``logits`` of them;
    without ``cutoff`` where every expert takes every token."""
    tokens, num_experts = values.shape
    if histogram.k == num_experts or cutoff is None:
        histogram.tokens += tokens if valid is None else valid.sum()
        return
    if not tokens:
        return
    own = histogram
    tables = (own.low, own.scale, own.bias, own.counts, own.tokens)
    given = (values, cutoff.float().contiguous(), byte_mask(valid), *tables, tokens)
    fixed = {
        **{"E": num_experts, "COARSE": COARSE_BINS, "SIDE": SIDE_BINS, "WINDOW": WINDOW},
        **{"FIRST": FIRST, "SHIFT": SHIFT, "MASKED": valid is not None, "LOGITS": logits},
    }
    with on_device_of(values):
        if is_hopper(values.device):
            groups = -(-num_experts // HOPPER_EXPERTS)
            tiles = -(-tokens * HOPPER_EXPERTS // (32 * HOPPER_WARPS * HOPPER_DEPTH))
            shares = processors(values.device) // groups
            launch(count_hopper_kernel)[(groups, max(1, min(shares, tiles)))](
                *given,
                **fixed,
                BE=HOPPER_EXPERTS,
                DEPTH=HOPPER_DEPTH,
                num_warps=HOPPER_WARPS,
            )
        else:
            grid = [-(-n // block) for n, block in zip(values.shape, COUNT_TILE, strict=True)]
            launch(count_kernel)[tuple(grid)](
                *given, **fixed, BT=COUNT_TILE[0], BE=COUNT_TILE[1], FAST=values.is_cuda
            )


def add_load(load: Tensor, experts: Tensor, valid: Tensor | None) -> None:
    """Count routes ``experts [T, k]`` int64, contiguous, as `Counts` has it."""
    num_experts, routes = len(load), experts.numel()
    if not routes:
        return
    given = (experts, byte_mask(valid), load, routes)
    fixed = {"K": experts.shape[1], "MASKED": valid is not None}
    with on_device_of(load):
        if is_hopper(load.device):
            blocks = -(-routes // (32 * LOAD_WARPS * LOAD_DEPTH))
            launch(load_hopper_kernel)[(min(blocks, processors(load.device)),)](
                *given,
                **fixed,
                E=num_experts,
                BINS=power_above(num_experts + 1),
                DEPTH=LOAD_DEPTH,
                num_warps=LOAD_WARPS,
            )
        else:
            launch(load_kernel)[(-(-routes // LOAD_ROUTES),)](*given, **fixed, BLOCK=LOAD_ROUTES)


def rows_at_once(num_experts: int) -> int:
    return max(1, ELEMENTS // num_experts)


def blocks(tokens: int, num_experts: int) -> Iterator[slice]:
    step = rows_at_once(num_experts)
    return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def terms_of(x: Tensor, weight: Tensor) -> tuple[torch.dtype, bool, bool]:
    """The 16-bit type that both are multiplied in, and which of them are split."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    dtype = x.dtype if narrow else PART
    return dtype, not narrow, not narrow or weight.dtype != dtype


class Routing(torch.autograd.Function):
    """`router` on the GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        k: int,
        given: tuple[Tensor, Tensor] | None,
        counts: Counts | None,
    ) -> tuple[Tensor, Tensor]:
        tokens, num_experts = len(x), len(weight)
        dtype, *split = terms_of(x, weight)
        matrix = parts_of(weight, dtype, split[1])
        experts = torch.empty(tokens, k, dtype=torch.int64, device=x.device)
        weights, chosen = (x.new_empty(tokens, k, dtype=torch.float32) for _ in range(2))
        room = min(tokens, rows_at_once(num_experts))
        buffer = x.new_empty(room, num_experts, dtype=torch.float32)
        load, histogram, valid = counts or (None, None, None)
        for some in blocks(tokens, num_experts):
            logits = buffer[: some.stop - some.start]
            product(parts_of(x[some], dtype, split[0]), matrix, logits, 1 + sum(split))
            counted = None if valid is None else valid[some]
            mixed = chosen[some], weights[some]
            taken = None if given is None else (given[0][some], given[1][some])
            cutoff = select(logits, bias, k, True, experts[some], mixed, taken)
            if histogram is not None:
                count(histogram, logits, cutoff, counted, True)
        if load is not None:
            add_load(load, experts, valid)
        ctx.save_for_backward(x, weight, experts, weights, chosen)
        ctx.mark_non_differentiable(experts)
        return experts, weights

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_experts: Tensor, d_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, experts, weights, chosen = ctx.saved_tensors
        total = chosen.sum(1, keepdim=True) + 1e-20
        d_chosen = (d_weights - (d_weights * weights).sum(1, keepdim=True)) / total
        narrow = x.dtype == torch.bfloat16  # fp16 would lose small gradients
        d_logits = (d_chosen * chosen * (1 - chosen)).to(x.dtype if narrow else torch.float32)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32)
        turned = parts_of(weight.t(), x.dtype, False) if narrow else weight.float()
        with as_given(x):
            for some in blocks(len(x), len(weight)):
                dense = d_logits.new_zeros(some.stop - some.start, len(weight))
                dense.scatter_(1, experts[some], d_logits[some])
                if narrow:
                    product(parts_of(dense, x.dtype, False), turned, dx[some])
                    d_weight += torch.mm(dense.t(), x[some], out_dtype=torch.float32)  # pyright: ignore[reportCallIssue, reportArgumentType]
                else:
                    dx[some] = torch.mm(dense, turned)
                    d_weight += torch.mm(dense.t(), x[some].float())
        return dx, d_weight.to(weight.dtype), None, None, None, None
