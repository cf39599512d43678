"""Operations that a CPU trains with, a block of rows at a time: against their definitions in fp64,
with blocks so small that a few rows fill several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from farhorizon.kernels import blocks
from farhorizon.kernels.attnres import mix, mix_norm, naive_mix
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


@pytest.mark.parametrize("strided", [False, True])
def test_expanded_gradients_and_strided_inputs(strided: bool) -> None:
    """`sum` hands on one number for all; heads are columns of wider rows."""
    wide = torch.randn(9, 2, 16, dtype=torch.float64)
    weight = torch.linspace(-1, 1, 8, dtype=torch.float64)

    def mixture(of: Callable[..., Tensor], x: Tensor) -> Tensor:
        return of([x, x * 2], weight, weight)

    for own, twin in (
        (lambda x: rms_norm(x, weight, EPS), lambda x: naive_rms_norm(x, weight, EPS)),
        (lambda x: situ_glu(x, x * 2), lambda x: naive_situ_glu(x, x * 2)),
        (lambda x: mixture(mix, x), lambda x: mixture(naive_mix, x)),
    ):
        x = (wide[:, 0, ::2] if strided else wide[:, 0, :8].clone()).requires_grad_()
        grads = [torch.autograd.grad(form(x).sum(), x)[0] for form in (own, twin)]
        torch.testing.assert_close(*grads, atol=1e-11, rtol=1e-10)


def test_a_mixture_of_types() -> None:
    """Under autocast the first block is fp32, later ones are not."""
    sources = [torch.randn(9, 8) for _ in range(3)]
    query, norm = torch.randn(8), torch.rand(8)
    kinds = (torch.float32, torch.bfloat16, torch.bfloat16)
    for given in (kinds, kinds[::-1]):
        cast = [
            x.to(kind, copy=True).requires_grad_() for x, kind in zip(sources, given, strict=True)
        ]
        results = []
        for form in (mix, naive_mix):
            out = form(cast, query, norm)
            results.append([out, *torch.autograd.grad(out.float().sum(), cast)])
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)


def test_shapes_that_do_not_fit_are_named() -> None:
    x = torch.zeros(6, 8)
    for call, text in (
        (lambda: mix([x, torch.zeros(12, 8)], x[0], x[0]), r"sources\[1\] must be \[6, 8\]"),
        (lambda: mix([x, torch.zeros(3, 16)], x[0], x[0]), r"sources\[1\] must be \[6, 8\]"),
        (lambda: mix([x], x[0], torch.ones(1)), "norm_weight must hold 8 numbers"),
        (lambda: mix([x], x[0], torch.ones(8, 1)), "norm_weight must hold 8 numbers in one row"),
        (lambda: mix([x], torch.ones(8, 1), x[0]), "query must hold 8 numbers in one row"),
        (lambda: short_conv(x, torch.ones(8, 3), (0, 5, 3, 6)), "bounds must rise from 0 to the 6"),
        (lambda: situ_glu(x, torch.zeros(12, 8)), r"up must be \[6, 8\] as gate"),
        (lambda: rms_norm(x, torch.ones(1), EPS), r"weight must be \[8\], got \[1\]"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_gradients_are_those_of_differences() -> None:
    """Of each in blocks, against the values themselves and no twin."""
    forms: list[tuple[Callable[..., Any], list[Tensor]]] = [
        (lambda q, n, *s: mix(s, q, n), leaves((5,), (5,), (7, 5), (7, 5), (7, 5))),
        (
            lambda q, n, w, u, *s: mix_norm(s[:-1], s[-1], u, q, n, w)[1:],
            leaves((5,), (5,), (5,), (7, 5), (7, 5), (7, 5), (7, 5)),
        ),
        (lambda a, b: situ_glu(a, b), leaves((7, 5), (7, 5))),
        (lambda x, gate, w: gated_norm(x, gate, w, EPS), leaves((7, 5), (7, 5), (5,))),
        (lambda x, w: rms_norm(x, w, EPS), leaves((7, 5), (5,))),
        (lambda x, k, t: short_conv(x, k, (0, 0, 2, 7), t), leaves((7, 3), (3, 4), (3, 3, 3))),
    ]
    for call, inputs in forms:
        assert torch.autograd.gradcheck(call, inputs)
