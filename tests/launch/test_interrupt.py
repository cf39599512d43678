"""Ctrl-C waits for the end of an update, says so, and does not wait for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import ray

from farhorizon.launch import interrupt
from farhorizon.launch.interrupt import GivenUp, exit_code, heed_sigterm, uninterrupted


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the handlers back, and what the last signal was."""
    monkeypatch.setattr(interrupt, "_caught", signal.SIGINT)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_does_what_ctrl_c_does(handlers: None, ignored: bool) -> None:
    """Also in a job that a shell started in the background, with SIGINT ignored."""
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    heed_sigterm()
    assert exit_code() == 130
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_code() == 143
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted("finishing the step"):
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("end of the block")
    assert reached == ["end of the block"]


def test_ctrl_c_comes_after_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    reached: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped, uninterrupted("finishing the step"):
        press()
        press()
        reached.append("end of the block")
    assert reached == ["end of the block"] and not isinstance(stopped.value, GivenUp)
    assert signal.getsignal(signal.SIGINT) is handler
    told = "finishing the step; Ctrl-C 2 more times stops at once, without saving"
    assert capfd.readouterr().err.split("\n") == ["", told, ""]


def test_without_ctrl_c_nothing_happens(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted("finishing"):
        pass
    assert signal.getsignal(signal.SIGINT) is handler
    assert capfd.readouterr().err == ""


def test_an_error_inside_wins() -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted("finishing"):
        press()
        raise ZeroDivisionError


def test_the_third_press_gives_the_block_up() -> None:
    reached: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(GivenUp), uninterrupted("finishing"):
        press()
        press()
        reached.append("still there")
        press()
        reached.append("never")
    assert reached == ["still there"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_stuck_actor_can_be_given_up(ray_local: None) -> None:
    """Ray looks for signals once a second; quicker presses count as one."""
    stuck = ray.remote(num_cpus=0.01)(lambda: time.sleep(60)).remote()
    ended = threading.Event()

    def insist() -> None:
        while not ended.wait(1.2):
            press()

    presser = threading.Thread(target=insist)
    begin = time.monotonic()
    try:
        with pytest.raises(GivenUp), uninterrupted("finishing"):
            presser.start()
            try:
                ray.get(stuck)
            finally:
                ended.set()
                presser.join()
        assert time.monotonic() - begin < 30
    finally:
        ray.cancel(stuck, force=True)
