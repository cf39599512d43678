"""Where a checkpoint comes from: the command that made it, and the environment it played there."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from ..configs.errors import UserError
from ..configs.load import config_keys, load_config, parse_config
from ..configs.schema import EnvConfig, EvalConfig, SftConfig, StageConfig, TrainConfig
from ..policy.records import STAGE_FILE, read_json
from .stage_data import stage_env
from .stage_record import stage_folders
from .together import rollout_of


def evaluation_defaults(checkpoint: Path, overrides: list[str]) -> EvalConfig:
    """Settings of the run, stage run or warm-up that made the checkpoint, as far as they are known
    and not for the sake of a learner.

    A folder may come from somebody else: code that its config names is run only when the command
    line names it too. An environment that the command line replaces brings no arguments along.
    """
    found = _maker(checkpoint)
    if found is None:
        return EvalConfig()
    file, made = found
    env = _environment(made, checkpoint)
    if env is not None:
        if any(text.startswith("env.id=") and text != f"env.id={env.id}" for text in overrides):
            env = EnvConfig(id=env.id)
        elif env.plugins and not any(text.startswith("env.plugins=") for text in overrides):
            named = shlex.quote(f"env.plugins=[{','.join(env.plugins)}]")
            raise UserError(f"{file} names code of its own; to run it, add {named}")
    if not isinstance(made, TrainConfig):
        address = made.ray_address if isinstance(made, StageConfig) else None
        return EvalConfig(env=env, seed=made.seed, ray_address=address)
    return EvalConfig(
        env=env,
        seed=made.seed,
        context=made.context,
        rollout=replace(
            rollout_of(made.rollout, made.learner), vllm=replace(made.rollout.vllm, sleep=False)
        ),
        allow_longer_context=made.allow_longer_context,
        ray_address=made.ray_address,
    )


def _maker(checkpoint: Path) -> tuple[Path, TrainConfig | StageConfig | SftConfig] | None:
    """The settings of what made a checkpoint, and their file; None for one from elsewhere."""
    run = checkpoint / "run.json"
    if checkpoint.parent.name == "checkpoints" and run.is_file():
        # As a run that goes on does: its config.yaml is there to be edited.
        text = str(read_json(run).get("config", ""))
        return run, parse_config(TrainConfig, text, f"in {run}")
    if not (checkpoint / STAGE_FILE).is_file():
        return None
    around, beside = checkpoint.parent.parent / "config.yaml", checkpoint / "config.yaml"
    if checkpoint.parent.name == "stages" and around.is_file():
        return around, load_config(StageConfig, str(around), [])
    if not beside.is_file():
        return None
    schema = StageConfig if "stages" in config_keys(beside) else SftConfig
    return beside, load_config(schema, str(beside), [])


def _environment(made: TrainConfig | StageConfig | SftConfig, checkpoint: Path) -> EnvConfig | None:
    """The environment; of a stage run at the horizon of the stage that the checkpoint ended."""
    if not isinstance(made, StageConfig) or made.env is None:
        return made.env
    folders = stage_folders(checkpoint.parent.parent)
    index = folders.index(checkpoint) if checkpoint in folders else -1
    return stage_env(made.env, made.stages[index])
