"""Causal attention over packed sequences: the definition, and what a GPU runs against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from farhorizon.kernels.attention import causal_attention, fused, naive_causal_attention

BOUNDS = [(0, 9), (0, 4, 8), (0, 1, 6, 9)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(tokens: int, heads: int = 2, width: int = 6, values: int = 4) -> list[torch.Tensor]:
    shapes = ((tokens, heads, width), (tokens, heads, width), (tokens, heads, values))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_two_tokens_by_hand() -> None:
    """Scores 0 and ln 3 mix the values 1 and 5 to 4; the first token sees itself alone."""
    q = torch.tensor([[[1.0]], [[1.0]]])
    k = torch.tensor([[[0.0]], [[3.0]]]).log1p()
    k[1] = torch.tensor(3.0).log()
    v = torch.tensor([[[1.0]], [[5.0]]])
    out = causal_attention(q, k, v, (0, 2), 1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 4.0]))
    alone = causal_attention(q, k, v, (0, 1, 2), 1.0)
    torch.testing.assert_close(alone.flatten(), torch.tensor([1.0, 5.0]))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_the_packed_form_of_a_gpu_is_the_definition(bounds: tuple[int, ...]) -> None:
    inputs = draw(bounds[-1])
    results = []
    for call in (naive_causal_attention, fused.causal_attention_fused):
        out = call(*inputs, bounds=bounds, scale=0.4)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("call", [naive_causal_attention, fused.causal_attention_fused])
def test_heads_may_be_columns_of_one_tensor(call: Callable[..., torch.Tensor]) -> None:
    inputs = draw(9)
    wide = torch.cat([x.detach() for x in inputs], 2).requires_grad_()
    parts = wide.split([6, 6, 4], 2)
    assert not any(part.is_contiguous() for part in parts)
    results = []
    for given, leaves in ((inputs, inputs), (parts, [wide])):
        out = call(*given, bounds=(0, 4, 9), scale=0.4)
        grads = torch.autograd.grad(out.sum(), leaves)  # the same number for all
        results.append([out, torch.cat(grads, 2)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_what_does_not_fit_is_named() -> None:
    q, k, v = draw(6)
    with pytest.raises(ValueError, match=r"k must be \[T, H, K\] as q, got \[5, 2, 6\]"):
        causal_attention(q, k[:5], v, (0, 6), 1.0)
    with pytest.raises(ValueError, match=r"v must be \[6, 2\] and V, got \[6, 1, 4\]"):
        causal_attention(q, k, v[:, :1], (0, 6), 1.0)
    for bounds in ((0, 5), (0, 3, 3, 6), (1, 6), (0,)):
        with pytest.raises(ValueError, match="bounds must rise from 0 to the 6 tokens"):
            causal_attention(q, k, v, bounds, 1.0)
