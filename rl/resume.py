"""The learner's state on disk: weights, moments, counters and random state, by name.

Tensors are safetensors files, counters JSON; nothing is pickled. ``learner.json`` is written last
and lists the size of every file, so that a folder whose writing was cut off is refused. The state
can be read back with another number of ranks or another ZeRO stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..configs.errors import UserError
from .learner import Learner

SHARD_BYTES = 2 << 30
WEIGHT, MOMENT, RANDOM = "weight/", "moment/", "random/"


def save(learner: Learner, folder: Path) -> None:
    """Write the state into ``folder``; a collective, files come from rank 0."""
    engine = learner.engine
    shards = _Shards(folder) if engine.rank == 0 else None
    for prefix, tensors in ((WEIGHT, engine.gathered_state()), (MOMENT, engine.moments())):
        for name, tensor in tensors:
            if shards is not None:
                shards.add(prefix + name, tensor)
    for rank, state in enumerate(engine.random_states()):
        if shards is not None:
            shards.add(f"{RANDOM}{rank}", state)
    if shards is not None:
        shards.finish(
            version=learner.version,
            skipped_in_a_row=learner.skipped_in_a_row,
            threshold_version=learner.threshold_version,
            applied_steps=engine.applied_steps,
        )
    engine.barrier()


def load(learner: Learner, folder: Path) -> None:
    """Take over the state in ``folder``; a collective. UserError if it is torn or another's."""
    record = _read_record(folder)
    engine = learner.engine
    with ExitStack() as stack:
        tensors = _Stored(folder, record["files"], stack)
        missing = [n for n in engine.manifest.names if WEIGHT + n not in tensors]
        if missing:
            raise UserError(f"{folder}: the learner state has no {missing[0]}; wrong policy?")
        moments = engine.moment_names if record["applied_steps"] else []
        lost = [name for name in moments if MOMENT + name not in tensors]
        if lost:
            raise UserError(
                f"{folder}: the learner state has no {lost[0]}; it is that of another "
                "learner.optimizer"
            )
        engine.restore(
            _Prefixed(tensors, WEIGHT), _Prefixed(tensors, MOMENT), record["applied_steps"]
        )
        own = f"{RANDOM}{engine.rank}"
        if own in tensors:
            torch.set_rng_state(tensors[own])
    learner.version = record["version"]
    learner.skipped_in_a_row = record["skipped_in_a_row"]
    # a state that does not say it is of a learner that set them in every step
    learner.threshold_version = record.get("threshold_version", record["applied_steps"])
    engine.barrier()


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / "learner.json"
    try:
        record = json.loads(path.read_text())
        sizes = record["files"]
        _ = record["applied_steps"], record["version"], record["skipped_in_a_row"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a complete learner state ({error})") from None
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise UserError(f"{folder / name}: {found} bytes, learner.json says {size}")
    return record


class _Shards:
    """Collects tensors and writes a file whenever `SHARD_BYTES` are together."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.nbytes += tensor.nbytes
        if self.nbytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.tensors:
            path = self.folder / f"learner-{len(self.files):05d}.safetensors"
            try:
                save_file(self.tensors, path)
            except SafetensorError as error:  # of the file system, as text
                raise OSError(str(error)) from None
            self.files[path.name] = path.stat().st_size
            self.tensors, self.nbytes = {}, 0

    def finish(self, **counters: int) -> None:
        self.flush()
        record = {"files": self.files, **counters}
        (self.folder / "learner.json").write_text(json.dumps(record, indent=1) + "\n")


class _Stored(Mapping[str, Tensor]):
    """Tensors of several safetensors files, read when asked for."""

    def __init__(self, folder: Path, files: Mapping[str, int], stack: ExitStack) -> None:
        self.where: dict[str, Any] = {}
        for name in files:
            try:
                opened = stack.enter_context(safe_open(folder / name, "pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{folder / name}: not a safetensors file ({error})") from None
            self.where |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        return self.where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


class _Prefixed(Mapping[str, Tensor]):
    """The part of a mapping under a prefix, by the names that follow it."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (n.removeprefix(self.prefix) for n in self.tensors if n.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
