"""Routing, Quantile Balancing and experts on numbers that can be checked by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from farhorizon.kernels.moe import (
    Counts,
    QuantileHistogram,
    grouped_experts,
    naive_experts,
    route,
    router,
    situ_glu,
)
from farhorizon.kernels.moe.histogram import balanced, centred


def test_bias_is_added_for_the_choice_and_absent_from_the_weights():
    """C06."""
    scores = torch.tensor([[0.6, 0.5, 0.4, 0.3]])
    bias = torch.tensor([-0.3, 0.0, 0.0, 0.25])
    experts, weights, cutoff = route(scores, bias, 2)
    assert experts.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.375, 0.625]]))
    torch.testing.assert_close(cutoff, torch.tensor([0.4]))


def test_ties_go_to_the_lowest_index():
    experts, _, cutoff = route(torch.full((2, 5), 0.5), torch.zeros(5), 3)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert cutoff.tolist() == [0.5, 0.5]


def test_all_experts_chosen_when_k_is_their_number():
    experts, weights, cutoff = route(torch.tensor([[0.2, 0.8]]), torch.zeros(2), 2)
    assert experts.tolist() == [[1, 0]] and cutoff.tolist() == [-torch.inf]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 0.2]]))


def test_k_out_of_range_is_refused():
    with pytest.raises(ValueError, match="k must lie"):
        route(torch.zeros(1, 4), torch.zeros(4), 5)


def pairs(count: int) -> torch.Tensor:
    """Two experts whose scores differ by d, spread evenly over [-0.25, 0.75]."""
    d = torch.linspace(-0.25, 0.75, count)
    return torch.stack([0.5 + d / 2, 0.5 - d / 2], 1)


def solved(parts: list[torch.Tensor], bias: torch.Tensor, k: int) -> torch.Tensor:
    total = QuantileHistogram(bias, k)
    for part in parts:
        shard = QuantileHistogram(bias, k)
        shard.add(part)
        total.merge(shard)
    return total.solve()


@pytest.mark.parametrize("cuts", [[], [750], [250, 500, 750], [1, 999]])
def test_threshold_is_the_pooled_quantile_for_any_split(cuts):
    """C07."""
    parts = list(pairs(1000).tensor_split(cuts))
    bias = solved(parts, torch.zeros(2), 1)
    torch.testing.assert_close(bias, torch.tensor([-0.125, 0.125]), atol=0.004, rtol=0)
    assert abs(float(bias.mean())) < 1e-7
    experts, _, _ = route(pairs(1000), bias, 1)
    assert abs(float((experts == 0).float().mean()) - 0.5) < 0.005


def test_invalid_tokens_do_not_count():
    """C07."""
    scores = torch.cat([pairs(1000), torch.full((500, 2), 0.5)])
    valid = torch.arange(1500) < 1000
    histogram = QuantileHistogram(torch.zeros(2), 1)
    histogram.add(scores, valid)
    assert int(histogram.tokens) == 1000
    torch.testing.assert_close(histogram.solve(), torch.tensor([-0.125, 0.125]), atol=0.004, rtol=0)


@pytest.mark.parametrize("spread", [1.0, 0.1, 0.01, 1e-3, 1e-4])
def test_histogram_matches_the_exact_quantile_within_a_bin(spread: float):
    """As wide as 1/1000 of the range, or near the own bias as an eighth of the distance."""
    torch.manual_seed(0)
    scores, k = (torch.rand(4001, 12) - 0.5) * spread + 0.5, 3
    bias = torch.randn(12) * spread / 10
    histogram = QuantileHistogram(bias, k)
    histogram.add(scores)
    cutoff = route(scores, bias, k)[2]
    required = (cutoff[:, None] - scores).sort(0).values
    rank = len(scores) * k / 12  # a required bias below the threshold wins the expert
    exact = required[int(rank)]
    away = (exact - bias).abs()
    width = torch.where(away < 2.0**-6, (away / 8).clamp(min=2.0**-17), histogram.width)
    assert float(((histogram.solve() - (exact - exact.mean())).abs() - 2 * width.max()).max()) <= 0


def test_the_answer_is_right_on_either_side_of_the_window():
    """All required biases of an expert at one value, from far below its own to far above it."""
    for value in (-0.6, -0.02, -(2.0**-6), -1e-3, -1e-7, 0.0, 1e-7, 1e-3, 2.0**-6, 0.02, 0.6):
        histogram = QuantileHistogram(torch.zeros(2), 1)
        cutoff = torch.full((8,), 0.6)
        histogram.add(torch.stack([cutoff - value, cutoff], 1), cutoff=cutoff)
        low, high = histogram.solve().tolist()
        near = max(abs(value) / 8, 2.0**-17) if abs(value) < 2.0**-6 else float(histogram.width)
        assert low - high == pytest.approx(value, abs=near + 2.0**-17)


@pytest.mark.parametrize("spread", [1.0, 0.1, 0.01])
def test_scores_of_any_spread_are_balanced(spread: float):
    torch.manual_seed(3)
    tilt = torch.linspace(-2, 2, 32)
    scores, bias = torch.sigmoid((torch.randn(4096, 32) + tilt) * spread), torch.zeros(32)
    for _ in range(5):
        histogram = QuantileHistogram(bias, 4)
        histogram.add(scores)
        bias = histogram.solve()
    load = torch.bincount(route(scores, bias, 4)[0].flatten(), minlength=32)
    assert float(load.max() / load.float().mean()) < 1.05


def test_histograms_of_other_biases_do_not_merge():
    first = QuantileHistogram(torch.tensor([0.0, 0.5, 1.0]), 1)
    for other in (
        QuantileHistogram(torch.tensor([0.0, 0.2, 1.0]), 1),
        QuantileHistogram(torch.tensor([0.0, 0.5, 1.0]), 2),
    ):
        with pytest.raises(ValueError, match="different biases or k"):
            first.merge(other)
    with pytest.raises(ValueError, match=r"k must lie in \[1, 3\], got 5"):
        QuantileHistogram(torch.zeros(3), 5)


def test_a_mask_of_integers_is_a_mask():
    histogram = QuantileHistogram(torch.zeros(2), 1)
    histogram.add(pairs(4), torch.tensor([1, 0, 1, 0]))
    assert int(histogram.tokens) == 2 and int(histogram.counts.sum()) == 4


def test_balanced_load_on_the_same_scores_after_the_update():
    torch.manual_seed(1)
    scores = torch.sigmoid(torch.randn(4096, 16) + torch.linspace(-2, 2, 16))
    bias = torch.zeros(16)
    loads = []
    for _ in range(4):
        experts, _, _ = route(scores, bias, 4)
        load = torch.bincount(experts.flatten(), minlength=16).float()
        loads.append(float(load.max() / load.mean()))
        histogram = QuantileHistogram(bias, 4)
        histogram.add(scores)
        bias = histogram.solve()
    assert loads[0] > 2 and loads[-1] < 1.1


def test_several_are_solved_together_as_each_alone():
    """Biases of other spans and counts of other steps, one of them a single token."""
    torch.manual_seed(0)
    found = []
    for number, tokens in enumerate((4096, 1, 300)):
        one = QuantileHistogram(torch.randn(12) * number, 5)
        one.add(torch.rand(tokens, 12))
        found.append(one)
    assert torch.equal(balanced(found), torch.stack([one.solve() for one in found]))


def test_the_mean_depends_on_no_order():
    """A sum of floats from left to right has other bits in another order."""
    torch.manual_seed(0)
    bias = torch.randn(896, dtype=torch.float64) * 100
    found, order = centred(bias), torch.randperm(896)
    assert found.dtype == torch.float32
    assert torch.equal(centred(bias[order]), found[order])
    exact = bias - math.fsum(bias.tolist()) / 896
    assert torch.allclose(found.double(), exact, rtol=2**-24, atol=1e-12)
    every = QuantileHistogram(torch.tensor([0.5, 0.25]), 2)
    every.add(torch.rand(3, 2))
    assert torch.equal(every.solve(), torch.tensor([0.125, -0.125]))


def test_nothing_counted_is_an_error():
    with pytest.raises(ValueError, match="no token"):
        QuantileHistogram(torch.zeros(4), 1).solve()


def test_situ_by_hand_and_bounded():
    gate, up = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    expected = [
        4
        * torch.tanh(torch.tensor(a / 4))
        * torch.sigmoid(torch.tensor(a))
        * 25
        * torch.tanh(torch.tensor(b / 25))
        for a, b in ((1.0, 0.5), (-2.0, 3.0))
    ]
    torch.testing.assert_close(situ_glu(gate, up), torch.stack(expected))
    for dtype in (torch.float32, torch.bfloat16):
        huge = situ_glu(
            torch.tensor([1e4, 1e30], dtype=dtype), torch.tensor([1e4, -1e30], dtype=dtype)
        )
        assert bool((huge.abs() <= 100).all())


@pytest.mark.parametrize("activation", [(4.0, 25.0), None])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_grouped_experts_equal_naive_with_gradients(tokens, activation):
    torch.manual_seed(2)
    count, width, inner, k = 4, 6, 5, 2
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    w1, w3 = (
        torch.randn(count, inner, width, dtype=torch.float64, requires_grad=True) for _ in "13"
    )
    w2 = torch.randn(count, width, inner, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(tokens, count, dtype=torch.float64, requires_grad=True)
    leaves = [x, w1, w2, w3, scores]
    # the last expert gets no token
    experts, weights, _ = route(scores, torch.tensor([0.0, 0, 0, -9]), k)
    grads = []
    for form in (naive_experts, grouped_experts):
        out = form(x, w1, w2, w3, experts, weights, activation)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        grads.append([out, *torch.autograd.grad(loss, leaves, retain_graph=True)])
    for got, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-10)
    with torch.no_grad():
        quick = grouped_experts(x, w1, w2, w3, experts, weights, activation)
    torch.testing.assert_close(quick, grads[0][0].detach(), atol=1e-11, rtol=1e-10)


def drawn(tokens: int, count: int, experts: torch.Tensor) -> list[torch.Tensor]:
    """Leaves ``x, w1, w2, w3, weights`` of experts from 6 to 5 columns."""
    torch.manual_seed(3)
    shapes = ((tokens, 6), (count, 5, 6), (count, 6, 5), (count, 5, 6), experts.shape)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dense", [None, False, True])
@pytest.mark.parametrize("case", ["one expert", "every expert", "strided"])
def test_odd_routes_and_strided_inputs(case: str, dense: bool | None):
    every = torch.rand(9, 4).argsort(1)
    experts = {"one expert": torch.full((9, 1), 2), "every expert": every}.get(case, every[:, 1:3])
    x, w1, w2, w3, weights = leaves = drawn(9, 4, experts)
    results = []
    for form in (naive_experts, partial(grouped_experts, dense=dense)):
        given = [x, w1, w2, w3]
        if case == "strided" and form is not naive_experts:
            given = [torch.stack([t, -t], -1)[..., 0] for t in given]
            assert not any(t.is_contiguous() for t in (*given, experts))
        a, b, c, d = given
        out = form(a, b, c, d, experts, weights, (4.0, 25.0))
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-10)
    if case == "one expert":
        others = torch.tensor([0, 1, 3])
        assert not any(bool(grad[others].any()) for grad in results[1][2:5])


@pytest.mark.parametrize("dense", [None, False, True])
def test_no_token_gives_experts_gradients_of_zero(dense: bool | None):
    experts = torch.zeros(0, 2, dtype=torch.long)
    x, w1, w2, w3, weights = leaves = drawn(0, 4, experts)
    out = grouped_experts(x, w1, w2, w3, experts, weights, (4.0, 25.0), dense)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (0, 6) and not any(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_router_whose_tokens_all_take_every_expert(tokens: int):
    """The threshold has nothing to decide: its mean is taken out, and that is all."""
    bias = torch.tensor([0.5, 0.0, 0.25, 0.25])
    counts = Counts(torch.zeros(4, dtype=torch.long), QuantileHistogram(bias, 4))
    x, weight = (torch.randn(n, 3, requires_grad=True) for n in (tokens, 4))
    experts, weights = router(x, weight, bias, 4, counts=counts)
    assert experts.sort(1).values.tolist() == [[0, 1, 2, 3]] * tokens
    torch.testing.assert_close(weights.sum(1), torch.ones(tokens))
    grads = torch.autograd.grad(weights.square().sum(), [x, weight])
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert counts.load.tolist() == [tokens] * 4
    if tokens:
        assert counts.histogram is not None
        torch.testing.assert_close(counts.histogram.solve(), bias - 0.25)


def test_a_router_that_sends_all_tokens_to_one_expert():
    bias = torch.zeros(20)
    bias[7] = 5.0
    counts = Counts(torch.zeros(20, dtype=torch.long), QuantileHistogram(bias, 1))
    x, weight = torch.randn(40, 16), torch.randn(20, 16)
    experts, _ = router(x, weight.T.contiguous().T, bias, 1, counts=counts)
    assert experts.flatten().tolist() == [7] * 40
    assert counts.load.tolist() == [0] * 7 + [40] + [0] * 12
    assert counts.histogram is not None
    load = torch.bincount(router(x, weight, counts.histogram.solve(), 1)[0].flatten(), minlength=20)
    assert int(load.max()) <= 10  # of 40


def test_shapes_that_do_not_fit_are_named():
    """Kernels would read and write beyond what is there."""
    scores, x, weight, bias = torch.rand(3, 4), torch.rand(3, 8), torch.rand(4, 8), torch.zeros(4)
    with pytest.raises(ValueError, match=r"bias must be \[4\], got \[1\]"):
        route(scores, bias[:1], 2)
    with pytest.raises(ValueError, match=r"bias must be \[4\], got \[1\]"):
        router(x, weight, bias[:1], 2)
    with pytest.raises(ValueError, match=r"weight must be \[E, D\] for x \[T, D\], got \[4, 7\]"):
        router(x, weight[:, 1:], bias, 2)
    known = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"a mask must be \[3\] as the tokens, got \[2\]"):
        router(x, weight, bias, 2, (torch.zeros(3, 2, dtype=torch.long), known))
    load = torch.zeros(4, dtype=torch.long)
    for counts, message in (
        (Counts(load, None, known), r"a mask must be \[3\] as the tokens, got \[2\]"),
        (Counts(load[1:]), r"load must be \[4\], got \[3\]"),
        (Counts(load, QuantileHistogram(bias[1:], 2)), "histogram of 2 of 3 experts for 2 of 4"),
        (Counts(load, QuantileHistogram(bias, 3)), "histogram of 3 of 4 experts for 2 of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            router(x, weight, bias, 2, counts=counts)
    histogram = QuantileHistogram(bias, 2)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((scores[:, 1:],), r"scores must be \[T, 4\], got \[3, 3\]"),
        ((scores, known), r"valid must be \[3\], got \[2\]"),
        ((scores, None, scores[:1, 0]), r"cutoff must be \[3\], got \[1\]"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            histogram.add(*given)
    assert not load.any() and not histogram.counts.any()


@pytest.mark.parametrize(
    ("changed", "shape", "message"),
    [
        ("x", (9, 5), r"w1 must be \[4, 5, 5\], got \[4, 5, 6\]"),
        ("w2", (3, 6, 5), r"w2 must be \[4, 6, 5\], got \[3, 6, 5\]"),
        ("w3", (4, 6, 5), r"w3 must be \[4, 5, 6\], got \[4, 6, 5\]"),
        ("experts", (8, 2), r"must be \[9, k\] as the tokens, got \[8, 2\] and \[9, 2\]"),
        ("weights", (9, 1), r"must be \[9, k\] as the tokens, got \[9, 2\] and \[9, 1\]"),
        ("experts", (9,), r"experts \[T, k\], got \[9, 6\], \[4, 5, 6\] and \[9\]"),
    ],
)
def test_experts_of_shapes_that_do_not_fit_are_named(changed: str, shape: tuple, message: str):
    experts = torch.zeros(9, 2, dtype=torch.long)
    names = ("x", "w1", "w2", "w3", "weights")
    given: dict[str, Any] = dict(zip(names, drawn(9, 4, experts), strict=True))
    given["experts"] = experts
    given[changed] = torch.zeros(shape, dtype=given[changed].dtype)
    with pytest.raises(ValueError, match=message):
        grouped_experts(**given, activation=None)
