"""The rows of ``farhorizon bench kda`` and their file, ``kda.jsonl``: a line each, none lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ..configs.errors import UserError
from .files import finite, json_line, write_whole

OURS = "farhorizon"
FILE = "kda.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one implementation did at one shape; None where it has no such pass or figure.

    Rows of one invocation share their ``date``. ``errors`` are relative, by inputs and quantity;
    None is a figure that was not finite.
    """

    date: str  # when the invocation began
    device: str
    versions: dict[str, str]
    kind: Literal["sequence", "decode"]
    shape: str  # TOKENSxHEADS of one sequence, or SEQUENCESxHEADS of one token each
    name: str
    forward_ms: float
    both_ms: float | None = None  # forward and backward
    peak_gib: float | None = None  # of forward and backward, inputs included
    first_s: float | None = None  # the first call at this shape, in seconds
    first_in_process: bool = False  # whether it was the first call of all
    gb_per_s: float | None = None  # 1e9 bytes that have to be moved, per second
    copy_share: float | None = None  # of the bytes per second of a copy on the device
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)


def shape_text(length: int, heads: int) -> str:
    return f"{length}x{heads}"


def parse_shape(text: str, key: str, unit: str) -> tuple[int, int]:
    """The two numbers of ``64x96``; UserError names the setting."""
    first, _, heads = text.partition("x")
    if not (first.isdecimal() and heads.isdecimal() and int(first) and int(heads)):
        raise UserError(f"{key}: {text!r} is not {unit}xHEADS, for example 64x96")
    return int(first), int(heads)


def read_rows(folder: Path) -> list[Row]:
    """All rows in the order in which they were measured; UserError names a line that is none."""
    path = folder / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason}); choose another output") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = Row(**json.loads(line))
            parse_shape(row.shape, "shape", "LENGTH")
        except (ValueError, TypeError, AttributeError):
            raise UserError(
                f"{path}: line {number} is no row of bench kda; remove it, or choose another output"
            ) from None
        rows.append(row)
    return rows


def append_rows(folder: Path, rows: Iterable[Row]) -> list[Row]:
    """Add rows to the file and return all of it. UserError if it cannot be read or written."""
    found = [*read_rows(folder), *rows]
    write_text(folder / FILE, "".join(json_line(_plain(row)) for row in found))
    return found


def write_text(path: Path, text: str) -> None:
    """The whole file or none of it; UserError if it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(
            f"output {path}: cannot be written ({error.strerror}); choose another output"
        ) from None


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each implementation and shape: by head count, then length, ours first."""
    last = {(row.kind, row.name, row.shape): row for row in rows}
    return sorted(last.values(), key=_order)


def ratio(row: Row, rows: Iterable[Row], figure: Literal["forward_ms", "both_ms"]) -> float | None:
    """How many times as long as ours of the same invocation; None for ours, or without both."""
    mine = [
        getattr(other, figure)
        for other in rows
        if (other.name, other.kind, other.shape, other.date)
        == (OURS, row.kind, row.shape, row.date)
    ]
    theirs = getattr(row, figure)
    if row.name == OURS or theirs is None or not mine or mine[-1] is None:
        return None
    return theirs / mine[-1]


def shapes_of(rows: Sequence[Row]) -> list[str]:
    """Shapes in the order of the rows, each once."""
    return list(dict.fromkeys(row.shape for row in rows))


def _order(row: Row) -> tuple[bool, int, int, bool, str]:
    length, heads = parse_shape(row.shape, "shape", "LENGTH")
    return row.kind == "decode", heads, length, row.name != OURS, row.name


def _plain(row: Row) -> dict[str, object]:
    data = asdict(row)
    data["errors"] = {inputs: finite(errors) for inputs, errors in row.errors.items()}
    return data
