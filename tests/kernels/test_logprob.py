"""Token log-probs: hand values, temperature, row blocks and gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from farhorizon.kernels.logprob import naive_token_logprobs, token_logprobs


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.407606), (0.5, -0.142932)])
def test_temperature_divides_the_logits(temperature, expected):
    hidden, head = torch.eye(3)[:1], torch.tensor([[2.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    value, entropy = token_logprobs(hidden, head, torch.tensor([0]), temperature)
    assert float(value) == pytest.approx(expected, abs=1e-6)
    p = torch.softmax(torch.tensor([2.0, 1, 0]) / temperature, 0)
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


def test_row_blocks_change_nothing():
    torch.manual_seed(0)
    hidden = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (40,))
    results = []
    for form in (naive_token_logprobs, partial(token_logprobs, block_elements=7 * 11)):
        value, entropy = form(hidden, head, targets, 0.7)
        loss = (value * torch.linspace(0, 1, 40, dtype=value.dtype)).sum() + 0.3 * entropy.sum()
        results.append([value, entropy, *torch.autograd.grad(loss, [hidden, head])])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected)


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), 0.0)
