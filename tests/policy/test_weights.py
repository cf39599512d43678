"""Manifests, digests and buckets of published weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farhorizon.policy.weights import (
    Bucket,
    TensorSpec,
    WeightManifest,
    digest,
    digests,
    pack,
    policy_digest,
    read_bucket,
    tensor_bytes,
)


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5),
        "a.bias": torch.randn(7).to(torch.bfloat16),
        "c.count": torch.arange(4),
        "d.scalar": torch.tensor(2.5, dtype=torch.float64),
        "e.empty": torch.zeros(0, 4),
    }


def _buckets(state: dict[str, torch.Tensor], size: int) -> tuple[list[Bucket], tuple[str, ...]]:
    return pack(WeightManifest.of(state), sorted(state.items()), size, lambda bucket: bucket)


def test_manifest_is_sorted_and_counts_bytes() -> None:
    manifest = WeightManifest.of(_state())
    assert manifest.names == ("a.bias", "b.weight", "c.count", "d.scalar", "e.empty")
    assert [s.nbytes for s in manifest.specs] == [14, 60, 32, 8, 0]
    assert manifest.nbytes == 114
    assert manifest.specs[0] == TensorSpec("a.bias", (7,), "bfloat16")


@pytest.mark.parametrize("size", [1, 40, 80, 1000])
def test_buckets_round_trip_every_bit(size: int) -> None:
    state = _state()
    manifest = WeightManifest.of(state)
    buckets, found = _buckets(state, size)
    assert all(b.count == 1 or b.payload.numel() <= size for b in buckets)
    assert sum(b.count for b in buckets) == len(state)
    assert sum(b.payload.numel() for b in buckets) == 16 + 64 + 32 + 16
    got = {name: tensor for b in buckets for name, tensor in read_bucket(manifest, b).items()}
    assert got.keys() == state.keys()
    for name, tensor in state.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert np.array_equal(tensor_bytes(got[name]), tensor_bytes(tensor))
    assert list(found) == digests([state[name] for name in manifest.names])


def test_packed_tensors_are_copies_and_gaps_are_zero() -> None:
    """So that equal policies have equal buckets."""
    state = {"a": torch.ones(3), "b": torch.ones(5, 3).T}
    (bucket,), _ = _buckets(state, 100)
    read = read_bucket(WeightManifest.of(state), bucket)
    assert torch.equal(read["b"], state["b"]) and read["b"].is_contiguous()
    read["a"].add_(1)
    assert state["a"].tolist() == [1, 1, 1]
    words = bucket.payload.view(torch.float32).tolist()
    assert words == [2, 2, 2, 0, *[1] * 15, 0]


def test_what_stands_for_a_bucket_is_kept_in_order() -> None:
    state = _state()
    given, _ = pack(WeightManifest.of(state), sorted(state.items()), 1, lambda bucket: bucket.first)
    assert given == [0, 1, 2, 3, 4]


def test_digest_sees_one_bit_the_sign_of_zero_and_ignores_layout() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    y = x.clone()
    y.view(torch.int32)[1, 2] += 1
    assert digest(x) != digest(y)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(x.T) == digest(x.T.contiguous())
    assert len(digest(x)) == 32


def test_policy_digest_covers_names_and_order() -> None:
    state = _state()
    manifest = WeightManifest.of(state)
    digests = [digest(state[name]) for name in manifest.names]
    whole = policy_digest(manifest, digests)
    renamed = WeightManifest(
        (TensorSpec("a.other", manifest.specs[0].shape, "bfloat16"), *manifest.specs[1:])
    )
    assert policy_digest(renamed, digests) != whole
    assert policy_digest(manifest, [digests[0][::-1], *digests[1:]]) != whole
    with pytest.raises(ValueError):
        policy_digest(manifest, digests[:-1])


def test_difference_names_the_tensor() -> None:
    state = _state()
    manifest = WeightManifest.of(state)
    assert manifest.difference(manifest) is None
    short = WeightManifest(manifest.specs[1:])
    assert "a.bias" in str(manifest.difference(short))
    assert "missing" in str(manifest.difference(short))
    assert "unknown" in str(short.difference(manifest))
    other = WeightManifest.of({**state, "c.count": torch.arange(5)})
    assert manifest.difference(other) == "c.count: int64 [4] here, int64 [5] there"
    rounded = WeightManifest.of({**state, "b.weight": state["b.weight"].bfloat16()})
    assert "float32" in str(manifest.difference(rounded))


def test_fill_refuses_what_is_not_in_the_manifest() -> None:
    state = _state()
    manifest = WeightManifest.of(state)
    items = sorted(state.items())
    with pytest.raises(ValueError, match=r"expected c\.count next, found d\.scalar"):
        pack(manifest, items[:2] + items[3:], 50, str)
    with pytest.raises(ValueError, match=r"expected e\.empty next, found the end"):
        pack(manifest, items[:-1], 50, str)
    with pytest.raises(ValueError, match=r"f\.extra is not in the manifest"):
        pack(manifest, [*items, ("f.extra", torch.ones(1))], 50, str)


def test_torn_bucket_is_refused() -> None:
    state = _state()
    manifest = WeightManifest.of(state)
    (bucket,), _ = _buckets(state, 1000)
    torn = Bucket(bucket.first, bucket.count, bucket.payload[:-1])
    with pytest.raises(ValueError, match=r"starts with a\.bias"):
        list(read_bucket(manifest, torn))
