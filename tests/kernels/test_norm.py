"""RMSNorm, gated or not: in Triton's interpreter where there is no GPU, else compiled, and the twin
in torch that a CPU takes."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.norm import (  # noqa: E402
    fused,
    gated_norm,
    naive_gated_norm,
    naive_rms_norm,
    rms_norm,
)

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a few rows fill several programs."""
    torch.manual_seed(0)
    for name in ("FORWARD_ELEMENTS", "BACKWARD_ELEMENTS"):
        monkeypatch.setattr(fused, name, 64)
    monkeypatch.setattr(fused, "BACKWARD_BLOCKS", 3)


def by_definition(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight / (1 + torch.exp(-gate))


def draw(*shape: int) -> list[torch.Tensor]:
    x, gate = (torch.randn(*shape, dtype=torch.float64) for _ in range(2))
    return [x, 3 * gate, torch.randn(shape[-1], dtype=torch.float64)]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float, name: str = "") -> None:
    error = float((a.detach().double().cpu() - b.detach()).norm())
    assert error <= tolerance * float(b.detach().norm()), name


@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 16), (5, 2, 32), (9, 2, 20), (11, 128)])
def test_results_and_gradients_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    inputs = draw(*shape)
    wide, twin = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    own = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    expected = by_definition(*wide)
    again, found = naive_gated_norm(*twin, eps=EPS), fused.norm_fused(*own, eps=EPS)
    weight = torch.randn_like(expected)
    for out in (expected, again, found):
        out.backward(weight.to(out))
    close(found, expected, 3e-6)
    close(again, expected, 1e-12)
    for name, a, b, c in zip(("x", "gate", "weight"), own, twin, wide, strict=True):
        assert a.grad is not None and b.grad is not None and c.grad is not None
        close(a.grad, c.grad, 3e-6, name)
        close(b.grad, c.grad, 1e-12, name)


@pytest.mark.parametrize("shape", [(1, 16), (7, 20), (5, 2, 32), (3, 100)])
def test_without_a_gate(shape: tuple[int, ...]) -> None:
    x, _, weight = draw(*shape)
    wide, twin = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    own = [t.float().to(DEVICE).requires_grad_() for t in (x, weight)]
    # a gate of infinity is open
    expected = by_definition(wide[0], torch.full_like(x, torch.inf), wide[1])
    again, found = naive_rms_norm(*twin, eps=EPS), fused.norm_fused(own[0], None, own[1], EPS)
    pull = torch.randn_like(expected)
    for out in (expected, again, found):
        out.backward(pull.to(out))
    close(found, expected, 3e-6)
    close(again, expected, 1e-12)
    for a, b, c in zip(own, twin, wide, strict=True):
        assert a.grad is not None and b.grad is not None and c.grad is not None
        close(a.grad, c.grad, 3e-6)
        close(b.grad, c.grad, 1e-12)


def test_a_row_by_hand() -> None:
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0]), 0.5)
    torch.testing.assert_close(out, torch.tensor([[6.0, 4.0]]) / 13**0.5)


def test_a_head_by_hand() -> None:
    """The mean square of (3, 4) is 12.5; a gate of 0 halves."""
    weight = torch.tensor([2.0, 1.0])
    out = gated_norm(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), weight, 0.5)
    torch.testing.assert_close(out, torch.tensor([[3.0, 2.0]]) / 13**0.5)


def test_few_rows_on_a_cpu_take_the_twin() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, gate, weight = (t.to(dtype) for t in draw(4, 2, 16))
        out = gated_norm(x, gate, weight.float(), EPS)
        assert out.dtype == dtype
        assert torch.equal(out, naive_gated_norm(x, gate, weight.float(), EPS))


def test_a_row_has_the_same_bits_wherever_it_stands() -> None:
    x, gate, weight = (t.float().to(DEVICE) for t in draw(30, 16))
    results = []
    for begin in (0, 5, 11):
        own, opened = x[begin:].clone().requires_grad_(), gate[begin:].clone().requires_grad_()
        out = fused.norm_fused(own, opened, weight, EPS)
        grads = torch.autograd.grad(out.square().sum(), [own, opened])
        results.append([t[11 - begin :] for t in (out, *grads)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    x, gate, weight = (t.float().to(DEVICE) for t in draw(9, 16))
    x[4] = float("nan")
    own = x.requires_grad_()
    out = fused.norm_fused(own, gate, weight, EPS)
    (grad,) = torch.autograd.grad(out.sum(), own)
    for found in (out, grad):
        assert found.isnan().any(-1).nonzero().flatten().tolist() == [4]


def test_strided_heads_and_expanded_gradients() -> None:
    x, gate, weight = (t.float().to(DEVICE) for t in draw(6, 2, 16))
    pair = torch.stack([x, gate], 1)
    results = []
    for given in ((x, gate), pair.unbind(1)):
        own = given[0].detach().requires_grad_()
        out = fused.norm_fused(own, given[1], weight, EPS)
        results.append([out, *torch.autograd.grad(out.sum(), own)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_rows() -> None:
    x, gate, weight = (t.float().to(DEVICE).requires_grad_() for t in draw(0, 2, 16))
    out = fused.norm_fused(x, gate, weight, EPS)
    out.sum().backward()
    assert out.shape == (0, 2, 16) and weight.grad is not None and not bool(weight.grad.any())


def test_shapes_that_do_not_fit_are_named() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"gate must be \[2, 3, 4\] as x, got \[2, 4\]"):
        gated_norm(x, torch.zeros(2, 4), torch.ones(4), EPS)
    with pytest.raises(ValueError, match=r"weight must be \[4\], got \[3\]"):
        gated_norm(x, x, torch.ones(3), EPS)


@pytest.mark.parametrize("tensors", [2, 3])
@pytest.mark.parametrize("width", [20, 128, 7168, 16384, 20000, 65536])
def test_blocks_on_their_way_fit_in_shared_memory(width: int, tensors: int) -> None:
    """An SM of Hopper has 227 KiB for a program; up to 16,384 columns three stages fit."""
    block, padded = fused.block_rows(width, fused.BACKWARD_ELEMENTS)
    stages = fused.stages_for(block * padded, tensors)
    assert 2 * (stages - 1) * block * padded * tensors <= 227 << 10
    assert stages == fused.STAGES or padded > 16384
