"""The append-only chat format: messages as token ids, and sampled ids as messages.

Text is never parsed for control tokens: a message that contains the characters
``<|end_of_msg|>`` is encoded as ordinary bytes, so that no environment or user can forge the
structure of a conversation.

There are two styles behind one interface. ``full`` is the published XTML format of `xtml`;
``brief`` is ``<|open|> role <|sep|> content <|end_of_msg|>``, four tokens besides the content,
where the full one needs some forty for an empty answer. A policy that learns a task in minutes
with a vocabulary of 512 cannot spend its context on tags. It is not the full format with parts
left out (no element ``message``, nothing is closed), so it has its own few lines. Which of the
two a policy speaks is decided once, when its tokenizer is made, and seen in what that holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from ..configs.schema import ChatConfig
from ..envs.types import IMAGE_PLACEHOLDER, Action, Effort, Message, Role
from . import xtml
from .bpe import MEDIA_TOKENS, SPECIAL_TOKENS, Style
from .images import Placed, count_tokens, expand, place, prepare
from .records import ChatRecord, StageRecord
from .vision_config import ImageRules
from .xtml import CLOSE, END_OF_MESSAGE, MEDIA_PAD, OPEN, ROLES, SEPARATOR, Piece, Reply

_RESERVED = re.compile(r"<\|reserved_\d+\|>")


def control_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of a control token."""
    index = tokenizer.backend_tokenizer.token_to_id(token)
    if index is None:
        raise UserError(f"the tokenizer has no control token {token}")
    return index


def chat_style(tokenizer: PreTrainedTokenizerFast) -> Style:
    """``brief`` for what `train_tokenizer` makes by default, ``full`` for every other tokenizer.

    A brief tokenizer has each role as one token and no control token but `SPECIAL_TOKENS`; one
    for the full format, trained or published, has those of images as well.
    """
    backend = tokenizer.backend_tokenizer
    names = {token.content for token in backend.get_added_tokens_decoder().values()}
    others = {name for name in names - {*SPECIAL_TOKENS} if not _RESERVED.fullmatch(name)}
    whole = all(len(backend.encode(role, add_special_tokens=False).ids) == 1 for role in ROLES)
    return "brief" if whole and not others else "full"


def agreed(wanted: ChatConfig, style: Style, stage: StageRecord | None) -> ChatRecord | None:
    """How a policy speaks whose tokenizer is of ``style``, None for the brief one; UserError where
    that is not what is wanted.

    Its messages must be those that it was trained on, so a wish can only agree with what its
    checkpoint says. ``effort`` is free: it is something the policy is told.
    """
    if wanted.style not in (None, style):
        raise UserError(
            f"chat.style={wanted.style}: the policy's tokenizer speaks the {style} style; leave "
            f"the setting out, or make a new policy with farhorizon stage chat.style={wanted.style}"
        )
    if style == "brief":
        for name, value in (("thinking", wanted.thinking), ("effort", wanted.effort)):
            if value not in (None, False, "none"):
                shown = str(value).lower()
                raise UserError(f"chat.{name}={shown} needs the full chat style, this is brief")
        return None
    record = None if stage is None else stage.chat
    thinking = record.thinking if record else wanted.thinking is not False
    if wanted.thinking not in (None, thinking):
        raise UserError(
            f"chat.thinking={str(wanted.thinking).lower()}: the policy was trained with "
            f"chat.thinking={str(thinking).lower()}, as its stage.json says; leave the setting out"
        )
    effort = record.effort if record and wanted.effort is None else wanted.effort
    if effort == "none":
        effort = None
    if effort is not None and not thinking:
        raise UserError(f"chat.effort={effort} needs chat.thinking=true")
    return ChatRecord(thinking, effort)


def chat_of(
    tokenizer: PreTrainedTokenizerFast, stage: StageRecord, wanted: ChatConfig
) -> ChatFormat:
    """The format of a checkpoint with that tokenizer and record; errors as `agreed`."""
    record = agreed(wanted, chat_style(tokenizer), stage) or ChatRecord()
    return ChatFormat(tokenizer, thinking=record.thinking, effort=record.effort)


