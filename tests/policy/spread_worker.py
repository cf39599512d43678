"""One of two ranks that hold half of the experts each: ``spread_worker.py RANK PORT DEVICE``.

Both draw the tokens of both, so that each knows in fp64 what it should get.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from farhorizon.kernels.moe import naive_experts
from farhorizon.policy.spread import spread_experts

RANK, PORT, DEVICE = int(sys.argv[1]), sys.argv[2], sys.argv[3]
RANKS, EXPERTS, WIDTH, INNER = 2, 8, 64, 32
SITU = (4.0, 25.0)
# Tokens of each rank, experts of a token, and how many of the experts any token goes to.
CASES = ((40, 40, 2, 8), (70, 3, 2, 8), (50, 0, 3, 8), (33, 20, 1, 1), (9, 11, 8, 8))

Tensor = torch.Tensor


def draw(number: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """For each rank x, experts, weights and the gradient of its outputs; and w1, w2, w3."""
    *counts, k, used = CASES[number]
    gen = torch.Generator().manual_seed(number)
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=gen) * shape[-1] ** -0.5).to(kind).to(DEVICE)

    matrices = [normal(EXPERTS, INNER, WIDTH), normal(EXPERTS, WIDTH, INNER)]
    matrices.append(normal(EXPERTS, INNER, WIDTH))
    tokens = []
    for count in counts:
        experts = torch.rand(count, used, generator=gen).argsort(1)[:, :k].to(DEVICE)
        weights = torch.rand(count, k, generator=gen).to(DEVICE)
        tokens.append([normal(count, WIDTH), experts, weights, normal(count, WIDTH)])
    return tokens, matrices


def truth(tokens: list[list[Tensor]], matrices: list[Tensor]) -> list[Tensor]:
    """Of this rank: outputs, gradients of x and weights, and of its half of the matrices."""
    wide = [m.double().requires_grad_() for m in matrices]
    own: list[Tensor] = []
    sums = [torch.zeros_like(m) for m in wide]
    for number, (x, experts, weights, pull) in enumerate(tokens):
        leaves = [x.double().requires_grad_(), weights.double().requires_grad_()]
        out = naive_experts(leaves[0], wide[0], wide[1], wide[2], experts, leaves[1], SITU)
        grads = torch.autograd.grad(out, [*leaves, *wide], pull.double(), materialize_grads=True)
        sums = [a + b for a, b in zip(sums, grads[2:], strict=True)]
        if number == RANK:
            own = [out.detach(), *grads[:2]]
    half = slice(RANK * EXPERTS // RANKS, (RANK + 1) * EXPERTS // RANKS)
    return [*own, *(one[half] for one in sums)]


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", rank=RANK, world_size=RANKS)
    half = slice(RANK * EXPERTS // RANKS, (RANK + 1) * EXPERTS // RANKS)
    for number in range(len(CASES)):
        tokens, matrices = draw(number)
        x, experts, weights, pull = tokens[RANK]
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
        parts = [m[half].clone().requires_grad_() for m in matrices]
        w1, w2, w3 = parts
        out = spread_experts(leaves[0], w1, w2, w3, experts, leaves[1], SITU, dist.group.WORLD)
        grads = torch.autograd.grad(out, [*leaves, *parts], pull)
        for a, b in zip([out.detach(), *grads], truth(tokens, matrices), strict=True):
            error = float((a.double() - b).norm()) / max(float(b.norm()), 1e-9)
            assert error < (8e-3 if DEVICE == "cuda" else 1e-5), (CASES[number], error)
    dist.destroy_process_group()
    print("all right")


if __name__ == "__main__":
    main()
