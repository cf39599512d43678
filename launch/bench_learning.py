"""``farhorizon bench learning`` and ``bench overlap``: the same starts trained in several ways.

Every run is an ordinary ``farhorizon train`` of the quickstart's settings with a few more, in
``OUTPUT/NAME-SEED``. Runs that are finished are not repeated, so a benchmark that was stopped goes
on where it was; figures and pictures are made from what all runs have written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configs.benchmarks import LearningBenchConfig, OverlapBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..configs.load import load_config
from ..configs.schema import TrainConfig
from ..rl.algorithms import ALGORITHMS
from .files import finite, json_line, write_whole
from .learning_report import (
    Result,
    draw_learning,
    learning_table,
    overlap_table,
    step_seconds,
)
from .record import read_rows
from .train import train

POINTS = "points.jsonl"
# Several optimizer steps per rollout: with one no ratio leaves 1, and most losses are the same.
LEARNING = (
    *("learner.minibatches=4", "groups_per_step=8", "save_every=1000"),
    *("learner.ranks=1", "rollout.actors=1"),  # one after the other: a run takes one core
)
# Those without a ratio in their loss are off-policy from the second optimizer step on.
CORRECTED = ("algorithm.correction=token_truncate",)
# A learner and a sampler of a core each. PPO, since it learns from all groups: with others updates
# get shorter while groups lose their variance, and the bound with them. Routes are replayed, since
# those of older weights would be others. At the quickstart's rate one asynchronous run of five lost
# its policy.
OVERLAP = (
    *("learner.ranks=1", "rollout.actors=1", "groups_per_step=8", "save_every=1000"),
    *("algorithm.name=ppo", "learner.minibatches=2", "learner.replay=rollout", "learner.lr=5e-4"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train: its name in folders and pictures, and the settings that make it."""

    name: str
    settings: tuple[str, ...]


def bench_learning(config: LearningBenchConfig) -> int:
    """Every algorithm from every start; returns 0, or the code of an interrupted run."""
    check_bounds(config)
    unknown = [name for name in config.names if name not in ALGORITHMS]
    if unknown:
        raise UserError(f"names: no algorithm {unknown[0]}; known: {', '.join(ALGORITHMS)}")
    variants = [
        Variant(name, (*settings_of(name), f"steps={config.steps}"))
        for name in config.names or tuple(ALGORITHMS)
    ]
    folder = Path(config.output).absolute()
    if code := play(variants, config.seeds, config.start, folder, config.train):
        return code
    results = collect(folder)
    print(learning_table(results))
    draw_learning(folder / "learning.png", results)
    print(f"written {folder / POINTS}, {folder / 'learning.png'}")
    return 0


def settings_of(name: str) -> tuple[str, ...]:
    """What ``bench learning`` trains an algorithm with, beside the quickstart's settings."""
    more = () if ALGORITHMS[name].ratio else CORRECTED
    return (f"algorithm.name={name}", *LEARNING, *more)


def bench_overlap(config: OverlapBenchConfig) -> int:
    """Synchronous and asynchronous runs from every start; returns 0, or the code of an
    interrupted run."""
    check_bounds(config)
    common = (*OVERLAP, f"steps={config.steps}", f"env.kwargs.delay={config.delay:g}")
    variants = [
        Variant("sync", (*common, "max_staleness=0")),
        Variant("async", (*common, f"max_staleness={config.staleness}", *config.correction)),
    ]
    folder = Path(config.output).absolute()
    if code := play(variants, config.seeds, config.start, folder, config.train):
        return code
    print(overlap_table(collect(folder), config.staleness))
    print(f"written {folder / POINTS}")
    return 0


def play(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    start: str,
    folder: Path,
    more: Sequence[str],
) -> int:
    """Run what is not finished, all variants of a seed before the next one; the exit code."""
    for seed in seeds:
        for variant in variants:
            own = folder / f"{variant.name}-{seed}"
            settings = (
                *(f"policy={start.format(seed=seed)}", f"output={own}", f"seed={seed}"),
                *(*variant.settings, *more),
            )
            print(f"== {own.name}", flush=True)
            if code := train(load_config(TrainConfig, "quickstart", list(settings))):
                return code
            write_whole(folder / POINTS, "".join(map(json_line, points(folder))))
    return 0


def points(folder: Path) -> Iterator[dict[str, Any]]:
    """One object per evaluation of every run in a folder, in the order of their names."""
    for result in collect(folder):
        spent = 0.0
        for row in result.rows:
            spent += step_seconds(row)
            if "eval/success" in row:
                own = {name: row[f"eval/{name}"] for name in ("success", "ci_low", "ci_high")}
                told = {"name": result.name, "seed": result.seed, "step": row["step"]}
                yield finite({**told, **own, "episodes": row["eval/episodes"], "seconds": spent})


def collect(folder: Path) -> list[Result]:
    """What the runs in a folder have written so far."""
    results = []
    for file in sorted(folder.glob("*-*/metrics.jsonl")):
        name, _, seed = file.parent.name.rpartition("-")
        if seed.isdigit() and (rows := read_rows(file)):
            results.append(Result(name, int(seed), rows))
    return results
