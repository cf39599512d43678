"""Facts from a folder of text: are they true, and what happens with odd folders?"""

from __future__ import annotations

import ast
import time
from functools import cache
from pathlib import Path

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.envs.text import FactTable, fact_table, read_folder


def table(folder: Path | str, *, plain: bool = True, names: int | None = 4) -> FactTable:
    return fact_table(str(folder), sources=2, names=names, min_sources=2, plain=plain)


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    return folder


@cache
def definitions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(errors="replace"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("plain", [True, False])
def test_facts_of_the_standard_library_are_true(plain: bool) -> None:
    found = fact_table("stdlib", sources=12, names=24, min_sources=4, plain=plain)
    assert (len(found.sources), len(found.names)) == (12, 24)
    for name in found.names:
        assert len(found.facts[name]) >= 4
        for fact in found.facts[name]:
            module = fact.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            assert fact.name == name in definitions(Path(found.folder, fact.path))
            assert fact.source in found.sources
            assert fact.source == (module.split(".")[0] if plain else module)


def test_reading_the_standard_library_takes_under_two_seconds() -> None:
    read_folder.cache_clear()
    started = time.process_time()
    first = fact_table("stdlib", sources=8, names=15, min_sources=4, plain=True)
    assert time.process_time() - started < 2
    started = time.process_time()
    assert fact_table("stdlib", sources=8, names=15, min_sources=4, plain=True) is first
    assert time.process_time() - started < 0.01


def test_definitions_in_strings_and_comments_are_none(tmp_path: Path) -> None:
    content = (
        '"""Text.\n\ndef quoted(): pass\n"""\n# def commented(): pass\ns = "def inline(): pass"\n'
        'class Shape:\n    """A form.\n\n    def example(): pass\n    """\n\n'
        "    async def area(self): ...\n    def _hidden(self): ...\n"
    )
    (file,) = read_folder(str(write(tmp_path, shapes=content)))
    assert file.names == {"Shape": ("class", "A form."), "area": ("def", "")}


def test_chance_by_hand(tmp_path: Path) -> None:
    both = "".join(f"def {name}(): ...\n" for name in ("aa", "bb", "cc", "dd"))
    for name in ("one", "two", "six"):
        (tmp_path / f"{name}.py").write_text(both if name != "six" else both.replace("aa", "zz"))
    found = fact_table(str(tmp_path), sources=3, names=4, min_sources=2, plain=True)
    assert found.sources == ("one", "six", "two") and found.names == ("aa", "bb", "cc", "dd")
    assert found.chance == pytest.approx((1 / 2 + 3 * 1 / 3) / 4)


def test_a_folder_of_txt_files(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        text = f"Morning light, evening rain; winter snow and number {'x' * number}."
        (tmp_path / f"Chapter {number}.txt").write_text(text)
    (tmp_path / "notes.py").write_text("def ignored(): ...")  # most files are prose
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\x00")
    found = table(tmp_path, names=None)
    assert found.sources == ("chapter_1", "chapter_2")
    assert found.names == ("and", "evening", "light", "morning", "number", "rain", "snow", "winter")
    full = table(tmp_path, plain=False)  # a source is one word of an action, whatever the style
    assert full.sources == ("Chapter_1", "Chapter_2")
    assert {f.path for facts in found.facts.values() for f in facts} == {
        "Chapter 1.txt",
        "Chapter 2.txt",
    }


def test_undecodable_bytes_and_huge_files_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path, aa="def pp(): ...\n", bb="x")
    (tmp_path / "bb.py").write_bytes(b"\xff\xfe def \x00\ndef qq(): ...\n")
    (tmp_path / "cc.py").write_bytes(b"#" * ((1 << 20) + 1))
    assert [file.path for file in read_folder(str(tmp_path))] == ["aa.py", "bb.py"]


def test_nested_code_falls_back_to_file_names(tmp_path: Path) -> None:
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    four = "def aa(): ...\ndef bb(): ...\ndef cc(): ...\ndef dd(): ...\n"
    write(inner, left=four, right=four)
    assert table(tmp_path).sources == ("left", "right")
    assert table(tmp_path, plain=False).sources == ("src.deep.left", "src.deep.right")


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({}, "no readable text"),
        ({"one": "def aa(): ..."}, "1 files with usable names, but sources=2"),
        ({"one": "def aa(): ...", "two": "x = 1"}, "1 files with usable names, but sources=2"),
        ({"one": "def aa(): ...", "two": "def aa(): ..."}, "1 names stand in at least 2"),
    ],
)
def test_a_small_folder_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, str], missing: str
) -> None:
    write(tmp_path, **files)
    with pytest.raises(UserError) as error:
        table(tmp_path)
    assert str(tmp_path) in str(error.value) and missing in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_folder_or_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(UserError, match="no such folder"):
            table(path)
