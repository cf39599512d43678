"""A folder that one process works in."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.launch.files import sole_user


def hold(folder: Path, told: Connection) -> None:
    with sole_user(folder):
        told.send("in")
        told.poll(None)


def test_a_second_process_is_kept_out_until_the_first_has_gone(tmp_path: Path) -> None:
    """The first is killed without a chance to tidy up."""
    folder = tmp_path / "run"
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    first = context.Process(target=hold, args=(folder, its))
    first.start()
    assert mine.recv() == "in"
    with (
        pytest.raises(UserError, match=rf"^output {folder}: another process works in it; "),
        sole_user(folder),
    ):
        pass
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    with sole_user(folder):
        assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    with (
        pytest.raises(UserError, match=r"^output /proc/nothing: cannot be made \("),
        sole_user(Path("/proc/nothing")),
    ):
        pass
