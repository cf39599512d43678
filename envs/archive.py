"""The archive: page through a long stream of true facts, take notes, answer at the end.

The horizon is a parameter: ``pages``, or ``tokens`` from which pages follow. Page k is computed
from the episode's key and k alone, so a million-token episode costs no more memory than a short
one. `docs/environments.md` tells the rules and what the brief style simplifies.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import deque
from typing import Any, Literal

from ..configs.errors import UserError
from .base import Observation, Step
from .text import Fact, fact_table
from .tools import ToolEnv, tool
from .types import Message

Page = tuple[Fact | None, tuple[Fact, ...]]
_NOTHING: tuple[int, Page] = (-1, (None, ()))
COMMANDS = ("next", "note", "answer")
RESERVED = frozenset({*COMMANDS, "go", "user", "tool", "assistant", "system"})

_INSTRUCTIONS = (
    "You are reading an archive of {pages} pages; each lists facts about names found in {text}. "
    "Pages cannot be turned back. Some facts are starred (*): note each of them when you see it. "
    "After the last page you are asked in which place the name of one starred fact from the first "
    "half of the archive was found; the same name may also be found elsewhere, so what counts is "
    "the fact you were shown. Reply with exactly one command per turn:\n"
    "next - turn to the next page\n"
    "note NAME PLACE - write down a starred fact, then turn to the next page\n"
    "answer NAME PLACE - answer the question; this ends the episode\n"
    "Anything else ends the episode without reward. Reply with: next"
)

_NOTEBOOK = "\nYour notebook holds {slots} notes; a further note pushes out the oldest."


class Archive(ToolEnv):
    """Long-horizon recall over real text; reward 1 for a noted and rightly answered fact, else 0.

    ``sources`` and ``names`` (None: all there are) set the alphabet that `fact_table` chooses
    from ``text``: every name is found in ``min_sources`` places or more, so that the answer
    cannot be known without having read the episode. ``chance`` is the success of the best guess
    of an agent that notes every starred fact and then forgets. ``min_pages`` and
    ``min_stars`` make length and density vary from episode to episode, ``slots`` bounds the
    notebook, ``eager`` is how often the expert notes an unstarred fact as well. ``delay`` is how
    many seconds a page takes to come, as a slow tool would: sleeping, not computing.
    """

    def __init__(
        self,
        *,
        pages: int | None = None,
        min_pages: int | None = None,
        tokens: int | None = None,
        stars: int | None = None,
        min_stars: int | None = None,
        records_per_page: int = 2,
        sources: int | None = 8,
        names: int | None = 16,
        min_sources: int = 4,
        text: str = "stdlib",
        style: Literal["brief", "full"] = "brief",
        require_note: bool = True,
        slots: int | None = None,
        eager: float = 0.0,
        delay: float = 0.0,
    ) -> None:
        if style not in ("brief", "full"):
            raise UserError(f"archive-v0: style must be brief or full, got {style!r}")
        if pages is not None and tokens is not None:
            raise UserError("archive-v0: give pages or tokens, not both")
        for field, value, least in (
            ("pages", pages, 1),
            ("min_pages", min_pages, 1),
            ("tokens", tokens, 64),
            ("stars", stars, 1),
            ("min_stars", min_stars, 1),
            ("records_per_page", records_per_page, 1),
            ("sources", sources, 2),
            ("names", names, 4),
            ("min_sources", min_sources, 1),
            ("slots", slots, 1),
        ):
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(
                    f"archive-v0: {field} must be an integer of at least {least}, got {value!r}"
                )
        if not 0 <= eager <= 1:
            raise UserError(f"archive-v0: eager must lie in [0, 1], got {eager!r}")
        if not 0 <= delay < math.inf:
            raise UserError(f"archive-v0: delay must be seconds of at least 0, got {delay!r}")
        self.table = fact_table(
            text,
            sources=sources,
            names=names,
            min_sources=min_sources,
            plain=style == "brief",
            reserved=RESERVED,
        )
        self.records_per_page = records_per_page
        self.style = style
        self.require_note = require_note
        self.eager = eager
        self.delay = delay
        self._key = 0
        self._shown = _NOTHING  # the last page that was drawn, with its number
        self._names: list[str] = []  # this episode's names; the starred ones come first
        self._page = -1
        self._notes: deque[tuple[str, str]] = deque(maxlen=slots)
        self._question: Fact | None = None
        self._stars = stars
        self._least_stars = min_stars or stars or 1
        if min_stars is not None and (stars is None or min_stars > stars):
            raise UserError(f"archive-v0: min_stars={min_stars} needs stars of at least as many")
        self._set_pages(pages if pages is not None else 8, stars)
        if tokens is not None:
            self._set_pages(self._pages_for(tokens), stars)
        self._most_pages = self.pages
        self._least_pages = self.pages if min_pages is None else min_pages
        if self._least_pages > self._most_pages:
            raise UserError(
                f"archive-v0: min_pages={min_pages} is more than the {self.pages} pages at most"
            )

    @property
    def chance(self) -> float:
        """Success of the best memoryless guess (see the class)."""
        return self.table.chance

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word of the brief style; a tokenizer should keep each of them whole."""
        return ("go", *COMMANDS, "*", "?", *self.table.sources, *self.table.names)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        key = self.draw_key()
        rng = random.Random(key)
        pages = rng.randint(self._least_pages, self._most_pages)
        stars = self._stars
        if stars is not None:
            most = min(stars, pages)
            stars = rng.randint(min(self._least_stars, most), most)
        self._set_pages(pages, stars)
        self._open(key)
        if self.style == "brief":
            return (Message("user", " go"),), {}
        instructions = _INSTRUCTIONS.format(pages=self.pages, text=self.table.folder)
        if self._notes.maxlen is not None:
            instructions += _NOTEBOOK.format(slots=self._notes.maxlen)
        return (Message("user", instructions),), {}

    @tool
    def next(self) -> Step:
        """Turn the page."""
        if self._question is not None:
            return self.finish(0.0)
        return self._turn()

    @tool
    def note(self, name: str, source: str) -> Step:
        """Write a fact down, then turn the page; a full notebook loses its oldest note."""
        if self._question is not None:
            return self.finish(0.0)
        self._notes.append((name, source))
        return self._turn()

    @tool
    def answer(self, name: str, source: str) -> Step:
        """Answer the question; before it is asked, this ends the episode with 0."""
        asked = self._question
        if asked is None or (name, source) != (asked.name, asked.source):
            return self.finish(0.0)
        noted = (asked.name, asked.source) in self._notes
        return self.finish(1.0 if noted or not self.require_note else 0.0)

    def on_invalid(self, action: str) -> Step:
        return self.finish(0.0)

    def expert(self) -> str:
        if self._question is not None:
            action = f"answer {self._question.name} {self._question.source}"
        else:
            fact = self._worth_noting() if self._page >= 0 else None
            action = f"note {fact.name} {fact.source}" if fact else "next"
        return f" {action}" if self.style == "brief" else action

    def _worth_noting(self) -> Fact | None:
        """What the expert notes on this page: the starred fact, or eagerly the first one."""
        starred, others = self.page(self._page)
        if starred is None and self._rng("eager", self._page).random() < self.eager:
            return others[0]
        return starred

    # -- what an episode holds ---------------------------------------------------------------

    def page(self, number: int) -> Page:
        """The starred fact of a page, if it has one, and its other facts."""
        if number != self._shown[0]:
            self._shown = (number, self._draw_page(number))
        return self._shown[1]

    def _draw_page(self, number: int) -> Page:
        starred = self._starred(number)
        rng = self._rng("page", number)
        names = self._names[self._num_starred :]
        others = rng.sample(names, self.records_per_page - (starred is not None))
        return starred, tuple(rng.choice(self.table.facts[name]) for name in others)

    def _set_pages(self, pages: int, stars: int | None = None) -> None:
        """Fix the horizon: as many blocks of pages as there are starred facts, one in each.

        By default every second page is starred, as far as half of the names reach.
        """
        names = len(self.table.names)
        self.pages = pages
        self._half = -(-pages // 2)
        if stars is None:
            stars = min(-(-pages // max(1, min(2, self._half))), names // 2)
        self._num_starred = min(stars, pages)
        if names - self._num_starred < self.records_per_page:
            raise UserError(
                f"archive-v0: {self._num_starred} starred facts and records_per_page="
                f"{self.records_per_page} need more than {names} names; raise names or lower one"
            )

    def _pages_for(self, tokens: int) -> int:
        """Pages that fill about ``tokens`` tokens, chat format and replies included.

        One word is a token in the brief style, four characters in the full one; every message
        costs four more for its role and delimiters.
        """

        def count(text: str) -> float:
            return 4 + (len(text.split()) if self.style == "brief" else len(text) / 4)

        frame = count("? name") + count("answer name place") + count("next")
        frame += count("go") if self.style == "brief" else count(_INSTRUCTIONS)
        pages, per_page = self.pages, 0.0
        for _ in range(2):  # the share of starred pages depends on how many pages there are
            self._set_pages(max(pages, 1), self._stars)
            self._open(0)
            sample = range(0, self.pages, -(-self.pages // 64))
            cost = 0.0
            for number in sample:
                fact = self._starred(number)
                cost += count(self._render_page(number))
                cost += count(f"note {fact.name} {fact.source}" if fact else "next")
            per_page = cost / len(sample)
            pages = round((tokens - frame) / per_page)
        if pages < 1:
            raise UserError(
                f"archive-v0: tokens={tokens} is too short; a page takes about {per_page:.0f} "
                f"and the frame {frame:.0f}"
            )
        return pages

    def _open(self, key: int) -> None:
        self._key = key
        self._shown = _NOTHING
        self._page = -1
        self._notes.clear()
        self._question = None
        self._names = self._rng("names").sample(self.table.names, len(self.table.names))

    def _rng(self, *parts: str | int) -> random.Random:
        """A generator for one part of the episode, independent of every other part."""
        text = ":".join(str(part) for part in (self._key, *parts))
        return random.Random(hashlib.blake2b(text.encode(), digest_size=8).digest())

    def _first_page(self, block: int) -> int:
        return -(-block * self.pages // self._num_starred)

    def _starred_page(self, block: int) -> int:
        first = self._first_page(block)
        return first + self._rng("star", block).randrange(self._first_page(block + 1) - first)

    def _starred(self, number: int) -> Fact | None:
        block = number * self._num_starred // self.pages
        if number != self._starred_page(block):
            return None
        return self._rng("fact", block).choice(self.table.facts[self._names[block]])

    def _draw_question(self) -> Fact:
        """A starred fact, uniformly from those on the first half of the pages (or the first)."""
        blocks = self._half * self._num_starred // self.pages
        partial = self._first_page(blocks) < self._half
        if blocks == 0 or (partial and self._starred_page(blocks) < self._half):
            blocks += 1
        number = self._starred_page(self._rng("question").randrange(blocks))
        fact = self._starred(number)
        assert fact is not None
        return fact

    # -- what the policy sees ----------------------------------------------------------------

    def _turn(self) -> Step:
        time.sleep(self.delay)
        self._page += 1
        if self._page < self.pages:
            return self.reply(self._render_page(self._page))
        self._question = self._draw_question()
        name = self._question.name
        if self.style == "brief":
            return self.reply(f" ? {name}")
        return self.reply(f"Question: in which place was the starred {name} found?")

    def _render_page(self, number: int) -> str:
        starred, others = self.page(number)
        if self.style == "brief":
            words = ["*"] if starred else []
            for fact in (starred, *others) if starred else others:
                words += [fact.name, fact.source]
            return "".join(f" {word}" for word in words)
        lines = [f"Page {number + 1} of {self.pages}"]
        lines += [f"* {_describe(starred)}"] if starred else []
        lines += [f"  {_describe(fact)}" for fact in others]
        return "\n".join(lines)


def _describe(fact: Fact) -> str:
    """One readable line, e.g. ``def loads in json: Deserialize a document.``"""
    line = f"{fact.kind} {fact.name} in {fact.source}"
    return f"{line}: {fact.doc}" if fact.doc else line
