"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """Shows phase, step, tokens per second, success and time left; keeps the time of each phase.

    On a terminal the line is live and finished steps scroll by above it. Without one every step
    is one plain line, so that a log file stays readable.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self.total, self.done = total, done
        self.seconds: dict[str, float] = {}
        self._stream = stream or sys.stdout
        self._step_seconds: list[float] = []
        self._live: Progress | None = None
        if self._stream.isatty():
            self._live = Progress(
                TextColumn("{task.fields[phase]:<9}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed}/{task.total}  {task.fields[status]}"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                refresh_per_second=2,
                transient=True,
            )
            self._task = self._live.add_task(
                "run", total=total, completed=done, phase="", status=""
            )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what is going on and adds its duration to `seconds`."""
        if self._live is not None:
            self._live.update(self._task, phase=name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take_seconds(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def line(self, text: str) -> None:
        """A message that stays."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, step: int, seconds: float, tokens_per_second: float, success: float) -> None:
        """One finished step; ``seconds`` without evaluation, ``success`` of its own episodes."""
        self.done = step
        self._step_seconds.append(seconds)
        recent = self._step_seconds[-8:]
        left = sum(recent) / len(recent) * (self.total - step)
        status = f"{tokens_per_second:,.0f} tokens/s  success {success:.2f}  left {_minutes(left)}"
        if self._live is not None:
            self._live.update(self._task, completed=step, status=status)
        self.line(f"step {step}/{self.total}  {seconds:.1f} s  {status}")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
