"""Attention of packed sequences as a GPU runs it, outputs and gradients against fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from farhorizon.kernels.attention import causal_attention, naive_causal_attention

pytestmark = pytest.mark.gpu
BOUNDS = [(0, 4096), (0, 5000), (0, 5000, 5300, 9800), (0, 300, 301, 1175), (0, 4096, 8192)]
SCALE = 192**-0.5


def draw(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    shapes = ((tokens, 2, 192), (tokens, 2, 192), (tokens, 2, 128))
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [x.requires_grad_() for x in given]


def attend(given: list[torch.Tensor], bounds: tuple[int, ...]) -> torch.Tensor:
    return causal_attention(given[0], given[1], given[2], bounds, SCALE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_outputs_and_gradients_are_those_of_the_definition(
    bounds: tuple[int, ...], deterministic: bool
) -> None:
    """Long sequences in cuDNN and short ones in flash attention, or all of them in the latter."""
    given = draw(bounds[-1])
    pull = torch.randn(bounds[-1], 2, 128, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = attend(given, bounds)
        found = [out.detach(), *torch.autograd.grad(out, given, pull)]
    finally:
        torch.use_deterministic_algorithms(False)
    for start, end in pairwise(bounds):  # a sequence at a time: scores in fp64 are large
        wide = [x[start:end].detach().double().requires_grad_() for x in given]
        truth = naive_causal_attention(wide[0], wide[1], wide[2], (0, end - start), SCALE)
        want = [truth, *torch.autograd.grad(truth, wide, pull[start:end].double())]
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
            error = float((x[start:end].double() - y.detach()).norm() / y.detach().norm())
            if end - start > 1 or name in ("out", "dv"):  # one token's scores have no gradient
                assert error < 6e-3, (name, start, error)


def test_a_sequence_has_the_bits_that_it_has_alone() -> None:
    bounds = (0, 5000, 5300, 9800)
    given = [x.detach() for x in draw(bounds[-1])]
    together = attend(given, bounds)
    for start, end in pairwise(bounds):
        alone = attend([x[start:end] for x in given], (0, end - start))
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("bounds", [(0, 4096), (0, 300, 301, 1175)])
def test_strides_do_not_matter(bounds: tuple[int, ...]) -> None:
    given = draw(bounds[-1])
    apart = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    assert all(x.stride(2) != 1 for x in apart)
    assert torch.equal(attend([x.requires_grad_() for x in apart], bounds), attend(given, bounds))
