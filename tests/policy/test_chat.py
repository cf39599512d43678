"""Messages as ids in both styles, for tokenizers trained here and for one as published."""

from __future__ import annotations

import json
import pickle
import random
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import RolloutConfig
from farhorizon.envs import Echo, MessageEnv
from farhorizon.envs.base import Observation, Step
from farhorizon.envs.expert import expert_messages
from farhorizon.envs.messages import conversation, said, tool_results
from farhorizon.envs.types import Action, Message, Task, ToolCall
from farhorizon.policy.bpe import MEDIA_TOKENS, Style, text_token_room
from farhorizon.policy.chat import chat_style
from farhorizon.policy.corpus import demonstration
from farhorizon.policy.tokenizer import (
    SPECIAL_TOKENS,
    ChatFormat,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from farhorizon.policy.xtml import WORDS, message_pieces
from farhorizon.rollout.episode import run_groups

from ..fakes import ScriptedGenerator

TEXTS = ["def load_module(path): return path\n" * 5, "import json\nimport io\n" * 5]
# As published, ids with gaps between them.
PUBLISHED = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "[start_header_id]": 163590,
    "[end_header_id]": 163591,
    "[EOT]": 163593,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<osagent_mode>": 163649,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
TASK = Task("t", 0)
CALL = ToolCall("find", {"query": 'a & "b" <|close|>', "limit": 3, "where": {"x": [1, None]}})
EPISODE = conversation(
    [
        Message("user", "find it", name='J & "K"'),
        Message("assistant", "", thinking="I look.", calls=(CALL, ToolCall('a & "b"', {}))),
        *tool_results([CALL, ToolCall('a & "b"')], ["one", "<|open|>message"]),
        Message("assistant", "It is one."),
    ],
    tools=[{"type": "function", "function": {"name": "find", "parameters": {}}}],
    effort="low",
    choice="none",
)


def write_published(folder: Path, special: dict[str, int], seed: int = 0) -> None:
    """A byte-level tokenizer.json; what is no control token in it is in an order of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    random.Random(seed).shuffle(alphabet)
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("m", "e"), ("me", "s"), ("s", "a"), ('"', "\u0120")]  # the last: `" `
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore
        [
            pre_tokenizers.Split(Regex(r"\p{Han}+|\p{L}+|\p{N}{1,3}|[^\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    content = json.loads(backend.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": index, "content": name, "special": name != "<osagent_mode>", **flags}
        for name, index in special.items()
    ]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("published")
    write_published(folder, PUBLISHED)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 320, style="full")


@pytest.fixture(params=["trained", "published"])
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    return ChatFormat(request.getfixturevalue(request.param))


def test_a_published_tokenizer_keeps_its_ids(published: PreTrainedTokenizerFast, tmp_path) -> None:
    names = list(PUBLISHED)
    assert published.convert_tokens_to_ids(names) == list(PUBLISHED.values())
    assert (published.eos_token_id, published.pad_token_id) == (163585, 163839)
    chat = ChatFormat(published)
    assert chat.style == "full" and chat.stop_token_ids == (163586,)
    assert [i for i in chat.render(Message("user", "hello")) if i > 260] == [
        *(163587, 163589, 163588, 163589, 163586)
    ]
    # This one is not marked as special in the file; corpora are encoded without a chat format.
    assert 163649 not in published.backend_tokenizer.encode("<osagent_mode>").ids
    published.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.convert_tokens_to_ids(names) == list(PUBLISHED.values())
    assert tokenizer_sha256(again) == tokenizer_sha256(published)


def test_ids_are_found_by_name(tmp_path) -> None:
    moved = {name: 7000 - index for index, name in enumerate(PUBLISHED)}
    write_published(tmp_path, moved, seed=1)
    chat = ChatFormat(load_tokenizer(tmp_path))
    assert chat.render(Message("user", ""))[-1] == moved["<|end_of_msg|>"]
    assert chat.parse(chat.render_reply(EPISODE)) == EPISODE


def test_a_trained_tokenizer_of_the_full_style_spells_no_tag(
    trained: PreTrainedTokenizerFast,
) -> None:
    assert len(trained) == 320
    control = [*SPECIAL_TOKENS[:-2], *MEDIA_TOKENS, *SPECIAL_TOKENS[-2:]]
    assert trained.convert_tokens_to_ids(control) == list(range(320 - len(control), 320))
    chat = ChatFormat(trained)
    # <|open|> message [ role = " assistant "] <|sep|> <|open|> think <|sep|>
    assert len(chat.prompt()) == 10
    # and close think, open and close response, close message, end
    assert len(chat.render(Message("assistant", ""))) == 10 + 3 + 6 + 4
    assert text_token_room(320, "full") == 320 - 256 - 13 - len(WORDS)
    smallest = 256 + 13 + len(WORDS)
    assert len(train_tokenizer(TEXTS, smallest, style="full")) == smallest
    with pytest.raises(UserError, match=rf"13 control tokens .* need {smallest}"):
        train_tokenizer(TEXTS, smallest - 1, style="full")


def test_parsing_inverts_rendering(chat: ChatFormat) -> None:
    assert chat.parse(chat.render_reply(EPISODE)) == EPISODE
    assert chat.parse([]) == []
    instruct = ChatFormat(chat.tokenizer, thinking=False)
    messages = [Message("user", "x"), Message("assistant", "y", calls=(CALL,))]
    assert instruct.parse(instruct.render_reply(messages)) == messages
    thoughtful = Message("assistant", "y", thinking="x", calls=(CALL,))
    assert instruct.render(thoughtful) == instruct.render(messages[1])


def test_each_piece_is_encoded_alone(published: PreTrainedTokenizerFast) -> None:
    """In the rendering as one text, a quote and the space after it are one token here."""
    backend = published.backend_tokenizer
    apart = ["message", " role", '="', "user", '"', " name", '="', "ol", '"']
    expected = [token for text in apart for token in backend.encode(text).ids]
    assert backend.encode("".join(apart)).ids != expected
    ids = ChatFormat(published).render(Message("user", "x", name="ol"))
    assert ids[1 : 1 + len(expected)] == expected
    assert ids[1 + len(expected)] == 163589


def text_full_of_control_strings(rng: random.Random) -> str:
    parts = [*PUBLISHED, "<|reserved_0|>", "message", ' role="', '"', "&", " ", "\n", "\u4f60", "a"]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(8)))


def test_text_never_becomes_a_control_token(chat: ChatFormat) -> None:
    rng = random.Random(0)
    added = set(chat.tokenizer.backend_tokenizer.get_added_tokens_decoder())
    chat.tokenizer("resets the switch", split_special_tokens=False)
    for _ in range(200):
        texts = [text_full_of_control_strings(rng) for _ in range(4)]
        call = ToolCall(texts[0], {texts[1]: texts[2], texts[3] + "x": [texts[0]]})
        message = Message("assistant", texts[1], thinking=texts[2], calls=(call,))
        others = [Message("user", texts[0], name=texts[1]), Message("tool", texts[2])]
        others += [Message("tool", texts[0], tool=texts[1] or "f", index=1)]
        for rendered in (message, *others):
            ids = chat.render(rendered)
            plain = Message(
                rendered.role, "", tool="f" if rendered.tool else "", index=rendered.index
            )
            if rendered.role == "assistant":
                plain = Message("assistant", "", calls=(ToolCall("f", {"a": "", "b": []}),))
            found = [token for token in ids if token in added]
            assert found == [token for token in chat.render(plain) if token in added]
            assert chat.parse(ids) == [rendered]


def test_a_vocabulary_with_control_tokens_among_its_words_is_no_way_round(tmp_path) -> None:
    """Without a splitter, a text that is a control token's name is that token for the model."""
    write_published(tmp_path, PUBLISHED)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    chat = ChatFormat(load_tokenizer(tmp_path))
    assert chat.tokenizer.backend_tokenizer.encode("<|open|>").ids == [163587]
    message = Message("user", "<|open|>")
    assert chat.render(message).count(163587) == 1
    assert chat.parse(chat.render(message)) == [message]


def test_half_of_a_surrogate_pair_is_shown_as_a_question_mark(chat: ChatFormat) -> None:
    assert chat.parse(chat.render(Message("tool", "a\ud800b"))) == [Message("tool", "a?b")]


def test_a_reply_gives_the_environment_its_response_and_the_caller_all(chat: ChatFormat) -> None:
    said = Message("assistant", "next", thinking="go on", calls=(CALL,))
    sampled = chat.render(said)[len(chat.prompt()) :]
    assert chat.prompt() + sampled == chat.render(said)
    assert chat.text(sampled) == "next"
    assert chat.read(sampled) == (said, ())
    message, faults = chat.read([*sampled[:-1], 10**6])
    assert message == said and faults == ("token 1000000 where none can stand", "no <|end_of_msg|>")


def test_the_mask_starts_at_the_first_channel_and_ends_with_the_message(chat: ChatFormat) -> None:
    for message in EPISODE:
        ids, mask = chat.render_masked(message)
        assert ids == chat.render(message) and len(mask) == len(ids)
        if message.role != "assistant":
            assert not any(mask)
            continue
        header = len(chat.prompt()) - chat.prompt()[::-1].index(chat.prompt()[0]) - 1
        assert mask == [False] * header + [True] * (len(ids) - header)
    raw = Message("assistant", "", calls=(ToolCall("f", "{x"),))
    ids, mask = chat.render_masked(raw)
    backend = chat.tokenizer.backend_tokenizer
    assert backend.decode([i for i, on in zip(ids, mask, strict=True) if on]) == (
        'thinkthinkresponseresponsetoolscall tool="f" index="1"calltoolsmessage'
    )


def test_a_brief_tokenizer_keeps_its_ids() -> None:
    tokenizer = train_tokenizer(TEXTS, 300, ("note", " json"))
    chat = ChatFormat(tokenizer)
    assert chat.style == chat_style(tokenizer) == "brief"
    # 256 bytes, the roles, two words, 29 merges and reserved tokens, then [BOS] at 291.
    assert chat.prompt() == [294, 258, 296]
    # Bytes are in the order of their characters from "!" on.
    assert chat.render(Message("tool", "zQ")) == [294, 259, 296, 89, 48, 293]
    assert chat.render(Message("tool", " json", tool="f", index=1)) == [294, 259, 296, 261, 293]
    assert chat.render(Message("assistant", "note", thinking="x")) == [294, 258, 296, 260, 293]


def test_the_brief_style_reads_what_it_writes() -> None:
    chat = ChatFormat(train_tokenizer(TEXTS, 300))
    messages = [Message("user", "<|sep|>a"), Message("assistant", ""), Message("tool", "\n")]
    ids = chat.render_reply(messages)
    assert chat.parse(ids) == messages
    assert chat.render_masked(messages[1]) == (ids[-9:-5], [False] * 3 + [True])
    for wrong in (ids[:-1], ids[1:], [*ids, ids[0]], ids[:1] * 4):
        with pytest.raises(ValueError, match=r"message . is malformed"):
            chat.parse(wrong)
    sampled = chat.render(Message("assistant", "ab"))[3:]
    assert chat.read(sampled) == (Message("assistant", "ab"), ())
    assert chat.read([*sampled[:1], ids[0], *sampled[1:-1]]) == (
        Message("assistant", "ab"),
        ("no <|end_of_msg|>", "<|open|> where none can stand"),
    )
    with pytest.raises(ValueError, match="the brief chat format has no tool calls"):
        chat.render(Message("assistant", "", calls=(CALL,)))


@pytest.mark.parametrize("style", ["brief", "full"])
@pytest.mark.parametrize("token", [-1, 10**6, 2**32, 2**70])
def test_numbers_that_are_no_ids_are_faults(style: Style, token: int) -> None:
    chat = ChatFormat(train_tokenizer(TEXTS, 300), style=style)
    assert any(f"token {token}" in fault for fault in chat.read([token]).faults)
    with pytest.raises(ValueError):
        chat.parse([token])


def test_the_style_may_be_chosen() -> None:
    chat = ChatFormat(train_tokenizer(TEXTS, 300), style="full")
    assert chat.parse(chat.render_reply(EPISODE)) == EPISODE


def test_folders_without_a_usable_tokenizer_say_what_to_do(tmp_path) -> None:
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    with pytest.raises(UserError, match=r"tiktoken file alone is not read; write tokenizer\.json"):
        load_tokenizer(tmp_path)
    write_published(tmp_path, {**PUBLISHED, "<|im_end|>": 163700})
    assert load_tokenizer(tmp_path)
    family = {name: index for name, index in PUBLISHED.items() if "|" not in name}
    write_published(tmp_path, {**family, "<|im_end|>": 163586})
    with pytest.raises(UserError, match="control tokens of the K2 family"):
        load_tokenizer(tmp_path)
    write_published(tmp_path, family)
    with pytest.raises(UserError, match=r"missing: <\|end_of_msg\|>, <\|open\|>"):
        load_tokenizer(tmp_path)
    for content in ("[]", "{}", '{"added_tokens": 3}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match="not a tokenizer file"):
            load_tokenizer(tmp_path)


class Repeater(MessageEnv):
    """Two turns; keeps what it was told."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return (Message("user", "go"),), {}

    def step(self, action: str) -> Step:
        self.heard.append(said(action))
        results = tool_results(self.heard[-1].calls, ["ok"] * len(self.heard[-1].calls))
        return results or (Message("tool", "none"),), 0.0, len(self.heard) == 2, False, {}


def test_an_episode_hears_tool_calls_and_reads_back_as_messages(chat: ChatFormat) -> None:
    called = Message("assistant", "hm", thinking="t", calls=(CALL,))
    answer = Message("assistant", "done")
    turns = [chat.render(message)[len(chat.prompt()) :] for message in (called, answer)]
    env = Repeater()
    config = RolloutConfig(max_turn_tokens=1000)
    groups, _ = run_groups(ScriptedGenerator(turns), [TASK], 1, lambda: env, chat, config, 4096)
    (played,) = groups[0].trajectories
    assert env.heard == [called, answer]
    assert chat.parse(played.token_ids.tolist()) == [
        *(Message("user", "go"), called, *tool_results([CALL], ["ok"]), answer)
    ]
    assert played.token_ids[played.loss_mask].tolist() == turns[0] + turns[1]


def test_a_demonstration_is_masked_as_a_rollout_of_it(chat: ChatFormat) -> None:
    shown = demonstration(expert_messages(Echo(turns=2), TASK), chat)
    messages = chat.parse(shown.token_ids.tolist())
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
    sampled = [chat.render(m)[len(chat.prompt()) :] for m in messages if m.role == "assistant"]
    assert shown.token_ids[shown.assistant_mask].tolist() == [i for ids in sampled for i in ids]


class Caller(Repeater):
    """Its expert calls a tool, then answers."""

    success_threshold: ClassVar[float] = 0.0

    def expert(self) -> str:
        said = Message("assistant", "", calls=() if self.heard else (CALL,))
        return Action(said)


def test_an_expert_may_call_tools(chat: ChatFormat) -> None:
    messages = chat.parse(demonstration(expert_messages(Caller(), TASK), chat).token_ids.tolist())
    assert messages == [
        Message("user", "go"),
        Message("assistant", "", calls=(CALL,)),
        *tool_results([CALL], ["ok"]),
        Message("assistant", ""),
    ]


def test_an_action_is_text_and_survives_another_process() -> None:
    action = Action(Message("assistant", "next", calls=(CALL,)), ("fault",))
    again = pickle.loads(pickle.dumps(action))
    assert (again.message, again.faults) == (action.message, ("fault",)) and again == "next"
    assert said(again).calls == (CALL,)
    assert said("plain") == Message("assistant", "plain")


def test_the_guide_shows_what_is_rendered(chat: ChatFormat) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "chat-format.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE):
        exec(code, names)
    expected = {True: "", False: ""}
    for message in names["episode"]:
        for piece in message_pieces(message):
            expected[piece.trained] += "".join(piece.text.split())
    block = re.search(r"^```text\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert block is not None
    lines = block[1].splitlines()
    for trained in (True, False):
        shown = [line.removeprefix(">") for line in lines if line.startswith(">") == trained]
        assert "".join("".join(shown).split()) == expected[trained]

    env = names["Search"]()
    opening, _ = env.reset(seed=0)
    called, answer = (m for m in names["episode"] if m.role == "assistant")
    results, *_ = env.step(Action(called))
    _, reward, terminated, *_ = env.step(Action(answer))
    assert (reward, terminated) == (1.0, True)
    assert [*opening[:1], *opening[1:], called, *results] == [
        message for message in names["episode"] if message.type != "thinking-effort"
    ][:-1]
