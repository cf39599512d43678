"""Where stage training starts: an untrained policy of a preset, or a checkpoint to go on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from ..configs.errors import UserError
from ..configs.load import PRESETS
from ..configs.schema import EnvConfig, StageConfig
from ..envs.base import MessageEnv, checked_threshold
from ..envs.expert import expert_messages
from ..envs.registry import make_config, tasks
from ..envs.types import Message
from ..policy import Policy, PolicyConfig
from ..policy.checkpoint import save_checkpoint
from ..policy.corpus import sample_texts
from ..policy.records import ChatRecord, StageRecord
from ..policy.tokenizer import (
    agreed,
    frequent_words,
    text_token_room,
    tokenizer_sha256,
    train_tokenizer,
)
from .prepare import find_checkpoint

TEXT_BYTES = 4_000_000  # least text a tokenizer is trained on
BYTES_PER_TOKEN = 4096  # and how much more for a larger vocabulary
EPISODES, EPISODE_CHARACTERS = 256, 1_000_000  # at most, to find an environment's words


def policy_presets() -> dict[str, Path]:
    """Files of the policies that come with the project, by name."""
    return {path.stem: path for path in sorted((PRESETS / "policy").glob("*.json"))}


def starting_checkpoint(config: StageConfig, folder: Path) -> Path:
    """The checkpoint that ``config.policy`` names; a preset is built and saved in ``folder``."""
    presets = policy_presets()
    if config.policy not in presets:
        try:
            return find_checkpoint(config.policy)
        except UserError as error:
            raise UserError(f"policy {error}; presets: {', '.join(presets)}") from None
    style = config.chat.style or "brief"
    record = agreed(config.chat, style, None)
    texts = list(
        sample_texts(config.text, config.seed, max(TEXT_BYTES, BYTES_PER_TOKEN * config.vocab_size))
    )
    spoken = list(_spoken(config.env, config.seed, record)) if config.env is not None else []
    # Half of the room at most: a vocabulary of whole words alone would spell all other text.
    words = frequent_words(spoken, max(0, text_token_room(config.vocab_size, style) // 2))
    tokenizer = train_tokenizer([*texts, *spoken], config.vocab_size, words, style)
    fields = json.loads(presets[config.policy].read_text(encoding="utf-8"))
    policy_config = PolicyConfig.from_dict(fields | {"vocab_size": config.vocab_size})
    torch.manual_seed(config.seed)
    policy = Policy(policy_config)
    count = sum(parameter.numel() for parameter in policy.parameters())
    print(
        f"stage: new policy {config.policy} of {count / 1e6:,.1f} M parameters; tokenizer of "
        f"{config.vocab_size} tokens, {len(words)} of them words of the environment",
        flush=True,
    )
    # Trained on nothing: a context of 0 keeps it from being run as if it were.
    stage = StageRecord(0, (), 0, tokenizer_sha256(tokenizer), chat=record)
    return save_checkpoint(folder, policy, policy_config, tokenizer, stage)


def expert_env(config: EnvConfig) -> MessageEnv:
    """The environment; UserError if it has no expert, or no number as its threshold."""
    env = make_config(config)
    checked_threshold(env)
    if not env.has_expert():
        raise UserError(f"env.id {config.id}: has no expert() to take demonstrations from")
    return env


def _spoken(config: EnvConfig, seed: int, record: ChatRecord | None) -> Iterator[str]:
    """What is said in some episodes, and in their calls; ``record`` of a policy that makes some."""
    effort = None if record is None else record.effort
    env = expert_env(config)
    left = EPISODE_CHARACTERS
    try:
        for task in tasks(config.id, "train", 0, EPISODES, seed):
            for message in expert_messages(env, task, record is not None, effort):
                for text in _texts(message):
                    left -= len(text)
                    yield text
                if left <= 0:
                    return
    finally:
        env.close()


def _texts(message: Message) -> Iterator[str]:
    """All that a policy has to spell in a message."""
    yield from (text for text in (message.content, message.thinking) if text)
    for call in message.calls:
        yield call.tool
        given = {"": call.arguments} if isinstance(call.arguments, str) else call.arguments
        for name, value in given.items():
            yield name
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
