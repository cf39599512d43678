"""One way to speak from stage to play: made once, remembered, and never changed unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import (
    ChatConfig,
    EnvConfig,
    EvalConfig,
    PlayConfig,
    RolloutConfig,
    SftConfig,
    Stage,
    StageConfig,
    TrainConfig,
)
from farhorizon.envs import ToolCall, make_config
from farhorizon.envs.expert import expert_messages
from farhorizon.envs.types import Message, Task
from farhorizon.launch.evaluate import output_file
from farhorizon.launch.fresh import starting_checkpoint
from farhorizon.launch.play import play
from farhorizon.launch.prepare import prepare
from farhorizon.launch.sft import run_sft
from farhorizon.launch.stage import run_stages
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint
from farhorizon.policy.records import ChatRecord, StageRecord, read_stage
from farhorizon.policy.tokenizer import (
    ChatFormat,
    chat_of,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from farhorizon.rollout.episode import run_groups
from farhorizon.rollout.generator import NativeGenerator

from ..fakes import LampEnv, ScriptedGenerator

FAKES = str(Path(__file__).parents[1] / "fakes.py")
ENV = EnvConfig(id="lamps-v0", plugins=(FAKES,))
FULL = ChatConfig(style="full", effort="low")


def stages(tmp_path: Path, **changes) -> StageConfig:
    text = tmp_path / "text"
    text.mkdir(exist_ok=True)
    for number in range(4):
        (text / f"{number}.txt").write_text("light the red lamp, the green one, the blue\n" * 60)
    config = StageConfig(
        policy="tiny",
        stages=(Stage(context=512, steps=1, batch_tokens=512, lr=1e-3),),
        text=str(text),
        output=str(tmp_path / "stage"),
        vocab_size=360,
        chat=FULL,
        env=ENV,
    )
    return replace(config, **changes)


def write(folder: Path, chat: ChatRecord | None, context: int = 512) -> Path:
    """A tiny policy of the full style."""
    shown = expert_messages(make_config(ENV), Task("", 0), calls=True, effort="low")
    texts = [message.content for message in shown] * 2
    tokenizer = train_tokenizer(texts, 360, ("light", "lamp", "red", "green", "blue"), "full")
    config = PolicyConfig.tiny(vocab_size=360, hidden_size=32, num_hidden_layers=2)
    torch.manual_seed(0)
    record = StageRecord(context, (context,), 0, tokenizer_sha256(tokenizer), None, chat)
    return save_checkpoint(folder, Policy(config), config, tokenizer, record)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("chat") / "full", ChatRecord(True, "low"))


def sft(policy: Path, tmp_path: Path, chat: ChatConfig) -> SftConfig:
    return SftConfig(
        policy=str(policy),
        env=ENV,
        chat=chat,
        output=str(tmp_path / "sft"),
        context=512,
        steps=1,
        batch_tokens=512,
        warmup_steps=0,
    )


def training(policy: Path, tmp_path: Path, chat: ChatConfig) -> TrainConfig:
    return TrainConfig(
        policy=str(policy), env=ENV, chat=chat, output=str(tmp_path / "run"), context=512
    )


def test_a_new_policy_speaks_as_its_stage_run_says(tmp_path: Path) -> None:
    folder = starting_checkpoint(stages(tmp_path), tmp_path / "new")
    chat = chat_of(load_tokenizer(folder), read_stage(folder), ChatConfig())
    assert (chat.style, chat.thinking, chat.effort) == ("full", True, "low")
    assert json.loads((folder / "stage.json").read_text())["chat"] == {
        "thinking": True,
        "effort": "low",
    }
    # what its calls spell is in the vocabulary, as what it is shown is
    assert len(chat.tokenizer.backend_tokenizer.encode("green", add_special_tokens=False).ids) == 1

    silent = stages(tmp_path, chat=ChatConfig(style="full", thinking=False))
    folder = starting_checkpoint(silent, tmp_path / "silent")
    assert read_stage(folder).chat == ChatRecord(False, None)

    brief = stages(tmp_path, chat=ChatConfig(), vocab_size=300)
    folder = starting_checkpoint(brief, tmp_path / "brief")
    assert ChatFormat(load_tokenizer(folder)).style == "brief"
    assert "chat" not in json.loads((folder / "stage.json").read_text())


def test_a_warm_up_inherits_it_and_an_effort_may_change(speaking: Path, tmp_path: Path) -> None:
    warm = run_sft(sft(speaking, tmp_path, ChatConfig(effort="max")))
    assert read_stage(warm).chat == ChatRecord(True, "max")
    run = prepare(training(warm, tmp_path, ChatConfig(style="full")))
    assert run.stage.chat == ChatRecord(True, "max")
    run = prepare(training(warm, tmp_path, ChatConfig(effort="none")))
    assert run.stage.chat == ChatRecord(True, None)
    # told of an effort, and of tools, before the first question
    with pytest.raises(UserError, match=r"context=100 is too small: the first prompt .* has 3\d\d"):
        prepare(replace(training(warm, tmp_path, ChatConfig()), context=100))


WRONG = [
    (ChatConfig(style="brief"), r"^chat\.style=brief: the policy's tokenizer speaks the full"),
    (ChatConfig(thinking=False), r"^chat\.thinking=false: the policy was trained with .*=true"),
]


@pytest.mark.parametrize(("chat", "said"), WRONG)
def test_another_format_than_the_checkpoints_is_refused_everywhere(
    speaking: Path, tmp_path: Path, chat: ChatConfig, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        run_sft(sft(speaking, tmp_path, chat))
    with pytest.raises(UserError, match=said):
        prepare(training(speaking, tmp_path, chat))
    with pytest.raises(UserError, match=said):
        run_stages(stages(tmp_path, policy=str(speaking), chat=chat))
    with pytest.raises(UserError, match=said):
        play(PlayConfig(policy=str(speaking), env=ENV, chat=chat))
    assert {path.name for path in tmp_path.iterdir()} <= {"text", "stage"}
    assert not list(tmp_path.glob("stage/**/*.safetensors"))


def test_the_brief_style_has_no_thoughts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for chat, said in (
        (ChatConfig(style="full"), r"^chat\.style=full: the policy's tokenizer speaks the brief"),
        (ChatConfig(thinking=True), r"^chat\.thinking=true needs the full chat style"),
        (ChatConfig(effort="high"), r"^chat\.effort=high needs the full chat style"),
    ):
        with pytest.raises(UserError, match=said):
            prepare(replace(training(tiny_checkpoint, tmp_path, chat), env=EnvConfig(id="echo-v0")))
    agreed = ChatConfig(style="brief", thinking=False, effort="none")
    echo = replace(training(tiny_checkpoint, tmp_path, agreed), env=EnvConfig(id="echo-v0"))
    assert prepare(echo).stage.chat is None
    with pytest.raises(UserError, match=r"^chat\.effort=low needs the full chat style"):
        starting_checkpoint(stages(tmp_path, chat=ChatConfig(effort="low")), tmp_path / "new")


def test_an_effort_needs_thoughts(tmp_path: Path) -> None:
    published = write(tmp_path / "published", None)
    config = training(published, tmp_path, ChatConfig(thinking=False))
    assert prepare(config).stage.chat == ChatRecord(False, None)
    with pytest.raises(UserError, match=r"^chat\.effort=low needs chat\.thinking=true"):
        prepare(replace(config, chat=ChatConfig(thinking=False, effort="low")))


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (3, "chat must be null or hold thinking and effort"),
        ({"thinking": True}, "chat must be null or hold thinking and effort"),
        ({"thinking": "yes", "effort": None}, r"chat\.thinking='yes' must be true or false"),
        ({"thinking": True, "effort": "most"}, r"chat\.effort='most' must be null or one of low"),
        ({"thinking": True, "effort": ["low"]}, r"chat\.effort=\['low'\] must be null or one of"),
    ],
)
def test_a_record_that_says_something_else_is_refused(
    speaking: Path, tmp_path: Path, chat: object, said: str
) -> None:
    fields = json.loads((speaking / "stage.json").read_text()) | {"chat": chat}
    (tmp_path / "stage.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=said):
        read_stage(tmp_path)


def test_another_effort_is_another_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat\.effort: low -> max: another kind of evaluation"):
        output_file(
            tmp_path,
            EvalConfig(chat=ChatConfig(effort="low")),
            EvalConfig(chat=ChatConfig(effort="max")),
        )


def test_a_policy_calls_the_tools_of_its_environment(speaking: Path) -> None:
    """Episodes in which a right, a wrong and a malformed call are made, and those of a policy that
    knows nothing, which must end without an error whatever it samples."""
    loaded = load_checkpoint(speaking)
    chat = chat_of(loaded.tokenizer, loaded.stage, ChatConfig())
    task = Task("t", 0)
    first, answer, _ = list(expert_messages(LampEnv(), task, calls=True))[-3:]
    assert first.calls[0].tool == "light"
    skip = len(chat.prompt())
    wrong = Message("assistant", "", thinking="?", calls=(ToolCall("dim", {"lamp": "red"}),))
    unread = chat.render(wrong)[skip:]
    unread = [token for token in unread if token != unread[-2]]  # every <|sep|> is gone
    turns = [unread, chat.render(wrong)[skip:], chat.render(first)[skip:]]
    second = Message("assistant", "", calls=(ToolCall("light", {"lamp": answer.content}),))
    turns.append(chat.render(second)[skip:])
    config = RolloutConfig(max_turn_tokens=200)
    groups, stats = run_groups(ScriptedGenerator(turns), [task], 1, LampEnv, chat, config, 4096)
    (played,) = groups[0].trajectories
    assert (played.reward, played.success, stats.env_errors) == (1.0, True, 0)
    assert played.token_ids[played.loss_mask].tolist() == [i for ids in turns for i in ids]
    ids = played.token_ids.tolist()
    opening, malformed = played.segments[0].token_ids.tolist(), len(turns[0])
    declared, effort, asked = chat.parse(opening[: -len(chat.prompt())])
    assert (declared.type, effort.type, asked.role) == ("tool-declare", "thinking-effort", "user")
    assert "light" in declared.content and "thinking_effort=low" in effort.content
    results = [m for m in chat.parse(ids[len(opening) + malformed :]) if m.role == "tool"]
    assert [(m.tool, m.index) for m in results] == [("", 0), ("dim", 1), ("light", 1)]
    assert results[0].content.startswith("invalid action (")
    assert results[1].content == "invalid action (1: no tool 'dim'); tools: light LAMP"
    assert results[2] == answer

    tasks = [Task(f"t/{seed}", seed) for seed in range(4)]
    generator = NativeGenerator(loaded.policy, seed=1)
    config = RolloutConfig(max_turn_tokens=16, max_turns=3, concurrency=8)
    groups, stats = run_groups(generator, tasks, 2, LampEnv, chat, config, 900)
    assert (stats.episodes, stats.errors, stats.env_errors) == (8, 0, 0)
    assert all(t.turns >= 1 for group in groups for t in group.trajectories)
