"""Ctrl-C between the steps of an update, never inside one unless it is insisted on.

SIGTERM does the same as Ctrl-C, with an exit code of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PRESSES = 3  # of Ctrl-C that give up what holds it back
_caught: signal.Signals = signal.SIGINT


class GivenUp(KeyboardInterrupt):
    """Ctrl-C came in the middle of what must be whole: a step, a checkpoint."""


def heed_sigterm() -> None:
    """Let SIGTERM do from now on what Ctrl-C does; Ray takes it over whenever it starts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def exit_code() -> int:
    """Of a process that was interrupted: 130 by Ctrl-C, 143 by SIGTERM."""
    return 128 + _caught


def _terminate(signum: int, frame: FrameType | None) -> None:
    global _caught
    _caught = signal.SIGTERM
    handler = signal.getsignal(signal.SIGINT)
    # a shell starts jobs in the background with SIGINT ignored
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


@contextmanager
def uninterrupted(doing: str) -> Iterator[None]:
    """Hold Ctrl-C back while the block runs, then raise KeyboardInterrupt if it came.

    The first press says what it waits for, ``doing``; the third raises `GivenUp` from inside, for
    a block that takes too long or is stuck.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    presses = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            _say(f"{doing}; Ctrl-C {PRESSES - 1} more times stops at once, without saving")
        elif presses >= PRESSES:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    except KeyboardInterrupt:
        # Not raised by `note` itself: Ray catches what a handler raises and raises it anew.
        if presses >= PRESSES:
            raise GivenUp from None
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
    if presses:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    """A line past all buffers: a signal may come in the middle of a print."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())
