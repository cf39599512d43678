"""Ctrl-C waits for the end of an update."""

from __future__ import annotations

import os
import signal

import pytest

from farhorizon.launch.interrupt import uninterrupted


def test_ctrl_c_comes_after_the_block() -> None:
    reached: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("end of the block")
    assert reached == ["end of the block"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_without_ctrl_c_nothing_happens() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_inside_wins() -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise ZeroDivisionError
