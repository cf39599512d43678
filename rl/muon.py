"""Muon: momentum whose every matrix is orthogonalised, beside AdamW for all that is no matrix.

Of a parameter, each attention head and each expert is a matrix of its own. A rank orthogonalises
those of which it holds a number; what ZeRO cut apart is put together first, in one sum over ranks
of buffers that are zero wherever a rank holds nothing, so that no bit is changed by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTUM = 0.95  # mu of Moonlight and K2
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST = 1e-7  # Frobenius norm below which a matrix is not blown up to full size
BATCH_NUMBERS = 1 << 26  # numbers orthogonalised at once; 256 MiB in fp32


def orthogonalised(matrices: Tensor) -> Tensor:
    """U V^T of each of the ``matrices [..., rows, columns]`` = U S V^T, up to a factor for each
    singular vector of about 0.7 to 1.2 where S is above 1 % of its norm.

    Five steps of the quintic Newton-Schulz iteration X <- a X + (b A + c A A) X with A = X X^T from
    X = G / |G|, a, b, c = 3.4445, -4.7750, 2.0315 (Jordan et al., "Muon: An optimizer for hidden
    layers", 2024; used by Moonlight, arXiv:2502.16982, and K2, arXiv:2507.20534
    algorithm 1). On a GPU products are in bfloat16, as there; else in the dtype given.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    if matrices.is_cuda:
        x = x.bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def update_scale(rows: int, columns: int) -> float:
    """0.2 sqrt(max(rows, columns)): an orthogonal update gets the root mean square of AdamW's by
    it, so that one learning rate and weight decay serve both (Moonlight, arXiv:2502.16982 section
    2.2; K2, arXiv:2507.20534 algorithm 1)."""
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True, slots=True)
class Block:
    """A matrix ``[rows, columns]``, and what this rank holds of it: its numbers from ``begin`` on,
    ``held`` of them, lie at ``at`` in the tensor that is optimized. ``shared`` if no rank holds it
    whole."""

    rows: int
    columns: int
    at: int
    begin: int
    held: int
    shared: bool


class Muon(torch.optim.AdamW):
    """AdamW whose groups with ``muon=True`` are optimized by Muon instead (K2 algorithm 1).

    M <- mu M + G; W <- W - lr (scale orthogonalised(M) + weight_decay W), no Nesterov. `lay_out`
    says which matrices a tensor of such a group consists of; a collective where any is shared.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.batches: dict[Tensor, list[list[Block]]] = {}

    def lay_out(self, tensor: Tensor, blocks: Iterable[Block]) -> None:
        """Set the matrices of a tensor; shared ones in the same order on every rank."""
        blocks = list(blocks)
        own = [block for block in blocks if block.held and not block.shared]
        shared = [block for block in blocks if block.shared]
        self.batches[tensor] = [*_batches(own), *_batches(shared)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] - no closures
        """One step of every group; tensors without a gradient in Muon's have one of zeros."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for tensor in group["params"] if group["muon"] else []:
                self._descend(tensor, group["lr"], group["weight_decay"])

    def _descend(self, tensor: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor.data)
        momentum = state["momentum_buffer"].mul_(MOMENTUM)
        if tensor.grad is not None:
            momentum.add_(tensor.grad)
        tensor.mul_(1 - lr * weight_decay)
        numbers, source = tensor.data.view(-1), momentum.view(-1)
        for batch in self.batches[tensor]:
            rows, columns = batch[0].rows, batch[0].columns
            whole = source.new_zeros(len(batch), rows * columns)
            for row, block in zip(whole, batch, strict=True):
                part = source[block.at : block.at + block.held]
                row[block.begin : block.begin + block.held] = part
            if batch[0].shared:
                dist.all_reduce(whole)
            mine = [number for number, block in enumerate(batch) if block.held]
            if not mine:
                continue
            updates = orthogonalised(whole[mine].view(-1, rows, columns)).flatten(1)
            for update, number in zip(updates, mine, strict=True):
                block = batch[number]
                part = update[block.begin : block.begin + block.held]
                step = -lr * update_scale(rows, columns)
                numbers[block.at : block.at + block.held].add_(part, alpha=step)


def _batches(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Runs of matrices of one shape, of at most `BATCH_NUMBERS` together or one."""
    batch: list[Block] = []
    for block in blocks:
        size = block.rows * block.columns
        same = batch and (batch[0].rows, batch[0].columns) == (block.rows, block.columns)
        if batch and not (same and (len(batch) + 1) * size <= BATCH_NUMBERS):
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch
