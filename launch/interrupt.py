"""Ctrl-C between the steps of an update, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class RunFailed(RuntimeError):
    """A run that cannot go on, for a reason one line can say; the command line exits with 1."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while the block runs, then raise KeyboardInterrupt if it came."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        raise KeyboardInterrupt
