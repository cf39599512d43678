"""The mixture over depth on the GPU in 16 bits: accuracy, bits, memory, large tensors."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.attnres import mix, mix_norm, naive_mix, naive_mix_norm

pytestmark = pytest.mark.gpu

# Relative error against fp64 on the same inputs: that of rounding to 16 bits, and of fp32 sums.
ROUNDED, WEIGHTS = 2.5e-3, 1e-4
EPS = 1e-5

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(tokens: int, width: int, count: int, kind: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """``count`` tensors of tokens, a query, the weight of the norm and of the next norm."""
    tensors = [torch.randn(tokens, width, device="cuda").to(kind) for _ in range(count)]
    query = torch.randn(width, device="cuda") / width**0.5
    return [*tensors, query, *(1 + torch.randn(2, width, device="cuda") / 4)]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def both(inputs: list[Tensor], updated: bool, d_out: Tensor) -> list[Tensor]:
    """New sum, normed mixture and gradients."""
    own = [x.detach().requires_grad_() for x in inputs]
    update = own[-4] if updated else None
    *blocks, partial = own[: -4 if updated else -3]
    _, partial, normed = mix_norm(blocks, partial, update, *own[-3:], eps=EPS)
    return [partial.detach(), normed.detach(), *torch.autograd.grad(normed, own, d_out)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "sources"),
    [(20, 3), (264, 3), (512, 2), (1536, 9), (2048, 17), (7168, 3), (7168, 9), (7168, 13)],
)
def test_errors_are_those_of_rounding(kind: torch.dtype, width: int, sources: int) -> None:
    inputs = draw(777, width, sources + 1, kind)
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    *blocks, partial, update = narrow[:-3]
    blocks, partial, normed = mix_norm(blocks, partial, update, *narrow[-3:], eps=EPS)
    assert torch.equal(partial, narrow[-5] + update) and normed.dtype == kind
    # the sum is mixed as it is stored: rounded, and differentiated as if it were not
    total = wide[-5] + wide[-4]
    total = total + (partial.double() - total).detach()
    _, _, expected = naive_mix_norm(wide[:-5], total, None, *wide[-3:], eps=EPS)
    assert relative(normed, expected) < ROUNDED
    upstream = [torch.randn_like(t) for t in (normed, partial, *blocks)]
    found = torch.autograd.grad([normed, partial, *blocks], narrow, upstream)
    wanted = torch.autograd.grad(
        [expected, total, *(b * 1 for b in wide[:-5])], wide, [g.double() for g in upstream]
    )
    for i, (a, b, given) in enumerate(zip(found, wanted, narrow, strict=True)):
        assert a.dtype == given.dtype
        assert relative(a, b) < (ROUNDED if i < len(inputs) - 3 else WEIGHTS), i


def test_a_mixture_alone() -> None:
    inputs = draw(777, 2048, 4)
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    found, expected = (
        mix(narrow[:4], *narrow[4:6], eps=EPS),
        naive_mix(wide[:4], *wide[4:6], eps=EPS),
    )
    d_out = torch.randn_like(found)
    gradients = torch.autograd.grad(found, narrow[:6], d_out)
    wanted = torch.autograd.grad(expected, wide[:6], d_out.double())
    assert relative(found, expected) < ROUNDED
    for i, (a, b) in enumerate(zip(gradients, wanted, strict=True)):
        assert relative(a, b) < (ROUNDED if i < 4 else WEIGHTS), i


@pytest.mark.parametrize(("width", "sources"), [(2048, 9), (7168, 3)])
def test_without_gradients_the_bits_are_the_same(width: int, sources: int) -> None:
    *tensors, query, norm, next_norm = draw(777, width, sources + 1)
    *blocks, partial, update = tensors

    def run() -> tuple[Tensor, Tensor]:
        return mix_norm(blocks, partial, update, query, norm, next_norm, EPS)[1:]

    with torch.no_grad():
        plain = [*run(), *run()]
    query.requires_grad_()
    assert all(torch.equal(a, b) for a, b in zip(plain, [*run(), *run()], strict=True))


def test_tensors_may_begin_anywhere() -> None:
    """Slices of one buffer, as a partitioned optimiser makes them, are not aligned."""
    inputs = draw(100, 2048, 4)
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs]
    d_out = torch.randn_like(inputs[0])
    results = [both(given, True, d_out) for given in (inputs, shifted, inputs)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("width", "sources"), [(2048, 9), (7168, 5)])
def test_a_token_has_the_same_bits_wherever_it_stands(width: int, sources: int) -> None:
    inputs = draw(5000, width, sources)
    d_out = torch.randn_like(inputs[0])
    whole = both(inputs, True, d_out)[: 2 + sources]
    for begin in (1, 333, 4990):
        part = both([x[begin:] for x in inputs[:-3]] + inputs[-3:], True, d_out[begin:])
        assert all(torch.equal(a[begin:], b) for a, b in zip(whole, part, strict=False))


def test_repeats_have_the_same_bits() -> None:
    inputs = draw(20000, 2048, 5)
    d_out = torch.randn_like(inputs[0])
    first = both(inputs, True, d_out)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, both(inputs, True, d_out), strict=True))


def test_blocks_that_are_passed_on_collect_their_gradients_in_place() -> None:
    """The way back of four sites holds one gradient for each block, not one for each use."""
    tokens, width, count = 20000, 2048, 9
    *tensors, query, norm, next_norm = draw(tokens, width, count + 1)
    own = [x.requires_grad_() for x in tensors[:count]]
    blocks, partial, outs = tuple(own[:-1]), own[-1], []
    for _ in range(4):
        blocks, partial, x = mix_norm(blocks, partial, tensors[-1], query, norm, next_norm)
        outs.append(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    upstream = torch.ones_like(outs[0])
    gradients = torch.autograd.grad(outs, own, [upstream] * 4)
    used = (torch.cuda.max_memory_allocated() - before) / upstream.nbytes
    assert used < count + 4 and all(g.isfinite().all() for g in gradients)


def test_a_gradient_that_a_hook_keeps_is_left_as_it_is() -> None:
    *tensors, query, norm, next_norm = draw(1000, 2048, 3)
    results = []
    for keeps in (True, False):
        own, kept = [x.detach().requires_grad_() for x in tensors[:2]], []
        blocks, partial, outs = (own[0],), own[1], []
        for _ in range(3):
            blocks, partial, x = mix_norm(blocks, partial, tensors[-1], query, norm, next_norm)
            blocks[0].register_hook(
                lambda found, kept=kept, keeps=keeps: (
                    None if found is None else kept.append(found if keeps else found.clone())
                )
            )
            outs.append(x)
        kept += torch.autograd.grad(outs, own, [torch.ones_like(outs[0])] * 3)
        results.append(kept)
    assert len(results[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_more_elements_than_32_bits_count() -> None:
    inputs = draw(300_000, 7168, 2)
    d_out = torch.randn_like(inputs[0])
    whole = both(inputs, False, d_out)[:4]
    part = both([x[-500:] for x in inputs[:-3]] + inputs[-3:], False, d_out[-500:])
    assert all(torch.equal(a[-500:], b) for a, b in zip(whole, part, strict=False))


def test_a_graph_replays_a_site() -> None:
    *tensors, query, norm, next_norm = draw(256, 2048, 4)

    def run() -> tuple[Tensor, Tensor]:
        return mix_norm(tensors[:2], tensors[2], tensors[3], query, norm, next_norm)[1:]

    with torch.no_grad():
        expected = [t.clone() for t in run()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
