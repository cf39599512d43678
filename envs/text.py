"""True facts from a folder of real text: which name stands in which file.

A Python file gives its ``def`` and ``class`` names (methods included), any other text file its
words. A folder is read as code when most of its readable files are Python, else as text.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..configs.errors import UserError
from ..configs.text import text_folder, walk

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".org", ".tex"})
SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "lib2to3"})
MAX_FILE_BYTES = 1 << 20  # larger files are tables, not prose or code
MAX_RANKED_NAMES = 256  # most frequent names that decide which sources are chosen
MAX_SEARCHED_SOURCES = 16  # larger alphabets take the sources that share most names
MAX_TOTAL_BYTES = 64 << 20  # a folder is read in sorted order up to here

# Strings and comments come first so that a "def" inside them is never taken for a definition.
_CODE = re.compile(
    r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
    r"|^[ \t]*(?:async[ \t]+)?(?P<kind>def|class)[ \t]+(?P<name>[A-Za-z_]\w*)"
    r'(?:[^\n]*:[ \t]*\n[ \t]+[rR]?"""[ \t]*(?P<doc>[^\n"]*)[^"]*""")?',
    re.MULTILINE,
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_PLAIN = re.compile(r"[a-z]{2,}")


@dataclass(frozen=True, slots=True)
class Fact:
    """``name`` stands in the file ``path`` (relative to the folder), which is called ``source``.

    ``kind`` is ``def``, ``class`` or ``word``; ``doc`` is the first docstring line, if any.
    """

    name: str
    source: str
    kind: str
    doc: str
    path: str


@dataclass(frozen=True, slots=True)
class TextFile:
    """What was found in one file: ``names`` maps each name to its kind and doc.

    ``source`` is the dotted module or path without spaces, e.g. ``json.decoder``.
    """

    path: str
    source: str
    names: dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FactTable:
    """A closed alphabet: every one of ``names`` has facts in several of ``sources``."""

    folder: str
    sources: tuple[str, ...]
    names: tuple[str, ...]
    facts: dict[str, tuple[Fact, ...]]  # by name, in the order of sources

    @property
    def chance(self) -> float:
        """Success of the best guess of a source from the name alone, all facts equally likely."""
        return sum(1 / len(self.facts[name]) for name in self.names) / len(self.names)


def fact_table(
    text: str,
    *,
    sources: int | None,
    names: int | None,
    min_sources: int,
    plain: bool,
    reserved: frozenset[str] = frozenset(),
) -> FactTable:
    """Choose an alphabet from a folder; deterministic, and cached for the life of the process.

    ``sources`` files are chosen greedily for how many names they share, then the ``names`` names
    found in most of them, each in at least ``min_sources``; None takes all there are. ``plain``
    restricts to lower-case words that a tokenizer keeps whole; ``reserved`` words are left out.
    ``UserError`` names the folder and what was missing.
    """
    return _choose(str(text_folder(text)), sources, names, min_sources, plain, reserved)


@lru_cache(maxsize=16)
def _choose(
    folder: str,
    num_sources: int | None,
    num_names: int | None,
    min_sources: int,
    plain: bool,
    reserved: frozenset[str],
) -> FactTable:
    if num_sources is not None and min_sources > num_sources:
        raise UserError(
            f"text folder {folder}: min_sources={min_sources} is more than sources={num_sources}; "
            "lower min_sources"
        )
    corpus = _by_source(read_folder(folder), plain, num_sources, reserved)
    wanted = max(num_sources or 0, min_sources)
    if len(corpus) < wanted:
        raise UserError(
            f"text folder {folder}: {len(corpus)} files with usable names, but sources={wanted} "
            "are needed; name a larger folder or lower sources"
        )
    degree = Counter(name for found in corpus.values() for name in found)
    shared = {
        source: {n for n in found if degree[n] >= min_sources} for source, found in corpus.items()
    }
    chosen = sorted(corpus)
    if num_sources is not None:
        chosen = _dense(shared, num_sources, min_sources)
    count = Counter(n for source in chosen for n in shared[source] if n not in chosen)
    found = sorted((n for n in count if count[n] >= min_sources), key=lambda n: (-count[n], n))
    if len(found) < max(num_names or 4, 4):
        raise UserError(
            f"text folder {folder}: {len(found)} names stand in at least {min_sources} of the "
            f"{len(chosen)} chosen files, but names={max(num_names or 4, 4)} are needed; name a "
            "larger folder, or lower names or min_sources"
        )
    kept = sorted(found[:num_names])
    facts = {
        name: tuple(
            Fact(name, source, *corpus[source][name].names[name], corpus[source][name].path)
            for source in chosen
            if name in corpus[source]
        )
        for name in kept
    }
    return FactTable(folder, tuple(chosen), tuple(kept), facts)


def _dense(shared: dict[str, set[str]], num_sources: int, min_sources: int) -> list[str]:
    """The sources among which most names are found ``min_sources`` times.

    Greedy from several starts, then single swaps while they help: not optimal, but the same
    everywhere.
    """
    degree = Counter(name for names in shared.values() for name in names)
    common = set(sorted(degree, key=lambda n: (-degree[n], n))[:MAX_RANKED_NAMES])
    ranked = {source: names & common for source, names in shared.items()}
    pool = sorted(ranked, key=lambda s: (-len(ranked[s]), s))
    if num_sources > MAX_SEARCHED_SOURCES:
        return sorted(pool[:num_sources])
    pool = pool[: 4 * MAX_SEARCHED_SOURCES]

    def score(chosen: list[str]) -> tuple[int, int]:
        count = Counter(name for source in chosen for name in ranked[source])
        for source in chosen:  # a word that is a source cannot be a name as well
            count.pop(source, None)
        near = sum(min(c, min_sources) ** 2 for c in count.values())
        return sum(c >= min_sources for c in count.values()), near

    best: list[str] = []
    for start in pool[:16]:
        chosen, count = [start], Counter(ranked[start])
        while len(chosen) < min(num_sources, len(pool)):
            rest = [s for s in pool if s not in chosen]
            gain = {s: sum(min(count[n], min_sources) ** 2 for n in ranked[s]) for s in rest}
            chosen.append(max(rest, key=lambda s: gain[s]))
            count.update(ranked[chosen[-1]])
        best = max(best or chosen, chosen, key=score)
    for index in range(2 * len(best)):
        spot = index % len(best)
        others = [s for s in pool if s not in best]
        swaps = [[*best[:spot], s, *best[spot + 1 :]] for s in others]
        best = max([best, *swaps], key=score)
    return sorted(best)


def _by_source(
    files: tuple[TextFile, ...], plain: bool, num_sources: int | None, reserved: frozenset[str]
) -> dict[str, dict[str, TextFile]]:
    """By source and name, the file where the name stands.

    A plain source is one word: the top-level module, package or folder, or, where there are too
    few of those, the file's own name; if all else fails also names that are no plain words.
    """
    corpus: dict[str, dict[str, TextFile]] = {}
    if not plain:
        return {file.source: dict.fromkeys(file.names, file) for file in files if file.names}
    for part, any_word in ((0, False), (-1, False), (-1, True)):
        corpus = {}
        for file in files:
            word = re.sub(r"\W+", "_", file.source.split(".")[part].lower())
            if word in reserved or not (any_word or _PLAIN.fullmatch(word)):
                continue
            for name, (kind, _) in file.names.items():
                if name not in reserved and (kind == "word" or _PLAIN.fullmatch(name)):
                    corpus.setdefault(word, {}).setdefault(name, file)
        if len(corpus) >= (num_sources or 4):
            break
    return corpus


@lru_cache(maxsize=4)
def read_folder(folder: str) -> tuple[TextFile, ...]:
    """All files of a folder, sorted by path; tests, hidden and vendored folders are skipped."""
    paths = _list_files(folder)
    code = [p for p in paths if p.endswith(".py")]
    prose = [p for p in paths if not p.endswith(".py")]
    chosen = code if len(code) >= len(prose) else prose
    if not chosen:
        raise UserError(
            f"text folder {folder}: no readable text in it; wanted .py or "
            f"{' '.join(sorted(TEXT_SUFFIXES))} files"
        )
    files: list[TextFile] = []
    total = 0
    for path in chosen:
        content = Path(folder, path).read_bytes()
        total += len(content)
        if total > MAX_TOTAL_BYTES:
            break
        decoded = content.decode("utf-8", errors="replace")
        files.append(_read_code(path, decoded) if chosen is code else _read_prose(path, decoded))
    return tuple(files)


def _list_files(folder: str) -> list[str]:
    """Relative paths of text files, sorted."""
    found: list[str] = []
    for file in walk(Path(folder), lambda name: name in SKIPPED_FOLDERS or name[0] == "_"):
        known = file.suffix.lower() in TEXT_SUFFIXES | {".py"}
        if known and file.stat().st_size <= MAX_FILE_BYTES:
            found.append(str(file.relative_to(folder)))
    return sorted(found)


def _read_code(path: str, content: str) -> TextFile:
    parts = path[: -len(".py")].split(os.sep)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    names: dict[str, tuple[str, str]] = {}
    for match in _CODE.finditer(content):
        name = match["name"]
        if name is not None and not name.startswith("_"):
            names.setdefault(name, (match["kind"], (match["doc"] or "").strip()))
    return TextFile(path, re.sub(r"\s+", "_", ".".join(parts)), names)


def _read_prose(path: str, content: str) -> TextFile:
    source = re.sub(r"\s+", "_", os.path.splitext(path)[0]).replace(os.sep, ".")
    words = sorted({word.lower() for word in _WORD.findall(content)})
    return TextFile(path, source, dict.fromkeys(words, ("word", "")))
