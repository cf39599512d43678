"""RMSNorm on the GPU in 16 bits, gated or not: accuracy, invariance, determinism, large sizes."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.norm import gated_norm, naive_gated_norm, naive_rms_norm, rms_norm

pytestmark = pytest.mark.gpu

EPS = 1e-5
ALLOWED = {"x": 2.5e-3, "gate": 2.5e-3, "weight": 1e-4}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    x, gate = (torch.randn(*shape, device="cuda").to(dtype) for _ in range(2))
    return [x, gate, 1 + torch.randn(shape[-1], device="cuda") / 4]


def both(inputs: list[torch.Tensor], d_out: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = gated_norm(*leaves, eps=EPS)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 16), (777, 3, 64), (500, 12, 128), (33, 2, 96)])
def test_errors_are_those_of_rounding(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = draw(*shape, dtype=dtype)
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    found, expected = gated_norm(*narrow, eps=EPS), naive_gated_norm(*wide, eps=EPS)
    d_out = torch.randn_like(found)
    found.backward(d_out)
    expected.backward(d_out.double())
    assert found.dtype == dtype and relative(found, expected) < 2.5e-3
    for name, a, b in zip(ALLOWED, narrow, wide, strict=True):
        assert a.grad is not None and b.grad is not None
        assert a.grad.dtype == a.dtype and relative(a.grad, b.grad) < ALLOWED[name], name


@pytest.mark.parametrize("shape", [(1, 16), (777, 768), (500, 12, 128), (33, 1536)])
def test_errors_without_a_gate(shape: tuple[int, ...]) -> None:
    x, _, weight = draw(*shape)
    narrow = [t.clone().requires_grad_() for t in (x, weight)]
    wide = [t.double().requires_grad_() for t in (x, weight)]
    found, expected = rms_norm(*narrow, eps=EPS), naive_rms_norm(*wide, eps=EPS)
    d_out = torch.randn_like(found)
    found.backward(d_out)
    expected.backward(d_out.double())
    assert found.dtype == x.dtype and relative(found, expected) < 2.5e-3
    for name, a, b in zip(("x", "weight"), narrow, wide, strict=True):
        assert a.grad is not None and b.grad is not None
        assert a.grad.dtype == a.dtype and relative(a.grad, b.grad) < ALLOWED[name], name


def test_a_head_has_the_same_bits_wherever_it_stands() -> None:
    x, gate, weight = draw(1000, 12, 128)
    d_out = torch.randn_like(x)
    whole = both([x, gate, weight], d_out)
    for begin in (1, 333, 997):
        part = both([x[begin:], gate[begin:], weight], d_out[begin:])
        assert all(torch.equal(a[begin:], b) for a, b in zip(whole[:3], part[:3], strict=True))
    heads = both([x[:, 5:6], gate[:, 5:6], weight], d_out[:, 5:6])
    assert all(torch.equal(a[:, 5:6], b) for a, b in zip(whole[:3], heads[:3], strict=True))


def test_repeats_have_the_same_bits() -> None:
    inputs = draw(5000, 32, 128)
    d_out = torch.randn_like(inputs[0])
    first = both(inputs, d_out)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, both(inputs, d_out), strict=True))


def test_more_elements_than_32_bits_count() -> None:
    x, gate, weight = draw(140_000, 128, 128)
    d_out = torch.randn_like(x)
    whole = both([x, gate, weight], d_out)
    part = both([x[-500:], gate[-500:], weight], d_out[-500:])
    assert all(torch.equal(a[-500:], b) for a, b in zip(whole[:3], part[:3], strict=True))


def test_memory_of_a_cpu_is_refused_at_every_launch() -> None:
    """A kernel that is launched again does not look at its arguments as Triton does."""
    x, _, weight = draw(4, 64)
    rms_norm(x, weight, EPS)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            rms_norm(x, weight.cpu(), EPS)
