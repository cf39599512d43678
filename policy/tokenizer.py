"""Byte-level BPE and the append-only chat format.

Control tokens carry the names of the published vocabulary and sit behind the text tokens. Text is
never parsed for them: a message that contains the characters ``<|end_of_msg|>`` is encoded as
ordinary bytes, so that no environment or user can forge the structure of a conversation.

Left out of the published format: message attributes, thinking and tool channels. A message is
``<|open|> role <|sep|> content <|end_of_msg|>``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from ..envs.types import Message, Role

END_OF_DOCUMENT = "[EOS]"
END_OF_MESSAGE = "<|end_of_msg|>"
OPEN = "<|open|>"
SEPARATOR = "<|sep|>"
SPECIAL_TOKENS = (
    "[BOS]",
    END_OF_DOCUMENT,
    END_OF_MESSAGE,
    OPEN,
    "<|close|>",
    SEPARATOR,
    "[EOT]",
    "[UNK]",
    "[PAD]",
)
ROLES: tuple[str, ...] = get_args(Role)

# An identifier is one piece, with the space before it: " load_module".
_PIECES = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly ``vocab_size`` tokens, control tokens included.

    Each of ``words`` (for example ``" loads"``) and each role name becomes a single token. The
    other tokens are merges learned from ``texts``; where the texts give fewer merges than there
    is room for, unused ``<|reserved_i|>`` tokens fill the vocabulary.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = _pre_tokenizer()
    whole = dict.fromkeys(_piece(pre_tokenizer, word) for word in (*ROLES, *words))
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *whole]))}
    room = vocab_size - len(vocab) - len(SPECIAL_TOKENS)
    if room < 0:
        raise UserError(
            f"vocab_size={vocab_size} is too small: 256 bytes, {len(SPECIAL_TOKENS)} "
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
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(room)] + [*SPECIAL_TOKENS])
    return _wrap(tokenizer)


def text_token_room(vocab_size: int) -> int:
    """How many tokens of a vocabulary are left for words and merges."""
    return vocab_size - len(pre_tokenizers.ByteLevel.alphabet()) - len(ROLES) - len(SPECIAL_TOKENS)


def frequent_words(texts: Iterable[str], count: int) -> list[str]:
    """The ``count`` most frequent pieces of more than one byte, most frequent first."""
    pre_tokenizer = _pre_tokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [word for word in ranked if len(word.encode()) > 1][:count]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder; control tokens are never parsed out of text."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: no tokenizer (tokenizer.json is missing)")
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception for every malformed file
        raise UserError(f"{folder / 'tokenizer.json'}: not a tokenizer file ({error})") from None
    missing = [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is None]
    if missing:
        raise UserError(
            f"{folder / 'tokenizer.json'}: control tokens missing: {', '.join(missing)}"
        )
    return _wrap(backend)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Digest of everything that decides token ids."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting_of_the_last_call in ("padding", "truncation"):
        content.pop(setting_of_the_last_call, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def control_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of a control token."""
    index = tokenizer.backend_tokenizer.token_to_id(token)
    if index is None:
        raise UserError(f"the tokenizer has no control token {token}")
    return index


class ChatFormat:
    """Messages as token ids, each message on its own, so that a conversation only ever grows.

    Example: ``Message("tool", " json io")`` is ``[<|open|>, tool, <|sep|>, " json", " io",
    <|end_of_msg|>]``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._open, self._separator, self._end = (
            control_id(tokenizer, token) for token in (OPEN, SEPARATOR, END_OF_MESSAGE)
        )
        self._prompt = [self._open, *self._encode("assistant"), self._separator]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sampled completion."""
        return (self._end,)

    def prompt(self) -> list[int]:
        """The prefix after which the policy speaks."""
        return list(self._prompt)

    def render(self, message: Message) -> list[int]:
        """One message, from its opening token to its end token."""
        return [
            self._open,
            *self._encode(message.role),
            self._separator,
            *self._encode(message.content),
            self._end,
        ]

    def render_reply(self, messages: Iterable[Message]) -> list[int]:
        """Several messages in order."""
        return [token for message in messages for token in self.render(message)]

    def text(self, sampled_ids: Sequence[int]) -> str:
        """What the policy said, control tokens dropped."""
        return self._backend.decode([int(token) for token in sampled_ids], skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        # Set on every call: calling the wrapping tokenizer can change this switch of the backend.
        self._backend.encode_special_tokens = True
        return self._backend.encode(text, add_special_tokens=False).ids


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


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
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
