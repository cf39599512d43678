"""Everything that can be wrong with a run, found before Ray starts or anything is written."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..configs.load import dump_config, parse_config
from ..configs.schema import EnvConfig, TrainConfig
from ..envs.registry import EnvBuildError, make_config, resolve_plugins, tasks
from ..policy.records import StageRecord, check_context, read_config, read_stage
from ..policy.tokenizer import ChatFormat, chat_of, load_tokenizer, tokenizer_sha256
from ..policy.value import VALUE_FILE
from ..policy.vision_config import ImageRules
from ..rl.algorithms import make_algorithm
from ..rollout.calls import EnvCalls, Fault, build
from . import checkpoints
from .checkpoints import Found, RunState
from .together import check_parts, check_sight, check_together

# A run keeps these for life: its start, data, random numbers and moments follow from them.
IDENTITY = ("policy", "env", "chat", "seed", "group_size", "groups_per_step", "learner.optimizer")
RUN_FOLDERS = ("checkpoints", "rollouts")  # one of them is there as soon as a run has begun


@dataclass(slots=True)
class Run:
    """A checked run: where it starts and how far it is."""

    config: TrainConfig
    folder: Path
    checkpoint: Path  # weights to start with
    saved: Found | None  # its newest checkpoint: what it goes on from, or has saved since
    tokenizer: PreTrainedTokenizerFast
    stage: StageRecord
    notes: list[str]
    vision: bool = False  # whether its environment shows images
    step: int = 0
    tasks: int = 0  # training tasks used up

    @property
    def state(self) -> RunState:
        """What a checkpoint of this moment says."""
        return RunState(self.step, self.tasks, dump_config(self.config))

    def advance(self, tasks: int, tokens: int) -> None:
        """Count one more step, which used up ``tasks`` and saw ``tokens``."""
        self.step += 1
        self.tasks += tasks
        self.stage = replace(self.stage, tokens_seen=self.stage.tokens_seen + tokens)


def prepare(config: TrainConfig) -> Run:
    """Check a training config against the world; UserError for whatever does not fit."""
    check_bounds(config)
    check_together(config)
    folder = Path(config.output).absolute()
    _check_output(folder)
    policy = _starting_policy(config, folder)
    config = replace(
        config, policy=str(policy), output=str(folder), env=resolve_plugins(config.env)
    )
    config = _with_teachers(_with_reference(config))
    notes: list[str] = []
    resumed = _find_resumable(config, folder, notes)
    checkpoint = resumed.folder if resumed else Path(config.policy)
    _check_others(config, checkpoint)
    own = read_config(checkpoint)
    check_parts(config, own)
    tokenizer = load_tokenizer(checkpoint)
    check_context(checkpoint, config.context, config.allow_longer_context)
    stage = read_stage(checkpoint)
    chat = chat_of(tokenizer, stage, config.chat)
    vision = check_first_prompt(
        config.env, config.context, chat, config.seed, config.rollout.env_timeout_s, own.image_rules
    )
    check_sight(config.env, config.rollout, vision)
    state = resumed.state if resumed else RunState(0, 0, "")
    return Run(
        config,
        folder,
        checkpoint,
        resumed,
        tokenizer,
        replace(stage, chat=chat.record),
        notes,
        vision,
        state.step,
        state.tasks,
    )


def check_unchanged(run: Run) -> None:
    """UserError if the folder is not as `prepare` found it; to be asked when nobody else is in."""
    if checkpoints.newest(run.folder) != run.saved:
        raise UserError(
            f"output {run.folder}: another process worked in it meanwhile; start again, or "
            "choose another output"
        )


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that ``path`` names: itself, or the newest complete one of a run."""
    path = Path(path)
    if os.path.isfile(path / "config.json"):  # asks without an exception whatever the name is
        return path
    if any(os.path.isdir(path / name) for name in RUN_FOLDERS):
        found = checkpoints.newest(path)
        if found is None:
            raise UserError(f"{path}: the run has no complete checkpoint yet")
        return found.folder
    missing = (
        "no such folder" if not os.path.isdir(path) else "neither a checkpoint nor a run folder"
    )
    raise UserError(f"{path}: {missing}")


def check_first_prompt(
    env: EnvConfig,
    context: int,
    chat: ChatFormat,
    seed: int,
    timeout_s: float,
    rules: ImageRules | None,
) -> bool:
    """Build the environment, start one episode, and see that its prompt leaves room to answer;
    whether it shows images, which need the policy's ``rules``."""
    task = tasks(env.id, "train", 0, 1, seed)[0]
    calls = EnvCalls(1, timeout_s)
    try:
        make = partial(make_config, env)
        calls.submit(None, "reset", partial(build, make, task, chat.calls, chat.effort))
        ((_, outcome),) = calls.ready(wait=True)
        if outcome.fault is not None:
            raise UserError(_reset_failed(env, outcome.fault))
        made, messages = outcome.value
        calls.submit(None, "close", made.close, made)
        calls.drain()
    finally:
        calls.shutdown()
    vision: bool = made.shows_images
    if vision and rules is None:
        raise UserError(
            f"env.id {env.id}: shows images, but the policy's config.json has no vision_config"
        )
    if vision:
        chat = chat.seeing(rules)
    length = len(chat.render_reply(messages)) + len(chat.prompt())
    if length >= context:
        raise UserError(
            f"context={context} is too small: the first prompt of {env.id} has {length} tokens; "
            f"set context to at least {length + 1}"
        )
    return vision


def _reset_failed(env: EnvConfig, fault: Fault) -> str:
    """One line about what a fresh environment of the user did."""
    if fault.kind == EnvBuildError.__name__:
        return fault.message
    return f"env.id {env.id}: reset failed: {fault.line}"


