"""The experts' kernels on a GPU, beside the same experts in fp64."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.moe import grouped_experts, layout
from farhorizon.kernels.moe.layout import layout_of

pytestmark = pytest.mark.gpu

Tensors = list[torch.Tensor]
BOUNDS = (4.0, 25.0)
# Tokens, experts, routes of a token, width, inner width, how routes are drawn, activation, dtype;
# the bound of errors is a few roundings of the dtype.
CASES = {
    "even": (1000, 16, 4, 256, 256, "even", BOUNDS, torch.bfloat16),
    "half of the experts, SwiGLU": (777, 40, 6, 384, 128, "hole", None, torch.bfloat16),
    "every expert": (300, 8, 8, 256, 128, "even", BOUNDS, torch.bfloat16),
    "one expert": (2000, 8, 2, 512, 384, "one", BOUNDS, torch.bfloat16),
    "one token": (1, 896, 16, 1024, 512, "even", BOUNDS, torch.bfloat16),
    "odd widths": (513, 5, 2, 100, 72, "even", BOUNDS, torch.bfloat16),
    "fp16": (400, 6, 2, 256, 128, "even", (2.0, 9.0), torch.float16),
    "fp16, narrow": (64, 3, 1, 24, 24, "one", None, torch.float16),
    "many routes": (3000, 130, 8, 2304, 1024, "even", BOUNDS, torch.bfloat16),
}


def draw(
    tokens: int, count: int, k: int, width: int, inner: int, routes: str, dtype: torch.dtype
) -> Tensors:
    """``x``, ``w1``, ``w2``, ``w3``, ``experts`` and ``weights``."""
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    x = normal(tokens, width).to(dtype)
    w1, w3 = ((normal(count, inner, width) * 1.5 / width**0.5).to(dtype) for _ in "13")
    w2 = (normal(count, width, inner) / inner**0.5).to(dtype)
    scores = torch.rand(tokens, count, generator=gen, device="cuda")
    if routes == "hole":
        scores[:, count // 2 :] -= 9
    experts = scores.topk(k).indices
    if routes == "one":
        experts = torch.full_like(experts, count - 1)
    weights = torch.rand(tokens, k, generator=gen, device="cuda") + 0.1
    return [x, w1, w2, w3, experts, weights / weights.sum(1, keepdim=True)]


def forward(given: Tensors, bounds: tuple[float, float] | None) -> torch.Tensor:
    x, w1, w2, w3, experts, weights = given
    return grouped_experts(x, w1, w2, w3, experts, weights, bounds)


def passes(
    given: Tensors, bounds: tuple[float, float] | None, pull: torch.Tensor, wide: bool = False
) -> Tensors:
    """Outputs, and gradients of the inputs and weights; ``wide`` in fp64 by other code."""
    leaves = [one.double() if wide and one.is_floating_point() else one for one in given]
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in leaves]
    out = forward(leaves, bounds)
    wanted = [one for one in leaves if one.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, pull.to(out.dtype))]


@pytest.mark.parametrize("case", CASES)
def test_both_passes_beside_fp64(case: str) -> None:
    tokens, count, k, width, inner, routes, bounds, dtype = CASES[case]
    given = draw(tokens, count, k, width, inner, routes, dtype)
    pull = torch.randn(tokens, width, device="cuda").to(dtype)
    found, truth = passes(given, bounds, pull), passes(given, bounds, pull, wide=True)
    for one, other in zip(found, truth, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3)
    unused = torch.bincount(given[4].flatten(), minlength=count) == 0
    assert not any(bool(grad[unused].any()) for grad in found[2:5])
    for _ in range(5):
        assert all(map(torch.equal, found, passes(given, bounds, pull)))
    x, w1, w2, w3, experts, weights = given
    with torch.no_grad():
        assert torch.equal(forward(given, bounds), found[0])
        for part in (slice(tokens // 2, tokens // 2 + 1), slice(0, tokens // 3 + 1)):
            some = [x[part], w1, w2, w3, experts[part], weights[part]]
            assert torch.equal(forward(some, bounds), found[0][part])


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_small_inputs_have_the_errors_of_large_ones(scale: float) -> None:
    """The activation is nearly linear there, as a difference it would lose all of its bits."""
    given = draw(500, 8, 2, 256, 128, "even", torch.bfloat16)
    given[0] *= scale
    pull = torch.randn(500, 256, device="cuda").to(torch.bfloat16)
    found, truth = passes(given, BOUNDS, pull), passes(given, BOUNDS, pull, wide=True)
    for one, other in zip(found, truth, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 6e-3


def test_no_token() -> None:
    given = draw(0, 4, 2, 256, 128, "even", torch.bfloat16)
    found = passes(given, BOUNDS, torch.zeros(0, 256, device="cuda"))
    assert found[0].shape == (0, 256) and not any(bool(one.any()) for one in found)


def test_strides_do_not_matter() -> None:
    x, w1, w2, w3, experts, weights = given = draw(600, 16, 4, 256, 256, "even", torch.bfloat16)
    apart = x.new_zeros(600, 512)[:, 1:257]  # not aligned to what is copied at once
    apart.copy_(x)
    turned = w1.transpose(1, 2).contiguous().transpose(1, 2)
    odd = [apart, turned, w2, w3, experts.T.contiguous().T, weights.T.contiguous().T]
    pull = torch.ones(1, 1, device="cuda").expand(600, 256)
    assert all(map(torch.equal, passes(given, BOUNDS, pull), passes(odd, BOUNDS, pull)))


@pytest.mark.parametrize("tokens", [100, 2000])  # few and many routes
def test_a_graph_replays_other_routes_and_nothing_waits(tokens: int) -> None:
    given = draw(tokens, 64, 8, 512, 256, "even", torch.bfloat16)
    pull = torch.randn(tokens, 512, device="cuda").to(torch.bfloat16)
    passes(given, BOUNDS, pull)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes(given, BOUNDS, pull)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = passes(given, BOUNDS, pull)
    given[4].copy_(torch.rand(tokens, 64, device="cuda").topk(8).indices)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, kept, passes(given, BOUNDS, pull)))


@pytest.mark.parametrize(("tokens", "count", "k"), [(256, 32, 4), (1, 1, 1), (512, 128, 8)])
def test_one_launch_finds_the_layout_of_many(
    tokens: int, count: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = torch.randint(count, (tokens, k), device="cuda")
    few = layout_of(experts, count)
    monkeypatch.setattr(layout, "FEW_ROUTES", 0)
    assert all(map(torch.equal, few, layout_of(experts, count)))


def test_many_routes_are_sorted_and_stable() -> None:
    experts = torch.randint(896, (20_000, 16), device="cuda")
    found = layout_of(experts, 896)
    order = found.source[found.source >= 0].long()
    assert torch.equal(order, experts.flatten().argsort(stable=True))
    assert torch.equal(found.sizes.long(), experts.flatten().bincount(minlength=896))
    assert torch.equal(found.starts[1:], ((found.sizes + 127) // 128 * 128).cumsum(0).int())
