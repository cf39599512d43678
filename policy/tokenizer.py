"""Tokenizers of policies: read from a folder, told apart by digest, heard by a chat format."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from .bpe import (
    END_OF_DOCUMENT,
    SPECIAL_TOKENS,
    frequent_words,
    text_token_room,
    train_tokenizer,
    wrap,
)
from .chat import ChatFormat, agreed, chat_of, control_id
from .records import one_line
from .xtml import END_OF_MESSAGE, MEDIA_PAD, ROLES

__all__ = [
    "END_OF_DOCUMENT",
    "END_OF_MESSAGE",
    "MEDIA_PAD",
    "ROLES",
    "SPECIAL_TOKENS",
    "ChatFormat",
    "agreed",
    "chat_of",
    "control_id",
    "frequent_words",
    "load_tokenizer",
    "text_token_room",
    "tokenizer_sha256",
    "train_tokenizer",
]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder, ours or a published one.

    Control tokens are found by name and never parsed out of text. Reads ``tokenizer.json`` only:
    no code of the folder is run.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder}: {_instead(folder)}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        backend, added = _backend(content), [token["content"] for token in content["added_tokens"]]
    except Exception as error:  # tokenizers raises plain Exception for every malformed file
        raise UserError(f"{file}: not a tokenizer file ({one_line(error)})") from None
    missing = [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is None]
    if "<|im_end|>" in backend.get_vocab() and missing:
        raise UserError(
            f"{file}: has the control tokens of the K2 family (<|im_end|>), whose chat format is "
            "not supported; use the tokenizer.json of a K3 folder, which has the same text tokens"
        )
    if missing:
        raise UserError(f"{file}: control tokens missing: {', '.join(missing)}")
    ids = Counter(backend.token_to_id(token) for token in {*SPECIAL_TOKENS, *added})
    index, count = ids.most_common(1)[0]
    if count > 1:
        same = sorted(t for t in {*SPECIAL_TOKENS, *added} if backend.token_to_id(t) == index)
        raise UserError(f"{file}: control tokens of one id, {index}: {', '.join(same)}")
    return wrap(backend)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Digest of everything that decides token ids."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting_of_the_last_call in ("padding", "truncation"):
        content.pop(setting_of_the_last_call, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _backend(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer that ``tokenizer.json`` describes, with the ids that stand there."""
    added = content["added_tokens"]
    # Tokens that are added but not special would be found in text.
    for token in added:
        token["special"] = True
    backend = Tokenizer.from_str(json.dumps(content))
    if any(backend.token_to_id(token["content"]) != token["id"] for token in added):
        # Ids with gaps between them are renumbered, unless the tokens are in the vocabulary.
        content["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
        backend = Tokenizer.from_str(json.dumps(content))
    return backend


def _instead(folder: Path) -> str:
    """What to do where ``tokenizer.json`` is missing."""
    if not [*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")]:
        return "no tokenizer (tokenizer.json is missing)"
    return (
        "tokenizer.json is missing, and a tiktoken file alone is not read; write tokenizer.json "
        "beside it with transformers.integrations.tiktoken.convert_tiktoken_to_fast, all control "
        "tokens in the order of their ids, reserved ones too"
    )
