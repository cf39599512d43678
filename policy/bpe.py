"""Byte-level BPE for small policies: every word that the chat format needs is one token.

Control tokens carry the names of the published vocabulary and sit behind the text tokens, in
published order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from .xtml import (
    CLOSE,
    END_OF_MESSAGE,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    ROLES,
    SEPARATOR,
    WORDS,
)

Style = Literal["brief", "full"]

END_OF_DOCUMENT = "[EOS]"
SPECIAL_TOKENS = (
    "[BOS]",
    END_OF_DOCUMENT,
    END_OF_MESSAGE,
    OPEN,
    CLOSE,
    SEPARATOR,
    "[EOT]",
    "[UNK]",
    "[PAD]",
)
MEDIA_TOKENS = (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD)

_FIXED: dict[Style, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "brief": (SPECIAL_TOKENS, ROLES),
    "full": ((*SPECIAL_TOKENS[:-2], *MEDIA_TOKENS, *SPECIAL_TOKENS[-2:]), WORDS),
}
"""Control tokens and whole words of either chat format."""

# An identifier is one piece, with the space before it: " load_module".
_PIECES = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, words: Sequence[str] = (), style: Style = "brief"
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly ``vocab_size`` tokens, control tokens included.

    Each of ``words`` (for example ``" loads"``) becomes a single token, and so do the role names
    and, for the full chat format, whatever its tags are written with. The other tokens are merges
    learned from ``texts``; where the texts give fewer merges than there is room for, unused
    ``<|reserved_i|>`` tokens fill the vocabulary.
    """
    control, structure = _FIXED[style]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = _pre_tokenizer()
    whole = dict.fromkeys(_piece(pre_tokenizer, word) for word in (*structure, *words))
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *whole]))}
    room = vocab_size - len(vocab) - len(control)
    if room < 0:
        raise UserError(
            f"vocab_size={vocab_size} is too small: 256 bytes, {len(control)} "
            f"control tokens and {len(whole)} whole words need {vocab_size - room}"
        )
    merges: list[tuple[str, str]] = []
    # The learned merges may repeat whole words, hence the margin.
    for left, right in _learn_merges(texts, len(alphabet) + room + len(whole), pre_tokenizer):
        if room == 0 and left + right not in vocab:
            break
        room -= left + right not in vocab
        vocab.setdefault(left + right, len(vocab))
        merges.append((left, right))
    # ignore_merges: a piece that is in the vocabulary is that token, whatever the merges say.
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(room)] + [*control])
    return wrap(tokenizer)


def text_token_room(vocab_size: int, style: Style = "brief") -> int:
    """How many tokens of a vocabulary are left for words and merges."""
    control, structure = _FIXED[style]
    return vocab_size - len(pre_tokenizers.ByteLevel.alphabet()) - len(structure) - len(control)


def frequent_words(texts: Iterable[str], count: int) -> list[str]:
    """The ``count`` most frequent pieces of more than one byte, most frequent first."""
    pre_tokenizer = _pre_tokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [word for word in ranked if len(word.encode()) > 1][:count]


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="[BOS]",
        eos_token=END_OF_DOCUMENT,
        unk_token="[UNK]",
        pad_token="[PAD]",
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    tokenizer.backend_tokenizer.encode_special_tokens = True
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [  # pyright: ignore[reportReturnType]
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _piece(pre_tokenizer: pre_tokenizers.PreTokenizer, word: str) -> str:
    """``word`` in the byte alphabet; it must be what the splitter gives as one piece."""
    pieces = pre_tokenizer.pre_tokenize_str(word)
    if len(pieces) != 1:
        raise UserError(
            f"words: {word!r} cannot be a single token, it is split into "
            f"{len(pieces)} pieces (letters, digits and signs never share a token)"
        )
    return pieces[0][0]


def _learn_merges(
    texts: Iterable[str], size: int, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> list[tuple[str, str]]:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=size,
        show_progress=False,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]
