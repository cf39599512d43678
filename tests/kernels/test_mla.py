"""Latent attention of decode steps: its plain kernels beside the formula in fp64, in Triton's
interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.mla import (  # noqa: E402
    append_latent,
    fused,
    latent_attention,
    naive_latent_attention,
)
from farhorizon.kernels.norm import naive_rms_norm  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, loops: None) -> None:
    """Parts that a few tokens fill: at most four of eight tokens, or of a multiple of that."""
    torch.manual_seed(0)
    for name, value in (("PART", 8), ("PARTS", 4), ("MERGED", 2), ("TOKENS", 16)):
        monkeypatch.setattr(fused, name, value)


def draw(lengths: list[int], heads: int, rank: int = 32, extra: int = 16) -> tuple[Tensor, ...]:
    """Query, shared, cache, places and lengths; the sequences lie in the cache back to front."""
    count, capacity = len(lengths), max(lengths) + 3
    return (
        torch.randn(count, heads, rank, device=DEVICE),
        torch.randn(count, heads, extra, device=DEVICE),
        torch.randn(count + 1, capacity, rank + extra, device=DEVICE),
        torch.arange(count, 0, -1, device=DEVICE, dtype=torch.int32),
        torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
    )


def attend(given: tuple[Tensor, ...], scale: float = 0.3) -> Tensor:
    query, shared, cache, places, lengths = given
    return fused.attend(query, shared, cache, places, lengths, scale)


@pytest.mark.parametrize("heads", [3, 17])
def test_it_is_the_formula(heads: int) -> None:
    given = draw([1, 8, 9, 31, 70], heads)
    query, shared, cache, places, lengths = given
    wide = (query.double(), shared.double(), cache.double())
    truth = naive_latent_attention(*wide, places, lengths, 0.3)
    assert float((attend(given).double() - truth).abs().max()) < 2e-6


def test_equal_keys_give_the_mean_of_the_latents() -> None:
    query, shared, cache, places, lengths = draw([5], 2)
    found = attend((0 * query, 0 * shared, cache, places, lengths))
    assert torch.allclose(found[0, 1], cache[1, :5, :32].mean(0), atol=1e-6)


def test_what_lies_behind_a_sequence_is_not_used() -> None:
    given = draw([3, 20], 2)
    found = attend(given)
    for place, length in zip(given[3].tolist(), given[4].tolist(), strict=True):
        given[2][place, length:] = torch.nan
    given[2][0] = torch.nan
    assert torch.equal(attend(given), found)


def test_a_sequence_has_the_same_bits_in_any_company() -> None:
    query, shared, cache, places, lengths = draw([3, 20, 70], 2)
    found = attend((query, shared, cache, places, lengths))
    alone = [x[1:2] for x in (query, shared)]
    assert torch.equal(attend((*alone, cache[:, :20], places[1:2], lengths[1:2]))[0], found[1])


def test_no_place_and_no_token_give_zeros() -> None:
    query, shared, cache, places, lengths = draw([3, 20], 2)
    places[0], lengths[1] = -1, 0
    assert not attend((query, shared, cache, places, lengths)).any()
    assert not naive_latent_attention(query, shared, cache, places, lengths, 0.3).any()


def test_queries_and_caches_may_be_parts_of_larger_tensors() -> None:
    query, shared, cache, places, lengths = draw([3, 20], 2)
    both = torch.cat((shared, query), -1)
    wide = torch.cat((cache, cache), 1)[:, : cache.shape[1]]
    pair = torch.stack((places, lengths), 1)
    parts = (both[..., 16:], both[..., :16], wide, *pair.unbind(1))
    assert torch.equal(attend(parts), attend((query, shared, cache, places, lengths)))


def test_a_new_latent_is_normed_and_its_key_is_not() -> None:
    _, _, cache, places, lengths = draw([3, 20], 2)
    entry, weight = torch.randn(2, 48, device=DEVICE), torch.randn(32, device=DEVICE)
    places[0] = -1
    before = cache.clone()
    fused.append(entry, weight, 1e-5, cache, places, lengths)
    row = int(places[1])
    line = torch.cat((naive_rms_norm(entry[1, :32], weight, 1e-5), entry[1, 32:]))
    assert torch.allclose(cache[row, 20], line, atol=1e-6)
    apart, pair = before.clone(), torch.stack((places, lengths), 1)
    fused.append(entry, weight, 1e-5, apart, *pair.unbind(1))
    assert torch.equal(apart, cache)
    cache[row, 20] = before[row, 20]
    assert torch.equal(cache, before)
    again = before.clone()
    append_latent(entry, weight, 1e-5, again, places, lengths)
    assert torch.allclose(again[row, 20], line, atol=1e-6)


def test_a_shape_that_does_not_fit_is_named() -> None:
    query, shared, cache, places, lengths = draw([3, 20], 2)
    with pytest.raises(ValueError, match=r"shared has shape \(2, 2, 15\), expected \(2, 2, 16\)"):
        latent_attention(query, shared[..., 1:], cache, places, lengths, 1.0)
    turned = cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="cache must have a last stride of 1"):
        latent_attention(query, shared, turned, places, lengths, 1.0)
    with pytest.raises(ValueError, match="cache must have a last stride of 1"):
        append_latent(query[:, 0], query[0, 0], 1e-5, turned, places, lengths)
    with pytest.raises(ValueError, match=r"entry must be \[2, 48\]"):
        append_latent(query[:, 0], query[0, 0], 1e-5, cache, places, lengths)
