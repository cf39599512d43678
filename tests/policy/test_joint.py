"""Linear maps of one input whose backward products add up its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farhorizon.policy.joint import Maps, trained

SIZES = (24, 24, 16, 8, 3)


def test_they_are_the_maps_and_their_gradients() -> None:
    """In fp64, where products added up at once and one by one hardly differ."""
    torch.manual_seed(0)
    x = torch.randn(10, 12, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(n, 12, dtype=torch.float64, requires_grad=True) for n in SIZES]
    pair, one, rest = Maps.apply(x, (2, 1, 2), *weights)
    assert [t.shape[1] for t in (pair, one, rest)] == [48, 16, 16]
    assert not rest[:, 11:].any()
    got = [*pair.split(24, 1), one, *rest[:, :11].split((8, 3), 1)]
    wanted = [x @ weight.T for weight in weights]
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    upstream = [torch.randn_like(t) for t in wanted]
    leaves = [x, *weights]
    ours = torch.autograd.grad(got, leaves, upstream)
    torch.testing.assert_close(
        ours, torch.autograd.grad(wanted, leaves, upstream), rtol=1e-12, atol=1e-12
    )


def test_an_output_without_gradient_adds_none() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    weights = [torch.full((4, 3), float(n), requires_grad=True) for n in (1, 2)]
    _, second = Maps.apply(x, (1, 1), *weights)
    dx, first, other = torch.autograd.grad(second.sum(), [x, *weights], allow_unused=True)
    assert dx.eq(8).all() and first is None and other.eq(2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_keeps_its_own_products(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, dtype=dtype)
    assert trained(x, [(nn.Linear(3, 4, bias=False).to(dtype),)]) is None
