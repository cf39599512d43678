"""The run folder: resolved config, metrics, TensorBoard files, readable rollouts, the curve."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase

from ..rollout.types import Group, Trajectory
from .files import finite, json_line, write_whole
from .report import curve_points, draw_curve

CURVE_SECONDS = 10.0  # drawing takes a fraction of a second, small steps less
ROLLOUT_CHARACTERS = 2_000_000  # text kept per step; whole trajectories, the first one always


class Recorder:
    """Writes what a run leaves for people; a resumed run goes on where its checkpoint was.

    ``metrics.jsonl`` has one JSON object per step (``step`` 0 is before training). Rows after
    ``step`` belong to work that is done again and are dropped.
    """

    def __init__(self, folder: Path, config_text: str, step: int) -> None:
        self.folder = folder
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", config_text)
        self._metrics = folder / "metrics.jsonl"
        self.rows = [row for row in read_rows(self._metrics) if row["step"] <= step]
        write_whole(self._metrics, "".join(map(json_line, self.rows)))
        self._drawn = time.monotonic()
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def metrics(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """The row of a step, or more values for the newest one.

        Non-finite numbers become null, which every JSON reader accepts.
        """
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(finite(values))
            write_whole(self._metrics, "".join(map(json_line, self.rows)))
        else:
            self.rows.append({"step": step, **finite(values)})
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json_line(self.rows[-1]))
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)
        self._board.flush()

    def rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        tokenizer: PreTrainedTokenizerBase,
        kind: Literal["step", "heldout"] = "step",
    ) -> None:
        """``rollouts/step-N.jsonl``: one trajectory per line, its text split by who wrote it."""
        lines: list[str] = []
        room = ROLLOUT_CHARACTERS
        for trajectory in (t for group in groups for t in group.trajectories):
            line = json_line(readable(trajectory, tokenizer))
            if lines and len(line) > room:
                break
            lines.append(line)
            room -= len(line)
        file = self.folder / "rollouts" / f"{kind}-{step}.jsonl"
        write_whole(file, "".join(lines))

    def curve(self, force: bool = False) -> None:
        """Redraw ``learning_curve.png``, not more often than every ten seconds unless forced."""
        if force or time.monotonic() > self._drawn + CURVE_SECONDS:
            path = self.folder / "learning_curve.png"
            draw_curve(path, *curve_points(self.rows), self.folder.name)
            self._drawn = time.monotonic()

    def close(self) -> None:
        """Flush what is buffered."""
        self._board.close()


def readable(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A trajectory as JSON data: outcome, then ``text`` as ``[who, text]`` pairs in order."""
    sampled = trajectory.versions[trajectory.versions >= 0]
    return {
        "task": trajectory.task_id,
        "kind": trajectory.kind,
        "sibling": trajectory.sibling,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "stop": str(trajectory.stop),
        "turns": trajectory.turns,
        "tokens": len(trajectory.token_ids),
        "versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else [],
        "error": trajectory.error,
        "text": [
            ["policy" if part.sampled else "given", tokenizer.decode(part.token_ids.tolist())]
            for part in trajectory.segments
        ],
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; lines that are none, as a kill may leave one, are dropped."""
    rows: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
