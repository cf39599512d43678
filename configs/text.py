"""The folder that a ``text`` setting names, and the files in it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import UserError

STDLIB = "stdlib"  # stands for the running Python's own library

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


def text_folder(text: str) -> Path:
    """The folder that ``text`` names; UserError if there is none."""
    folder = Path(sysconfig.get_path("stdlib") if text == STDLIB else text).expanduser()
    if not folder.is_dir():
        raise UserError(f"text: no such folder {text} (give a folder of text files, or {STDLIB})")
    return folder


def walk(folder: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Readable files below ``folder``, by name, those of a folder before those of its subfolders.

    Left out are hidden files and folders, vendored packages, and folders whose name ``skip`` takes.
    """
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not (name.startswith(".") or name in _SKIPPED_FOLDERS or skip(name))
        )
        for name in sorted(files):
            file = Path(path, name)
            # isfile: opening a pipe would wait for its writer
            if not name.startswith(".") and os.path.isfile(file) and os.access(file, os.R_OK):
                yield file
