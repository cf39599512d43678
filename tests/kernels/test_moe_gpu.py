"""The router and Quantile Balancing on the GPU, at real sizes: the exact choice, accuracy,
invariance, determinism, counts, no waiting for the GPU."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.moe import (
    Counts,
    QuantileHistogram,
    mixing_weights,
    naive_router,
    route,
    router,
)
from farhorizon.kernels.moe.histogram import COARSE_BINS, FIRST, SHIFT, SIDE_BINS, WINDOW

pytestmark = pytest.mark.gpu

SHAPES = [(896, 16, 2048), (512, 10, 1024), (128, 8, 2048), (32, 4, 1536), (20, 3, 100)]
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(
    tokens: int, experts: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    weight = (torch.randn(experts, width, device="cuda") / width**0.5).to(dtype)
    return [x, weight, torch.randn(experts, device="cuda") * 0.05]


def counted(bias: torch.Tensor, k: int, valid: torch.Tensor | None = None) -> Counts:
    load = torch.zeros(len(bias), dtype=torch.int64, device="cuda")
    return Counts(load, QuantileHistogram(bias, k), valid)


def table_of(counts: Counts) -> QuantileHistogram:
    assert counts.histogram is not None
    return counts.histogram


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("levels", [7, 1000, 0])
@pytest.mark.parametrize(("experts", "k"), [(896, 16), (896, 63), (130, 8), (2000, 32), (40, 40)])
def test_the_choice_is_that_of_a_stable_sort(experts: int, k: int, levels: int) -> None:
    scores = torch.rand(5000, experts, device="cuda")
    bias = torch.randn(experts, device="cuda") * 0.1
    if levels:
        scores, bias = ((x * levels).floor() / levels for x in (scores, bias))
    scores[7], scores[8, ::3], scores[9, 1:] = 0.5, torch.nan, -torch.inf
    found, weights, cutoff = route(scores, bias, k)
    ranked, order = (scores + bias).sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, order[:, :k])
    last = ranked[:, k] if k < experts else torch.full_like(cutoff, -torch.inf)
    torch.testing.assert_close(cutoff, last, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(weights[20:], mixing_weights(scores, found)[20:])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float16,) * 2, ("wide",) * 2])
@pytest.mark.parametrize(("experts", "k", "width"), SHAPES)
def test_routes_and_weights_are_right(
    experts: int, k: int, width: int, dtypes: tuple[torch.dtype | str, ...]
) -> None:
    dtype = torch.float32 if dtypes[0] == "wide" else dtypes[0]
    x, weight, bias = draw(3000, experts, width, dtype)  # type: ignore[arg-type]
    exact = torch.sigmoid(x.double() @ weight.double().T)
    found, weights = router(x, weight, bias, k)
    biased = exact + bias
    best = biased.sort(dim=1, descending=True).values
    chosen = biased.gather(1, found)
    # in falling order, none below the k-th best: up to the error of a score
    assert float((chosen - best[:, :k]).abs().max()) < 2e-5
    assert float((weights - mixing_weights(exact, found)).abs().max()) < 1e-5


@pytest.mark.parametrize("wide", ["neither", "weight", "both"])
@pytest.mark.parametrize(("experts", "k", "width"), SHAPES)
def test_gradients_are_those_of_the_twin(experts: int, k: int, width: int, wide: str) -> None:
    x, weight, bias = draw(2000, experts, width)
    narrow = [x.float() if wide == "both" else x, weight if wide == "neither" else weight.float()]
    leaves = [t.clone().requires_grad_() for t in narrow]
    exact = [t.double().requires_grad_() for t in (x, weight)]
    found, weights = router(leaves[0], leaves[1], bias, k)
    d_weights = torch.randn_like(weights)
    weights.backward(d_weights)
    scores = torch.sigmoid(exact[0] @ exact[1].T)
    mixing_weights(scores, found).backward(d_weights.double())
    for ours, twin in zip(leaves, exact, strict=True):
        assert ours.grad is not None and twin.grad is not None and ours.grad.dtype == ours.dtype
        assert relative(ours.grad, twin.grad) < (1e-4 if wide == "both" else 4e-3)


def test_gradients_below_the_range_of_fp16_reach_the_weights() -> None:
    """A sum over tokens of terms that fp16 would round to 0, and dx, which it does round."""
    x, weight, bias = draw(2000, 128, 256, torch.float16)
    wide = weight.float().requires_grad_()
    weights = router(x, wide, bias, 8)[1]
    d_weights = torch.randn_like(weights)
    (small,) = torch.autograd.grad(weights, wide, d_weights * 2.0**-30, retain_graph=True)
    (large,) = torch.autograd.grad(weights, wide, d_weights)
    assert float(small.abs().max()) > 0 and relative(small * 2.0**30, large) < 1e-5


def test_experts_that_all_are_chosen() -> None:
    x, weight, bias = draw(3000, 40, 256)
    valid = torch.rand(3000, device="cuda") > 0.5
    counts = counted(bias, 40, valid)
    found, weights = router(x, weight, bias, 40, counts=counts)
    scores = torch.sigmoid(x.double() @ weight.double().T)
    assert torch.equal(found.sort(1).values, torch.arange(40, device="cuda").expand(3000, 40))
    assert float((weights - mixing_weights(scores, found)).abs().max()) < 1e-6
    assert bool((counts.load == valid.sum()).all()) and int(table_of(counts).tokens) == valid.sum()
    assert not bool(table_of(counts).counts.any())


@pytest.mark.parametrize("tokens", [1, 31, 128, 255, 256, 1025, 9000])
def test_counts_of_any_number_of_tokens(tokens: int) -> None:
    x, weight, bias = draw(tokens, 100, 64)
    ours, twin = counted(bias, 7), counted(bias, 7)
    router(x, weight, bias, 7, counts=ours)
    naive_router(x, weight, bias, 7, counts=twin)
    assert int(table_of(ours).tokens) == tokens and int(ours.load.sum()) == 7 * tokens
    assert bool((table_of(ours).counts.sum(1) == tokens).all())
    # a score that is rounded otherwise may be in the next bin
    moved = (table_of(ours).counts - table_of(twin).counts).cumsum(1).abs().max()
    assert int(moved) <= max(1, tokens // 500)


@pytest.mark.parametrize(("experts", "k", "width"), SHAPES)
def test_a_token_has_the_same_bits_in_any_company(experts: int, k: int, width: int) -> None:
    """Also across the sizes at which the tiles change."""
    x, weight, bias = draw(40_000, experts, width)
    d_weights = torch.randn(40_000, k, device="cuda")

    def run(begin: int, end: int) -> list[torch.Tensor]:
        own = x[begin:end].clone().requires_grad_()
        found, weights = router(own, weight, bias, k)
        return [found, weights.detach(), *torch.autograd.grad(weights, own, d_weights[begin:end])]

    whole = run(0, 40_000)
    for begin, end in ((0, 1), (777, 900), (100, 1124), (3, 2000), (20_001, 40_000)):
        part = run(begin, end)
        assert all(torch.equal(a[begin:end], b) for a, b in zip(whole, part, strict=True))


def test_repeats_have_the_same_bits() -> None:
    x, weight, bias = draw(20_000, 896, 1024)
    valid = torch.rand(20_000, device="cuda") > 0.1
    first: list[torch.Tensor] = []
    for _ in range(30):
        counts = counted(bias, 16, valid)
        found = [*router(x, weight, bias, 16, counts=counts), counts.load, table_of(counts).counts]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(896, 16), (33, 4), (8, 1)])
def test_counts_are_those_of_the_twin(experts: int, k: int, masked: bool) -> None:
    """Of the same scores, bin by bin, in both forms; so is the solution, to the bit."""
    from farhorizon.kernels.moe.fused import byte_mask
    from farhorizon.kernels.moe.triton_histogram import count_kernel

    scores = torch.rand(30_001, experts, device="cuda")
    scores[:9000] = scores[0]  # many in one bin
    scores[20_000:] = scores[20_000:] / 50 + 0.5  # near the biases of some
    bias = torch.randn(experts, device="cuda") * 0.2
    valid = torch.rand(30_001, device="cuda") > 0.3 if masked else None
    cutoff = route(scores, bias, k)[2]
    ours, plain = QuantileHistogram(bias, k), QuantileHistogram(bias, k)
    twin = QuantileHistogram(bias.cpu(), k)
    for _ in range(2):
        ours.add(scores, valid, cutoff)
        twin.add(scores.cpu(), None if valid is None else valid.cpu(), cutoff.cpu())
        grid = (-(-len(scores) // 32), -(-experts // 32))
        count_kernel[grid](
            *(scores, cutoff, byte_mask(valid), plain.low, plain.scale, plain.bias),
            *(plain.counts, plain.tokens, len(scores)),
            **{"E": experts, "COARSE": COARSE_BINS, "SIDE": SIDE_BINS},  # type: ignore[arg-type]
            **{"WINDOW": WINDOW, "FIRST": FIRST, "SHIFT": SHIFT},  # type: ignore[arg-type]
            **{"BT": 32, "BE": 32},  # type: ignore[arg-type]
            **{"MASKED": masked, "LOGITS": False, "FAST": True},  # type: ignore[arg-type]
        )
    assert torch.equal(ours.counts.cpu(), twin.counts)
    assert torch.equal(plain.counts, ours.counts)
    assert int(ours.tokens) == int(twin.tokens) == int(plain.tokens)
    assert torch.equal(ours.solve().cpu(), twin.solve())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (20, 3), (128, 8), (896, 16), (4096, 63)])
def test_routes_are_counted_in_both_forms(experts: int, k: int, masked: bool) -> None:
    from farhorizon.kernels.moe.fused import add_load, byte_mask
    from farhorizon.kernels.moe.triton_histogram import load_kernel

    routes = torch.randint(experts, (20_001, k), device="cuda")
    routes[:5000] %= 7  # many of few experts
    valid = torch.rand(20_001, device="cuda") > 0.3 if masked else None
    ours, plain = (torch.zeros(experts, dtype=torch.int64, device="cuda") for _ in range(2))
    for _ in range(2):
        add_load(ours, routes, valid)
        load_kernel[(-(-routes.numel() // 1024),)](
            *(routes, byte_mask(valid), plain, routes.numel()),
            **{"K": k, "BLOCK": 1024, "MASKED": masked},  # type: ignore[arg-type]
        )
    counted_routes = routes if valid is None else routes[valid]
    expected = 2 * torch.bincount(counted_routes.flatten(), minlength=experts)
    assert torch.equal(ours, expected) and torch.equal(plain, expected)


def test_what_is_not_finite_has_a_bin() -> None:
    scores = torch.full((4, 2), 0.5, device="cuda")
    cutoff = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5011], device="cuda")
    table = QuantileHistogram(torch.zeros(2, device="cuda"), 1)
    table.add(scores, cutoff=cutoff)
    assert table.counts[0].nonzero().flatten().tolist() == [0, 999, 1000 + 88 + 7 * 8 + 1]
    assert table.counts[0, 0] == 2


def test_counts_of_a_forward_balance_the_next() -> None:
    x, weight, bias = draw(60_000, 896, 512)
    weight += torch.linspace(-0.02, 0.02, 896, device="cuda").bfloat16()[:, None]
    x[:, 0] += 20
    counts = counted(bias, 16)
    router(x, weight, bias, 16, counts=counts)
    assert int(counts.load.sum()) == 60_000 * 16
    assert int(table_of(counts).counts.sum()) == 60_000 * 896
    before = counts.load
    for _ in range(3):
        bias = table_of(counts).solve()
        counts = counted(bias, 16)
        router(x, weight, bias, 16, counts=counts)
    loads = [float(load.max() / load.float().mean()) for load in (before, counts.load)]
    assert loads[0] > 1.5 and loads[1] < 1.3


def test_routes_that_are_given_give_the_bits_of_their_own() -> None:
    x, weight, bias = draw(5000, 896, 1024)
    own = router(x, weight, bias, 16)
    known = torch.rand(5000, device="cuda") > 0.5
    counts = Counts(torch.zeros(896, dtype=torch.int64, device="cuda"))
    again = router(x, weight, bias, 16, (own[0].short(), known), counts)
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))
    assert torch.equal(counts.load, torch.bincount(own[0].flatten(), minlength=896))


def test_all_tokens_on_one_expert() -> None:
    x, weight, bias = draw(30_000, 128, 256)
    bias[77] = 3.0
    counts = counted(bias, 1)
    found, weights = router(x, weight, bias, 1, counts=counts)
    assert bool((found == 77).all()) and int(counts.load[77]) == 30_000
    assert float((weights - 1).abs().max()) < 1e-6
    after = counted(table_of(counts).solve(), 1)
    router(x, weight, table_of(after).bias, 1, counts=after)
    assert int(after.load.max()) < 3000


def test_strided_inputs() -> None:
    x, weight, bias = draw(3000, 256, 512)
    expected = router(x, weight, bias, 8)
    apart = torch.stack([x, x], 2)[..., 0]
    slices = torch.cat([x, x], 1)[:, :512]
    for own in (apart, slices, x.T.contiguous().T):
        found = router(own, weight.T.contiguous().T, bias, 8)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    scores = torch.sigmoid(x.float() @ weight.float().T)
    turned = route(scores.T.contiguous().T, bias, 8)
    assert all(torch.equal(a, b) for a, b in zip(turned, route(scores, bias, 8), strict=True))


def test_no_tokens() -> None:
    x, weight, bias = draw(0, 256, 512)
    counts = counted(bias, 8)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found, weights = router(leaves[0], leaves[1], bias, 8, counts=counts)
    weights.sum().backward()
    assert found.shape == (0, 8) and leaves[1].grad is not None
    assert not bool(leaves[1].grad.any()) and int(table_of(counts).tokens) == 0
    assert route(torch.rand(0, 9, device="cuda"), torch.zeros(9, device="cuda"), 2)[0].shape == (
        0,
        2,
    )


def test_nothing_waits_for_the_gpu() -> None:
    x, weight, bias = draw(4000, 896, 512)
    x.requires_grad_()
    weight.requires_grad_()
    valid = torch.rand(4000, device="cuda") > 0.1
    counts = counted(bias, 16, valid)
    router(x, weight, bias, 16, counts=counts)[1].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        router(x, weight, bias, 16, counts=counts)[1].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_it() -> None:
    x, weight, bias = draw(256, 32, 1536)
    router(x, weight, bias, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = router(x, weight, bias, 4)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, router(x, weight, bias, 4), strict=True))


def test_more_scores_than_32_bits_count() -> None:
    scores = torch.rand(2_500_000, 896, device="cuda")
    bias = torch.randn(896, device="cuda") * 0.1
    table, part = QuantileHistogram(bias, 16), QuantileHistogram(bias, 16)
    found, _, cutoff = route(scores, bias, 16)
    last = route(scores[-900:], bias, 16)
    assert torch.equal(found[-900:], last[0]) and torch.equal(cutoff[-900:], last[2])
    table.add(scores, torch.arange(2_500_000, device="cuda") >= 2_499_100, cutoff)
    part.add(scores[-900:])
    assert torch.equal(table.counts, part.counts) and int(table.tokens) == 900


def test_what_the_kernels_do_not_serve_takes_torch() -> None:
    x, weight, bias = draw(300, 200, 64)
    for k in (64, 199, 200):
        found, expected = (f(x, weight, bias, k) for f in (router, naive_router))
        assert torch.equal(found[0], expected[0])
    scores = torch.rand(50, 12, dtype=torch.float64, device="cuda")
    assert route(scores, bias[:12], 3)[1].dtype == torch.float64
