"""One episode, printed turn by turn, with the sampled (trained) tokens marked."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.schema import PlayConfig
from ..envs.base import MessageEnv, checked_threshold, succeeded
from ..envs.expert import expert_turns
from ..envs.registry import make_config, tasks
from ..envs.types import Message, Task
from ..policy.checkpoint import load_checkpoint
from ..policy.records import check_context, read_config, read_stage
from ..policy.tokenizer import chat_of, load_tokenizer
from ..rollout.episode import run_groups
from ..rollout.generator import NativeGenerator
from ..rollout.types import Trajectory
from .prepare import check_first_prompt, find_checkpoint
from .together import check_native, check_unused

TRAINED, GIVEN = ">", " "
UNUSED = (
    *("engine", "actors", "threads", "gpus", "dtype", "concurrency"),
    *("keep_states", "restarts", "max_error_fraction"),
)


def play(config: PlayConfig) -> int:
    """Print the held-out episode of ``config.seed``; returns 0."""
    check_bounds(config)
    check_native(config.rollout)
    check_unused("rollout", config.rollout, UNUSED, "one episode is played, by this process")
    task = tasks(config.env.id, "heldout", 0, 1, config.seed)[0]
    if config.policy is None:
        _play_expert(make_config(config.env), task, config.rollout.max_turns)
    else:
        _play_policy(config, task)
    return 0


def _play_policy(config: PlayConfig, task: Task) -> None:
    folder = find_checkpoint(str(config.policy))
    rules = read_config(folder).image_rules
    context = config.context or read_stage(folder).context
    check_context(folder, context, config.allow_longer_context)
    chat = chat_of(load_tokenizer(folder), read_stage(folder), config.chat)
    vision = check_first_prompt(
        config.env,
        context,
        chat,
        config.seed,
        config.rollout.env_timeout_s,
        rules,
    )
    checkpoint = load_checkpoint(folder, vision=vision)
    groups, _ = run_groups(
        NativeGenerator(checkpoint.policy, config.seed),
        [task],
        1,
        lambda: make_config(config.env),
        chat.seeing(rules) if vision else chat,
        config.rollout,
        context,
    )
    trajectory = groups[0].trajectories[0]
    print(f"{config.env.id}  task {task.id}  seed {task.seed}  policy {folder}")
    print(f"'{TRAINED}' marks tokens the policy sampled, which training learns from")
    for segment in trajectory.segments:
        text = checkpoint.tokenizer.decode(segment.token_ids.tolist())
        _print_turn(str(text), segment.sampled)
    print(_outcome(trajectory))
    if trajectory.error is not None:
        raise RunFailed(f"env: {trajectory.error.splitlines()[0]}")


def _play_expert(env: MessageEnv, task: Task, max_turns: int) -> None:
    if not env.has_expert():
        env.close()
        raise UserError(f"{type(env).__name__} has no expert: add policy=FOLDER to play it")
    threshold = checked_threshold(env)
    print(f"{type(env).__name__}  task {task.id}  seed {task.seed}  played by its expert")
    print(f"'{TRAINED}' marks what a policy would have written, which training learns from")
    rewards: list[float] = []
    success = cut = False
    try:
        for turn in expert_turns(env, task):
            if not rewards:
                _print_given(turn.shown)
            _print_turn(f"assistant: {turn.action}", True)
            _print_given(turn.reply)
            rewards.append(turn.reward)
            success = succeeded(rewards, threshold, turn.terminated)
            cut = len(rewards) >= max_turns and not turn.terminated
            if cut:
                break
    finally:
        env.close()
    stop = "  stopped by rollout.max_turns" if cut else ""
    print(f"reward {sum(rewards):g}  success {success}  turns {len(rewards)}{stop}")


def _print_given(messages: Iterable[Message]) -> None:
    for message in messages:
        _print_turn(f"{message.role}: {message.content}", False)


def _print_turn(text: str, trained: bool) -> None:
    mark = TRAINED if trained else GIVEN
    colour = trained and sys.stdout.isatty()
    for line in text.splitlines() or [""]:
        print(f"{mark} \033[32m{line}\033[0m" if colour else f"{mark} {line}")


def _outcome(trajectory: Trajectory) -> str:
    trained = int(trajectory.loss_mask.sum())
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    return (
        f"reward {reward}  success {trajectory.success}  turns {trajectory.turns}  "
        f"stop {trajectory.stop}  tokens {len(trajectory.token_ids)} ({trained} trained)"
    )
