"""Latent attention of a decode step at the sizes of the presets, on Hopper in Gluon."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.mla import latent_attention, naive_latent_attention

pytestmark = pytest.mark.gpu
LENGTHS = [1, 2047, 2049, 4096, 40_000, 300_000]


@pytest.mark.parametrize("heads", [12, 16, 48, 96])
def test_one_token_over_parts_of_a_long_cache(heads: int) -> None:
    """One part, several, and so many that each is longer; NaN behind every sequence."""
    torch.manual_seed(heads)
    count = len(LENGTHS)
    query, shared = (
        torch.randn(count, heads, size, device="cuda", dtype=torch.bfloat16) for size in (512, 64)
    )
    cache = torch.randn(count, max(LENGTHS) + 5, 576, device="cuda", dtype=torch.bfloat16)
    places = torch.arange(count - 1, -1, -1, device="cuda", dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    for place, length in zip(places.tolist(), LENGTHS, strict=True):
        cache[place, length:] = torch.nan
    found = latent_attention(query, shared, cache, places, lengths, 0.1)
    for n, (place, length) in enumerate(zip(places.tolist(), LENGTHS, strict=True)):
        own = cache[place : place + 1, :length].double()
        zero, size = places[:1] * 0, lengths[n : n + 1]
        truth = naive_latent_attention(
            query[n : n + 1].double(), shared[n : n + 1].double(), own, zero, size, 0.1
        )
        error = float((found[n].double() - truth[0]).norm() / truth.norm())
        assert error < 6e-3, (length, error)
        alone = latent_attention(
            query[n : n + 1], shared[n : n + 1], cache[place : place + 1], zero, size, 0.1
        )
        assert torch.equal(alone[0], found[n])
