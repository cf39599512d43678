"""``farhorizon sft``: warm a checkpoint up on its environment's demonstrations."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, spawn

from ..configs.bounds import check_bounds
from ..configs.errors import NO_ROOM, RunFailed, UserError
from ..configs.load import dump_config
from ..configs.schema import SftConfig
from ..envs.expert import expert_messages
from ..envs.registry import resolve_plugins, tasks
from ..policy.checkpoint import load_checkpoint, save_checkpoint
from ..policy.corpus import (
    Demonstration,
    demonstration,
    load_demonstrations,
    save_demonstrations,
)
from ..policy.records import StageRecord, check_context, read_stage
from ..policy.tokenizer import ChatFormat, chat_of, load_tokenizer, tokenizer_sha256
from ..rl.sft import SftStep, join_processes, train_on_demonstrations
from .files import json_line, sole_user
from .fresh import expert_env
from .interrupt import uninterrupted
from .prepare import check_writable, starting_policy

LINE_SECONDS = 5.0
DATA_FILE = "demonstrations.npz"
MOST_NAME_BYTES = 240  # a name beside it has 255
PR_SET_PDEATHSIG = 1  # of Linux: the signal to get when the parent process ends


def run_sft(config: SftConfig) -> Path:
    """Train, and write the checkpoint folder ``config.output``; returns it."""
    check_writable(Path(config.output).absolute())
    output = Path(config.output).resolve()  # its lock lies beside it, whatever name leads there
    parent = starting_policy(config.policy)
    config = replace(
        config, policy=str(parent), output=str(output), env=resolve_plugins(config.env)
    )
    _check(config, parent, output)
    with sole_user(output, replaced=True):
        _check_output(parent, output)
        _run_sft(config, parent)
    return output


def _run_sft(config: SftConfig, parent: Path) -> None:
    """`run_sft` of a checked config, while the output is this process's own."""
    begin = time.perf_counter()
    demonstrations = collect(config, _chat(config, parent))
    lengths = [len(d.token_ids) for d in demonstrations]
    print(
        f"sft: {len(lengths)} demonstrations of {min(lengths)} to {max(lengths)} tokens, "
        f"{time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="farhorizon-") as scratch:
        save_demonstrations(Path(scratch) / DATA_FILE, demonstrations)
        train_ranks(config, str(parent), scratch)


def train_ranks(config: SftConfig, parent: str, scratch: str) -> None:
    """Train on the demonstrations in ``scratch``, in one process per rank; write the result."""
    if config.ranks == 1:
        _train(0, config, parent, scratch)
        return
    failures = torch.multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (config, parent, scratch, failures)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # ends are told here
    ranks = spawn(_train_process, arguments, nprocs=config.ranks, join=False)
    assert ranks is not None
    try:
        while not ranks.join():
            pass
    except ProcessException as error:
        if not failures.empty():
            raise failures.get() from None
        killed = any(p is not None and p.exitcode == -signal.SIGKILL for p in ranks.processes)
        if killed or isinstance(error, ProcessExitedException):
            raise RunFailed(
                "sft: a rank ended while it worked: it was killed, or ran out of memory"
            ) from None
        raise
    finally:
        _end(ranks.processes)


def _end(processes: Sequence[Any]) -> None:
    """End what still runs: a Ctrl-C has reached the ranks too, but a signal to this process alone
    has not. SIGINT first, on which they tidy up or write what they have begun to write."""
    for patience, stop in ((2.0, signal.SIGINT), (60.0, signal.SIGTERM)):
        deadline = time.monotonic() + patience
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, stop)


def _train_process(
    rank: int, config: SftConfig, parent: str, scratch: str, failures: SimpleQueue[Exception]
) -> None:
    """`_train` in a process of its own: spawn hands on a traceback, not what was raised."""
    # Ranks inherit that a shell starts jobs in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        _train(rank, config, parent, scratch)
    except (UserError, RunFailed) as error:
        failures.put(error)
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            failures.put(error)
        raise
    except KeyboardInterrupt:
        sys.exit(130)  # spawn would take it for done
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may outlive the group, and end the interpreter with an abort


