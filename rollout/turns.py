"""Two threads that take turns at one engine: the one that steps, and one that must not be between
two of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Turns:
    """A lock whose holder lets a waiting thread in after at most one more turn."""

    def __init__(self) -> None:
        self._entry, self._working = Lock(), Lock()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn of others to end, and hold them off while the block runs."""
        # A bare lock would let the stepping thread take it again and again. Here a thread that
        # waits for the work lock keeps the entry, so the stepping thread queues up behind it.
        with self._entry:
            self._working.acquire()
        try:
            yield
        finally:
            self._working.release()
