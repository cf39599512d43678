"""``farhorizon bench grpo``: one GRPO step of ours beside one of TRL's, on the same task.

A step is rollout, update and weight sync. Both sides sample the same number of tokens from
policies of the same size, in turns, each with the machine to itself.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..configs.benchmarks import BenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.load import dump_config
from ..configs.schema import AlgorithmConfig, EnvConfig, SyncConfig
from ..envs.registry import tasks
from ..policy.tokenizer import ChatFormat, load_tokenizer
from ..rl.actor import LearnerGroup
from ..rl.types import UpdateResult
from ..rollout.pool import RolloutPool
from ..rollout.types import Group
from . import bench_task as task
from .bench_task import Measurement
from .cluster import check_gpus, cluster
from .prepare import check_writable
from .together import check_unused, rollout_of

MAX_LOG_RATIO = 1e-4  # nats between the sampler's and the learner's log-prob of any token
PACKAGES = ("farhorizon", "torch", "ray", "deepspeed", "trl", "transformers")


def bench_grpo(config: BenchConfig) -> int:
    """Print the table of both sides; returns 0."""
    check_bounds(config)
    if config.learner.minibatches != 1:
        raise UserError("learner.minibatches must be 1: TRL's step is one optimizer step as well")
    check_unused("learner", config.learner, ["decay"], "its steps have one rate")
    check_unused("learner", config.learner, ["replay"], "a batch is one step on its own weights")
    check_unused("rollout", config.rollout, ["keep_states"], "weights change between rollouts")
    check_unused("rollout", config.rollout, ["restarts"], "a step with one is not timed")
    if config.output is not None:
        check_writable(Path(config.output).absolute().parent)
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    ours: list[Measurement] = []
    theirs: list[Measurement] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="farhorizon-bench-") as scratch:
        folder = Path(scratch)
        write_task(folder, config)
        for run in range(config.runs):
            ours.append(measure_ours(folder, config))
            _say(run, config.runs, "farhorizon", ours[-1])
            theirs.append(measure_trl(folder, config))
            _say(run, config.runs, "TRL", theirs[-1])
    _print_table(ours, theirs, load)
    if config.output is not None:
        with Path(config.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record(config, ours, theirs, load)) + "\n")
        print(f"appended to {config.output}")
    return 0


def write_task(folder: Path, config: BenchConfig) -> None:
    """The tokenizer of both sides and the checkpoint of ours."""
    tokenizer = task.write_tokenizer(folder / "tokenizer")
    task.write_policy(folder / "policy", tokenizer, _context(config))


def measure_ours(folder: Path, config: BenchConfig) -> Measurement:
    """One warm-up step and ``config.steps`` timed ones on a Ray of their own.

    RunFailed if a step was not what it has to be: lengths, log-probs, versions, sync.
    """
    checkpoint = str(folder / "policy")
    env = _environment(folder)
    algorithm, sync = AlgorithmConfig(), SyncConfig()
    seconds: list[float] = []
    parts: list[tuple[float, float, float]] = []
    with cluster(None), ExitStack() as stack:
        check_gpus(None, config.rollout, config.learner)
        temperature = config.rollout.temperature
        learner = LearnerGroup(
            checkpoint, config.learner, algorithm, sync, config.seed, temperature
        )
        stack.callback(learner.close)
        rollout = rollout_of(config.rollout, config.learner)
        pool = RolloutPool(checkpoint, env, rollout, _context(config), config.seed)
        stack.callback(pool.close)
        pool.sync(learner)
        for step in range(config.steps + 1):
            batch = tasks(env.id, "train", step * task.GROUPS, task.GROUPS, config.seed)
            before = pool.version
            times = [time.perf_counter()]
            groups, _ = pool.collect(pool.submit(batch, task.GROUP_SIZE))
            times.append(time.perf_counter())
            update = learner.update(groups)
            times.append(time.perf_counter())
            pool.sync(learner)
            times.append(time.perf_counter())
            check_rollout(groups, config.rollout.max_turn_tokens, step)
            check_update(update, step)
            # The sync itself compares every tensor's digest and the scores of a canary.
            if before is None or pool.version is None or pool.version.number != learner.version:
                raise RunFailed(f"bench step {step}: the actors do not have what was published")
            if before.digest == pool.version.digest:
                raise RunFailed(f"bench step {step}: the update changed no weight")
            if step > 0:
                seconds.append(times[-1] - times[0])
                parts.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
        specs = learner.ask("announce").manifest.specs
        weights = sum(math.prod(spec.shape) for spec in specs)
    means = [statistics.fmean(part) for part in zip(*parts, strict=True)]
    return Measurement(
        tuple(seconds),
        task.COMPLETIONS * config.rollout.max_turn_tokens,
        weights,
        dict(zip(("rollout", "update", "sync"), means, strict=True)),
    )


def measure_trl(folder: Path, config: BenchConfig) -> Measurement:
    """TRL's side in a process of its own, with torch's default number of threads."""
    job = {
        "tokenizer": str(folder / "tokenizer"),
        "scratch": str(folder / "trl"),
        "context": _context(config),
        "completion_tokens": config.rollout.max_turn_tokens,
        "steps": config.steps,
        "lr": config.learner.lr,
        "temperature": config.rollout.temperature,
        "checkpointing": config.trl_checkpointing,
        "cpu": config.learner.gpus == 0,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"}
    module = f"{__package__}.bench_trl"
    command = [sys.executable, "-m", module, str(folder / "job.json"), str(folder / "trl.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunFailed(f"TRL's process ended with code {done.returncode}: {reason}")
    result = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
    return Measurement(**result | {"seconds": tuple(result["seconds"])})


def check_rollout(groups: list[Group], completion_tokens: int, version: int) -> None:
    """RunFailed unless all completions are there, of the right lengths and one weight version."""
    sizes = [len(group.trajectories) for group in groups]
    if sizes != [task.GROUP_SIZE] * task.GROUPS:
        raise RunFailed(f"bench step {version}: groups of {sizes} completions")
    for trajectory in (t for group in groups for t in group.trajectories):
        shape = [(len(s.token_ids), s.sampled) for s in trajectory.segments]
        if shape != [(task.PROMPT_TOKENS, False), (completion_tokens, True)]:
            raise RunFailed(
                f"bench step {version}: {trajectory.task_id} has segments (tokens, sampled) "
                f"{shape}, error {trajectory.error}"
            )
        if set(trajectory.segments[1].versions.tolist()) != {version}:
            raise RunFailed(f"bench step {version}: {trajectory.task_id} is of other weights")


def check_update(update: UpdateResult, step: int) -> None:
    """RunFailed unless the weights were updated by what the learner agrees was sampled from it."""
    metrics = update.metrics
    if update.skipped or update.version != step + 1:
        raise RunFailed(f"bench step {step}: the update was skipped; another seed=N gives rewards")
    # Written so that a NaN fails.
    if not (metrics["log_ratio_max"] < MAX_LOG_RATIO and metrics["clip_fraction"] == 0):
        raise RunFailed(
            f"bench step {step}: log-probs of rollout and learner differ by "
            f"{metrics['log_ratio_max']:.1e}, {metrics['clip_fraction']:.1%} clipped"
        )


def medians(runs: list[Measurement]) -> dict[str, float]:
    """Median over runs of what a run gives."""
    return {
        "completions_per_second": statistics.median(r.completions_per_second for r in runs),
        "tokens_per_second": statistics.median(r.tokens_per_second for r in runs),
        "step_seconds": statistics.median(statistics.fmean(r.seconds) for r in runs),
    }


def record(
    config: BenchConfig, ours: list[Measurement], theirs: list[Measurement], load: float
) -> dict[str, Any]:
    """All there is to know about one benchmark, as JSON data."""
    mine, other = medians(ours), medians(theirs)
    return {
        "benchmark": "grpo",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: version(package) for package in PACKAGES},
        "cores": os.cpu_count(),
        "load_before": load,
        "config": dump_config(config),
        "ratio": mine["completions_per_second"] / other["completions_per_second"],
        "farhorizon": mine | {"runs": [asdict(run) for run in ours]},
        "trl": other | {"runs": [asdict(run) for run in theirs]},
    }


def _environment(folder: Path) -> EnvConfig:
    """The task in our chat format, its text shortened by what the format adds."""
    chat = ChatFormat(load_tokenizer(folder / "tokenizer"))
    room = task.PROMPT_TOKENS - len([*chat.render(task.Message("user", "")), *chat.prompt()])
    module = task.__name__
    return EnvConfig(
        id=f"{module}:CountLetters", kwargs={"prompt": task.prompt(room)}, plugins=(module,)
    )


def _context(config: BenchConfig) -> int:
    """One token more than an episode: the answer ends by its own limit and is then rewarded."""
    return task.PROMPT_TOKENS + config.rollout.max_turn_tokens + 1


def _say(run: int, runs: int, side: str, result: Measurement) -> None:
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.parts.items())
    print(
        f"run {run + 1}/{runs}  {side:<10}  {result.completions_per_second:6.2f} completions/s  "
        f"{parts}",
        flush=True,
    )


def _print_table(ours: list[Measurement], theirs: list[Measurement], load: float) -> None:
    mine, other = medians(ours), medians(theirs)
    table = Table(
        title=f"One GRPO step of {task.COMPLETIONS} completions, {ours[0].tokens} sampled tokens; "
        f"median of {len(ours)} runs, {os.cpu_count()} cores, load before {load:.1f}"
    )
    for column in ("", "farhorizon", f"TRL {version('trl')}", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name, key in (
        ("completions/s", "completions_per_second"),
        ("sampled tokens/s", "tokens_per_second"),
        ("seconds a step", "step_seconds"),
    ):
        ratio = mine[key] / other[key]
        table.add_row(name, f"{mine[key]:.2f}", f"{other[key]:.2f}", f"{ratio:.2f}")
    table.add_row("weights of the policy", f"{ours[0].weights:,}", f"{theirs[0].weights:,}", "")
    Console().print(table)
