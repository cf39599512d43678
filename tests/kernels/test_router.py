"""The router's kernels: in Triton's interpreter where there is no GPU, else compiled, and the twins
in torch that a CPU takes."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.moe import (  # noqa: E402
    Counts,
    QuantileHistogram,
    fused,
    naive_router,
    route,
    router,
)

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def small(loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a few tokens fill several. The interpreter cannot multiply bf16."""
    torch.manual_seed(0)
    monkeypatch.setattr(fused, "COUNT_TILE", (8, 16))
    monkeypatch.setattr(fused, "LOAD_ROUTES", 16)
    monkeypatch.setattr(fused, "PART", torch.float16)


def select(scores: torch.Tensor, bias: torch.Tensor, k: int) -> Pair:
    experts = torch.empty(len(scores), k, dtype=torch.int64, device=DEVICE)
    cutoff = fused.select(scores.to(DEVICE), bias.to(DEVICE), k, False, experts)
    return experts.cpu(), cutoff.cpu()


def by_definition(scores: torch.Tensor, bias: torch.Tensor, k: int) -> Pair:
    """Sorted in Python; what is no number comes first, as it does in torch."""
    experts, cutoff = [], []
    for row in (scores + bias).tolist():
        order = sorted(range(len(row)), key=lambda e: (row[e] == row[e], -row[e], e))
        experts.append(order[:k])
        cutoff.append(row[order[k]] if k < len(row) else -torch.inf)
    return torch.tensor(experts), torch.tensor(cutoff)


def same_choice(scores: torch.Tensor, bias: torch.Tensor, k: int) -> None:
    experts, cutoff = by_definition(scores, bias, k)
    for found in (select(scores, bias, k), route(scores, bias, k)[::2]):
        assert torch.equal(found[0], experts)
        torch.testing.assert_close(found[1], cutoff, atol=0, rtol=0, equal_nan=True)


SIZES = [(1, 1), (3, 1), (5, 5), (8, 7), (16, 4), (70, 63), (128, 8), (200, 16), (896, 16)]


@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_the_choice_is_that_of_a_sort(experts: int, k: int) -> None:
    bias = torch.randn(experts) * 0.1
    same_choice(torch.rand(6, experts), bias, k)
    same_choice(torch.randn(4, experts) * 1e3, bias, k)  # of any sign


@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_equal_scores_go_to_the_lowest_index(experts: int, k: int) -> None:
    coarse = (torch.rand(4, experts) * 4).floor() / 4
    coarse[1] = 0.5
    coarse[2] = torch.tensor([0.0, -0.0]).repeat(experts)[:experts]
    same_choice(coarse, torch.zeros(experts), k)
    same_choice(coarse, (torch.rand(experts) * 4).floor() / 4, k)


def test_what_is_not_finite_has_its_place() -> None:
    scores = torch.rand(5, 40)
    scores[0, ::7] = torch.nan
    scores[1] = torch.nan
    scores[2, ::9] = torch.inf
    scores[3, 1:] = -torch.inf
    scores[4, 3], scores[4, 5] = -torch.nan, torch.inf
    same_choice(scores, torch.zeros(40), 6)


def test_the_best_may_share_columns() -> None:
    """Those that stand in the same place of different rows of the kernel's table."""
    scores = torch.rand(3, 896) / 2
    scores[0, 5::64] += 0.5
    scores[1, 7::64] += 0.5
    scores[1, 9::64] += 0.4
    scores[2, :14] += 0.5
    same_choice(scores, torch.zeros(896), 16)


def draw(tokens: int, width: int, experts: int) -> list[torch.Tensor]:
    """fp64, rounded to what fp16 holds: the same numbers in every type."""
    found = [torch.randn(tokens, width), torch.randn(experts, width) / width**0.5]
    return [x.half().double().to(DEVICE) for x in (*found, torch.randn(experts) * 0.1)]


def run(
    inputs: list[torch.Tensor], k: int, given: Pair | None = None, counts: Counts | None = None
) -> Pair:
    x, weight, bias = inputs
    return fused.Routing.apply(x, weight, bias.float(), k, given, counts)  # type: ignore[no-any-return]


