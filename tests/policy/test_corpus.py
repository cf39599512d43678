"""Packed sequences: exact size, whole episodes, held-out text, same data for the same step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from farhorizon.configs.errors import UserError
from farhorizon.envs.types import Message
from farhorizon.policy.corpus import (
    EpisodeTooLong,
    PackedCorpus,
    TextCorpus,
    cut,
    demonstration,
    sample_texts,
    text_files,
)
from farhorizon.policy.tokenizer import ChatFormat, train_tokenizer

TOKENIZER = train_tokenizer(["one two three\n"], 300, (" one", " two", "one", "two"))
END = TOKENIZER.convert_tokens_to_ids("[EOS]")


PLAYED = [Message("user", " two"), Message("assistant", "two")] * 2


def folder(tmp_path: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return str(tmp_path)


def test_demonstration_trains_on_what_a_policy_samples() -> None:
    chat = ChatFormat(TOKENIZER)
    ids, mask = demonstration(PLAYED, chat)
    assert ids.tolist() == [id for message in PLAYED for id in chat.render(message)]
    # 5 tokens of the user, 3 of the assistant's header, then content and stop; twice.
    assert mask.tolist() == ([False] * 8 + [True] * 2) * 2
    assert ids.dtype == np.int32 and mask.dtype == np.bool_


def test_a_demonstration_longer_than_the_context_is_refused() -> None:
    with pytest.raises(EpisodeTooLong, match="is longer than the context of 19 tokens"):
        demonstration(PLAYED, ChatFormat(TOKENIZER), max_tokens=19)
    assert len(demonstration(PLAYED, ChatFormat(TOKENIZER), max_tokens=20)[0]) == 20


def test_files_of_a_folder_follow_each_other_closed_by_eos(tmp_path: Path) -> None:
    text = TextCorpus(
        folder(tmp_path, {f"{i}.txt": "one two\n" for i in range(3)}), TOKENIZER, "train"
    )
    piece = text.piece(np.random.default_rng(0), 100)
    file = [*TOKENIZER.encode("one two\n"), END]
    # Of three files one is held out: from some line of one of the two to the folder's end.
    assert piece.tolist() in ([END], [END, *file], file + file, file)
    assert len(text.piece(np.random.default_rng(0), 1)) == 1


@pytest.mark.parametrize("context", [8, 64, 200])
def test_sequences_have_exactly_the_context_and_whole_episodes(
    tmp_path: Path, context: int
) -> None:
    episode = np.full(8, 7, np.int32)
    corpus = PackedCorpus(
        TextCorpus(folder(tmp_path, {"a.txt": "one two\n" * 99}), TOKENIZER, "train"),
        lambda i: episode,
        0.5,
        seed=3,
    )
    shares = []
    for step in range(20):
        pieces = corpus.batch(step, context, sequences=4).pieces
        assert sum(map(len, pieces)) == 4 * context
        assert max(map(len, pieces)) <= context
        filled = 0
        for piece in pieces:  # a piece never crosses the border of a packed sequence
            assert filled + len(piece) <= context
            filled = (filled + len(piece)) % context
        episodes = [piece for piece in pieces if piece[0] == 7]
        assert all(len(piece) == 8 for piece in episodes)
        shares.append(8 * len(episodes) / (4 * context))
    assert np.mean(shares) == pytest.approx(0.5, abs=0.08)


def test_a_batch_depends_on_seed_and_step_only(tmp_path: Path) -> None:
    path = folder(tmp_path, {f"{i}.txt": f"one {i} two\n" * 50 for i in range(9)})

    def ids(seed: int, step: int) -> list[int]:
        text = TextCorpus(path, TOKENIZER, "train")
        pieces = PackedCorpus(text, None, 0.0, seed).batch(step, 32, 2).pieces
        return np.concatenate(pieces).tolist()

    assert ids(0, 5) == ids(0, 5)
    assert ids(0, 5) != ids(0, 6) and ids(0, 5) != ids(1, 5)


def test_held_out_text_is_never_trained_on(tmp_path: Path) -> None:
    path = folder(tmp_path, {f"d{i}/{i}.txt": f"{i:02d}\n" * 50 for i in range(40)})
    seen = {}
    for split in ("train", "heldout"):
        text = TextCorpus(path, TOKENIZER, split)
        rng = np.random.default_rng(0)
        words = " ".join(str(TOKENIZER.decode(text.piece(rng, 20).tolist())) for _ in range(400))
        seen[split] = {word for word in words.split() if len(word) == 2 and word.isdigit()}
    assert len(seen["heldout"]) == 2 and seen["train"].isdisjoint(seen["heldout"])
    assert len(seen["train"]) == 38
    trained = "".join(sample_texts(path, seed=0, total_bytes=5000))
    assert not any(number + "\n" in trained for number in seen["heldout"])


def test_only_text_files_are_read(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        {"a.txt": "x", "b/c.md": "y", "empty": "", ".hidden": "z", "__pycache__/d.py": "w"},
    )
    (tmp_path / "binary").write_bytes(b"a\0b")
    assert [file.name for file in text_files(path)] == ["a.txt", "c.md"]
    names = {file.name for file in text_files("stdlib")}
    assert {"json", "pathlib.py"} & names == {"pathlib.py"} and "test_json.py" not in names


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_folder_without_text_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="text: no"):
        text_files(str(tmp_path / name))


def test_a_file_of_one_line_is_read_from_within_it(tmp_path: Path) -> None:
    """Behind its only line begins no other: all that was read was the end of the file."""
    (tmp_path / "a.txt").write_text("one two " * 400)
    text = TextCorpus(str(tmp_path), TOKENIZER, "train")
    rng = np.random.default_rng(0)
    assert all(len(text.piece(rng, 8)) == 8 for _ in range(50))


def test_a_single_letter_is_no_text_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"^text: .*a\.txt is all there is, and too short to train"):
        TextCorpus(str(tmp_path), TOKENIZER, "train")


def test_another_episode_is_drawn_for_one_beyond_the_context(tmp_path: Path) -> None:
    """Odd episodes are too long. The even ones come in the order in which all are drawn."""
    text = TextCorpus(folder(tmp_path, {"a.txt": "one\n" * 99}), TOKENIZER, "train")
    drawn: list[int] = []

    def uneven(number: int) -> np.ndarray:
        drawn.append(number)
        if number % 2:
            raise EpisodeTooLong("too long")
        return np.full(16, 1000 + len(drawn), np.int32)

    packed = PackedCorpus(text, uneven, 1.0, seed=0).batch(0, 32, sequences=8)
    even = [1000 + i for i, number in enumerate(drawn, start=1) if number % 2 == 0]
    assert [int(piece[0]) for piece in packed.pieces] == even[:16]  # one more is waiting
    assert packed.too_long == sum(number % 2 for number in drawn) > 0
    assert PackedCorpus(text, None, 0.0, seed=0).batch(0, 32, 1).too_long == 0


@pytest.mark.parametrize("raised", [True, False])
def test_a_context_that_no_episode_fits_is_told(tmp_path: Path, raised: bool) -> None:
    def long(number: int) -> np.ndarray:
        if raised:
            raise EpisodeTooLong("too long")
        return np.zeros(33, np.int32)

    text = TextCorpus(folder(tmp_path, {"a.txt": "one\n" * 9}), TOKENIZER, "train")
    with pytest.raises(UserError, match="64 episodes in a row are longer than the context of 32"):
        PackedCorpus(text, long, 0.5, seed=0).batch(0, 32, 1)


def test_cut_keeps_the_tokens() -> None:
    pieces = cut([np.arange(5), np.arange(2)], 2)
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3], [4], [0, 1]]
