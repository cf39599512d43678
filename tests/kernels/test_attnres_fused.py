"""A site of the mixture over depth in its kernels: in Triton's interpreter where there is no GPU,
else compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.attnres import fused, mix_norm, naive_mix, naive_mix_norm, plans  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

pytestmark = pytest.mark.usefixtures("loops")
DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-5

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs so small that a few rows fill several of them, and a few sources two groups."""
    torch.manual_seed(0)
    monkeypatch.setattr(plans, "PROGRAMS", 3)
    monkeypatch.setattr(fused, "GROUP", 2)
    monkeypatch.setattr(fused, "BACKWARD_GROUP", 2)
    monkeypatch.setattr(fused, "SHARES", 2)
    monkeypatch.setattr(fused, "COLUMNS", 16)


def site(
    blocks: tuple[Tensor, ...], partial: Tensor, update: Tensor | None, *weights: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    query, norm, next_norm = weights
    normed, partial, *passed = fused.mix_fused(
        [*blocks, partial], update, query, norm, next_norm, EPS
    )
    return tuple(passed), partial, normed


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weights_of(width: int) -> list[Tensor]:
    return [draw(1, width) / 4, draw(width), draw(width)]


def leaves(tensors: list[Tensor], kind: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [t.to(device, kind, copy=True).requires_grad_() for t in tensors]


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    error = float((a.detach().double().cpu() - b.detach().double().cpu()).norm())
    assert error <= tolerance * float(b.detach().norm())


def compare(
    function: Callable[[list[Tensor]], list[Tensor]],
    twin: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    tolerance: float,
) -> None:
    own, wide = leaves(inputs, torch.float32, DEVICE), leaves(inputs, torch.float64)
    found, expected = function(own), twin(wide)
    upstream = [torch.randn_like(t) for t in expected]
    gradients = torch.autograd.grad(found, own, [g.to(found[0]) for g in upstream])
    wanted = torch.autograd.grad(expected, wide, upstream)
    for a, b in zip([*found, *gradients], [*expected, *wanted], strict=True):
        assert a.shape == b.shape
        close(a, b, tolerance)


@pytest.mark.parametrize("held", [0, 144])
@pytest.mark.parametrize(
    ("sources", "shape", "updated"),
    [(2, (7, 16), True), (3, (2, 4, 20), False), (5, (5, 8), True), (9, (1, 40), True)],
)
def test_a_site_and_its_gradients(
    sources: int, shape: tuple[int, ...], updated: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "HELD", held)
    inputs = [draw(*shape) for _ in range(sources + updated)] + weights_of(shape[-1])

    def run(form: Callable[..., tuple[tuple[Tensor, ...], Tensor, Tensor]]):
        def call(given: list[Tensor]) -> list[Tensor]:
            update = given[sources] if updated else None
            passed, partial, normed = form(
                tuple(given[: sources - 1]), given[sources - 1], update, *given[-3:]
            )
            return [normed, partial, *passed]

        return call

    compare(run(site), run(naive_mix_norm), inputs, 3e-6)


@pytest.mark.parametrize("sources", [1, 2, 4])
def test_a_mixture_alone_and_its_gradients(sources: int) -> None:
    inputs = [draw(6, 24) for _ in range(sources)] + weights_of(24)[:2]

    def own(given: list[Tensor]) -> list[Tensor]:
        return [fused.mix_fused(given[:-2], None, given[-2], given[-1], None, EPS)[0]]

    def twin(given: list[Tensor]) -> list[Tensor]:
        return [naive_mix(given[:-2], given[-2], given[-1], EPS)]

    if sources > 1:
        return compare(own, twin, inputs, 3e-6)
    given = leaves(inputs, torch.float32, DEVICE)
    (out,) = own(given)
    d_out = torch.randn_like(out)
    d_source, *d_weights = torch.autograd.grad(out, given, d_out)
    assert torch.equal(out, given[0]) and torch.equal(d_source, d_out)
    assert all(not bool(d.any()) for d in d_weights)  # there is nothing to choose: exactly zero


def several(
    form: Callable[..., tuple[tuple[Tensor, ...], Tensor, Tensor]],
    given: list[Tensor],
    look: Callable[[Tensor], object] = lambda block: None,
) -> list[Tensor]:
    """Four sites, the third of which begins a block, on updates that depend on what was mixed."""
    embedded, partial, *rest = given
    weights = [rest[i : i + 3] for i in range(0, 12, 3)]
    blocks, update, outs = (embedded,), None, []
    for i in range(4):
        blocks, partial, x = form(blocks, partial, update, *weights[i])
        look(blocks[0])
        outs.append(x)
        update = torch.tanh(x) * x
        if i == 2:
            blocks, partial, update = (*blocks, partial), update, None
    return outs


def test_blocks_that_are_passed_on_collect_their_gradients_in_place() -> None:
    inputs = [draw(5, 16), draw(5, 16)] + [w for _ in range(4) for w in weights_of(16)]
    compare(lambda g: several(site, g), lambda g: several(naive_mix_norm, g), inputs, 2e-5)
    given, seen = leaves(inputs, torch.float32, DEVICE), []

    def look(block: Tensor) -> None:
        block.register_hook(lambda found: seen.append(0 if found is None else found.data_ptr()))

    outs = several(site, given, look)
    gradients = torch.autograd.grad([x.sum() for x in outs], given)
    assert seen == [0, *[gradients[0].data_ptr()] * 3]  # nobody took it from the last site


@pytest.mark.parametrize("way", ["retained", "kept by a hook", "asked for"])
def test_gradients_of_passed_blocks_are_right_for_who_looks_at_them(way: str) -> None:
    """Nothing is added in place to what somebody else holds."""
    inputs = [draw(5, 16), draw(5, 16)] + [w for _ in range(4) for w in weights_of(16)]
    results = []
    for form, kind, device in (
        (site, torch.float32, DEVICE),
        (naive_mix_norm, torch.float64, "cpu"),
    ):
        given, seen, kept = leaves(inputs, kind, device), [], []

        def look(block: Tensor, seen: list[Tensor] = seen, kept: list[Tensor] = kept) -> None:
            seen.append(block)
            if way == "retained":
                block.retain_grad()
            elif way == "kept by a hook":
                block.register_hook(kept.append)

        def passing(*site_of: Tensor, form: Callable[..., Any] = form) -> Any:
            blocks, partial, x = form(*site_of)
            if form is not site:  # which returns the very blocks
                blocks = tuple(block.view_as(block) for block in blocks)
            return blocks, partial, x

        outs = several(passing, given, look)
        loss = sum((x.square().sum() for x in outs), torch.zeros((), device=device))
        wanted = [*seen[2::-1], given[0]] if way == "asked for" else [given[0]]
        found = torch.autograd.grad(loss, wanted) if way != "retained" else ()
        if way == "retained":
            loss.backward()
            found = [*(x.grad for x in seen[2::-1]), given[0].grad]
        results.append([*(x for x in kept if x is not None), *found])
    assert [len(one) for one in results] == [4, 4]
    for a, b in zip(*results, strict=True):
        close(a, b, 2e-5)


def test_a_gradient_from_elsewhere_is_left_as_it_is() -> None:
    given = leaves([draw(5, 16), draw(5, 16), *weights_of(16)], torch.float32, DEVICE)
    (block,), partial, normed = site((given[0],), given[1], None, *given[2:])
    upstream = [torch.randn_like(t) for t in (block, partial, normed)]
    kept = [g.clone() for g in upstream]
    torch.autograd.grad([block, partial, normed], given, upstream)
    assert all(torch.equal(a, b) for a, b in zip(upstream, kept, strict=True))
    # nor is one that two receive: the sum of a passed block with another
    other = torch.zeros_like(given[0], requires_grad=True)
    (block,), partial, normed = site((given[0],), given[1], None, *given[2:])
    (block,), _, again = site((block + other,), partial, None, *given[2:])
    found = torch.autograd.grad(normed.sum() + again.square().sum(), [given[0], other])
    wide = leaves([t.detach() for t in (*given, other)], torch.float64)
    blocks, partial, normed = naive_mix_norm((wide[0],), wide[1], None, *wide[2:5], eps=EPS)
    _, _, again = naive_mix_norm((blocks[0] + wide[5],), partial, None, *wide[2:5], eps=EPS)
    wanted = torch.autograd.grad(normed.sum() + again.square().sum(), [wide[0], wide[5]])
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 2e-5)


def test_the_sum_and_one_source_may_be_wider() -> None:
    """As under autocast: an embedding in fp32, sub-layers in 16 bits."""
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    tensors = [draw(7, 16).to(DEVICE, kind).requires_grad_() for kind in kinds]
    weights = leaves(weights_of(16), torch.float32, DEVICE)
    passed, partial, normed = site((tensors[0], tensors[1]), tensors[2], tensors[3], *weights)
    assert [t.dtype for t in (*passed, partial, normed)] == [*kinds[:2], *[torch.float32] * 2]
    found = torch.autograd.grad(normed.square().sum(), [*tensors, *weights])
    wide = leaves([t.detach() for t in (*tensors, *weights)], torch.float64)
    _, _, expected = naive_mix_norm((wide[0], wide[1]), wide[2], wide[3], *wide[4:], eps=EPS)
    wanted = torch.autograd.grad(expected.square().sum(), wide)
    close(normed, expected, 1e-6)
    for a, b, given in zip(found, wanted, [*tensors, *weights], strict=True):
        assert a.dtype == given.dtype
        close(a, b, 1e-5 if a.dtype == torch.float32 else 8e-3)


def test_a_row_has_the_same_bits_wherever_it_stands() -> None:
    tensors = [draw(12, 16).to(DEVICE, torch.float32) for _ in range(4)]
    weights = [w.to(DEVICE, torch.float32) for w in weights_of(16)]
    results = []
    for begin in (0, 3, 7):
        own = [t[begin:].clone().requires_grad_() for t in tensors]
        _, partial, normed = site((own[0], own[1]), own[2], own[3], *weights)
        grads = torch.autograd.grad(normed.square().sum(), own)
        results.append([t[7 - begin :] for t in (partial, normed, *grads)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    own = [draw(9, 16).to(DEVICE, torch.float32) for _ in range(2)]
    own[0][4] = float("nan")
    own = [t.requires_grad_() for t in own]
    weights = [w.to(DEVICE, torch.float32) for w in weights_of(16)]
    _, _, normed = site((own[0],), own[1], None, *weights)
    for found in (normed, *torch.autograd.grad(normed.sum(), own)):
        assert found.isnan().any(-1).nonzero().flatten().tolist() == [4]


def test_equal_scores_and_large_rows() -> None:
    """A zero query averages; the mean square of 1e18 is far above fp16 and within fp32."""
    own = [torch.full((2, 16), v, device=DEVICE) for v in (1e18, 3e18)]
    query, norm = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)
    out = fused.mix_fused(own, None, query, norm, None, EPS)[0]
    torch.testing.assert_close(out, torch.full_like(out, 2e18))
    _, _, normed = site((own[0],), own[1], None, query, norm, norm)
    torch.testing.assert_close(normed, torch.ones_like(normed))


def test_strided_sources_and_expanded_gradients() -> None:
    tensors = [draw(6, 16).to(DEVICE, torch.float32) for _ in range(3)]
    weights = [w.to(DEVICE, torch.float32) for w in weights_of(16)]
    pair = torch.stack(tensors, 1)
    results = []
    for given in (tensors, pair.unbind(1)):
        own = [t.detach().requires_grad_() for t in given]
        (passed,), partial, normed = site((own[0],), own[1], own[2], *weights)
        results.append([normed, *torch.autograd.grad((normed + passed + partial).sum(), own)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_rows() -> None:
    given = leaves([draw(0, 16), draw(0, 16), *weights_of(16)], torch.float32, DEVICE)
    _, _, normed = site((given[0],), given[1], None, *given[2:])
    gradients = torch.autograd.grad(normed.sum(), given)
    assert normed.shape == (0, 16) and not any(bool(g.any()) for g in gradients)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, w = torch.zeros(2, 16), torch.zeros(16)
    for sources, update, weights, message in (
        (
            [x, x[:1]],
            None,
            (w, w, w),
            r"sources\[1\] must be \[2, 16\] as the first, got \[1, 16\]",
        ),
        ([x, x], x[0], (w, w, w), r"update must be \[2, 16\] as the first, got \[16\]"),
        ([x, x], None, (w[:8], w, w), r"query must hold 16 numbers in one row, got \[8\]"),
        ([x, x], None, (w, w, w[:8]), r"next_weight must hold 16 numbers in one row, got \[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mix_norm(sources[:-1], sources[-1], update, *weights, EPS)
