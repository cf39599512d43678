"""Names, digests and buckets of a published set of weights; both ends of a weight sync use it.

A published set is every parameter and every persistent buffer of a policy in one fixed order
(the manifest). Payloads are raw bytes, so that no dtype is ever rounded on the way, and each
tensor has a digest of those bytes which the receiver recomputes from the tensors it then serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

THRESHOLD = ".e_score_correction_bias"  # how names of routing thresholds end


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a manifest, e.g. ``TensorSpec("lm_head.weight", (512, 64), "float32")``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """The specification of a tensor."""
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Every tensor of a published set, in the order in which it is shipped."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> WeightManifest:
        """The manifest of a state dict, sorted by name."""
        return cls(tuple(TensorSpec.of(name, state[name]) for name in sorted(state)))

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in order."""
        return tuple(spec.name for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Size of all payloads together."""
        return sum(spec.nbytes for spec in self.specs)

    def narrowed(self, other: WeightManifest) -> WeightManifest:
        """This manifest with the dtypes of ``other`` where its own hold all their numbers."""
        theirs = {spec.name: spec.torch_dtype for spec in other.specs}
        specs: list[TensorSpec] = []
        for spec in self.specs:
            own, narrow = spec.torch_dtype, theirs.get(spec.name)
            if narrow is not None and torch.promote_types(own, narrow) == own:
                spec = replace(spec, dtype=str(narrow).removeprefix("torch."))
            specs.append(spec)
        return WeightManifest(tuple(specs))

    def difference(self, other: WeightManifest) -> str | None:
        """What first sets ``other`` apart from this manifest, naming the tensor; None if nothing.

        Both are compared by name, so that a set that came in another order is the same set.
        """
        mine = {spec.name: spec for spec in self.specs}
        theirs = {spec.name: spec for spec in other.specs}
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in theirs:
                return f"{name}: missing on the other side"
            if name not in mine:
                return f"{name}: unknown on this side"
            if mine[name] != theirs[name]:
                a, b = mine[name], theirs[name]
                return f"{name}: {a.dtype} {list(a.shape)} here, {b.dtype} {list(b.shape)} there"
        return None


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A set of weights by number (updates so far that changed weights) and by content.

    ``digest`` covers names, shapes, dtypes and bytes of every tensor: equal digests are equal
    policies, whatever their numbers.
    """

    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class ThresholdVersion:
    """Routing thresholds by number (steps so far that set them) and by content.

    ``digests`` are (name, digest) of each, of the tensors that the publisher itself routes with:
    they say what was meant, where those of a publication say what was sent.
    """

    number: int
    digests: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, number: int, tensors: Mapping[str, Tensor]) -> ThresholdVersion:
        """The version of the thresholds among ``tensors``, by name."""
        names = sorted(name for name in tensors if name.endswith(THRESHOLD))
        return cls(number, tuple((name, digest(tensors[name])) for name in names))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a manifest: ``first`` is the index of the first, ``payload`` uint8
    their bytes end to end without gaps, ``count`` how many whole tensors those are."""

    first: int
    count: int
    payload: np.ndarray


@dataclass(frozen=True, slots=True)
class Publication:
    """All a receiver needs to take over a version and to prove that it did.

    ``buckets`` are Ray references to (or, within one process, instances of) `Bucket` in manifest
    order; ``digests`` are one per tensor of the manifest. The canary is a sequence of token ids
    (int64 [n]) with the learner's log-probs of tokens 1..n-1 (fp32 [n - 1]) at ``temperature``;
    the receiver must reproduce them within ``tolerance`` nats. ``thresholds`` are what the learner
    routes with.
    """

    version: PolicyVersion
    manifest: WeightManifest
    buckets: tuple[Any, ...]
    digests: tuple[str, ...]
    canary_ids: np.ndarray
    canary_logprobs: np.ndarray
    temperature: float
    tolerance: float
    thresholds: ThresholdVersion = ThresholdVersion(0, ())


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """The raw bytes of a tensor in row-major order, uint8 [nbytes]; a view where possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def digest(tensor: Tensor) -> str:
    """Hex digest (128-bit blake2b) of a tensor's bytes; -0.0 and 0.0 differ, as do NaNs."""
    return _digest_of(tensor_bytes(tensor))


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """`digest` of each, on as many threads as torch may use."""
    return _spread(digest, tensors)


