"""Operations that a CPU trains with, a block of rows at a time: against their definitions in fp64,
with blocks so small that a few rows fill several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from farhorizon.kernels import blocks
from farhorizon.kernels.attnres import mix, naive_mix
from farhorizon.kernels.conv import naive_short_conv, rows, short_conv
from farhorizon.kernels.moe import naive_situ_glu, situ_glu
from farhorizon.kernels.norm import gated_norm, naive_gated_norm, naive_rms_norm, rms_norm

EPS = 1e-5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(blocks, "FEW_ELEMENTS", -1)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 24)
    monkeypatch.setattr(rows, "LEAST_ELEMENTS", 0)


def leaves(*shapes: Sequence[int]) -> list[Tensor]:
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


def check(own: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Value and all gradients are those of the twin, which autograd differentiates."""
    out, expected = own(*inputs), twin(*inputs)
    assert out.grad_fn is not None and "Rows" in repr(out.grad_fn.next_functions) + repr(out)
    pull = torch.randn_like(expected)
    got = [out, *torch.autograd.grad(out, inputs, pull)]
    wanted = [expected, *torch.autograd.grad(expected, inputs, pull)]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-10)
    own_wide = own(*(x.detach().float().requires_grad_() for x in inputs))
    torch.testing.assert_close(own_wide, expected.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 8), (7, 8), (3, 5, 6), (2, 40), (0, 8)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, gate, weight = leaves(shape, shape, shape[-1:])
    check(lambda x, w: rms_norm(x, w, EPS), lambda x, w: naive_rms_norm(x, w, EPS), [x, weight])
    check(
        lambda x, gate, w: gated_norm(x, gate, w, EPS),
        lambda x, gate, w: naive_gated_norm(x, gate, w, EPS),
        [x, gate, weight],
    )


@pytest.mark.parametrize("shape", [(5,), (7, 8), (3, 5, 6), (2, 40), (0, 8)])
def test_situ(shape: tuple[int, ...]) -> None:
    gate, up = leaves(shape, shape)
    check(situ_glu, naive_situ_glu, [gate, up])
    check(
        lambda a, b: situ_glu(a * 9, b * 50, 0.7, 3.0),
        lambda a, b: naive_situ_glu(a * 9, b * 50, 0.7, 3.0),
        [gate, up],
    )


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 6), (9, 6), (2, 5, 6), (0, 6)])
def test_mixture(shape: tuple[int, ...], count: int) -> None:
    query, norm, *sources = leaves((1, 6), (6,), *[shape] * count)

    def form(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda query, norm, *sources: of(sources, query, norm, EPS)

    check(form(mix), form(naive_mix), [query, norm, *sources])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bounds", [(0, 1), (0, 30), (0, 2, 3, 3, 20, 24), (0, 0, 7, 8)])
def test_convolution(bounds: tuple[int, ...], width: int) -> None:
    x, kernel = leaves((bounds[-1], 4), (4, width))
    check(
        lambda x, kernel: short_conv(x, kernel, bounds)[0],
        lambda x, kernel: naive_short_conv(x, kernel, bounds)[0],
        [x, kernel],
    )
    tails = [of(x, kernel, bounds)[1] for of in (short_conv, naive_short_conv)]
    torch.testing.assert_close(*tails, atol=0, rtol=0)


def test_a_sequence_has_the_same_bits_packed_and_alone() -> None:
    x, kernel, pull = (torch.randn(s) for s in ((31, 4), (4, 4), (31, 4)))
    found = []
    for first, bounds in ((0, (0, 5, 11, 31)), (11, (0, 20))):
        own = x[first:].clone().requires_grad_()
        out, _ = short_conv(own, kernel, bounds)
        found.append([t[11 - first :] for t in (out, *torch.autograd.grad(out, own, pull[first:]))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_rounds_nothing_in_backward() -> None:
    x, weight = (torch.randn(s).requires_grad_() for s in ((9, 64), (64,)))
    pull = torch.randn(9, 64)
    wanted = torch.autograd.grad(rms_norm(x, weight, EPS), [x, weight], pull)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(rms_norm(x, weight, EPS), [x, weight], pull)
    torch.testing.assert_close(got, wanted)