def counted(bias: torch.Tensor, k: int, valid: torch.Tensor | None) -> Counts:
    load = torch.zeros(len(bias), dtype=torch.int64, device=DEVICE)
    return Counts(load, QuantileHistogram(bias.float(), k), valid)


@pytest.mark.parametrize(("width", "experts", "k"), [(20, 12, 3), (64, 130, 8), (136, 16, 16)])
def test_routes_weights_and_gradients_are_those_of_the_twin(
    width: int, experts: int, k: int
) -> None:
    inputs = draw(37, width, experts)
    wide = [x.clone().requires_grad_() for x in inputs[:2]]
    narrow = [x.float().requires_grad_() for x in inputs[:2]]
    expected, weights = naive_router(wide[0], wide[1], inputs[2], k)
    found, mixed = run([*narrow, inputs[2]], k)
    d_weights = torch.randn_like(weights)
    weights.backward(d_weights)
    mixed.backward(d_weights.float())
    assert mixed.dtype == torch.float32 and torch.equal(found, expected)
    torch.testing.assert_close(mixed, weights.float(), atol=1e-6, rtol=1e-5)
    for a, b in zip(narrow, wide, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad.float(), atol=3e-6, rtol=1e-4)


def test_numbers_of_fp32_are_multiplied_in_two_parts() -> None:
    x, weight = (torch.randn(9, 64, dtype=torch.float64, device=DEVICE) for _ in range(2))
    out = torch.empty(9, 9, device=DEVICE)
    parts = [fused.parts_of(t.float(), fused.PART, True) for t in (x, weight)]
    errors = []
    for terms in (1, 2, 3):
        fused.product(parts[0], parts[1], out, terms)
        errors.append(float((out - x @ weight.T).norm() / (x @ weight.T).norm()))
    assert errors[0] > 1e-4 and errors[1] > 1e-4 and errors[2] < 3e-6


