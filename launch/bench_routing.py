"""``farhorizon bench routing``: what thresholds do that see too few tokens, or old ones.

No policy: the scores are those of a router whose weights drift, on tokens of topics that drift as
well, in sequences of one topic. The thresholds are set by the library's own histogram and rules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from ..configs.benchmarks import RoutingBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..kernels.moe import QuantileHistogram, route
from ..policy.moe import max_over_mean
from ..policy.thresholds import TRACK, Ema, ThresholdRule
from .files import write_whole
from .prepare import check_writable

WIDTH, TOPICS = 16, 64  # of a token, and how many kinds of sequences there are
FRESH = 128  # tokens of every topic that nothing is learned from, for the load
SETTLED = 10  # solutions after which thresholds of the same tokens stand still
WARM = 0.3  # first share of the steps, which no figure is taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of one setting: the load max / mean of fresh tokens, and how far a threshold moves in a step,
    both as means over steps. ``frozen`` is that load where thresholds stay at their start.
    ``loads`` are those of all steps."""

    experts: int
    batch: int
    window: int
    load: float
    moved: float
    frozen: float
    loads: tuple[float, ...]


class Drift:
    """Scores of a router that changes from step to step, deterministic in its seed."""

    def __init__(self, experts: int, config: RoutingBenchConfig) -> None:
        self.random = torch.Generator().manual_seed(config.seed)
        self.step, self.length = config.drift, config.sequence
        self.weight = self._normal(experts, WIDTH)
        self.topics = self._normal(TOPICS, WIDTH)

    def advance(self) -> None:
        """One optimizer step: both turn by ``drift`` radians, without growing."""
        for moving in (self.weight, self.topics):
            turned = moving + self.step * self._normal(*moving.shape)
            moving.copy_(turned / (1 + self.step**2) ** 0.5)

    def scores(self, tokens: int) -> Tensor:
        """Scores ``[tokens, E]`` of sequences of one topic each."""
        sequences = -(-tokens // self.length)
        topics = torch.randint(TOPICS, (sequences,), generator=self.random)
        return self._scores(topics.repeat_interleave(self.length)[:tokens])

    def fresh(self) -> Tensor:
        """Scores of as many tokens of each topic: what all sequences together would load."""
        return self._scores(torch.arange(TOPICS).repeat_interleave(FRESH))

    def _scores(self, topics: Tensor) -> Tensor:
        x = (self.topics[topics] + self._normal(len(topics), WIDTH)) / 2**0.5
        return torch.sigmoid(x @ self.weight.T / WIDTH**0.5)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)


class Thresholds:
    """Those of one window: below a step's tokens it sees the first of them alone, above it is an
    average that steps count for about ``window / batch`` updates in."""

    def __init__(self, start: Tensor, k: int, batch: int, window: int) -> None:
        self.bias, self.k, self.window = start, k, window
        self.rule: ThresholdRule = TRACK if window <= batch else Ema(1 - batch / window)

    def update(self, scores: Tensor) -> float:
        """Take in a step's tokens; the mean distance that thresholds moved."""
        histogram = QuantileHistogram(self.bias, self.k)
        histogram.add(scores[: self.window])
        after = self.rule(self.bias, histogram.solve)
        moved = float((after - self.bias).abs().mean())
        self.bias = after
        return moved

    def load(self, scores: Tensor) -> float:
        """Max / mean load of tokens that go by these thresholds."""
        experts = route(scores, self.bias, self.k)[0]
        return float(max_over_mean(torch.bincount(experts.flatten(), minlength=len(self.bias))))


def bench_routing(config: RoutingBenchConfig) -> int:
    """Simulate every number of experts and batch with every window, write and draw; returns 0."""
    check_bounds(config)
    if config.experts and min(config.experts) <= config.k:
        raise UserError(f"k={config.k} must be below each of experts={list(config.experts)}")
    folder = Path(config.output).absolute()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for experts, batch in settings(config):
        rows += simulate(experts, batch, config)
        for row in rows[-len(config.windows) :]:
            print(line(row), flush=True)
    origin = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__}
    told = {"config": asdict(config), **origin, "rows": [asdict(row) for row in rows]}
    write_whole(folder / "routing.json", json.dumps(told, indent=1) + "\n")
    draw(folder / "routing.png", rows, config)
    print(f"written {folder / 'routing.json'}, {folder / 'routing.png'}")
    return 0


