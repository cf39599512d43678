"""What a stage run leaves for people: progress lines, metrics, transitions and their plot."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..configs.errors import RunFailed, UserError
from ..policy.records import read_json
from .files import finite, json_line, write_whole

LIMIT = 0.02  # relative change of the fixed text's loss that a switch may make
LINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StageStep:
    """One optimizer step: 1-based ``stage`` and ``step`` of ``steps``, ``tokens`` seen so far,
    ``loss`` in nats per token, largest max / mean ``expert_load`` of any layer; so many episodes
    drawn for it were ``episodes_too_long``."""

    stage: int
    context: int
    step: int
    steps: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    expert_load: float
    skipped: float
    tokens_per_second: float
    episodes_too_long: int = 0


@dataclass(frozen=True, slots=True)
class Transition:
    """Loss of one fixed held-out text around a switch of context, nats per token.

    ``before`` is measured at the end of the old stage; ``after`` and ``settled`` after the first
    and the fourth step of the new one, on the same sequences: they differ from ``before`` by the
    weights alone. ``at_new_context`` is measured before any step, in sequences of the new
    context: it differs by the sequence length alone.
    """

    from_context: int
    to_context: int
    tokens: int
    before: float
    at_new_context: float
    after: float
    settled: float

    @property
    def change(self) -> float:
        """Relative change of the loss by the first step after the switch."""
        return self.after / self.before - 1

    @property
    def worst_rise(self) -> float:
        """Largest relative rise of any measurement above ``before``."""
        return max(self.at_new_context, self.after, self.settled) / self.before - 1

    @property
    def smooth(self) -> bool:
        """Whether the loss stayed where it was; falling while training goes on is no spike."""
        return abs(self.change) < LIMIT and self.worst_rise < LIMIT

    def __str__(self) -> str:
        return (
            f"context {self.from_context} -> {self.to_context}: fixed text {self.before:.4f} "
            f"before, {self.at_new_context:.4f} in longer sequences, {self.after:.4f} after one "
            f"step ({self.change:+.2%}), {self.settled:.4f} after four"
        )


class StageRecorder:
    """Prints and writes; files in ``output`` are ``metrics.jsonl`` (a line per step, as it
    happens), ``transitions.json`` and ``stage.png``. Of a run that goes on it keeps what the
    ``finished`` stages left."""

    def __init__(self, output: Path, stages: int, fixed_tokens: int, finished: int = 0) -> None:
        self.output, self.stages, self.fixed_tokens = output, stages, fixed_tokens
        self.steps: list[StageStep] = []
        self.measured: list[tuple[int, float]] = []
        self.transitions: list[Transition] = []
        output.mkdir(parents=True, exist_ok=True)
        self._metrics = output / "metrics.jsonl"
        self._printed = 0.0
        if finished:
            try:
                self._restore(finished)
            except (OSError, ValueError, TypeError, KeyError, IndexError):
                newest = stage_folders(output)[-1]
                raise UserError(
                    f"output {output}: its metrics.jsonl or transitions.json is missing or "
                    f"damaged; go on in another output with policy={newest} and the stages left"
                ) from None
        write_whole(self._metrics, "".join(json_line(asdict(step)) for step in self.steps))

    def _restore(self, finished: int) -> None:
        lines = self._metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [StageStep(**_numbers(json.loads(line))) for line in lines if line.endswith("\n")]
        self.steps = [step for step in whole if step.stage <= finished]
        content = read_json(self.output / "transitions.json")
        measured = content["fixed_text"][: 2 * finished]  # at the start and the end of a stage
        self.measured = [(row["tokens"], row["loss"]) for row in map(_numbers, measured)]
        names = [field.name for field in fields(Transition)]
        self.transitions = [
            Transition(**{name: row[name] for name in names})
            for row in map(_numbers, content["transitions"])
            if row["tokens"] < self.steps[-1].tokens
        ]

    def step(self, step: StageStep) -> None:
        """One optimizer step."""
        self.steps.append(step)
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json_line(asdict(step)))
        now = time.perf_counter()
        if now - self._printed < LINE_SECONDS and step.step < step.steps:
            return
        self._printed = now
        print(
            f"stage {step.stage}/{self.stages}  context {step.context}  step {step.step}/"
            f"{step.steps}  loss {step.loss:.4f}  lr {step.lr:.1e}  "
            f"{step.tokens_per_second:,.0f} tokens/s",
            flush=True,
        )

    def fixed_text(self, tokens: int, loss: float) -> None:
        """The fixed text's loss in sequences of the current context, after ``tokens``."""
        self.measured.append((tokens, loss))

    def transition(self, transition: Transition) -> None:
        """A finished switch."""
        self.transitions.append(transition)
        verdict = "smooth" if transition.smooth else f"NOT smooth (limit {LIMIT:.0%})"
        print(f"stage: {transition}: {verdict}", flush=True)

    def write(self) -> None:
        """``transitions.json`` and ``stage.png`` of what is known so far."""
        content = {
            "limit": LIMIT,
            "fixed_text_tokens": self.fixed_tokens,
            "fixed_text": [
                finite({"tokens": tokens, "loss": loss}) for tokens, loss in self.measured
            ],
            "transitions": [
                finite(
                    {
                        **asdict(t),
                        "change": t.change,
                        "worst_rise": t.worst_rise,
                        "smooth": t.smooth,
                    }
                )
                for t in self.transitions
            ],
        }
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        write_whole(self.output / "transitions.json", text)
        draw_stages(self.output / "stage.png", self.steps, self.measured, self.transitions)

    def require_smooth(self) -> None:
        """RunFailed if any switch was not."""
        rough = [t for t in self.transitions if not t.smooth]
        if rough:
            raise RunFailed(
                f"the switch of {rough[0]}: more than {LIMIT:.0%}; train the stage before it "
                f"longer or with a lower final lr (all switches: {self.output}/transitions.json)"
            )


def stage_folders(output: Path) -> list[Path]:
    """Checkpoints of the finished stages of a run in ``output``, in order; copies do not count."""
    folders = [file.parent for file in (output / "stages").glob("*/stage.json")]
    own = [folder for folder in folders if re.fullmatch(r"[1-9]\d*-\d+", folder.name)]
    return sorted(own, key=lambda folder: int(folder.name.split("-")[0]))


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A stored row with NaN for null."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def draw_stages(
    path: Path,
    steps: Sequence[StageStep],
    measured: Sequence[tuple[int, float]],
    transitions: Sequence[Transition],
) -> None:
    """Loss over tokens: every training step, the fixed text, and the switches of context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        [s.tokens for s in steps],
        [s.loss for s in steps],
        color="tab:gray",
        alpha=0.6,
        linewidth=1,
        label="training batch",
    )
    axes.plot(
        *zip(*measured, strict=True), color="tab:blue", marker="o", linestyle="", label="fixed text"
    )
    low = min((s.loss for s in steps if math.isfinite(s.loss)), default=0.0)
    for t in transitions:
        axes.axvline(t.tokens, color="tab:red", linestyle="--", linewidth=1)
        axes.annotate(
            f"{t.from_context} \u2192 {t.to_context}\n{t.change:+.2%}",
            (t.tokens, low),
            xytext=(4, 0),
            textcoords="offset points",
            color="tab:red",
            fontsize=8,
        )
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title="context stages")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    pyplot.close(figure)
    partial.replace(path)
