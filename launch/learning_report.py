"""What runs from the same starts came to: tables in Markdown, and pictures with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from .report import CurvePoint, curve_points, wilson

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """The metrics of one run, of a variant and a seed."""

    name: str
    seed: int
    rows: Rows

    @property
    def heldout(self) -> list[CurvePoint]:
        """Its evaluations, the first one of the start."""
        return curve_points(self.rows)[0]

    @property
    def done(self) -> bool:
        """Whether there is an evaluation behind its last step."""
        points = self.heldout
        return len(points) > 1 and points[-1].step == self.rows[-1]["step"]

    @property
    def episodes(self) -> int:
        """Episodes of each of its evaluations."""
        return next(row["eval/episodes"] for row in self.rows if "eval/success" in row)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of steps."""
        return [row for row in self.rows if "seconds/learn" in row]

    @property
    def seconds(self) -> float:
        """Time of rollouts, updates and syncs."""
        return sum(step_seconds(row) for row in self.steps)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a step of one seed: of a synchronous run in parts, and of an asynchronous one."""

    rollout: float
    learn: float
    step: float  # synchronous, with its sync
    together: float  # asynchronous

    @property
    def bound(self) -> float:
        """What perfect overlap would be faster by."""
        return (self.rollout + self.learn) / max(self.rollout, self.learn)

    @property
    def reached(self) -> float:
        """The share of that bound that was."""
        return (self.rollout + self.learn) / self.together / self.bound


def learning_table(results: Sequence[Result]) -> str:
    """Held-out success of the starts and after training, by algorithm and seed, with the 95 %
    Wilson interval of all seeds' episodes together; and the mean time of a run."""
    done = [result for result in results if result.done]
    seeds = sorted({result.seed for result in done})
    starts = {result.seed: result.heldout[0] for result in done}
    lines = [
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | all | updates | seconds |",
        "|---|" + "---|" * (len(seeds) + 3),
        _line("start", starts, seeds, done, "", ""),
    ]
    for name in sorted({result.name for result in done}):
        own = [result for result in done if result.name == name]
        after = {result.seed: result.heldout[-1] for result in own}
        steps = "-".join(map(str, sorted({result.heldout[-1].step for result in own})))
        lines.append(
            _line(name, after, seeds, own, steps, f"{mean(result.seconds for result in own):.0f}")
        )
    return "\n".join(lines)


def _line(
    name: str,
    points: Mapping[int, CurvePoint],
    seeds: Sequence[int],
    results: Sequence[Result],
    *rest: str,
) -> str:
    cells = [f"{points[seed].success:.1%}" if seed in points else "" for seed in seeds]
    episodes = {result.seed: result.episodes for result in results}
    successes = sum(round(points[seed].success * count) for seed, count in episodes.items())
    low, high = wilson(successes, sum(episodes.values()))
    whole = f"{successes / sum(episodes.values()):.1%} [{low:.1%}, {high:.1%}]"
    return f"| {' | '.join([name, *cells, whole, *rest])} |"


def overlap_of(sync: Result, other: Result, staleness: int) -> Overlap:
    """Means over steps, without the first of each, which fills the pipeline, and without those of
    the asynchronous run that nothing is sampled beside any more."""
    own, theirs = sync.steps[1:], other.steps[1 : len(other.steps) - staleness]
    return Overlap(
        mean(row["seconds/rollout"] for row in own),
        mean(row["seconds/learn"] for row in own),
        mean(map(step_seconds, own)),
        mean(map(step_seconds, theirs)),
    )


def overlap_table(results: Sequence[Result], staleness: int) -> str:
    """Success and seconds per step of synchronous and asynchronous runs by seed."""
    lines = [
        "| seed | success sync | success async | rollout s | learn s | step sync s | step async s "
        "| bound | reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    runs = {(result.name, result.seed): result for result in results if result.done}
    for seed in sorted({seed for _, seed in runs}):
        sync, other = runs.get(("sync", seed)), runs.get(("async", seed))
        if sync is None or other is None:
            continue
        o = overlap_of(sync, other, staleness)
        lines.append(
            f"| {seed} | {_percent(sync.heldout[-1])} | {_percent(other.heldout[-1])} "
            f"| {o.rollout:.2f} | {o.learn:.2f} | {o.step:.2f} | {o.together:.2f} "
            f"| {o.bound:.2f} | {o.reached:.0%} |"
        )
    return "\n".join(lines)


def draw_learning(path: Path, results: Sequence[Result]) -> None:
    """PNG: held-out success after training by algorithm, of each seed and of all; and success of
    training episodes by update. Intervals are 95 % Wilson ones of the episodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [result for result in results if result.done]
    names = sorted({result.name for result in done})
    if not names:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.9 + 0.42 * len(names)), dpi=120)
    seeds = sorted({result.seed for result in done})
    for place, name in enumerate(names):
        own = [result for result in done if result.name == name]
        for result in own:
            shift = 0.12 * (seeds.index(result.seed) - (len(seeds) - 1) / 2)
            for point, color in ((result.heldout[0], "tab:gray"), (result.heldout[-1], "tab:blue")):
                _mark(left, point, place + shift, color)
        for step, successes, episodes in pooled(own):
            low, high = wilson(successes, episodes)
            rate = successes / episodes
            right.plot([step], [rate], marker=".", color=f"C{place % 10}")
            right.plot([step, step], [low, high], color=f"C{place % 10}", alpha=0.4)
        curve = [(step, successes / episodes) for step, successes, episodes in pooled(own)]
        style = "-" if place < 10 else "--"
        right.plot(*zip(*curve, strict=True), style, color=f"C{place % 10}", label=name)
    left.set_yticks(range(len(names)), names)
    left.set(xlim=(-0.02, 1.02), xlabel="held-out success of each seed: before (grey), after")
    left.invert_yaxis()
    right.set(xlabel="update", ylabel="success of training episodes, all seeds", ylim=(-0.02, 1.02))
    right.legend(fontsize=7, ncols=2)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    pyplot.close(figure)
    partial.replace(path)


def pooled(results: Sequence[Result]) -> list[tuple[int, int, int]]:
    """Of every step that all have done: its number, successes and episodes of all runs."""
    by_step: dict[int, list[tuple[int, int]]] = {}
    for result in results:
        for row in result.steps:
            episodes = row["rollout/episodes"] - row["rollout/errors"]
            successes = round((row["train/success"] or 0.0) * episodes)
            by_step.setdefault(row["step"], []).append((successes, episodes))
    whole = {step: own for step, own in by_step.items() if len(own) == len(results)}
    return [(step, sum(a for a, _ in own), sum(b for _, b in own)) for step, own in whole.items()]


def step_seconds(row: dict[str, Any]) -> float:
    """Of its rollout (or what was waited for it), update and sync."""
    return sum(row.get(f"seconds/{part}") or 0.0 for part in ("rollout", "learn", "sync"))


def _mark(axes: Any, point: CurvePoint, height: float, color: str) -> None:
    axes.plot([point.ci_low, point.ci_high], [height, height], color=color, alpha=0.6)
    axes.plot([point.success], [height], marker="o", markersize=4, color=color)


def _percent(point: CurvePoint) -> str:
    return f"{point.success:.1%} [{point.ci_low:.1%}, {point.ci_high:.1%}]"
