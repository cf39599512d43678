"""The mixture over depth against its formula, its average at zero query, and its gradient."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.attnres import mix, mix_norm, naive_mix, naive_mix_norm


def test_zero_query_averages_the_sources():
    sources = [torch.full((3, 4), float(i)) for i in (1, 2, 6)]
    torch.testing.assert_close(mix(sources, torch.zeros(4), torch.ones(4)), torch.full((3, 4), 3.0))


def test_one_token_by_hand():
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])
    query, norm = torch.tensor([[2.0, 0.0]]), torch.tensor([0.5, 1.0])
    # direction (1, 0); rms of a is sqrt(12.5), of b sqrt(0.5)
    scores = torch.tensor([3 / 12.5**0.5, 1 / 0.5**0.5])
    p = torch.softmax(scores, 0)
    torch.testing.assert_close(mix([a, b], query, norm, eps=0.0), p[0] * a + p[1] * b)


def test_gradient_and_value_equal_the_specification():
    torch.manual_seed(0)
    sources = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    norm = torch.randn(6, dtype=torch.float64, requires_grad=True)
    leaves = [*sources, query, norm]
    results = []
    for form in (naive_mix, mix):
        out = form(sources, query, norm)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        results.append([out, *torch.autograd.grad(loss, leaves)])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)
    assert torch.autograd.gradcheck(lambda *s: mix(list(s[:3]), s[3], s[4]), leaves)


def test_a_site_by_hand_and_as_specified():
    """The sum is (3, 4); with a zero query the mixture is (2, 2) and its mean square 4."""
    block, partial, update = (torch.tensor([[x, y]]) for x, y in ((1.0, 0.0), (1.0, 4.0), (2.0, 0)))
    zero, norm, after = torch.zeros(2), torch.ones(2), torch.tensor([1.0, 3.0])
    (passed,), total, normed = mix_norm([block], partial, update, zero, norm, after, eps=0.0)
    assert torch.equal(passed, block) and total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(normed, torch.tensor([[1.0, 3.0]]))
    torch.manual_seed(0)
    tensors = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    weights = [torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    results = []
    for form in (naive_mix_norm, mix_norm):
        _, total, normed = form(tensors[:2], tensors[2], tensors[3], *weights, eps=1e-5)
        loss = (normed.square() + total * normed).sum()
        results.append([total, normed, *torch.autograd.grad(loss, [*tensors, *weights])])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("small", [True, False])
def test_weights_may_be_narrower_than_sources(small: bool, monkeypatch: pytest.MonkeyPatch):
    """Sums are in fp64 where anything is; results and gradients have the types of their own."""
    torch.manual_seed(0)
    monkeypatch.setattr("farhorizon.kernels.blocks.FEW_ELEMENTS", 1 << 13 if small else 0)
    kinds = (torch.float64, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16)
    shapes = ((5, 6), (5, 6), (5, 6), (6,), (6,))
    given = [torch.randn(s).to(k).requires_grad_() for s, k in zip(shapes, kinds, strict=True)]
    wide = [x.detach().double().requires_grad_() for x in given]
    results = []
    for form, leaves in ((mix, given), (naive_mix, wide)):
        out = form(leaves[:3], leaves[3], leaves[4])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert [x.dtype for x in results[0]] == [torch.float64, *kinds]
    for got, expected in zip(*results, strict=True):
        close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[got.dtype]
        torch.testing.assert_close(got, expected.to(got.dtype), atol=close, rtol=close)
    with pytest.raises(ValueError, match="sources must be at least one"):
        mix([], given[3], given[4])


def test_zero_query_still_learns():
    query = torch.zeros(4, requires_grad=True)
    norm = torch.ones(4, requires_grad=True)
    sources = [torch.randn(3, 4), torch.randn(3, 4)]
    mix(sources, query, norm)[:, 0].sum().backward()
    assert query.grad is not None and float(query.grad.norm()) > 0
    assert norm.grad is not None and float(norm.grad.norm()) == 0


def test_autocast_does_not_round_the_mixture():
    """The choice over depth hangs on margins of a few hundredths, values of about 3 apart."""
    torch.manual_seed(1)
    sources = [(3 * torch.randn(40, 64)).requires_grad_() for _ in range(4)]
    query, norm = (0.2 * torch.randn(64)).requires_grad_(), torch.rand(64).requires_grad_()
    leaves, weight = [*sources, query, norm], torch.randn(40, 64)
    expected = naive_mix(sources, query, norm)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        got = mix(sources, query, norm)
        gradients = torch.autograd.grad((got * weight).sum(), leaves)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gradients, wanted, atol=1e-4, rtol=1e-5)
