"""Where a checkpoint comes from: the command that made it, and the environment it played there."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..configs.errors import UserError
from ..configs.load import load_config
from ..configs.schema import EnvConfig, EvalConfig, SftConfig, StageConfig, TrainConfig
from ..policy.records import STAGE_FILE
from .stage_data import stage_env
from .stage_record import stage_folders


def evaluation_defaults(checkpoint: Path, overrides: list[str]) -> EvalConfig:
    """Settings of the run, stage run or warm-up that made the checkpoint, as far as they are known.

    A folder may come from somebody else: code that its config names is run only when the command
    line names it too. An environment that the command line replaces brings no arguments along.
    """
    found = _config_file(checkpoint)
    if found is None:
        return EvalConfig()
    file, schema = found
    made = load_config(schema, str(file), [])
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
        rollout=made.rollout,
        allow_longer_context=made.allow_longer_context,
        ray_address=made.ray_address,
    )


def _config_file(
    checkpoint: Path,
) -> tuple[Path, type[TrainConfig] | type[StageConfig] | type[SftConfig]] | None:
    """The stored config of what made a checkpoint, and its kind; None for one from elsewhere."""
    around = checkpoint.parent.parent / "config.yaml"
    if around.is_file():
        if checkpoint.parent.name == "checkpoints" and (checkpoint / "run.json").is_file():
            return around, TrainConfig
        if checkpoint.parent.name == "stages" and (checkpoint / STAGE_FILE).is_file():
            return around, StageConfig
    beside = checkpoint / "config.yaml"
    if beside.is_file() and (checkpoint / STAGE_FILE).is_file():
        return beside, StageConfig if (checkpoint / "stages").is_dir() else SftConfig
    return None


def _environment(made: TrainConfig | StageConfig | SftConfig, checkpoint: Path) -> EnvConfig | None:
    """The environment; of a stage run at the horizon of the stage that the checkpoint ended."""
    if not isinstance(made, StageConfig) or made.env is None:
        return made.env
    folders = stage_folders(checkpoint.parent.parent)
    index = folders.index(checkpoint) if checkpoint in folders else -1
    return stage_env(made.env, made.stages[index])
