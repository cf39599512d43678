"""Checkpoints of a run: written whole or not at all, newest complete one found again.

``RUN/checkpoints/step-000010/`` is a policy checkpoint folder, loadable on its own, with
``state/`` (optimizer, scheduler, random state) and ``run.json`` beside it. ``run.json`` lists every
other file with its size, which is how a torn copy is told from a complete one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..configs.errors import RunFailed, written


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is: updates done, training tasks used up, its settings as YAML."""

    step: int
    tasks: int
    config: str


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint."""

    folder: Path
    state: RunState


def save(run: Path, state: RunState, write: Callable[[Path], None], keep: int) -> Path:
    """Write the checkpoint of ``state.step``, then remove all but the newest ``keep``.

    ``write(folder)`` fills a folder that does not exist yet; it gets its name only when complete.
    RunFailed if there is a complete one of that name, which then is another process's.
    """
    root = run / "checkpoints"
    final = root / f"step-{state.step:06d}"
    if _read(final) is not None:
        raise RunFailed(
            f"{final}: another process has saved this step meanwhile; choose another output"
        )
    partial = root / f".saving-step-{state.step:06d}"
    for stale in (partial, final):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        with written(final):
            root.mkdir(parents=True, exist_ok=True)
            write(partial)
            record = json.dumps({**asdict(state), "files": _files(partial)}, indent=1)
            (partial / "run.json").write_text(record + "\n", encoding="utf-8")
            partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk wants its space back
    complete, _ = scan(run)
    for old in complete[: -max(keep, 1)]:
        with written(old.folder):
            remove(old.folder)
    return final


def remove(folder: Path) -> None:
    """Delete a checkpoint; from the first moment on it no longer counts as complete."""
    (folder / "run.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def scan(run: Path) -> tuple[list[Found], list[Path]]:
    """Complete checkpoints, oldest first, and folders that look like one but are not complete."""
    complete: list[Found] = []
    torn: list[Path] = []
    for folder in sorted((run / "checkpoints").glob("*")):
        if not folder.is_dir():
            continue
        found = _read(folder) if re.fullmatch(r"step-\d+", folder.name) else None
        if found is None:
            torn.append(folder)
        else:
            complete.append(found)
    return sorted(complete, key=lambda found: found.state.step), torn


def newest(run: Path) -> Found | None:
    """The complete checkpoint with the most steps."""
    complete, _ = scan(run)
    return complete[-1] if complete else None


def _files(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / "run.json"
    }


def _read(folder: Path) -> Found | None:
    try:
        record: Any = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        state = RunState(int(record["step"]), int(record["tasks"]), str(record["config"]))
        files: dict[str, int] = dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    present = _files(folder)
    whole = all(present.get(name) == size for name, size in files.items())
    return Found(folder, state) if whole and files else None
