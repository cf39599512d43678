"""The vision tower of a policy that was read without it: still in its files, copied by a save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..configs.errors import UserError
from .shards import Shards, StoredTensor, read_bits

Kinds = tuple[tuple[str, str, tuple[int, ...]], ...]

TOWER = ("vision_tower.", "mm_projector.")  # these names have no prefix in files


def has_tower(names: Iterable[str]) -> bool:
    """Whether any tensor of a vision tower is among ``names``."""
    return any(name.startswith(TOWER) for name in names)


class CarriedTower:
    """Where the tensors of a vision tower lie; iterates over their names and bits.

    Its files stay open, so that it is there whatever becomes of their folder: a run moves its
    checkpoints, and deletes old ones. Copies are the same object; another process, which a pickled
    one is sent to, opens the files anew.
    """

    def __init__(self, folder: Path, tensors: Sequence[StoredTensor]) -> None:
        paths = {Path(stored.file.name) for stored in tensors}
        self._files = {path: path.open("rb", buffering=0) for path in paths}
        self._folder = folder
        self._tensors = [
            replace(stored, file=self._files[Path(stored.file.name)]) for stored in tensors
        ]

    @classmethod
    def of(cls, shards: Shards) -> CarriedTower | None:
        """The tower in open files, if there is any of it."""
        found = [s for name, s in sorted(shards.tensors.items()) if name.startswith(TOWER)]
        return cls(shards.folder.absolute(), found) if found else None

    @classmethod
    def reopen(cls, folder: Path, kinds: Kinds) -> CarriedTower:
        """The tower of a folder, in another process; UserError where it is no longer there."""
        if folder.is_dir():
            with Shards(folder) as shards:
                tower = cls.of(shards)
            if tower is not None and tower.kinds == kinds:
                return tower
        raise UserError(
            f"{folder}: the vision tower of a policy that was read from there without it is gone; "
            "keep the folder as long as the policy is sent to other processes, or read it with "
            "vision=True"
        )

    @property
    def kinds(self) -> Kinds:
        """Name, dtype and shape of each tensor."""
        return tuple((stored.name, stored.dtype, stored.shape) for stored in self._tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((stored.name, read_bits(stored)) for stored in self._tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> CarriedTower:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CarriedTower.reopen, (self._folder, self.kinds)

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            file.close()