def _find_resumable(config: TrainConfig, folder: Path, notes: list[str]) -> Found | None:
    complete, torn = checkpoints.scan(folder)
    if config.resume == "never":
        if complete:
            raise UserError(
                f"output {folder} already holds a run and resume=never; "
                "choose another output or resume=auto"
            )
        return None
    notes += [f"skipped incomplete checkpoint {path}" for path in torn]
    if not complete:
        if config.resume == "required":
            raise UserError(f"resume=required: {folder} has no complete checkpoint")
        return None
    found = complete[-1]
    if found.state.config != dump_config(config):
        # Not the run's config.yaml: it may be the very file that was edited and given.
        before = parse_config(TrainConfig, found.state.config, f"in {found.folder / 'run.json'}")
        changed = changes(before, config)
        for text in changed:
            key = text.split(":")[0]
            if any(key == name or key.startswith(f"{name}.") for name in IDENTITY):
                raise UserError(
                    f"output {folder} holds a run with another {text}; choose another output"
                )
        judged = make_algorithm(config.algorithm).critic is not None
        if judged and not (found.folder / VALUE_FILE).exists():
            raise UserError(
                f"algorithm.name={config.algorithm.name} needs a critic, and {found.folder} has "
                "none; choose another output, with that folder as policy"
            )
        notes += [f"settings changed since the last run: {text}" for text in changed]
    return found


def changes(before: Any, after: Any, key: str = "") -> list[str]:
    """Leaves that differ, as ``key: old -> new``."""
    if not hasattr(before, "__dataclass_fields__"):
        return [f"{key}: {before} -> {after}"] if before != after else []
    out: list[str] = []
    for name in before.__dataclass_fields__:
        out += changes(getattr(before, name), getattr(after, name), f"{key}.{name}".lstrip("."))
    return out


def starting_policy(path: str) -> Path:
    """The checkpoint folder that the setting ``policy`` names, free of links."""
    try:
        return find_checkpoint(path).resolve()
    except UserError as error:
        raise UserError(
            f"policy {error}; name what stage, sft or train has written: policy=FOLDER"
        ) from None


def _starting_policy(config: TrainConfig, folder: Path) -> Path:
    """The checkpoint a run starts from; one that goes on may have lost it."""
    try:
        return starting_policy(config.policy)
    except UserError:
        if checkpoints.newest(folder) is None:
            raise
        return Path(config.policy).resolve()


def _with_reference(config: TrainConfig) -> TrainConfig:
    """The config with the folder of the reference that it names; UserError where there is none."""
    if config.algorithm.kl == 0:
        if config.reference is not None:
            raise UserError(
                f"reference={config.reference} would have no effect: it needs algorithm.kl above 0"
            )
        return config
    try:
        folder = find_checkpoint(config.reference or config.policy).resolve()
    except UserError as error:
        raise UserError(f"algorithm.kl needs its reference: {error}") from None
    return config if config.reference is None else replace(config, reference=str(folder))


def _with_teachers(config: TrainConfig) -> TrainConfig:
    """The config with the folders of the teachers that it names; UserError where there is none."""
    if config.algorithm.distill == 0:
        if config.teachers:
            raise UserError(
                f"teachers.0.policy={config.teachers[0].policy} would have no effect: it needs "
                "algorithm.distill above 0"
            )
        return config
    if not config.teachers:
        raise UserError(
            f"algorithm.distill={config.algorithm.distill:g} needs teachers; name them: "
            "teachers=[{policy: FOLDER}]"
        )
    found = []
    for number, teacher in enumerate(config.teachers):
        try:
            folder = find_checkpoint(teacher.policy).resolve()
        except UserError as error:
            raise UserError(f"teachers.{number}.policy {error}") from None
        found.append(replace(teacher, policy=str(folder)))
    return replace(config, teachers=tuple(found))


def _check_others(config: TrainConfig, checkpoint: Path) -> None:
    """UserError if the reference or a teacher cannot score what the policy of ``checkpoint``
    samples."""
    others = {f"teachers.{n}.policy": teacher.policy for n, teacher in enumerate(config.teachers)}
    if config.reference is not None:
        others["reference"] = config.reference
    own = tokenizer_sha256(load_tokenizer(checkpoint)) if others else ""
    for name, folder in others.items():
        try:
            theirs = tokenizer_sha256(load_tokenizer(folder))
        except UserError as error:
            raise UserError(f"{name} {error}") from None
        if theirs != own:
            raise UserError(f"{name} {folder}: has another tokenizer than policy {config.policy}")
        trained = read_stage(folder).context
        if config.context > trained and not config.allow_longer_context:
            raise UserError(
                f"{name} {folder}: was trained for {trained} tokens, and context={config.context}; "
                "lower it, or set allow_longer_context=true"
            )


def check_writable(folder: Path) -> None:
    """UserError if nothing can be written in ``folder``, which need not exist yet."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"output {folder}: {reason}; choose another output") from None
    # os.path: asks without an exception where even looking is forbidden
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UserError(f"output {folder}: {nearest} is not a directory; choose another output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"output {folder}: {nearest} is not writable; choose another output")


def _check_output(folder: Path) -> None:
    """UserError if no run can be written there."""
    check_writable(folder)
    if (folder / "config.json").is_file():
        raise UserError(f"output {folder}: is a checkpoint folder; choose another output")
    if folder.is_dir() and any(folder.iterdir()) and not is_run(folder):
        raise UserError(f"output {folder}: holds other files and no run; choose another output")


def is_run(folder: Path) -> bool:
    """Whether a training run has worked in the folder."""
    return any((folder / name).is_dir() for name in RUN_FOLDERS)
