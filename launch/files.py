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
def sole_user(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep other processes out while the block runs; UserError if one is in it.

    The kernel frees the lock of a process that was killed. Where the file system has no locks
    there is no protection. A folder that was made and stayed empty is removed again.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"output {folder}: cannot be made ({error.strerror}); choose another output"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output {folder}: another process works in it; wait for it, or choose another "
                "output"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
        if made:
            with suppress(OSError):  # not empty, as it should be
                folder.rmdir()


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
