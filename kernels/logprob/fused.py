"""Token log-probs on the GPU: matrix products by cuBLAS around two kernels, tile by tile.

Logits are never kept: a tile ``[R, C]`` of them in fp32 is made, used, and made again in the
backward pass, where it becomes its own gradient in place. Those are four products of the size of
the logits. Three would do only if the factors of the rows were known in the forward pass: the
gradient of the head is one sum over rows, out of which they cannot be taken afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..device import launch, on_device_of
from ..once import once_differentiable
from .triton_rows import gradient_kernel, statistics_kernel

# The sums of d_hidden are read and written once per column tile, those of d_lm_head once per row
# tile: as square a tile as fits moves least. 16,384 x 10,240 are 640 MiB of logits, and 56 GB of
# sums for 131,072 rows and 163,840 columns of width 2,048, about 3 % of the time of the products.
# Sums of d_hidden for the rows are 128 MiB of it more; of a wider policy there are fewer rows.
ELEMENTS = 16_384 * (10_240 + 2_048)
COLUMNS = 10_240
UNIT = 256  # columns of cuBLAS's own tiles
BLOCK, WARPS, STAGES = 2048, 8, 3  # of the kernel of statistics
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8


class TokenLogprobs(torch.autograd.Function):
    """``hidden [T, D]``, ``lm_head [V, D]``, ``targets [T]`` contiguous; products in ``dtype``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        lm_head: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        most: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        row_tiles, column_tiles, buffer = tiles(hidden, lm_head, most)
        peak, total, weighted, logprobs, entropy = (
            hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(5)
        )
        for columns in column_tiles:
            weight = lm_head[columns].to(dtype).T
            for rows in row_tiles:
                logits = buffer[: rows.stop - rows.start, : weight.shape[1]]
                multiply(logits, hidden[rows].to(dtype), weight)
                carried = (peak[rows], total[rows], weighted[rows], logprobs[rows], entropy[rows])
                with on_device_of(hidden):
                    launch(statistics_kernel)[(len(logits),)](
                        *(logits, logits.stride(0), targets[rows], *carried),
                        *(columns.start, logits.shape[1], math.log2(math.e) / temperature),
                        BLOCK=BLOCK,
                        FIRST=columns is column_tiles[0],
                        LAST=columns is column_tiles[-1],
                        STAGES=STAGES,
                        num_warps=WARPS,
                    )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, lm_head, targets, peak, total, entropy)
        ctx.options = temperature, dtype, most
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, d_logprobs: torch.Tensor | None, d_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, lm_head, targets, peak, log_total, entropy = ctx.saved_tensors
        temperature, dtype, most = ctx.options
        row_tiles, column_tiles, buffer = tiles(hidden, lm_head, most)
        d_hidden = d_head = sums = None
        if ctx.needs_input_grad[0]:
            d_hidden = torch.empty_like(hidden)
            sums = buffer.new_empty(len(buffer), hidden.shape[1])
        if ctx.needs_input_grad[1]:
            d_head = torch.zeros_like(lm_head, dtype=torch.float32)
        # without an upstream gradient the kernel is told so, and reads nothing there
        pulls = [peak if d is None else d.contiguous() for d in (d_logprobs, d_entropy)]
        for rows in row_tiles:
            own = hidden[rows].to(dtype)
            per_row = [x[rows] for x in (targets, peak, log_total, entropy, *pulls)]
            for columns in column_tiles:
                weight = lm_head[columns].to(dtype)
                logits = buffer[: len(own), : len(weight)]
                multiply(logits, own, weight.T)
                grads = buffer.view(dtype)[: len(own), : len(weight)]
                with on_device_of(hidden):
                    launch(gradient_kernel)[(len(own),)](
                        *(logits, grads, logits.stride(0), grads.stride(0), *per_row),
                        *(columns.start, len(weight), math.log2(math.e) / temperature),
                        1 / temperature,
                        BLOCK=GRADIENT_BLOCK,
                        LOGPROB=d_logprobs is not None,
                        ENTROPY=d_entropy is not None,
                        num_warps=GRADIENT_WARPS,
                    )
                if sums is not None:
                    multiply(sums[: len(own)], grads, weight, add=columns is not column_tiles[0])
                if d_head is not None:
                    multiply(d_head[columns], grads.T, own, add=True)
            if d_hidden is not None and sums is not None:
                d_hidden[rows] = sums[: len(own)]
        if d_head is not None:
            d_head = d_head.to(lm_head.dtype)
        return d_hidden, d_head, None, None, None, None


def tiles(
    hidden: torch.Tensor, lm_head: torch.Tensor, most: int | None
) -> tuple[list[slice], list[slice], torch.Tensor]:
    """Rows, ``most`` at once, and columns of the tiles, and an fp32 buffer for one.

    Columns do not depend on the rows: what a row gives is the same in any company.
    """
    columns = even(len(lm_head), COLUMNS, UNIT)
    width = columns[0].stop
    rows = even(len(hidden), most or max(1, ELEMENTS // (width + hidden.shape[1])), 1)
    height = rows[0].stop if rows else 0
    buffer = hidden.new_empty(height, -(-width // UNIT) * UNIT, dtype=torch.float32)
    return rows, columns, buffer


def even(total: int, most: int, unit: int) -> list[slice]:
    """Ranges over ``total`` of one length, a multiple of ``unit`` if one is at most ``most``."""
    step = -(-total // max(1, -(-total // most)))
    step = min(-(-step // unit) * unit, max(most, 1))
    return [slice(begin, min(begin + step, total)) for begin in range(0, total, max(step, 1))]


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False) -> None:
    """``out = a b``, or ``out += a b``; ``out`` is fp32 and no product is rounded on its way."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, beta=int(add), out_dtype=torch.float32, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=int(add), out=out)


def token_logprobs_fused(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
    most: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`farhorizon.kernels.logprob.token_logprobs` on the GPU, with products of ``dtype``, ``most``
    rows at once."""
    return TokenLogprobs.apply(hidden, lm_head, targets.contiguous(), temperature, dtype, most)
