"""A folder that one process works in."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path, PosixPath

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.launch.files import _lock, sole_user


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
    its.close()  # or a first one that ends at once would be waited for
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


class Late(PosixPath):
    """A folder that another user makes and enters just before this one would."""

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name == "run" and not self.exists():
            FIRST.enter_context(sole_user(Path(self)))
        super().mkdir(mode, parents, exist_ok)


FIRST = ExitStack()


def test_who_is_refused_removes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FIRST:
        with pytest.raises(UserError, match="another process works in it"), sole_user(Late(folder)):
            pass
        assert folder.is_dir()
    assert not folder.exists()  # the first one's, which left nothing in it


def test_only_a_folder_that_was_made_is_removed(tmp_path: Path) -> None:
    with sole_user(tmp_path / "there"):
        (tmp_path / "there" / "file").touch()
    for _ in range(2):
        with sole_user(tmp_path / "there"):
            (tmp_path / "there" / "file").unlink(missing_ok=True)
        assert (tmp_path / "there").is_dir()


def test_the_lock_of_a_folder_that_is_gone_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        assert _lock(folder, descriptor) is True
        folder.rename(tmp_path / "moved")
        assert _lock(folder, descriptor) is False
        folder.mkdir()
        assert _lock(folder, descriptor) is False
    finally:
        os.close(descriptor)


def test_an_output_that_is_replaced_is_locked_beside_itself(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (tmp_path / ".out.lock").mkdir()  # left by a process that was killed
    with sole_user(output, replaced=True):
        output.mkdir()
        output.rename(tmp_path / "old")
        with (
            pytest.raises(UserError, match=rf"^output {output}: another process works in it; "),
            sole_user(output, replaced=True),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    with (
        pytest.raises(UserError, match=r"^output /proc/nothing: cannot be made \("),
        sole_user(Path("/proc/nothing")),
    ):
        pass
