"""The experts' kernels: in Triton's interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.moe import grouped, layout, naive_experts  # noqa: E402
from farhorizon.kernels.moe.grouped import GroupedExperts  # noqa: E402
from farhorizon.kernels.moe.layout import layout_of  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def small(loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few tokens fill several."""
    torch.manual_seed(0)
    for module in (grouped, layout):
        monkeypatch.setattr(module, "TILE", 16)
    monkeypatch.setattr(layout, "COUNT_BLOCK", 16)
    monkeypatch.setattr(grouped, "PLAIN_TILE", (32, 16, 16))
    monkeypatch.setattr(grouped, "COMBINE_BLOCK", 16)


@pytest.fixture(params=["one launch", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks":
        monkeypatch.setattr(layout, "FEW_ROUTES", 0)


@pytest.mark.usefixtures("way")
def test_rows_are_sorted_and_fill_tiles() -> None:
    """Two tokens of expert 2, one of 0 and 3 each: a tile for each of the three, and room for one
    more; expert 1 has none."""
    experts = torch.tensor([[2, 0], [3, 2]], device=DEVICE)
    found = layout_of(experts, 4)
    assert found.sizes.tolist() == [1, 0, 2, 1]
    assert found.starts.tolist() == [0, 16, 16, 32, 48]
    assert found.place.tolist() == [16, 0, 32, 17]
    assert found.tile_expert.tolist() == [0, 2, 3, 4]
    rows = {0: 1, 16: 0, 17: 3, 32: 2}
    assert found.source.tolist() == [rows.get(i, -1) for i in range(64)]
    assert found.token.tolist() == [rows[i] // 2 if i in rows else -1 for i in range(64)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("tokens", "count", "k"), [(1, 1, 1), (40, 3, 2), (33, 100, 5)])
def test_the_sort_is_stable(tokens: int, count: int, k: int) -> None:
    experts = torch.randint(count, (tokens, k), device=DEVICE)
    found = layout_of(experts, count)
    order = found.source[found.source >= 0].long()
    assert torch.equal(order, experts.flatten().argsort(stable=True))
    back = found.source[found.place.long()].long()
    assert torch.equal(back, torch.arange(tokens * k, device=DEVICE))


SHAPES = [
    (7, 4, 2, 24, 20, (4.0, 25.0)),
    (33, 5, 5, 16, 33, None),  # every expert
    (1, 20, 3, 40, 16, (2.0, 7.0)),  # most without a token
]


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize(("tokens", "count", "k", "width", "inner", "bounds"), SHAPES)
def test_the_kernels_equal_the_definition(
    tokens: int,
    count: int,
    k: int,
    width: int,
    inner: int,
    bounds: tuple[float, float] | None,
    scale: float,
) -> None:
    """With small inputs too, where the activation must not cancel."""
    x = torch.randn(tokens, width) * scale
    w1, w3 = (torch.randn(count, inner, width) / width**0.5 for _ in "13")
    w2 = torch.randn(count, width, inner) / inner**0.5
    given = [x, w1, w2, w3, torch.rand(tokens, k)]
    experts = torch.rand(tokens, count).argsort(1)[:, :k]
    pull = torch.randn(tokens, width)
    wide = [one.double().requires_grad_() for one in given]
    leaves = [one.to(DEVICE).requires_grad_() for one in given]
    a, b, c, d, weights = wide
    truth = naive_experts(a, b, c, d, experts, weights, bounds)
    found = GroupedExperts.apply(*leaves[:4], experts.to(DEVICE), leaves[4], bounds, True)
    truths = [truth, *torch.autograd.grad(truth, wide, pull.double())]
    results = [found, *torch.autograd.grad(found, leaves, pull.to(DEVICE))]
    close = 1e-2 if GPU else 1e-5  # products of fp32 run in TF32 there
    for got, expected in zip(results, truths, strict=True):
        off, size = (got.cpu() - expected).detach(), expected.detach()
        assert float(off.norm()) < close * float(size.norm())


def test_both_ways_find_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 routes one launch takes the second of its sizes; expert 7 has none."""
    experts = torch.randint(7, (100, 3), device=DEVICE)
    few = layout_of(experts, 8)
    monkeypatch.setattr(layout, "FEW_ROUTES", 0)
    for one, other in zip(few, layout_of(experts, 8), strict=True):
        assert torch.equal(one, other)


def test_no_token_has_gradients_of_zero() -> None:
    given = [(0, 8), (3, 4, 8), (3, 8, 4), (3, 4, 8), (0, 2)]
    leaves = [torch.zeros(shape, device=DEVICE, requires_grad=True) for shape in given]
    experts = torch.zeros(0, 2, dtype=torch.long, device=DEVICE)
    out = GroupedExperts.apply(*leaves[:4], experts, leaves[4], None, True)
    assert out.shape == (0, 8)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [tuple(g.shape) for g in grads] == given and not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize("strided", [False, True])
def test_all_tokens_on_one_expert(strided: bool) -> None:
    """The others have no row and gradients of exactly 0; inputs may lie apart."""
    experts = torch.full((40, 1), 2)
    shapes = ((40, 24), (4, 20, 24), (4, 24, 20), (4, 20, 24), (40, 1))
    given = [torch.randn(shape) for shape in shapes]
    pull = torch.ones(1, 1).expand(40, 24)
    wide = [one.double().requires_grad_() for one in given]
    leaves = [one.to(DEVICE).requires_grad_() for one in given]
    a, b, c, d, scales = wide
    truth = naive_experts(a, b, c, d, experts, scales, (4.0, 25.0))
    x, w1, w2, w3, weights = (torch.stack([t, -t], -1)[..., 0] if strided else t for t in leaves)
    assert strided is not w1.is_contiguous()
    routes = experts.to(DEVICE).repeat(1, 2)[:, :1] if strided else experts.to(DEVICE)
    found = GroupedExperts.apply(x, w1, w2, w3, routes, weights, (4.0, 25.0), True)
    truths = [truth, *torch.autograd.grad(truth, wide, pull.double())]
    results = [found, *torch.autograd.grad(found, leaves, pull.to(DEVICE))]
    close = 1e-2 if GPU else 1e-5
    for got, expected in zip(results, truths, strict=True):
        off, size = (got.cpu() - expected).detach(), expected.detach()
        assert float(off.norm()) < close * float(size.norm())
    others = torch.tensor([0, 1, 3])
    assert not any(bool(grad[others].any()) for grad in results[2:5])
