"""``farhorizon sft``: warm a checkpoint up on its environment's demonstrations."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..configs.errors import UserError
from ..configs.schema import SftConfig
from ..envs.registry import tasks
from ..policy.checkpoint import check_replaceable, load_checkpoint, save_checkpoint
from ..policy.corpus import Demonstration, demonstration
from ..policy.records import StageRecord, check_context
from ..policy.tokenizer import ChatFormat, tokenizer_sha256
from ..rl.sft import SftStep, train_on_demonstrations
from .fresh import expert_env
from .prepare import find_checkpoint

LINE_SECONDS = 5.0


def run_sft(config: SftConfig) -> Path:
    """Train, and write the checkpoint folder ``config.output``; returns it."""
    output = Path(config.output)
    parent = find_checkpoint(config.policy)
    _check(config, parent, output)
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    start = load_checkpoint(parent)
    begin = time.perf_counter()
    demonstrations = collect(config, ChatFormat(start.tokenizer))
    lengths = [len(d.token_ids) for d in demonstrations]
    print(
        f"sft: {len(lengths)} demonstrations of {min(lengths)} to {max(lengths)} tokens, "
        f"{time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    progress = _Progress(config.steps)
    tokens = train_on_demonstrations(
        start.policy, start.tokenizer, demonstrations, config, progress.step
    )
    record = StageRecord(
        start.stage.context,
        start.stage.stages,
        start.stage.tokens_seen + tokens,
        tokenizer_sha256(start.tokenizer),
        str(parent),
    )
    save_checkpoint(output, start.policy, start.policy.config, start.tokenizer, record)
    (output / "metrics.jsonl").write_text(
        "".join(json.dumps(asdict(step)) + "\n" for step in progress.steps), encoding="utf-8"
    )
    print(f"sft: {tokens} tokens; checkpoint {output}", flush=True)
    return output


def collect(config: SftConfig, chat: ChatFormat) -> list[Demonstration]:
    """Demonstrations of training tasks, enough to fill all steps once."""
    env = expert_env(config.env)
    found: list[Demonstration] = []
    missing = config.steps * config.batch_tokens
    try:
        while missing > 0:
            for task in tasks(config.env.id, "train", len(found), 256, config.seed):
                found.append(demonstration(env, task.seed, chat, config.context))
                missing -= len(found[-1].token_ids)
                if missing <= 0:
                    break
    finally:
        env.close()
    return found


def _check(config: SftConfig, parent: Path, output: Path) -> None:
    for key in ("steps", "context", "batch_tokens"):
        if getattr(config, key) < 1:
            raise UserError(f"{key}={getattr(config, key)} must be at least 1")
    if config.batch_tokens < config.context:
        raise UserError(
            f"batch_tokens={config.batch_tokens} must hold one sequence of "
            f"context={config.context} tokens"
        )
    if output.exists() and output.samefile(parent):
        raise UserError(f"output {output}: is the checkpoint to start from; choose another output")
    check_replaceable(output)
    check_context(parent, config.context, allow_longer=False)


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