class ChatFormat:
    """Messages as token ids, each message on its own, so that a conversation only ever grows.

    ``style`` is what the tokenizer speaks unless given. ``thinking`` is of the full style:
    without it an assistant's message has no thoughts; ``effort`` is what it is told of them at the
    start of an episode. ``images`` are the rules of a policy that
    sees images; without them a message with images is a `UserError`. Example in the brief style:
    ``Message("tool", " json io")`` is ``[<|open|>, tool, <|sep|>, " json", " io",
    <|end_of_msg|>]``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        style: Style | None = None,
        thinking: bool = True,
        images: ImageRules | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.effort: Effort | None = effort
        self.image_rules = images
        self.tokenizer = tokenizer
        self.style: Style = style or chat_style(tokenizer)
        self.thinking = thinking
        self._backend = tokenizer.backend_tokenizer
        self._control = {t: control_id(tokenizer, t) for t in (OPEN, CLOSE, SEPARATOR)}
        self._control[END_OF_MESSAGE] = self._end = control_id(tokenizer, END_OF_MESSAGE)
        if images is not None:
            self._control |= {token: control_id(tokenizer, token) for token in MEDIA_TOKENS}
        added = self._backend.get_added_tokens_decoder()
        self._names = {index: token.content for index, token in added.items()}
        # What stands for unknown characters is text.
        self._forbidden = {index for index, name in self._names.items() if name != "[UNK]"}
        self._longest = max(map(len, self._backend.get_vocab()))  # characters of a token
        self._words = {word: self._encode(word) for word in xtml.WORDS}

    def seeing(self, images: ImageRules | None) -> ChatFormat:
        """The same format with images."""
        return ChatFormat(self.tokenizer, self.style, self.thinking, images, self.effort)

    @property
    def calls(self) -> bool:
        """Whether the policy can call tools."""
        return self.style == "full"

    @property
    def record(self) -> ChatRecord | None:
        """What a checkpoint says of it."""
        return ChatRecord(self.thinking, self.effort) if self.style == "full" else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sampled completion."""
        return (self._end,)

    def prompt(self) -> list[int]:
        """The prefix after which the policy speaks."""
        brief = [Piece(OPEN, True), Piece("assistant"), Piece(SEPARATOR, True)]
        full = self.style == "full"
        return self._ids(xtml.prompt_pieces(self.thinking) if full else brief)

    def render(self, message: Message) -> list[int]:
        """One message, from its opening token to its end token."""
        return self._ids(self._pieces(message))

    def render_masked(self, message: Message) -> tuple[list[int], list[bool]]:
        """`render`, and for each id whether to train on it: what follows the header of an
        assistant's message, its end token included. Arguments that are no JSON are left out."""
        pieces = [(piece, self._ids([piece])) for piece in self._pieces(message)]
        mask = [piece.trained for piece, ids in pieces for _ in ids]
        return [token for _, ids in pieces for token in ids], mask

    def render_reply(self, messages: Iterable[Message], room: int | None = None) -> list[int]:
        """Several messages in order.

        Where they are longer than ``room`` tokens, maybe only so much of them that this shows: a
        text of megabytes takes minutes.
        """
        token_ids: list[int] = []
        for message in messages:
            if room is None:
                token_ids += self.render(message)
                continue
            if len(token_ids) > room:
                break
            characters = (room + 1) * self._longest  # where a token holds no more, that is enough
            start = self.render(_shortened(message, characters))
            cut = len(message.content) > characters
            token_ids += self.render(message) if cut and len(start) <= room else start
        return token_ids

    def placed(self, token_ids: Sequence[int], messages: Iterable[Message]) -> tuple[Placed, ...]:
        """The images of ``messages`` among the ids that `render_reply` made of all of them."""
        images = [image for message in messages for image in message.images]
        if not images:
            return ()
        rules, pad = self._rules(), self._control[MEDIA_PAD]
        return tuple(place(token_ids, [prepare(image, rules) for image in images], pad))

    def text(self, sampled_ids: Sequence[int]) -> str:
        """What the policy said, control tokens dropped; in the full style an `Action`."""
        if self.style == "full":
            return Action(*self.read(sampled_ids))
        known = [token for token in map(int, sampled_ids) if self._is_known(token)]
        return self._backend.decode(known, skip_special_tokens=True)

    def read(self, sampled_ids: Sequence[int]) -> Reply:
        """The message that the policy sampled after `prompt`, and what is malformed about it."""
        pieces = self._split(sampled_ids)
        if self.style == "full":
            return xtml.read_reply(pieces, self.thinking)
        ended = bool(pieces) and pieces[-1] == Piece(END_OF_MESSAGE, True)
        faults = [] if ended else [f"no {END_OF_MESSAGE}"]
        inside = pieces[:-1] if ended else pieces
        faults += [f"{piece.text} where none can stand" for piece in inside if piece.control]
        return Reply(Message("assistant", self.text(sampled_ids)), tuple(faults))

    def parse(self, token_ids: Sequence[int]) -> list[Message]:
        """The messages that were rendered; ValueError where ids are no rendered messages."""
        pieces = self._split(token_ids)
        if self.style == "full":
            return xtml.read_messages(pieces, self.thinking)
        return _read_brief(pieces)

    def _pieces(self, message: Message) -> list[Piece]:
        if self.style == "full":
            pieces = xtml.message_pieces(message, self.thinking)
            if not message.images:
                return pieces
            rules = self._rules()
            sizes = [image.pixels.shape[:2] for image in message.images]
            counts = [count_tokens(height, width, rules) for height, width in sizes]
            return expand(pieces, Piece(MEDIA_PAD, True, False), counts)
        if message.images:
            raise UserError(
                "the brief chat format has no images; train the policy's tokenizer with "
                'style="full"'
            )
        if message.calls:
            raise UserError(
                "the brief chat format has no tool calls; train the policy's tokenizer with "
                'style="full"'
            )
        trained = message.role == "assistant"
        return [
            *(Piece(OPEN, True, False), Piece(message.role, False, False)),
            Piece(SEPARATOR, True, False),
            *(Piece(message.content, False, trained), Piece(END_OF_MESSAGE, True, trained)),
        ]

    def _rules(self) -> ImageRules:
        if self.image_rules is None:
            raise UserError(
                "a message has images, but the policy sees none here: its environment must say "
                "shows_images = True, and only train, eval and play show images"
            )
        return self.image_rules

    def _ids(self, pieces: Iterable[Piece]) -> list[int]:
        ids: list[int] = []
        for text, control, _ in pieces:
            if control:
                ids.append(self._control[text])
            else:
                ids += self._words.get(text) or self._encode(text)
        return ids

    def _encode(self, text: str) -> list[int]:
        # Set on every call: calling the wrapping tokenizer can change this switch of the backend.
        self._backend.encode_special_tokens = True
        # Half of a surrogate pair is no character, but may stand in a string.
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._forbidden.isdisjoint(ids):
            return ids
        # A vocabulary that has control tokens among its words: letters alone are none of them.
        return [token for letter in text for token in self._encode_letter(letter)]

    def _encode_letter(self, letter: str) -> list[int]:
        ids = self._backend.encode(letter, add_special_tokens=False).ids
        return [token for token in ids if token not in self._forbidden]

    def _split(self, token_ids: Sequence[int]) -> list[Piece]:
        """Runs of text and control tokens; an id that the tokenizer lacks counts as the latter."""
        pieces: list[Piece] = []
        run: list[int] = []
        for token in map(int, token_ids):
            name = self._names.get(token)
            if name is None and self._is_known(token):
                run.append(token)
                continue
            if run:
                pieces.append(Piece(self._backend.decode(run)))
                run = []
            pieces.append(Piece(name or f"token {token}", True))
        return [*pieces, Piece(self._backend.decode(run))] if run else pieces

    def _is_known(self, token: int) -> bool:
        # The backend takes no other numbers.
        return 0 <= token < 2**32 and self._backend.id_to_token(token) is not None


def _shortened(message: Message, characters: int) -> Message:
    """The start of a message; of its images those whose placeholder is still whole."""
    if len(message.content) <= characters:
        return message
    content = message.content[:characters]
    count = content.count(IMAGE_PLACEHOLDER) if message.images else 0
    return replace(message, content=content, images=message.images[:count])


def _read_brief(pieces: Sequence[Piece]) -> list[Message]:
    """Messages of the brief style."""
    messages: list[Message] = []
    rest = list(pieces)
    while rest:
        # An empty content is no piece.
        size = 5 if len(rest) > 3 and not rest[3].control else 4
        frame = [piece.text if piece.control else "" for piece in rest[:size]]
        role = rest[1].text if len(rest) > 1 else ""
        wanted = [OPEN, "", SEPARATOR, *[""] * (size - 4), END_OF_MESSAGE]
        if frame != wanted or role not in ROLES:
            raise ValueError(f"message {len(messages) + 1} is malformed")
        content = rest[3].text if size == 5 else ""
        messages.append(Message(cast(Role, role), content))
        rest = rest[size:]
    return messages