def test_a_token_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across the sizes at which the tiles change."""
    monkeypatch.setattr(fused, "FEW_ROWS", 10)
    x, weight, bias = (t.float() for t in draw(40, 24, 40))
    if not GPU:  # NumPy's sums go in another order in other rows: let them be exact
        x, weight = ((t * 8).round() / 8 for t in (x, weight))
    whole = run([x, weight, bias], 4)
    for begin, end in ((0, 9), (37, 38), (5, 40)):
        part = run([x[begin:end], weight, bias], 4)
        assert all(torch.equal(a[begin:end], b) for a, b in zip(whole, part, strict=True))
    monkeypatch.setattr(fused, "ELEMENTS", 40 * 16)  # three pieces
    assert all(torch.equal(a, b) for a, b in zip(whole, run([x, weight, bias], 4), strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_counts_are_those_of_the_twin(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ELEMENTS", 20 * 16)
    x, weight, bias = draw(20, 16, 20)
    valid = torch.rand(20, device=DEVICE) > 0.4 if masked else None
    ours, twin = counted(bias, 3, valid), counted(bias, 3, valid)
    for _ in range(2):  # they add up
        run([x.float(), weight.float(), bias], 3, counts=ours)
        naive_router(x, weight, bias.float(), 3, counts=twin)
    assert torch.equal(ours.load, twin.load)
    assert ours.histogram is not None and twin.histogram is not None
    assert torch.equal(ours.histogram.tokens, twin.histogram.tokens)
    assert int(ours.histogram.counts.sum()) == 20 * int(twin.histogram.tokens)
    difference = (ours.histogram.solve() - twin.histogram.solve()).abs().max()
    assert float(difference) < 0.1 * float(twin.histogram.width)


def test_routes_that_are_given_are_taken_and_counted() -> None:
    x, weight, bias = (t.float() for t in draw(30, 16, 20))
    own, weights = run([x, weight, bias], 3)
    given = torch.rand(30, 20, device=DEVICE).argsort(1)[:, :3].to(torch.int16)
    known = torch.arange(30, device=DEVICE) % 3 > 0
    counts = Counts(torch.zeros(20, dtype=torch.int64, device=DEVICE), None, known)
    taken, mixed = run([x, weight, bias], 3, (given, known), counts)
    expected = torch.where(known[:, None], given.long(), own)
    assert torch.equal(taken, expected) and torch.equal(mixed[~known], weights[~known])
    masked = Counts(torch.zeros_like(counts.load), None, ~known)
    run([x, weight, bias], 3, (given, known), masked)
    assert torch.equal(masked.load, torch.bincount(own[~known].flatten(), minlength=20))
    scores = torch.sigmoid(x @ weight.T).gather(1, expected)
    torch.testing.assert_close(mixed, scores / scores.sum(1, keepdim=True), atol=1e-6, rtol=1e-5)
    assert torch.equal(counts.load, torch.bincount(given[known].flatten().long(), minlength=20))
    apart = torch.stack([own, own], 1).to(torch.uint8)[:, 1]  # of one layer among several
    again = run([x, weight, bias], 3, (apart, known))
    assert torch.equal(again[0], own) and torch.equal(again[1], weights)


def bins_of(scores: torch.Tensor, cutoff: torch.Tensor, valid: torch.Tensor | None) -> list[int]:
    """Bins of the only expert of interest, by the kernel, after the twin agreed."""
    tables = [QuantileHistogram(torch.zeros(2), 1), QuantileHistogram(torch.zeros(2).to(DEVICE), 1)]
    tables[0].add(scores, valid, cutoff)
    sent = [t if t is None else t.to(DEVICE) for t in (scores, cutoff, valid)]
    fused.count(tables[1], sent[0], sent[1], sent[2], logits=False)  # type: ignore[arg-type]
    assert torch.equal(tables[0].counts, tables[1].counts.cpu())
    assert torch.equal(tables[0].tokens, tables[1].tokens.cpu())
    return tables[0].counts[0].nonzero().flatten().tolist()


def test_bins_by_hand() -> None:
    """Without thresholds 1000 bins span [-1, 1]: the width is 0.002. Below 2^-6 there are 88 on
    either side: 0.0011 = 1.1264 2^-10 is in the second of eight of its octave, the eighth."""
    scores = torch.tensor([[0.25, 0.5], [0.5, 0.5], [0.75, 0.5]])
    cutoff = torch.tensor([0.5011, 0.5011, 0.5011])
    assert bins_of(scores, cutoff, None) == [375, 625, 1000 + 88 + 7 * 8 + 1]
    assert bins_of(scores[1:2], torch.tensor([0.4989]), None) == [1000 + 87 - 7 * 8 - 1]
    assert bins_of(scores[1:2], torch.tensor([0.5]), None) == [1000 + 88]
    assert bins_of(scores[1:2], torch.tensor([0.5 - 2.0**-20]), None) == [1000 + 87]
    assert bins_of(scores[1:2], torch.tensor([0.5 + 2.0**-6]), None) == [507]  # 0.015625 / 0.002
    assert bins_of(scores[1:2], torch.tensor([0.5 - 2.0**-6]), None) == [492]
    assert bins_of(scores, cutoff, torch.tensor([True, False, True])) == [375, 625]
    assert bins_of(scores[:1], torch.tensor([9.0]), None) == [999]
    assert bins_of(scores[:1], torch.tensor([-9.0]), None) == [0]
    assert bins_of(scores[:1], torch.tensor([torch.nan]), None) == [0]
    assert bins_of(scores[:1], torch.tensor([torch.inf]), None) == [999]
    assert bins_of(scores[:0], cutoff[:0], None) == []


def test_counts_of_all_bins_are_those_of_the_twin() -> None:
    bias = torch.randn(33) * 0.2
    scores = torch.rand(300, 33)
    scores[:100] = scores[0]  # many in one bin
    cutoff = route(scores, bias, 4)[2]
    ours, twin = QuantileHistogram(bias.to(DEVICE), 4), QuantileHistogram(bias, 4)
    twin.add(scores)
    fused.count(ours, scores.to(DEVICE), cutoff.to(DEVICE), None, logits=False)
    assert torch.equal(ours.counts.cpu(), twin.counts)
    assert torch.equal(ours.solve().cpu(), twin.solve())  # on another device, where there is one


@pytest.mark.parametrize("experts", [1, 7, 8, 20])
def test_routes_are_counted_of_tokens_that_count(experts: int) -> None:
    routes = torch.randint(experts, (50, 3), device=DEVICE)
    load = torch.full((experts,), 5, device=DEVICE)
    valid = torch.arange(50, device=DEVICE) % 4 > 0
    for counting, counted_routes in ((None, routes), (valid, routes[valid])):
        before = load.clone()
        fused.add_load(load, routes, counting)
        found = torch.bincount(counted_routes.flatten(), minlength=experts)
        assert torch.equal(load - before, found)
    fused.add_load(load, routes[:0], None)
    assert int(load.sum()) == 5 * experts + 150 + 3 * 37


def test_where_every_expert_takes_every_token_only_tokens_count() -> None:
    table = QuantileHistogram(torch.zeros(4, device=DEVICE), 4)
    valid = torch.tensor([True, False, True], device=DEVICE)
    fused.count(table, torch.rand(3, 4, device=DEVICE), valid.float(), valid, logits=False)
    assert int(table.tokens) == 2 and not bool(table.counts.any())


def test_all_tokens_on_one_expert() -> None:
    x, weight, bias = (t.float() for t in draw(40, 16, 20))
    bias[7] = 5.0
    counts = counted(bias, 1, None)
    experts, weights = run([x, weight, bias], 1, counts=counts)
    assert bool((experts == 7).all()) and bool((weights - 1).abs().max() < 1e-6)
    assert counts.load.tolist() == [0] * 7 + [40] + [0] * 12
    assert counts.histogram is not None
    run([x, weight, counts.histogram.solve()], 1, counts=(balanced := counted(bias, 1, None)))
    assert int(balanced.load.max()) <= 10  # of 40


def test_strided_inputs() -> None:
    x, weight, bias = (t.float() for t in draw(12, 24, 20))
    expected = run([x, weight, bias], 3)
    apart = torch.stack([x, x], 2)[..., 0]
    slices = torch.cat([weight, weight], 1)[:, :24]
    for own in ([apart, weight], [x, slices], [x, weight.T.contiguous().T]):
        found = run([*own, bias], 3)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    x, weight = x.half(), weight.half()  # which are copied where they are
    one = run([x[:1], weight, bias], 3)
    column = x[0][:, None].clone().t()  # a row of stride 1
    for own, rows in ((column, 1), (x[:1].expand(12, 24), 12)):
        found = run([own, weight, bias], 3)
        assert all(torch.equal(a, b.expand(rows, 3)) for a, b in zip(found, one, strict=True))
        assert fused.parts_of(own, torch.float16, False).stride() == (24, 1)


def test_no_tokens() -> None:
    x, weight, bias = draw(0, 16, 20)
    leaves = [t.float().requires_grad_() for t in (x, weight)]
    counts = counted(bias, 3, torch.zeros(0, dtype=torch.bool, device=DEVICE))
    experts, weights = run([*leaves, bias], 3, counts=counts)
    weights.sum().backward()
    assert experts.shape == weights.shape == (0, 3)
    assert leaves[1].grad is not None and not bool(leaves[1].grad.any())
    assert counts.histogram is not None and int(counts.histogram.tokens) == 0


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    x, weight, bias = (t.float() for t in draw(9, 16, 20))
    clean = run([x, weight, bias], 3)
    x[4] = torch.nan
    own = x.clone().requires_grad_()
    experts, weights = run([own, weight, bias], 3)
    (grad,) = torch.autograd.grad(weights.square().sum(), own)
    rest = torch.arange(9) != 4
    assert experts[4].tolist() == [0, 1, 2] and bool(weights[4].isnan().all())
    assert torch.equal(experts[rest], clean[0][rest]) and torch.equal(weights[rest], clean[1][rest])
    assert grad.isnan().any(1).nonzero().flatten().tolist() == [4]


def test_what_does_not_fit_is_named() -> None:
    x, weight, bias = torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(4)
    with pytest.raises(ValueError, match=r"k must lie in \[1, 4\], got 5"):
        router(x, weight, bias, 5)
    given = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="routes of 3 tokens for 2 tokens"):
        router(x, weight, bias, 2, given)
    with pytest.raises(ValueError, match="routes of 2 experts for k = 3"):
        router(torch.zeros(3, 8), weight, bias, 3, given)


def test_a_cpu_takes_the_twin() -> None:
    inputs = [t.cpu() for t in draw(20, 16, 12)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, weight = (t.to(dtype) for t in inputs[:2])
        found, expected = (f(x, weight, inputs[2].float(), 3) for f in (router, naive_router))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
