"""Files that somebody may read at any moment: never half written, and JSON for every reader."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
