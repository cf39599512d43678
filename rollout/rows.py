"""What a generator keeps of each of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

ROW = np.dtype(
    [
        ("session", np.int64),
        ("key", np.uint64),
        ("position", np.int64),  # index in its trajectory of the token sampled next
        ("todo", np.int64),  # known tokens that the state has not seen; 0 while waiting
        ("last", np.int64),  # the newest known token
        ("count", np.int64),  # tokens of this completion
        ("budget", np.int64),
        ("temperature", np.float64),
        ("stop", np.int64),  # index into the table of stop sets
        ("version", np.int64),  # of the weights that the state began with
    ]
)


@dataclass(slots=True)
class Opening:
    """Sequences that share a prompt and are still one row, named after the first session."""

    prompt: np.ndarray
    keys: Sequence[int]
    sessions: list[int] = field(default_factory=list)
