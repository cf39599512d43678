"""Two threads that take turns at one engine: the one that steps, and one that must not be between
two of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock

from ..configs.errors import RunFailed


class Turns:
    """A lock whose holder lets a waiting thread in after at most one more turn.

    An update may wait for what runs to end. What is asked meanwhile is ``held``.
    """

    def __init__(self) -> None:
        self._entry, self._working, self._updating = Lock(), Lock(), Lock()
        self._quiet = Event()
        self.holding = False
        self.held: list[int] = []  # sessions

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

    @contextmanager
    def update(self, wait: bool, running: Callable[[], int]) -> Iterator[None]:
        """The turn of an update; with ``wait`` it comes when nothing is ``running``.

        RunFailed for a second one, whose block is not entered.
        """
        if not self._updating.acquire(blocking=False):
            why = "waits for what runs to end" if self.holding else "is at work"
            raise RunFailed(f"weight sync refused: another update {why}; one comes after the other")
        try:
            if wait:
                with self.take():
                    self._quiet.clear()
                    self.holding = True
                    self.settle(running())
                self._quiet.wait()
            with self.take():
                try:
                    yield
                finally:
                    self.holding = False
        finally:
            self._updating.release()

    def settle(self, running: int) -> None:
        """Let an update that waits go on if nothing is running."""
        if running == 0:
            self._quiet.set()

    def admit(self, session: int) -> bool:
        """Whether what a session asks for may begin now; else it is held."""
        if self.holding:
            self.held.append(session)
        return not self.holding

    def released(self) -> list[int]:
        """Sessions that were held, once no update waits any more."""
        if self.holding:
            return []
        sessions, self.held = self.held, []
        return sessions

    def clear(self) -> None:
        """Nothing runs and nothing is asked."""
        self.held = []
        self.settle(0)
