"""What the stages of ``farhorizon stage`` read: text and, where asked for, episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from ..configs.errors import UserError
from ..configs.schema import EnvConfig, Stage, StageConfig
from ..envs.base import MessageEnv
from ..envs.expert import expert_messages
from ..envs.registry import tasks
from ..envs.types import Task
from ..policy.corpus import EpisodeTooLong, PackedCorpus, Split, TextCorpus, demonstration
from ..policy.tokenizer import ChatFormat
from .fresh import expert_env

FIXED_TOKENS = 8192  # of the fixed text, at most; but one sequence of the longest context at least
CHECKED_EPISODES = 8  # played at most before a stage run starts, to find one that fits


@contextmanager
def corpus_of(
    config: StageConfig, index: int, chat: ChatFormat, split: Split
) -> Iterator[PackedCorpus]:
    """Text and episodes of one stage.

    Horizons of the stages before stay in the mixture: a policy that saw only the new one would
    forget the others, and the loss of what it knew would jump at the switch.
    """
    text = TextCorpus(config.text, chat.tokenizer, split)
    if config.env is None or config.episode_fraction == 0:
        yield PackedCorpus(text, None, 0.0, config.seed)
        return
    context = config.stages[index].context
    horizons = [stage_env(config.env, stage) for stage in config.stages[: index + 1]]
    distinct = [env for i, env in enumerate(horizons) if env not in horizons[:i]]
    id = config.env.id
    with ExitStack() as stack:
        envs = [expert_env(env) for env in distinct]
        for env in envs:
            stack.callback(env.close)

        def episode(number: int) -> np.ndarray:
            task = tasks(id, split, number, 1, config.seed)[0]
            played = expert_messages(envs[number % len(envs)], task, chat.calls, chat.effort)
            return demonstration(played, chat, context).token_ids

        yield PackedCorpus(text, episode, config.episode_fraction, config.seed)


def stage_env(env: EnvConfig, stage: Stage) -> EnvConfig:
    """The environment at the horizon of a stage."""
    return replace(env, kwargs={**env.kwargs, **stage.env_kwargs})


def fixed_text(config: StageConfig, chat: ChatFormat) -> list[np.ndarray]:
    """Held-out text and episodes, the same tokens in the whole run.

    Its pieces are as long as the longest context; shorter contexts see them cut.
    """
    longest = max(stage.context for stage in config.stages)
    with corpus_of(config, 0, chat, "heldout") as corpus:
        return corpus.batch(0, longest, max(1, FIXED_TOKENS // longest)).pieces


def check_episodes(config: StageConfig, first: int, chat: ChatFormat) -> None:
    """Each stage from ``first`` must have episodes that fit: found now, not days later."""
    if config.env is None or config.episode_fraction == 0:
        return
    tried = tasks(config.env.id, "train", 0, CHECKED_EPISODES, config.seed)
    for number, stage in list(enumerate(config.stages))[first:]:
        env = expert_env(stage_env(config.env, stage))
        try:
            _play_one(env, tried, chat, stage.context)
        except UserError as error:
            raise UserError(f"stages[{number}]: {error}") from None
        finally:
            env.close()


def _play_one(env: MessageEnv, tried: Sequence[Task], chat: ChatFormat, context: int) -> None:
    """Play demonstrations until one fits; `EpisodeTooLong` if none of them does."""
    for task in tried:
        try:
            played = expert_messages(env, task, chat.calls, chat.effort)
            demonstration(played, chat, context)
            return
        except EpisodeTooLong:
            if task == tried[-1]:
                raise
