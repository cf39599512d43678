"""``farhorizon bench thresholds``: load and log-ratio over many steps of RL under routing replay,
with thresholds that stay, that follow free routing, and that follow the replayed routes.

The last is what a learner does that counts the forward it learns from. It is no setting of
ours: `NaiveReplay` stands here, for the comparison. One process, one core, no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.benchmarks import ThresholdBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..configs.load import load_config
from ..configs.schema import AlgorithmConfig, LearnerConfig, TrainConfig
from ..envs.registry import make_config, tasks
from ..policy.checkpoint import load_checkpoint
from ..policy.moe import Router
from ..policy.routing import Routes
from ..policy.tokenizer import ChatFormat
from ..rl.algorithms import make_algorithm
from ..rl.batch import deal, samples_of_groups, shares
from ..rl.engine import join, leave
from ..rl.learner import Learner
from ..rl.replay import Replay
from ..rl.types import MicroBatch
from ..rollout.episode import run_groups
from ..rollout.generator import NativeGenerator
from .files import finite, json_line, write_whole
from .prepare import check_writable
from .record import read_rows

KINDS = ("freeze", "track", "naive")
LOAD, FREE, APART = "replayed_load_max", "expert_load_max", "log_ratio_abs"


class NaiveReplay(Replay):
    """Statistics of the forward that learns: its own scores beside the routes that it was given."""

    def count_free(
        self, batch: MicroBatch, routes: Routes | None, forward: Callable[[], Any]
    ) -> None:
        """Count a forward on the replayed routes; the cutoff lies between the experts that were
        taken and the best of the others."""
        if routes is None or batch.padding:
            return
        with torch.no_grad(), self.taking(routes), _counted(self.policy.routers()):
            forward()


@contextmanager
def _counted(routers: Sequence[Router]) -> Iterator[None]:
    hooks = [router.register_forward_hook(_count) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _count(router: nn.Module, given: tuple[Tensor], routed: tuple[Tensor, Tensor]) -> None:
    assert isinstance(router, Router)
    x, experts = given[0], routed[0]
    scores = torch.sigmoid(x.float() @ router.weight.float().T)
    others = (scores + router.e_score_correction_bias).scatter(1, experts, -torch.inf)
    router.begin_counts().add(scores, cutoff=others.amax(1))
    router.load += torch.bincount(experts.flatten(), minlength=len(router.load))


def bench_thresholds(config: ThresholdBenchConfig) -> int:
    """Train in every way that is not finished, draw them; returns 0."""
    check_bounds(config)
    unknown = [name for name in config.names if name not in KINDS]
    if unknown:
        raise UserError(f"names: no such thresholds {unknown[0]}; known: {', '.join(KINDS)}")
    if config.minibatches > config.groups:
        raise UserError(
            f"minibatches={config.minibatches} would have no effect above groups={config.groups}: "
            "groups are never divided; lower it"
        )
    folder = Path(config.output).absolute()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    join(0, 1, "", "cpu")
    try:
        for name in config.names:
            file = folder / f"{name}-{config.seed}.jsonl"
            if len(read_rows(file)) < config.steps:
                _train(name, file, config)
    finally:
        leave()
    runs = {name: read_rows(folder / f"{name}-{config.seed}.jsonl") for name in KINDS}
    runs = {name: rows for name, rows in runs.items() if rows}
    for name, rows in runs.items():
        print(summary(name, rows))
    draw(folder / "thresholds.png", runs, config.lag)
    print(f"written {folder / 'thresholds.png'}, {datetime.now(UTC):%Y-%m-%d}")
    return 0


def _train(name: str, file: Path, config: ThresholdBenchConfig) -> None:
    """RL of one kind from its start, a row per step."""
    run = load_config(TrainConfig, "quickstart", [f"policy={config.start}", *config.train])
    torch.manual_seed(config.seed)
    start = load_checkpoint(config.start)
    settings = LearnerConfig(
        lr=config.lr,
        minibatches=config.minibatches,
        micro_batch_tokens=run.learner.micro_batch_tokens,
        replay="rollout",
        thresholds="freeze" if name == "freeze" else "track",
    )
    replay = (NaiveReplay if name == "naive" else Replay)(start.policy, settings)
    learner = Learner(start.policy, settings, run.rollout.temperature, replay=replay)
    sampler = load_checkpoint(config.start).policy
    generator = NativeGenerator(sampler, config.seed, record_routes=True)
    chat = ChatFormat(start.tokenizer)
    algorithm = make_algorithm(AlgorithmConfig(name="grpo", entropy=config.entropy))
    rows: list[dict[str, Any]] = []
    for step in range(1, config.steps + 1):
        wanted = tasks(run.env.id, "train", (step - 1) * config.groups, config.groups, config.seed)
        groups, _ = run_groups(
            generator,
            wanted,
            config.group_size,
            lambda: make_config(run.env),
            chat,
            run.rollout,
            run.context,
        )
        kept, stats = samples_of_groups(groups, algorithm.advantages, algorithm.flat)
        row: dict[str, Any] = {"step": step, "success": stats.success}
        if kept:
            limit = run.learner.micro_batch_tokens
            parts = [shares(part, 1, limit)[0] for part in deal(kept, config.minibatches)]
            row |= learner.update(parts, algorithm.loss).metrics
        if step % config.lag == 0:
            with generator.updating(learner.version):
                sampler.load_state_dict(start.policy.state_dict())
        rows.append(finite(row))
        write_whole(file, "".join(map(json_line, rows)))
        if step % 10 == 0 or step == config.steps:
            print(f"{name} {step}/{config.steps}  {summary(name, rows[-10:])}", flush=True)


def summary(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line: the load that rollouts had at first and at most, and the log-ratios."""
    there = [row for row in rows if LOAD in row]
    if not there:
        return f"{name}: no step had anything to learn from"
    first, loads = there[0], [row[LOAD] for row in there]
    return (
        f"{name}: max/mean load {loads[0]:.3f} at first, at most {max(loads):.3f} "
        f"({max(loads) / loads[0]:.2f} times), last {loads[-1]:.3f}; log-ratio "
        f"{first[APART]:.4f} -> {there[-1][APART]:.4f}; success {there[-1]['success']:.2f}"
    )


def draw(path: Path, runs: dict[str, list[dict[str, Any]]], lag: int) -> None:
    """PNG: load of rollouts, log-ratio of the oldest samples of every ``lag`` steps, success."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), dpi=120)
    shown = {
        LOAD: "max / mean load of rollouts",
        APART: "mean |log-ratio|, oldest",
        "success": "success",
    }
    for axes, (key, title) in zip(panels, shown.items(), strict=True):
        for color, (name, rows) in enumerate(runs.items()):
            every = lag if key == APART else 1
            there = [r for r in rows if r.get(key) is not None and r["step"] % every == 0]
            axes.plot([r["step"] for r in there], [r[key] for r in there], f"C{color}", label=name)
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[1].set(yscale="log")
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    pyplot.close(figure)
    partial.replace(path)
