"""Second derivatives of what has only a first one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from farhorizon.kernels import blocks
from farhorizon.kernels.attnres import mix
from farhorizon.kernels.conv import short_conv
from farhorizon.kernels.logprob import token_logprobs
from farhorizon.kernels.moe import grouped_experts, situ_glu
from farhorizon.kernels.norm import gated_norm

Tensor = torch.Tensor


def logprobs(x: Tensor) -> Tensor:
    return token_logprobs(x, torch.ones(3, 8), torch.zeros(6, dtype=torch.long), block_elements=6)[
        0
    ]


def experts(x: Tensor) -> Tensor:
    w, routes = torch.ones(1, 8, 8), torch.zeros(6, 1, dtype=torch.long)
    return grouped_experts(x, w, w, w, routes, torch.ones(6, 1), None)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixture": lambda x: mix([x, 2 * x], torch.ones(8), torch.ones(8)),
    "convolution": lambda x: short_conv(x, torch.ones(8, 2), (0, 6))[0],
    "norm": lambda x: gated_norm(x, x, torch.ones(8), 1e-5),
    "activation": lambda x: situ_glu(x, x),
    "log-probs": logprobs,
    "experts": experts,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_penalty_on_a_gradient_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a sum, whose own gradient is a constant: torch leaves the penalty out there."""
    torch.manual_seed(0)
    monkeypatch.setattr(blocks, "FEW_ELEMENTS", 0)
    monkeypatch.setattr("farhorizon.kernels.conv.rows.LEAST_ELEMENTS", 0)
    x = torch.randn(6, 8, requires_grad=True)
    out = FORMS[name](x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (out.square().sum() + grad.square().sum()).backward()
    FORMS[name](x).sum().backward()  # the first one is as ever
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad.detach())
