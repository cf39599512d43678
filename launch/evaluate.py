"""Held-out evaluation of a run or checkpoint: success with its interval, turns, tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.load import override_config
from ..configs.schema import EnvConfig, EvalConfig
from ..envs.registry import resolve_plugins, tasks
from ..policy.records import ChatRecord, StageRecord, check_context, read_config, read_stage
from ..policy.tokenizer import chat_of, load_tokenizer
from ..rollout.pool import RolloutPool
from ..rollout.types import Group
from .cluster import check_gpus, cluster
from .files import write_whole
from .origin import evaluation_defaults
from .prepare import changes, check_first_prompt, check_writable, find_checkpoint
from .report import Evaluation, context_line, wilson
from .together import check_engine, check_native, check_sight, check_unused

TRIES = 3  # to load a checkpoint of a run at work before it is removed
# What a success rate is of, beside checkpoint, seed and episodes, which the file holds.
JUDGED = (
    *("env.id", "env.kwargs", "context", "chat.thinking", "chat.effort"),
    *("rollout.temperature", "rollout.max_turn_tokens", "rollout.max_turns"),
)


def evaluate(path: str, overrides: list[str]) -> int:
    """Evaluate what ``path`` names, print a table and write a JSON file; returns 0.

    Settings that are not given are those of what made the checkpoint: `evaluation_defaults`. A run
    at work may remove the checkpoint before it is loaded: then its next one is taken.
    """
    for _ in range(TRIES):
        checkpoint = find_checkpoint(path).absolute()
        try:
            return _evaluate(path, checkpoint, overrides)
        except _Removed:
            print(f"{checkpoint}: removed by its run before it was loaded", flush=True)
    raise RunFailed(
        f"{path}: the run at work there removes checkpoints sooner than they are loaded; wait for "
        "it, or let it keep more of them"
    )


def _evaluate(path: str, checkpoint: Path, overrides: list[str]) -> int:
    with _loading(checkpoint, of_run=checkpoint != Path(path).absolute()):
        defaults = evaluation_defaults(checkpoint, overrides)
        config = override_config(defaults, overrides)
        env, context, file = _check(path, checkpoint, defaults, config)
    with cluster(config.ray_address):
        check_gpus(config.ray_address, config.rollout)
        with _loading(checkpoint, of_run=checkpoint != Path(path).absolute()):
            pool = RolloutPool(
                str(checkpoint),
                env,
                config.rollout,
                context,
                config.seed,
                visible_context=config.visible_context,
                chat=config.chat,
            )
        try:
            result, groups = measure(
                pool, env, config.episodes, config.seed, str(checkpoint), greedy=config.greedy
            )
        finally:
            pool.close()
    _print_table(result, groups, env, context, config)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(result), indent=2) + "\n")
    except OSError as error:
        raise RunFailed(f"output {file}: cannot be written ({error.strerror})") from None
    print(f"written {file}")
    return 0


class _Removed(Exception):
    """The run that made a checkpoint removed it before it was loaded."""


@contextmanager
def _loading(checkpoint: Path, of_run: bool) -> Iterator[None]:
    """Around what reads the checkpoint; one that the user named by itself is not searched again."""
    try:
        yield
    except Exception:
        if of_run and not (checkpoint / "run.json").exists():
            raise _Removed from None
        raise


def _check(
    path: str, checkpoint: Path, defaults: EvalConfig, config: EvalConfig
) -> tuple[EnvConfig, int, Path]:
    """Environment, context and output file; UserError for whatever does not fit."""
    check_bounds(config)
    if config.rollout.keep_states and not defaults.rollout.keep_states:
        check_unused("rollout", config.rollout, ["keep_states"], "an evaluation has one policy")
    check_unused("rollout.vllm", config.rollout.vllm, ["sleep"], "an evaluation learns nothing")
    check_engine(config.rollout, config.ray_address)
    check_native(config.rollout, defaults.rollout)  # of a run they may be there without one
    if config.env is None:
        raise UserError(f"{path} belongs to no run with an environment: name one, env.id=...")
    env = resolve_plugins(config.env)
    record = read_stage(checkpoint)
    trained = record.context
    context = config.context or trained
    check_context(checkpoint, context, config.allow_longer_context)
    vision = check_first_prompt(
        env,
        context,
        chat_of(load_tokenizer(checkpoint), record, config.chat),
        config.seed,
        config.rollout.env_timeout_s,
        read_config(checkpoint).image_rules,
    )
    check_sight(env, config.rollout, vision)
    file = output_file(Path(path), _resolved(defaults, record), _resolved(config, record))
    check_writable(file.absolute().parent)
    if file.is_dir():
        raise UserError(f"output {file}: is a folder; name a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"output {file}: is read-only; name another file, output=FILE.json")
    return env, context, file


def measure(
    pool: RolloutPool,
    env: EnvConfig,
    episodes: int,
    seed: int,
    checkpoint: str,
    greedy: bool = False,
) -> tuple[Evaluation, list[Group]]:
    """Success on the first ``episodes`` held-out tasks of ``seed``, one episode each.

    Episodes that ended in an error stay in the denominator; RunFailed if all of them did.
    """
    wanted = tasks(env.id, "heldout", 0, episodes, seed)
    groups, _ = pool.collect(pool.submit(wanted, 1, greedy=greedy))
    return summarise(groups, episodes, seed, checkpoint), groups


def summarise(groups: list[Group], episodes: int, seed: int, checkpoint: str) -> Evaluation:
    """The figures of one evaluation of ``episodes`` tasks."""
    played = [t for group in groups for t in group.trajectories]
    completed = [t for t in played if t.reward is not None]
    errors = episodes - len(completed)
    if not completed:
        first = next((t.error for t in played if t.error), "unknown").splitlines()[0]
        raise RunFailed(f"evaluation: all {episodes} episodes failed; first error: {first}")
    successes = sum(t.success for t in completed)
    low, high = wilson(successes, episodes)
    return Evaluation(
        success=successes / episodes,
        ci_low=low,
        ci_high=high,
        episodes=episodes,
        errors=errors,
        turns_mean=sum(t.turns for t in completed) / len(completed),
        tokens_mean=sum(len(t.token_ids) for t in completed) / len(completed),
        seed=seed,
        checkpoint=checkpoint,
    )


def output_file(path: Path, defaults: EvalConfig, config: EvalConfig) -> Path:
    """Where the figures go: to ``eval.json`` only those of the settings that it is taken to have.

    UserError where a file name has to be given.
    """
    parts = ["eval"]
    if config.visible_context is not None:
        parts.append(f"visible-{config.visible_context}")
    if config.greedy:
        parts.append("greedy")
    name = f"{'-'.join(parts)}.json"
    if config.output is not None:
        given = Path(config.output)
        return given if given.suffix == ".json" else given / name
    other = [text for text in changes(defaults, config) if text.split(":")[0] in JUDGED]
    if other:
        raise UserError(
            f"{', '.join(other)}: another kind of evaluation than {path / name} is for; "
            "name a file for it, output=FILE.json"
        )
    return path / name


def _resolved(config: EvalConfig, record: StageRecord) -> EvalConfig:
    spoken = record.chat or ChatRecord()
    given = config.chat.effort
    effort = spoken.effort if given is None else None if given == "none" else given
    chat = replace(config.chat, effort=effort)
    return replace(config, context=config.context or record.context, chat=chat)


def _print_table(
    result: Evaluation, groups: list[Group], env: EnvConfig, context: int, config: EvalConfig
) -> None:
    completed = result.episodes - result.errors
    successes = round(result.success * result.episodes)
    stops: dict[str, int] = {}
    for trajectory in (t for group in groups for t in group.trajectories):
        stops[str(trajectory.stop)] = stops.get(str(trajectory.stop), 0) + 1
    seen = f"{config.visible_context} last tokens" if config.visible_context else "everything"
    table = Table(title=f"{env.id}, held-out, seed {result.seed}", show_header=False)
    for name, value in (
        ("checkpoint", result.checkpoint),
        ("context", f"{context} tokens, the policy sees {seen}"),
        ("success", f"{successes}/{result.episodes} = {result.success:.3f}"),
        ("95 % interval", f"{result.ci_low:.3f} to {result.ci_high:.3f} (Wilson)"),
        ("of completed", f"{successes}/{completed} = {successes / completed:.3f}"),
        ("errors", f"{result.errors} of {result.episodes}"),
        ("turns", f"{result.turns_mean:.1f} mean of completed"),
        ("tokens", f"{result.tokens_mean:.1f} mean of completed"),
        ("stopped by", ", ".join(f"{name} {count}" for name, count in sorted(stops.items()))),
    ):
        table.add_row(name, value)
    if (cut := context_line(groups, context)) is not None:
        table.add_row("context", cut)
    Console().print(table)