def _train(rank: int, config: SftConfig, parent: str, scratch: str) -> None:
    """One process of the warm-up; rank 0 writes the result."""
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.ranks > 1:
        join_processes(rank, config.ranks, f"file://{scratch}/rendezvous", config.gpus > 0)
    start = load_checkpoint(parent)
    progress = _Progress(config.steps)
    tokens = train_on_demonstrations(
        start.policy,
        start.tokenizer,
        load_demonstrations(Path(scratch) / DATA_FILE),
        config,
        progress.step if rank == 0 else lambda _: None,
    )
    if rank == 0:
        record = StageRecord(
            start.stage.context,
            start.stage.stages,
            start.stage.tokens_seen + tokens,
            tokenizer_sha256(start.tokenizer),
            parent,
            _chat(config, Path(parent)).record,
        )
        output = Path(config.output)
        notes = {
            "metrics.jsonl": "".join(json_line(asdict(step)) for step in progress.steps),
            "config.yaml": dump_config(config),
        }
        with uninterrupted("writing the checkpoint"):
            save_checkpoint(
                output, start.policy, start.policy.config, start.tokenizer, record, notes=notes
            )
        print(f"sft: {tokens} tokens; checkpoint {output}", flush=True)
    if config.ranks > 1:
        torch.distributed.destroy_process_group()


def _chat(config: SftConfig, parent: Path) -> ChatFormat:
    return chat_of(load_tokenizer(parent), read_stage(parent), config.chat)


def collect(config: SftConfig, chat: ChatFormat) -> list[Demonstration]:
    """Demonstrations of training tasks, enough to fill all steps once."""
    env = expert_env(config.env)
    found: list[Demonstration] = []
    missing = config.steps * config.batch_tokens
    try:
        while missing > 0:
            for task in tasks(config.env.id, "train", len(found), 256, config.seed):
                played = expert_messages(env, task, chat.calls, chat.effort)
                found.append(demonstration(played, chat, config.context))
                missing -= len(found[-1].token_ids)
                if missing <= 0:
                    break
    finally:
        env.close()
    return found


def _check(config: SftConfig, parent: Path, output: Path) -> None:
    check_bounds(config)
    _check_devices(config)
    if config.batch_tokens < config.ranks * config.context:
        raise UserError(
            f"batch_tokens={config.batch_tokens} must hold one sequence of "
            f"context={config.context} tokens for each of ranks={config.ranks}"
        )
    _check_output(parent, output)
    check_writable(output.parent)  # where a checkpoint is made, to be renamed when it is whole
    check_context(parent, config.context, allow_longer=False)
    _chat(config, parent)


def _check_output(parent: Path, output: Path) -> None:
    """UserError unless the place is free: a warm-up leaves nothing before it is done."""
    if parent.is_relative_to(output.resolve()):
        raise UserError(f"output {output}: holds the policy to start from; choose another output")
    if len(os.fsencode(output.name)) > MOST_NAME_BYTES:
        raise UserError(f"output {output}: its name is too long; choose another output")
    if output.is_mount():
        raise UserError(f"output {output}: is a mount point; name a folder in it")
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output}: is not a directory; choose another output")
    if output.exists() and any(output.iterdir()):
        found = "holds a checkpoint" if (output / "config.json").exists() else "is not empty"
        raise UserError(f"output {output}: {found}; choose another output, or remove it")


def _check_devices(config: SftConfig) -> None:
    there = torch.cuda.device_count() if config.gpus > 0 else 0
    if config.ranks * config.gpus > there:
        raise UserError(
            f"gpus={config.gpus:g} for each of ranks={config.ranks} is more than the {there} GPUs "
            "of this machine; lower ranks, or set gpus=0 for the CPU"
        )


@dataclass(slots=True)
class _Progress:
    """Keeps every step and prints one now and then."""

    total_steps: int
    steps: list[SftStep] = field(default_factory=list)
    begin: float = field(default_factory=time.perf_counter)
    printed: float = 0.0

    def step(self, step: SftStep) -> None:
        self.steps.append(step)
        now = time.perf_counter()
        if now - self.printed < LINE_SECONDS and step.step < self.total_steps:
            return
        self.printed = now
        rate = step.tokens / (now - self.begin)
        print(
            f"sft step {step.step}/{self.total_steps}  loss {step.loss:.4f}  "
            f"accuracy {step.accuracy:.3f}  {rate:,.0f} tokens/s",
            flush=True,
        )
