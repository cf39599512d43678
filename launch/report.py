"""What a run amounts to: intervals, the learning curve and the closing lines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configs.schema import TrainConfig
from ..envs.types import StopReason
from ..rl.types import UpdateResult
from ..rollout.types import Group


def wilson(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a success rate, 95 % by default.

    Example: ``wilson(80, 100) == (0.711, 0.867)`` to three digits.
    """
    if not 0 <= successes <= episodes or episodes == 0:
        raise ValueError(f"{successes} successes of {episodes} episodes")
    rate = successes / episodes
    shrink = 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == episodes else centre + half
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out result. ``success`` is over all episodes asked for, failed ones included.

    The fields are the keys of ``eval.json``.
    """

    success: float
    ci_low: float
    ci_high: float
    episodes: int
    errors: int
    turns_mean: float
    tokens_mean: float
    seed: int
    checkpoint: str

    def __str__(self) -> str:
        text = f"{self.success:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"
        return f"{text} of {self.episodes}" + (f", {self.errors} errors" if self.errors else "")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Held-out success after ``step`` updates, with its interval."""

    step: int
    success: float
    ci_low: float
    ci_high: float


def draw_curve(
    path: Path, heldout: Sequence[CurvePoint], training: Sequence[tuple[int, float]], title: str
) -> None:
    """Learning curve as PNG: held-out success with intervals, training success per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    if training:
        steps, rates = zip(*training, strict=True)
        axes.plot(steps, rates, color="tab:gray", alpha=0.7, label="training, sampled")
    if heldout:
        below = [max(p.success - p.ci_low, 0.0) for p in heldout]
        above = [max(p.ci_high - p.success, 0.0) for p in heldout]
        axes.errorbar(
            [p.step for p in heldout],
            [p.success for p in heldout],
            yerr=[below, above],
            marker="o",
            capsize=4,
            color="tab:blue",
            label="held-out, 95 % Wilson interval",
        )
    axes.set(xlabel="update", ylabel="success rate", ylim=(-0.02, 1.02), title=title)
    axes.grid(alpha=0.3)
    if training or heldout:
        axes.legend(loc="best")
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    pyplot.close(figure)
    partial.replace(path)


def curve_points(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[CurvePoint], list[tuple[int, float]]]:
    """Held-out points and training points of the rows of ``metrics.jsonl``."""
    heldout = [
        CurvePoint(r["step"], r["eval/success"], r["eval/ci_low"], r["eval/ci_high"])
        for r in rows
        if "eval/success" in r
    ]
    played = [r for r in rows if r.get("train/success") is not None]  # null where all failed
    training = [(r["step"], r["train/success"]) for r in played]
    return heldout, training


def closing_lines(
    before: CurvePoint | None,
    after: Evaluation | None,
    run: Path,
    checkpoint: Path,
    steps: int,
    plugins: Sequence[str] = (),
) -> list[str]:
    """Four lines: what improved, where the checkpoint is, how to evaluate, how to resume."""
    if after is None:
        improved = f"held-out success was not measured; {run / 'metrics.jsonl'} has the training"
    elif before is None:
        improved = f"held-out success {after} after {steps} steps"
    else:
        change = "apart" if before.ci_high < after.ci_low else "overlapping"
        improved = (
            f"held-out success {before.success:.3f} [{before.ci_low:.3f}, {before.ci_high:.3f}]"
            f" -> {after} after {steps} steps (95 % intervals {change})"
        )
    return [
        f"result      {improved}",
        f"checkpoint  {checkpoint}",
        f"evaluate    {evaluate_line(run, plugins)}",
        f"resume      {resume_line(run, steps * 2)}",
    ]


def cut_by_context(groups: Sequence[Group]) -> int:
    """How many episodes did not fit the context."""
    return sum(t.stop is StopReason.CONTEXT_LIMIT for group in groups for t in group.trajectories)


def context_line(groups: Sequence[Group], context: int) -> str | None:
    """What to change where more than half of the episodes did not fit the context."""
    cut, episodes = cut_by_context(groups), sum(len(group.trajectories) for group in groups)
    if 2 * cut <= episodes:
        return None
    return f"{cut} of {episodes} episodes did not fit: raise context (now {context})"


def kinds_line(groups: Sequence[Group], config: TrainConfig) -> str | None:
    """Which settings are for kinds of tasks that none of these episodes is of."""
    met = {t.kind for group in groups for t in group.trajectories}
    named = [(f"algorithm.efforts.{kind}", kind) for kind in config.algorithm.efforts]
    for number, teacher in enumerate(config.teachers):
        named += [(f"teachers.{number}.kinds={kind}", kind) for kind in teacher.kinds]
    unmet = [setting for setting, kind in named if kind not in met]
    if not unmet or not met:
        return None
    seen = ", ".join(sorted(kind or "none" for kind in met))
    return f"no episode so far is of the kind of {', '.join(unmet)} (kinds so far: {seen})"


def unchanged_line(rows: Sequence[dict[str, Any]]) -> str | None:
    """What to change where more than half of the steps had no group with anything to teach."""
    steps = [row for row in rows if "train/update_skipped" in row]
    idle = [row for row in steps if row["train/update_skipped"]]
    flat = [r for r in idle if 0 < r.get("learn/groups", 0) == r.get("learn/groups_left_out")]
    if 2 * len(flat) <= len(steps):
        return None
    cut, episodes = (sum(r.get(n, 0) for r in flat) for n in ("train/cut", "rollout/episodes"))
    solved = sum(row["train/success"] or 0 for row in flat) > len(flat) / 2
    way_out = "make the task harder" if solved else "warm up longer or make the task easier"
    if 2 * cut > episodes:
        way_out = "raise context"
    return (
        f"{len(steps) - len(idle)} of {len(steps)} steps changed the policy "
        f"(groups without reward variance); {way_out}"
    )


def rounds_line(rounds: int, update: UpdateResult, wanted: int) -> str:
    """What more than one round of rollout gave; ``wanted`` groups with reward variance."""
    groups = round(update.metrics["groups"])
    taught = groups - round(update.metrics["groups_without_variance"])
    short = f", {wanted} wanted: raise algorithm.extra_rounds" if taught < wanted else ""
    return f"{rounds} rounds of rollout, {taught} of {groups} groups had reward variance{short}"


def skipped_line(update: UpdateResult) -> str:
    """What a gradient that was not finite cost."""
    return (
        f"gradient of {update.bad_tensor} is not finite, {update.metrics['skipped_steps']:g} "
        f"optimizer steps skipped, weights at version {update.version}"
    )


def evaluate_line(run: Path, plugins: Sequence[str]) -> str:
    """The command that evaluates a run, with the code of its own that it may use."""
    named = [f"env.plugins=[{','.join(plugins)}]"] if plugins else []
    return shlex.join(["farhorizon", "eval", str(run), *named])


def resume_line(run: Path, steps: int) -> str:
    """The command that goes on with a run, up to ``steps`` updates."""
    return shlex.join(["farhorizon", "train", str(run / "config.yaml"), f"steps={steps}"])
