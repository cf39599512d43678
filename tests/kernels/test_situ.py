"""SiTU-GLU: in Triton's interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.moe import fused_situ, naive_situ_glu  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few rows and columns fill several."""
    torch.manual_seed(0)
    monkeypatch.setattr(fused_situ, "BLOCK", 32)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    error = float((a.detach().double().cpu() - b.detach()).norm())
    assert error <= 3e-6 * float(b.detach().norm())


@pytest.mark.parametrize("shape", [(1, 16), (7, 20), (5, 2, 32), (3, 70), (9, 1)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_results_and_gradients_are_those_of_the_definition(
    shape: tuple[int, ...], scale: float
) -> None:
    """Small arguments, where tanh must not cancel, and large ones, where it is flat."""
    inputs = [torch.randn(shape, dtype=torch.float64) * scale for _ in range(2)]
    wide = [x.clone().requires_grad_() for x in inputs]
    own = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    expected = naive_situ_glu(wide[0], wide[1], 4.0, 25.0)
    found = fused_situ.situ_fused(own[0], own[1], 4.0, 25.0)
    weight = torch.randn_like(expected)
    expected.backward(weight)
    found.backward(weight.to(found))
    close(found, expected)
    for a, b in zip(own, wide, strict=True):
        assert a.grad is not None and b.grad is not None
        close(a.grad, b.grad)


def test_columns_of_one_tensor_and_expanded_gradients() -> None:
    both = torch.randn(6, 40, device=DEVICE)
    results = []
    for given in (both.chunk(2, 1), [x.contiguous() for x in both.chunk(2, 1)]):
        gate, up = (x.detach().requires_grad_() for x in given)
        out = fused_situ.situ_fused(gate, up, 4.0, 25.0)
        results.append([out, *torch.autograd.grad(out.sum(), (gate, up))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_rows() -> None:
    gate, up = (torch.zeros(0, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    out = fused_situ.situ_fused(gate, up, 4.0, 25.0)
    out.sum().backward()
    assert out.shape == (0, 8) and gate.grad is not None
