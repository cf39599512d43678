"""Safetensors files, read straight into the tensors of a policy and written straight from them.

Files are checked whole before a number is read, then read in pieces with plain reads: mapped files
would count as memory a second time, as would the bytes that libraries gather before they write.
Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..configs.errors import UserError
from ..kernels.moe import mxfp4_decode
from .records import listed, one_line, read_json
from .weights import TensorSpec, WeightManifest

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREFIX = "language_model."  # of the text policy where a vision tower stands beside it
CHUNK = 1 << 22  # numbers read and converted at once

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_BYTES = "U8"
_DTYPES = FLOATS | {_BYTES: torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``dtype`` as safetensors names it, ``start`` in bytes of the file."""

    file: BinaryIO
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class Shards:
    """All tensors of a checkpoint folder, by their names without prefix, and the ``notes`` of each
    file by its name; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.notes: dict[str, dict[str, str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Shards:
        with self._stack:  # closed again if anything is wrong
            placed = _weight_map(self.folder)
            files = sorted(set(placed.values())) or [SINGLE_FILE]
            absent = [name for name in files if not (self.folder / name).is_file()]
            if absent:
                raise UserError(f"{self.folder}: files missing: {listed(absent)}")
            found: dict[str, str] = {}
            for name in files:
                tensors, self.notes[name] = open_shard(self.folder / name, self._stack)
                for stored in tensors:
                    found[stored.name] = name
                    plain = stored.name.removeprefix(PREFIX)
                    if plain in self.tensors:
                        raise UserError(f"{self.folder / name}: {plain} is stored twice")
                    self.tensors[plain] = stored
            lost = sorted(name for name, file in placed.items() if found.get(name) != file)
            if lost:
                raise UserError(
                    f"{self.folder / INDEX_FILE}: tensors missing in the shards: {listed(lost)}"
                )
            unnamed = sorted(found.keys() - placed.keys()) if placed else []
            if unnamed:
                raise UserError(
                    f"{self.folder / INDEX_FILE}: does not name tensors of the shards: "
                    f"{listed(unnamed)}"
                )
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def stored_manifest(folder: Path) -> WeightManifest:
    """The tensors of a checkpoint folder as its files name them; `UserError` if one has a dtype
    that no policy has."""
    specs: list[TensorSpec] = []
    with Shards(folder) as shards:
        for stored in sorted(shards.tensors.values(), key=lambda one: one.name):
            dtype = _DTYPES.get(stored.dtype)
            if dtype is None:
                raise UserError(f"{folder}: {stored.name} has dtype {stored.dtype}")
            name = str(dtype).removeprefix("torch.")
            specs.append(TensorSpec(stored.name, stored.shape, name))
    return WeightManifest(tuple(specs))


def open_shard(path: Path, stack: ExitStack) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of one file, which ``stack`` closes, and the texts in its header; `UserError` if
    it is damaged."""
    try:
        with safe_open(path, framework="pt"):  # it checks the header and the file's length
            pass
        file = stack.enter_context(path.open("rb", buffering=0))
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged or truncated ({one_line(error)})") from None
    notes = header.pop("__metadata__", None) or {}
    tensors = [
        StoredTensor(
            file,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]
    return tensors, notes


def read_floats(stored: StoredTensor, place: Tensor) -> bool:
    """Fill the contiguous ``place`` with as many numbers, converted to its dtype; whether all are
    finite. `UserError` where the file does not hold floats, or finite ones that the dtype has
    not."""
    source = FLOATS.get(stored.dtype)
    if source is None:
        raise UserError(f"{stored.file.name}: {stored.name} has dtype {stored.dtype}, not floats")
    flat = place.view(-1)
    middle = None if source == flat.dtype else torch.empty(min(CHUNK, len(flat)), dtype=source)
    finite = True
    for begin in range(0, len(flat), CHUNK):
        part = flat[begin : begin + CHUNK]
        raw = part if middle is None else middle[: len(part)]
        _fill(stored, raw, begin)
        if middle is not None:
            part.copy_(raw)
        finite = finite and _is_kept(stored, part, raw)
    return finite


def _is_kept(stored: StoredTensor, part: Tensor, raw: Tensor) -> bool:
    """Whether numbers are finite; `UserError` if only those as they are stored are."""
    if bool(torch.isfinite(part).all()):
        return True
    if bool(torch.isfinite(raw).all()):
        dtype = str(part.dtype).removeprefix("torch.")
        raise UserError(
            f"{stored.file.name}: {stored.name} has numbers beyond the range of {dtype}; load it "
            "with dtype=torch.bfloat16 or torch.float32"
        )
    return False


def read_bits(stored: StoredTensor) -> Tensor:
    """A tensor as it lies in the file; `UserError` where its dtype cannot be written again."""
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None:
        raise UserError(f"{stored.file.name}: {stored.name} has dtype {stored.dtype}, unknown here")
    tensor = torch.empty(stored.shape, dtype=dtype)
    _fill(stored, tensor.view(-1), 0)
    return tensor


def read_mxfp4(packed: StoredTensor, scale: StoredTensor, place: Tensor) -> bool:
    """`read_floats` of a matrix that is stored as 4-bit floats and their scales."""
    for stored in (packed, scale):
        if stored.dtype != _BYTES:
            raise UserError(
                f"{stored.file.name}: {stored.name} has dtype {stored.dtype}, not {_BYTES}"
            )
    codes, powers = (torch.empty(s.shape, dtype=torch.uint8) for s in (packed, scale))
    _fill(packed, codes.view(-1), 0)
    _fill(scale, powers.view(-1), 0)
    step = max(1, CHUNK // place.shape[1])
    finite = True
    for first in range(0, len(place), step):
        some = slice(first, first + step)
        place[some] = mxfp4_decode(codes[some], powers[some], place.dtype)
        if not bool(torch.isfinite(place[some]).all()):
            wide = mxfp4_decode(codes[some], powers[some], torch.float32)
            finite = _is_kept(packed, place[some], wide) and finite
    return finite


def is_finite(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether all numbers are, in ``dtype`` if given, where the tensor lies and without a copy of
    its size."""
    parts = tensor.detach().reshape(-1).split(CHUNK)
    return all(bool(torch.isfinite(part.to(dtype or part.dtype)).all()) for part in parts)


def check_finite(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """UserError for a tensor that no checkpoint may hold, where it is stored as ``dtype``."""
    if not is_finite(tensor, dtype):
        kind = "" if dtype in (None, tensor.dtype) else f" as {dtype}"
        raise UserError(
            f"checkpoint: {name} is not finite{kind}, it cannot be saved; go on from an earlier one"
        )


def check_storable(name: Any, tensor: Any) -> None:
    """UserError for what is no tensor of floats with numbers in it, or has no name."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise UserError(f"checkpoint: {name!r} is a {kind}; names of tensors need tensors")
    if tensor.dtype not in FLOATS.values() or tensor.is_meta:
        kind = "the meta device" if tensor.is_meta else f"dtype {tensor.dtype}"
        raise UserError(f"checkpoint: {name} has {kind}, not floats that could be saved")


def write_shard(
    path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None
) -> None:
    """Write contiguous CPU tensors as one safetensors file, the widest types first as readers that
    map files want them aligned; ``notes`` are texts in its header."""
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | dict(notes or {})}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)


def _fill(stored: StoredTensor, numbers: Tensor, begin: int) -> None:
    """Read ``numbers [n]`` from the ``begin``-th of the stored ones on."""
    if len(numbers) == 0:
        return
    view = numbers.view(torch.uint8).numpy().data
    offset = stored.start + begin * numbers.element_size()
    while view:
        count = os.preadv(stored.file.fileno(), [view], offset)
        if count == 0:
            raise UserError(f"{stored.file.name}: damaged or truncated (ends in {stored.name})")
        view, offset = view[count:], offset + count


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor as the index says it; empty where there is none."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {}
    found = read_json(index).get("weight_map")
    placed: dict[str, str] = found if isinstance(found, dict) else {}
    names = list(placed.values())
    if not names or not all(isinstance(f, str) and _is_file_name(f) for f in names):
        raise UserError(f"{index}: weight_map does not name files of this folder")
    return placed


def _is_file_name(text: str) -> bool:
    return text.isprintable() and Path(text).name == text != "" and len(text.encode()) <= 255
