"""One sequence divided over processes, as context and pipeline parallelism would do it: what each
makes by itself, put together, is the whole (architecture notes, invariants 4 and 5)."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.attnres import mix
from farhorizon.kernels.kda import chunk_kda

HEADS, WIDTH, TOKENS = 2, 8, 64
Tensor = torch.Tensor


def draw() -> list[Tensor]:
    """q, k, v, log decays and betas of one sequence, leaves."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(1, TOKENS, HEADS, WIDTH, generator=gen, dtype=torch.float64) for _ in range(4)
    )
    beta = torch.rand(1, TOKENS, HEADS, generator=gen, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    k = torch.nn.functional.normalize(k, dim=-1)
    return [x.requires_grad_() for x in (q, k, v, -5 * torch.sigmoid(g), beta)]


def run(parts: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    out, final = chunk_kda(*parts, initial_state=state, output_final_state=True)
    assert final is not None
    return out, final


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_a_sequence_meet_through_their_maps(ranks: int) -> None:
    """Each part makes the map of the state through it and what it adds to an empty one; states at
    its beginning follow from those of the parts before, without reading their tokens again."""
    given = draw()
    whole, last = run(given, None)
    pull = torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view_as(whole)
    want = torch.autograd.grad((whole * pull).sum() + last.sum(), given)
    parts = list(zip(*(x.chunk(ranks, 1) for x in given), strict=True))
    identity = torch.eye(WIDTH, dtype=torch.float64).expand(1, HEADS, WIDTH, WIDTH)
    state = torch.zeros(1, HEADS, WIDTH, WIDTH, dtype=torch.float64)
    outs: list[Tensor] = []
    for q, k, v, g, beta in parts:
        _, through = run([q, k, torch.zeros_like(v), g, beta], identity)
        _, added = run([q, k, v, g, beta], None)
        outs.append(run([q, k, v, g, beta], state)[0])
        state = through @ state + added
    found = torch.cat(outs, 1)
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-10)
    grads = torch.autograd.grad((found * pull).sum() + state.sum(), given)
    for a, b in zip(grads, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


def test_a_mixture_over_depth_in_two_phases_is_the_mixture() -> None:
    """Finished blocks first, their largest score and weighted sum; then the partial sum."""
    gen = torch.Generator().manual_seed(1)
    *blocks, partial = (torch.randn(5, 6, generator=gen, dtype=torch.float64) for _ in range(4))
    query, norm = (torch.randn(6, generator=gen, dtype=torch.float64) for _ in range(2))

    def score(x: Tensor) -> Tensor:
        return (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm) @ query

    scores = torch.stack([score(block) for block in blocks])
    top = scores.amax(0)
    weights = (scores - top).exp()
    cached = (weights[..., None] * torch.stack(blocks)).sum(0), weights.sum(0), top
    own = score(partial)
    highest = torch.maximum(own, cached[2])
    old, new = (cached[2] - highest).exp(), (own - highest).exp()
    total = old * cached[1] + new
    found = (old[:, None] * cached[0] + new[:, None] * partial) / total[:, None]
    torch.testing.assert_close(found, mix([*blocks, partial], query, norm), atol=1e-14, rtol=0)
