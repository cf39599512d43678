"""Files that somebody may read at any moment: never half written, and JSON for every reader."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..configs.errors import UserError


@contextmanager
def sole_user(output: Path, *, replaced: bool = False) -> Iterator[None]:
    """Make the folder and keep other processes out while the block runs; UserError if one is in it.

    The kernel frees the lock of a process that was killed. Where the file system has no locks
    there is no protection. A folder that was made and stayed empty is removed again. An output
    that is ``replaced`` as a whole cannot hold the lock: a folder beside it does meanwhile.
    """
    folder = output.with_name(f".{output.name}.lock") if replaced else output
    made = replaced
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir()
            made = True
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"output {output}: cannot be made ({error.strerror}); choose another output"
        ) from None
    try:
        locked = _lock(folder, descriptor)
        if locked is False:
            raise UserError(
                f"output {output}: another process works in it; wait for it, or choose another "
                "output"
            )
        try:
            yield
        finally:
            if made and (locked or replaced):
                with suppress(OSError):  # not empty, as it should be
                    folder.rmdir()
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> bool | None:
    """Whether the folder is this process's own now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    try:  # who held the lock before may have removed the folder, and another have made it anew
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except OSError:
        return False


def write_whole(path: Path, text: str) -> None:
    """A reader finds the old content or the new, whenever the process is killed."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with null for numbers that are not finite, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def json_line(values: Mapping[str, Any]) -> str:
    """One line of a ``.jsonl`` file."""
    return json.dumps(finite(values), allow_nan=False) + "\n"
