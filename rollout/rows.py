"""What a generator keeps of each of its sequences, and of what they are sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PATIENCE = 8  # decode steps that a given piece may wait for others

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


class Pace:
    """How many tokens each sequence reads in a forward pass of at most ``prefill_tokens``.

    Single tokens go first while there are any, so that pieces given to different sessions at
    nearby times are prefilled together, once; after `PATIENCE` such steps all rows take part.
    """

    def __init__(self, prefill_tokens: int) -> None:
        self._prefill_tokens = prefill_tokens
        self._postponed = 0  # steps that the waiting pieces have been put off

    def plan(self, todo: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the ``active`` rows take part and how many of their ``todo`` tokens each feeds.

        Layers may pad to the longest piece, so it is rows x longest piece that is bounded.
        """
        single = active[todo[active] == 1]
        if 0 < len(single) < len(active) and self._postponed < PATIENCE:
            self._postponed += 1
            return single, np.ones(len(single), np.int64)
        self._postponed = 0
        longest = max(1, self._prefill_tokens // len(active))
        return active, np.minimum(todo[active], longest)


class StopSets:
    """Sets of stop tokens by number; ``table`` bool [S, V] has one in each row."""

    def __init__(self, vocab_size: int) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self.table = np.zeros((0, vocab_size), np.bool_)

    def number(self, token_ids: tuple[int, ...]) -> int:
        """That of a set, which is added if it is new."""
        number = self._numbers.get(token_ids)
        if number is None:
            number = self._numbers[token_ids] = len(self._numbers)
            row = np.zeros((1, self.table.shape[1]), np.bool_)
            row[0, list(token_ids)] = True
            self.table = np.concatenate((self.table, row))
        return number


class Drafts:
    """Tokens of unfinished completions, one row for each of a generator's."""

    def __init__(self) -> None:
        self._tokens = np.zeros((0, 16), np.int32)
        self._logprobs = np.zeros((0, 16), np.float32)
        self._versions = np.zeros((0, 16), np.int32)

    def take(self, index: np.ndarray, more: int) -> None:
        """Reorder, repeat or drop rows, then append ``more``."""
        for name in ("_tokens", "_logprobs", "_versions"):
            old = getattr(self, name)
            new = np.empty((len(index) + more, old.shape[1]), old.dtype)
            new[: len(index)] = old[index]
            setattr(self, name, new)

    def add(
        self,
        rows: np.ndarray,
        count: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
    ) -> None:
        """One token more for each of the ``rows``, which have ``count`` already."""
        if count.max() == self._tokens.shape[1]:
            for name in ("_tokens", "_logprobs", "_versions"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.empty_like(old)), axis=1))
        self._tokens[rows, count] = tokens
        self._logprobs[rows, count] = logprobs
        self._versions[rows, count] = version

    def of(self, row: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids int32, log-probs fp32 and versions int32 of a row's first ``count`` tokens."""
        kept = (self._tokens, self._logprobs, self._versions)
        ids, logprobs, versions = (part[row, :count].copy() for part in kept)
        return ids, logprobs, versions
