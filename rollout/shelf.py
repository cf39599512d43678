"""Tensors in memory of this process that others of the same user on this machine can read."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policy.weights import ALIGNED, TensorSpec, layout, views

FILE = 1 << 30  # bytes: how much at least lies in a file, which costs descriptors; unused ones none


@dataclass(frozen=True, slots=True)
class Shown:
    """Where tensors lie: ``files`` of a process by descriptor and size, and of each tensor which of
    them it is in, and from which byte on."""

    process: int
    files: tuple[tuple[int, int], ...]
    tensors: tuple[tuple[TensorSpec, int, int], ...]

    def open(self) -> dict[str, Tensor]:
        """The tensors by name, to read, in another process; what is written there stays there."""
        payloads = [_mapped(f"/proc/{self.process}/fd/{name}", size) for name, size in self.files]
        found: dict[str, Tensor] = {}
        for spec, file, start in self.tensors:
            flat = payloads[file][start : start + spec.nbytes]
            found[spec.name] = flat.view(spec.torch_dtype).view(spec.shape)
        return found


class _File(mmap.mmap):
    """Memory with a descriptor but without a name, which goes with the last tensor in it."""

    descriptor: int

    @classmethod
    def make(cls, size: int) -> _File:
        descriptor = os.memfd_create("farhorizon")
        os.ftruncate(descriptor, size)
        file = cls(descriptor, size)
        file.descriptor = descriptor
        weakref.finalize(file, os.close, descriptor)
        return file


class Shelf:
    """Makes tensors of the CPU that other processes can read without a copy."""

    def __init__(self) -> None:
        self._files: weakref.WeakValueDictionary[int, _File] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_File] | None = None
        self._used = 0  # bytes of the last one

    def put(self, payload: Tensor) -> Tensor:
        """A copy of uint8 [N] on the shelf, where it stays as long as there is a tensor in it."""
        held = self._room(payload.numel())
        held.copy_(payload)
        return held

    @contextmanager
    def shown(self, weights: Mapping[str, Tensor]) -> Iterator[Shown]:
        """Let others read ``weights`` of the CPU, contiguous ones, in the block. Those that do not
        lie on the shelf are copied there for as long."""
        lying = {name: one for name, one in weights.items() if self._file(one) is not None}
        others = {name: one for name, one in weights.items() if name not in lying}
        specs = [TensorSpec.of(name, one) for name, one in others.items()]
        copies = views(specs, self._room(layout(specs)[1]))
        for name, copy in copies.items():
            copy.copy_(others[name])
        yield self._show(lying | copies)

    def _show(self, weights: Mapping[str, Tensor]) -> Shown:
        files: dict[int, int] = {}  # by descriptor, which of them
        tensors: list[tuple[TensorSpec, int, int]] = []
        sizes: list[tuple[int, int]] = []
        for name, tensor in weights.items():
            file = self._file(tensor)
            assert file is not None and tensor.is_contiguous()
            if file.descriptor not in files:
                files[file.descriptor] = len(files)
                sizes.append((file.descriptor, len(file)))
            start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
            tensors.append((TensorSpec.of(name, tensor), files[file.descriptor], start))
        return Shown(os.getpid(), tuple(sizes), tuple(tensors))

    def _room(self, size: int) -> Tensor:
        file = None if self._last is None else self._last()
        start = -(-self._used // ALIGNED) * ALIGNED
        if file is None or start + size > len(file):
            file, start = _File.make(max(size, FILE)), 0
            self._last = weakref.ref(file)
        self._used = start + size
        held = torch.frombuffer(file, dtype=torch.uint8)
        self._files[held.data_ptr()] = file
        return held[start : start + size]

    def _file(self, tensor: Tensor) -> _File | None:
        return self._files.get(tensor.untyped_storage().data_ptr())


def _mapped(path: str, size: int) -> Tensor:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)
