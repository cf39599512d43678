"""Training sequences: text of a folder and demonstrations of an environment, packed to a context.

Nothing is tokenised ahead of time: a piece of text is read from a random place of a random file
when it is asked for, so that a folder may hold any number of gigabytes. Places are drawn
independently (by size of the file), not as a permutation: there are no epochs, and the data of a
step depends on nothing but the seed and the step.

Files of one folder are one long document in path order, each file closed by ``[EOS]``; this is
what gives a long context something to read. A document longer than the context is cut. Between
documents and around episodes the policy's state starts anew (each is a sequence of its own).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from ..configs.text import STDLIB, text_folder, walk
from ..envs.types import Message
from .tokenizer import END_OF_DOCUMENT, ChatFormat, control_id

Split = Literal["train", "heldout"]

_SKIPPED_STDLIB = frozenset({"test", "tests", "idlelib", "lib2to3", "ensurepip"})
_HELD_OUT_SHARE = 20  # one file in this many
EPISODE_DRAWS = 64  # in search of an episode that fits the context
_BLOCK_BYTES = 1 << 16  # read and tokenised at once, at most


class Demonstration(NamedTuple):
    """One expert episode: ``token_ids`` int32 [T]; ``assistant_mask`` bool [T] is true on what a
    policy would have sampled, i.e. contents and stop tokens of assistant messages."""

    token_ids: np.ndarray
    assistant_mask: np.ndarray


class EpisodeTooLong(UserError):
    """A demonstration longer than the context: where others are at hand, one of them is taken."""


def save_demonstrations(file: Path, demonstrations: Sequence[Demonstration]) -> None:
    """Write demonstrations as plain arrays."""
    np.savez(
        file,
        token_ids=np.concatenate([d.token_ids for d in demonstrations]),
        assistant_mask=np.concatenate([d.assistant_mask for d in demonstrations]),
        lengths=np.array([len(d.token_ids) for d in demonstrations]),
    )


def load_demonstrations(file: Path) -> list[Demonstration]:
    """Read what `save_demonstrations` wrote."""
    with np.load(file) as data:
        cuts = data["lengths"].cumsum()[:-1]
        parts = zip(
            np.split(data["token_ids"], cuts), np.split(data["assistant_mask"], cuts), strict=True
        )
        return [Demonstration(*part) for part in parts]


def demonstration(
    messages: Iterable[Message], chat: ChatFormat, max_tokens: int | None = None
) -> Demonstration:
    """The episode of an expert, token for token what a rollout of it would be.

    Raises `EpisodeTooLong` when it grows beyond ``max_tokens``.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    prefix = len(chat.prompt())
    for message in messages:
        rendered = chat.render(message)
        given = prefix if message.role == "assistant" else len(rendered)
        token_ids += rendered
        mask += [False] * given + [True] * (len(rendered) - given)
        if max_tokens is not None and len(token_ids) > max_tokens:
            raise EpisodeTooLong(
                f"env: a demonstration is longer than the context of {max_tokens} tokens; "
                "set a longer context, or shorten the episode through env.kwargs"
            )
    return Demonstration(np.asarray(token_ids, np.int32), np.asarray(mask, np.bool_))


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file that belong to a split."""

    path: Path
    start: int
    end: int


class TextCorpus:
    """Text files below ``folder`` (``"stdlib"``: the running Python's library), one split of them.

    ``split="heldout"`` holds one file in twenty (at least one; of a single file its last tenth),
    chosen by the digest of its path, and ``"train"`` the others. Files with NUL bytes and hidden
    ones are left out.
    """

    def __init__(self, folder: str, tokenizer: PreTrainedTokenizerFast, split: Split) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._end = control_id(tokenizer, END_OF_DOCUMENT)
        self._spans = _split(text_files(folder), split)
        self._ends = np.cumsum([span.end - span.start for span in self._spans])

    def piece(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Consecutive tokens from a random place, int32 [n] with 1 <= n <= ``length``; fewer than
        ``length`` only at the end of a folder."""
        index, offset = self._place(rng, length)
        span = self._spans[index]
        token_ids: list[int] = []
        folder = span.path.parent
        while len(token_ids) < length:
            for text in _read(span, offset, 4 * (length - len(token_ids))):
                token_ids += self._encode(text)
                if len(token_ids) >= length:
                    break
            else:
                token_ids.append(self._end)
            index += 1
            if index == len(self._spans) or self._spans[index].path.parent != folder:
                break
            span = self._spans[index]
            offset = span.start
        return np.asarray(token_ids[:length], np.int32)

    def _place(self, rng: np.random.Generator, tokens: int) -> tuple[int, int]:
        """A random span and an offset in it, if possible with ``tokens`` ahead of its end."""
        index = int(np.searchsorted(self._ends, rng.integers(self._ends[-1]), side="right"))
        span = self._spans[index]
        last = max(1, span.end - span.start - 2 * tokens)
        return index, span.start + int(rng.integers(last))

    def _encode(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True
        return self._backend.encode(text, add_special_tokens=False).ids


class Packed(NamedTuple):
    """``pieces`` of whole packed sequences, int32 [n] each; so many episodes were ``too_long``."""

    pieces: list[np.ndarray]
    too_long: int


@dataclass(frozen=True, slots=True)
class PackedCorpus:
    """Packed sequences of exactly ``context`` tokens out of text and episodes.

    ``episode(i)`` is the i-th demonstration as int32 [T], or `EpisodeTooLong`;
    ``episode_fraction`` the share of tokens that come from them. Example: with a context of 8 and
    episodes of 5 tokens a packed sequence is one episode and 3 tokens of text, or 8 tokens of text.
    """

    text: TextCorpus
    episode: Callable[[int], np.ndarray] | None
    episode_fraction: float
    seed: int

    def batch(self, step: int, context: int, sequences: int) -> Packed:
        """The pieces of ``sequences`` packed sequences, ``sequences * context`` tokens in all.

        A function of ``(seed, step, context)`` alone. Pieces are documents or parts of them; none
        is longer than ``context``. For an episode that is, another one is drawn.
        """
        rng = np.random.default_rng([self.seed, step, context])
        # Which side of the wanted share a batch lands on is drawn, so that the share holds on
        # average even where a batch has room for one episode only.
        rounding = float(rng.random())
        pieces: list[np.ndarray] = []
        total = from_episodes = 0
        waiting, too_long = self._next_episode(rng, context)
        for _ in range(sequences):
            left = context
            while left > 0:
                size = len(waiting)
                if 0 < size <= left and (
                    from_episodes + rounding * size <= self.episode_fraction * (total + size)
                ):
                    piece = waiting
                    waiting, others = self._next_episode(rng, context)
                    too_long += others
                    from_episodes += size
                else:
                    piece = self.text.piece(rng, left)
                pieces.append(piece)
                total += len(piece)
                left -= len(piece)
        return Packed(pieces, too_long)

    def _next_episode(self, rng: np.random.Generator, context: int) -> tuple[np.ndarray, int]:
        """The next episode that fits, and how many before it did not."""
        if self.episode is None or self.episode_fraction == 0:
            return np.zeros(0, np.int32), 0
        for too_long in range(EPISODE_DRAWS):
            try:
                episode = self.episode(int(rng.integers(2**31)))
            except EpisodeTooLong:
                continue
            if len(episode) <= context:
                return episode, too_long
        raise UserError(
            f"env: {EPISODE_DRAWS} episodes in a row are longer than the context of {context} "
            "tokens of this stage; shorten them through env.kwargs"
        )


def cut(pieces: Sequence[np.ndarray], context: int) -> list[np.ndarray]:
    """The same tokens in pieces of at most ``context``."""
    return [
        piece[start : start + context]
        for piece in pieces
        for start in range(0, len(piece), context)
    ]


def text_files(folder: str) -> list[Path]:
    """Text files below ``folder`` in path order; ``"stdlib"`` is the running Python's library."""
    stdlib = folder == STDLIB
    skipped = _SKIPPED_STDLIB if stdlib else frozenset[str]()
    files = [
        file
        for file in walk(text_folder(folder), skipped.__contains__)
        if (file.suffix == ".py" or not stdlib) and _is_text(file)
    ]
    if not files:
        raise UserError(f"text: no text files below {folder}")
    return files


def sample_texts(folder: str, seed: int, total_bytes: int) -> Iterator[str]:
    """Random blocks of the training split, for training a tokenizer; about ``total_bytes``."""
    rng = np.random.default_rng(seed)
    spans = _split(text_files(folder), "train")
    ends = np.cumsum([span.end - span.start for span in spans])
    read = 0
    while read < min(total_bytes, ends[-1]):
        span = spans[int(np.searchsorted(ends, rng.integers(ends[-1]), side="right"))]
        offset = span.start + int(rng.integers(max(1, span.end - span.start - _BLOCK_BYTES // 4)))
        text = next(_read(span, offset, _BLOCK_BYTES), "")
        read += max(len(text), 1)
        yield text


def _split(files: list[Path], split: Split) -> list[_Span]:
    spans = [_Span(file, 0, file.stat().st_size) for file in files]
    if len(spans) == 1:
        path, size = spans[0].path, spans[0].end
        border = size - max(1, size // 10)
        if border == 0:
            raise UserError(f"text: {path} is all there is, and too short to train on")
        return [_Span(path, border, size) if split == "heldout" else _Span(path, 0, border)]
    by_digest = sorted(
        spans, key=lambda span: hashlib.blake2b("/".join(span.path.parts[-2:]).encode()).digest()
    )
    held_out = set(by_digest[: max(1, len(spans) // _HELD_OUT_SHARE)])
    return [span for span in spans if (span in held_out) == (split == "heldout")]


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(1024)
    except OSError:
        return False
    return bool(head) and b"\0" not in head


def _read(span: _Span, offset: int, block_bytes: int) -> Iterator[str]:
    """The text from the first line at or after ``offset``, in blocks that end with a line."""
    block_bytes = min(max(block_bytes, 256), _BLOCK_BYTES)
    with span.path.open("rb") as stream:
        stream.seek(offset)
        if offset > span.start:
            stream.readline(_BLOCK_BYTES)
            if stream.tell() >= span.end and _is_one_line(stream, span):
                stream.seek(offset)  # no line begins behind the first one: from within it
        while (left := span.end - stream.tell()) > 0:
            block = stream.read(min(block_bytes, left))
            if len(block) < left:
                block += stream.readline(min(_BLOCK_BYTES, left - len(block)))
            yield block.decode("utf-8", errors="replace")


def _is_one_line(stream: BinaryIO, span: _Span) -> bool:
    stream.seek(span.start)
    stream.readline(span.end - span.start)
    one = stream.tell() >= span.end
    stream.seek(span.end)
    return one