def _digest_of(payload: np.ndarray) -> str:
    return hashlib.blake2b(payload.data, digest_size=16).hexdigest()


def _spread(work: Callable[[Any], str], items: Sequence[Any]) -> list[str]:
    """A function of each, which lets go of the interpreter: as hashing long bytes does."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def policy_digest(manifest: WeightManifest, digests: Iterable[str]) -> str:
    """The digest of a whole set, from its manifest and the digest of each tensor."""
    total = hashlib.blake2b(digest_size=16)
    for spec, tensor_digest in zip(manifest.specs, digests, strict=True):
        total.update(f"{spec.name} {spec.dtype} {spec.shape} {tensor_digest}\n".encode())
    return total.hexdigest()


def fill_buckets(
    manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[Bucket, tuple[str, ...]]]:
    """Pack tensors, given in manifest order, into buckets of at most ``bucket_bytes`` each.

    Yields each bucket with the digests of its tensors. A tensor larger than a bucket gets one of
    its own. Raises ValueError naming the tensor where order, shape or dtype differ from the
    manifest, or one is missing.
    """
    incoming = iter(tensors)
    index = 0
    while index < len(manifest.specs):
        count = _bucket_length(manifest, index, bucket_bytes)
        specs = manifest.specs[index : index + count]
        payload = np.empty(sum(spec.nbytes for spec in specs), np.uint8)
        parts: list[np.ndarray] = []
        offset = 0
        for spec in specs:
            name, tensor = next(incoming, ("", torch.empty(0)))
            if TensorSpec.of(name, tensor) != spec:
                found = f"{name} {tensor.dtype} {list(tensor.shape)}" if name else "the end"
                raise ValueError(f"weights: expected {spec.name} next, found {found}")
            parts.append(payload[offset : offset + spec.nbytes])
            parts[-1][:] = tensor_bytes(tensor)
            offset += spec.nbytes
        yield Bucket(index, count, payload), tuple(_spread(_digest_of, parts))
        index += count
    extra = next(incoming, None)
    if extra is not None:
        raise ValueError(f"weights: {extra[0]} is not in the manifest")


def read_bucket(manifest: WeightManifest, bucket: Bucket) -> Iterator[tuple[TensorSpec, Tensor]]:
    """The tensors of a bucket with their specifications; copies, safe to keep and to write to.

    Raises ValueError when the payload does not have the size that the manifest says.
    """
    specs = manifest.specs[bucket.first : bucket.first + bucket.count]
    if len(specs) != bucket.count or sum(spec.nbytes for spec in specs) != bucket.payload.nbytes:
        named = specs[0].name if specs else f"tensor {bucket.first}"
        raise ValueError(f"weights: the bucket that starts with {named} does not fit the manifest")
    offset = 0
    for spec in specs:
        # A copy: payloads from Ray are read-only and may start at any byte, whatever the dtype.
        tensor = torch.empty(spec.shape, dtype=spec.torch_dtype)
        tensor_bytes(tensor)[:] = bucket.payload[offset : offset + spec.nbytes]
        yield spec, tensor
        offset += spec.nbytes


def _bucket_length(manifest: WeightManifest, first: int, bucket_bytes: int) -> int:
    """How many tensors from ``first`` on fit one bucket, at least one."""
    total, count = 0, 0
    for spec in manifest.specs[first:]:
        total += spec.nbytes
        if count and total > bucket_bytes:
            break
        count += 1
    return count
