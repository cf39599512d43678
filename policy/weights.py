"""Names, digests and buckets of a published set of weights; both ends of a weight sync use it.

A published set is every parameter and every persistent buffer of a policy in one fixed order
(the manifest). Payloads are raw bytes, so that no dtype is ever rounded on the way, and each
tensor has a digest of those bytes which the receiver recomputes from the tensors it then serves.
Nothing of this moves a tensor to another device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.digest import ALIGNED, copied_lanes, digests, texts

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

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is as specified."""
        shaped = tuple(tensor.shape) == self.shape and tensor.dtype == self.torch_dtype
        return name == self.name and shaped

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


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
        found = digests([tensors[name] for name in names])
        return cls(number, tuple(zip(names, found, strict=True)))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a manifest: ``first`` is the index of the first, ``count`` how many
    those are, ``payload`` uint8 [N] their bytes, each tensor from a multiple of `ALIGNED` on."""

    first: int
    count: int
    payload: Tensor


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is said of a publication before its tensors are given: the number of its version, their
    manifest, and how many publications this is."""

    number: int
    manifest: WeightManifest
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Publication:
    """All a receiver needs to take over a version and to prove that it did.

    ``buckets`` are what stands for each `Bucket` in manifest order; ``digests`` are one per tensor
    of the manifest. The canary is a sequence of token ids (int64 [n]) with the learner's log-probs
    of tokens 1..n-1 (fp32 [n - 1]) at ``temperature``; the receiver must reproduce them within
    ``tolerance`` nats, in the mean where it rounds. ``thresholds`` are what the learner routes
    with. ``seconds`` is what it took to gather, digest and give the tensors.
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
    turn: int = 0
    seconds: float = 0.0

    @property
    def announced(self) -> Announcement:
        """What is said of it before."""
        return Announcement(self.version.number, self.manifest, self.turn)


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """The raw bytes of a tensor in row-major order, uint8 [nbytes]; a view where possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def digest(tensor: Tensor) -> str:
    """The digest of a tensor's bytes, wherever it lies; -0.0 and 0.0 differ, as do NaNs."""
    (found,) = digests([tensor])
    return found


def policy_digest(manifest: WeightManifest, digests: Iterable[str]) -> str:
    """The digest of a whole set, from its manifest and the digest of each tensor."""
    total = hashlib.blake2b(digest_size=16)
    for spec, tensor_digest in zip(manifest.specs, digests, strict=True):
        total.update(f"{spec.name} {spec.dtype} {spec.shape} {tensor_digest}\n".encode())
    return total.hexdigest()


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor of a bucket begins, in bytes, and how many bytes the bucket has."""
    starts: list[int] = []
    end = 0
    for spec in specs:
        starts.append(end)
        end += _padded(spec)
    return starts, end


def views(specs: Sequence[TensorSpec], payload: Tensor) -> dict[str, Tensor]:
    """The tensors of a payload by name, in its own memory."""
    found: dict[str, Tensor] = {}
    for spec, start in zip(specs, layout(specs)[0], strict=True):
        flat = payload[start : start + spec.nbytes].view(spec.torch_dtype)
        found[spec.name] = flat.view(spec.shape)
    return found


def pack(
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    give: Callable[[Bucket], Any],
) -> tuple[list[Any], tuple[str, ...]]:
    """Pack tensors, given in manifest order, into buckets of at most ``bucket_bytes`` each, on the
    device where they are; what ``give`` made of each, and the digests of what was packed.

    A tensor larger than a bucket gets one of its own. Raises ValueError naming the tensor where
    order, shape or dtype differ from the manifest, or one is missing.
    """
    incoming = iter(tensors)
    given: list[Any] = []
    found: list[Tensor] = []
    index = 0
    while index < len(manifest.specs):
        count = _bucket_length(manifest, index, bucket_bytes)
        specs = manifest.specs[index : index + count]
        payload, own = _packed(specs, incoming)
        found.append(own)
        given.append(give(Bucket(index, count, payload)))
        index += count
    extra = next(incoming, None)
    if extra is not None:
        raise ValueError(f"weights: {extra[0]} is not in the manifest")
    # The first that waits for the device.
    return given, tuple(texts(torch.cat(found))) if found else ()


def _packed(
    specs: Sequence[TensorSpec], incoming: Iterator[tuple[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The payload of one bucket, and the lanes of its tensors' digests."""
    starts, size = layout(specs)
    tensors: list[Tensor] = []
    for spec in specs:
        name, tensor = next(incoming, ("", torch.empty(0)))
        if not spec.fits(name, tensor):
            found = f"{name} {tensor.dtype} {list(tensor.shape)}" if name else "the end"
            raise ValueError(f"weights: expected {spec.name} next, found {found}")
        tensors.append(tensor.detach())
    payload = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    return payload, copied_lanes(tensors, starts, payload)


def read_bucket(manifest: WeightManifest, bucket: Bucket) -> dict[str, Tensor]:
    """The tensors of a bucket by name, in the memory of its payload.

    Raises ValueError when the payload does not have the size that the manifest says.
    """
    specs = manifest.specs[bucket.first : bucket.first + bucket.count]
    if len(specs) != bucket.count or layout(specs)[1] != bucket.payload.numel():
        named = specs[0].name if specs else f"tensor {bucket.first}"
        raise ValueError(f"weights: the bucket that starts with {named} does not fit the manifest")
    return views(specs, bucket.payload)


def _bucket_length(manifest: WeightManifest, first: int, bucket_bytes: int) -> int:
    """How many tensors from ``first`` on fit one bucket, at least one."""
    total, count = 0, 0
    for spec in manifest.specs[first:]:
        total += _padded(spec)
        if count and total > bucket_bytes:
            break
        count += 1
    return count


def _padded(spec: TensorSpec) -> int:
    return -(-spec.nbytes // ALIGNED) * ALIGNED