def settings(config: RoutingBenchConfig) -> list[tuple[int, int]]:
    """Every number of experts with the middle batch, and the middle number with every batch."""
    experts, batch = (x[len(x) // 2] for x in (config.experts, config.batches))
    pairs = [(e, batch) for e in config.experts] + [(experts, b) for b in config.batches]
    return list(dict.fromkeys(pairs))


def simulate(experts: int, batch: int, config: RoutingBenchConfig) -> list[Row]:
    """One row per window; all windows see the same tokens."""
    drift = Drift(experts, config)
    start = balanced(drift.fresh(), config.k)
    windows = [Thresholds(start, config.k, batch, window) for window in config.windows]
    frozen = Thresholds(start, config.k, batch, batch)
    loads: list[list[float]] = [[] for _ in windows]
    moved: list[list[float]] = [[] for _ in windows]
    still: list[float] = []
    for _ in range(config.steps):
        scores, fresh = drift.scores(batch), drift.fresh()
        for own, loads_of, moved_of in zip(windows, loads, moved, strict=True):
            loads_of.append(own.load(fresh))
            moved_of.append(own.update(scores))
        still.append(frozen.load(fresh))
        drift.advance()
    warm = int(WARM * config.steps)
    mean = [(_mean(a[warm:]), _mean(b[warm:])) for a, b in zip(loads, moved, strict=True)]
    return [
        Row(
            experts=experts,
            batch=batch,
            window=own.window,
            load=load,
            moved=move,
            frozen=_mean(still[warm:]),
            loads=tuple(of),
        )
        for own, (load, move), of in zip(windows, mean, loads, strict=True)
    ]


def balanced(scores: Tensor, k: int) -> Tensor:
    """Thresholds that balance these scores: what the rule comes to when it sees nothing else."""
    bias = torch.zeros(scores.shape[1])
    for _ in range(SETTLED):
        histogram = QuantileHistogram(bias, k)
        histogram.add(scores)
        bias = TRACK(bias, histogram.solve)
    return bias


def line(row: Row) -> str:
    """What was simulated, for people who wait for the picture."""
    return (
        f"  {row.experts:4} experts  batch {row.batch:6,}  window {row.window:8,}  "
        f"max/mean load {row.load:.3f} (frozen {row.frozen:.3f})  moves {row.moved:.4f} a step"
    )


def best(rows: Sequence[Row]) -> Row:
    """The row of the smallest load."""
    return min(rows, key=lambda row: row.load)


def draw(path: Path, rows: Sequence[Row], config: RoutingBenchConfig) -> None:
    """Load by window for all experts and for all batches, and load by step for three windows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    experts, batch = (x[len(x) // 2] for x in (config.experts, config.batches))
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), dpi=120)
    for axes, key, fixed in ((left, "experts", "batch"), (middle, "batch", "experts")):
        values = sorted({getattr(row, key) for row in rows})
        held = {"batch": batch, "experts": experts}[fixed]
        for color, value in enumerate(values):
            own = [r for r in rows if getattr(r, key) == value and getattr(r, fixed) == held]
            if not own:
                continue
            axes.plot(
                [row.window for row in own],
                [row.load for row in own],
                marker="o",
                color=f"C{color}",
                label=f"{value:,} {'experts' if key == 'experts' else 'tokens a step'}",
            )
            axes.axhline(own[0].frozen, color=f"C{color}", linestyle=":", alpha=0.6)
        axes.set(
            xscale="log",
            xlabel="window, tokens",
            ylabel="max / mean load of fresh tokens",
            title=f"{held:,} {'tokens a step' if fixed == 'batch' else 'experts'}; dotted: frozen",
        )
    own = [row for row in rows if row.experts == experts and row.batch == batch]
    for row in (own[0], best(own), own[-1]):
        right.plot(row.loads, label=f"window {row.window:,}", alpha=0.8)
    right.set(xlabel="step", title=f"{experts} experts, {batch:,} tokens a step", ylim=(1, None))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    pyplot.close(figure)
    partial.replace(path)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
