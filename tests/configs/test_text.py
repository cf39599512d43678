"""Which files of a folder count, for whoever reads text."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.configs.text import text_folder, walk


def test_files_in_order_without_hidden_and_vendored_ones(tmp_path: Path) -> None:
    for name in (
        *("b.txt", "a/z.md", "a/b/c.py", "a-b.py", "a/.hidden.md", ".git/x.txt"),
        *("node_modules/m.txt", "a/__pycache__/p.pyc", "build/n.txt", "_draft/d.txt"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nosuch")
    found = [path.relative_to(tmp_path).as_posix() for path in walk(tmp_path, "build".__eq__)]
    assert found == ["a-b.py", "b.txt", "_draft/d.txt", "a/z.md", "a/b/c.py"]


def test_a_setting_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    assert text_folder("~/texts") == tmp_path / "texts"
    assert text_folder("stdlib") == Path(sysconfig.get_path("stdlib"))
    with pytest.raises(UserError, match=r"^text: no such folder ~/none \(give a folder"):
        text_folder("~/none")
