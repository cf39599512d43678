"""The short convolution on the GPU in 16 bits: accuracy, invariance, determinism, large tensors."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.conv import naive_short_conv, short_conv

pytestmark = pytest.mark.gpu

NAMES = ("x", "kernel", "tail")
# Relative error against fp64 on the same inputs: that of rounding to 16 bits, and of fp32 sums.
ALLOWED = {"x": 2.5e-3, "kernel": 1e-4, "tail": 2.5e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(tokens: int, channels: int, sequences: int, dtype: torch.dtype) -> list[torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    tail = normal(sequences, 3, channels).to(dtype)
    return [normal(tokens, channels).to(dtype), normal(channels, 4) / 2, tail]


def both(
    inputs: list[torch.Tensor], bounds: tuple[int, ...], d_out: torch.Tensor
) -> list[torch.Tensor]:
    """Result, new tail and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y, new = short_conv(leaves[0], leaves[1], bounds, leaves[2] if len(leaves) > 2 else None)
    return [y.detach(), new.detach(), *torch.autograd.grad(y, leaves, d_out)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [24, 1536, 4608])
@pytest.mark.parametrize("tail", [False, True])
def test_errors_are_those_of_rounding(dtype: torch.dtype, channels: int, tail: bool) -> None:
    bounds = (0, 1, 1, 3, 200, 457, 458, 586, 700)
    inputs = draw(700, channels, len(bounds) - 1, dtype)[: 2 + tail]
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    found = short_conv(narrow[0], narrow[1], bounds, narrow[2] if tail else None)
    expected = naive_short_conv(wide[0], wide[1], bounds, wide[2] if tail else None)
    assert type(found[0].grad_fn).__name__ == "ShortConvBackward"
    weights = [torch.randn_like(t) for t in found]
    torch.autograd.backward(found, weights)
    torch.autograd.backward(expected, [w.double() for w in weights])
    assert found[0].dtype == dtype and relative(found[0], expected[0]) < 2.5e-3
    assert torch.equal(found[1].double(), expected[1])
    for name, a, b in zip(NAMES, narrow, wide, strict=False):
        assert a.grad is not None and b.grad is not None
        assert a.grad.dtype == a.dtype and relative(a.grad, b.grad) < ALLOWED[name], name


def test_a_sequence_has_the_same_bits_alone_packed_and_with_more_after_it() -> None:
    x, kernel, tail = draw(3000, 1536, 3, torch.bfloat16)
    d_out = torch.randn_like(x)

    def part(begin: int, end: int, bounds: tuple[int, ...], rows: slice) -> list[torch.Tensor]:
        inputs = [x[begin:end], kernel, tail[rows]]
        y, new, dx, _, d_tail = both(inputs, bounds, d_out[begin:end])
        a, n = 333 - begin, 1 - rows.start
        return [y[a : a + 901], new[n], dx[a : a + 901], d_tail[n]]

    alone = part(333, 1234, (0, 901), slice(1, 2))
    for other in (
        part(0, 3000, (0, 333, 1234, 3000), slice(0, 3)),
        part(333, 3000, (0, 901, 2667), slice(1, 3)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    longer = part(333, 3000, (0, 2667), slice(1, 2))  # tokens appended: not for the last three
    assert torch.equal(longer[0], alone[0]) and torch.equal(longer[2][:898], alone[2][:898])


def test_repeats_have_the_same_bits() -> None:
    inputs = draw(20000, 4608, 3, torch.bfloat16)
    d_out = torch.randn_like(inputs[0])
    first = both(inputs, (0, 7, 9001, 20000), d_out)
    for _ in range(100):
        again = both(inputs, (0, 7, 9001, 20000), d_out)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_pieces_with_carried_tails_have_the_bits_of_one_pass() -> None:
    x, kernel, tail = draw(400, 1536, 1, torch.bfloat16)
    whole, last = short_conv(x, kernel, (0, 400), tail)
    outs = []
    for piece in x.split([1, 1, 2, 62, 3, 131, 200]):
        out, tail = short_conv(piece, kernel, (0, len(piece)), tail)
        outs.append(out)
    assert torch.equal(torch.cat(outs), whole) and torch.equal(tail, last)


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    x, kernel, tail = draw(300, 1536, 3, torch.bfloat16)
    d_out = torch.randn_like(x)
    x[100:102], tail[1], d_out[100:102] = float("nan"), float("nan"), float("nan")
    y, new, dx, _, d_tail = both([x, kernel, tail], (0, 100, 102, 300), d_out)
    for found in (y, dx):
        assert found.isnan().any(-1).nonzero().flatten().tolist() == [100, 101]
    for found in (new, d_tail):
        assert not bool(found[::2].isnan().any())


def test_more_elements_than_32_bits_count() -> None:
    tokens, channels = 180_000, 12288
    x = torch.randn(tokens, channels, device="cuda", dtype=torch.bfloat16)
    d_out = torch.randn_like(x)
    _, kernel, _ = draw(1, channels, 1, torch.bfloat16)
    bounds = (0, tokens - 500, tokens)
    y, new, dx, _ = both([x, kernel], bounds, d_out)
    expected = both([x[-500:], kernel], (0, 500), d_out[-500:])
    for a, b in ((y[-500:], expected[0]), (new[1:], expected[1]), (dx[-500:], expected[2])):
        assert torch.equal(a, b)
