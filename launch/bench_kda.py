"""``farhorizon bench kda``: KDA on this GPU, beside what else is installed.

Peers are flash-linear-attention and FlashKDA (the extension that vLLM ships, forward only); one
that is not installed is left out and named. `farhorizon.launch.kda_measure` says how a figure comes
about. With an ``output`` every shape is written as soon as it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from ..configs.benchmarks import KdaBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from .files import sole_user
from .kda_measure import Bench
from .kda_peers import DECODERS, check_peers, find_sides
from .kda_report import line, tables, write_report
from .kda_rows import Row, append_rows, parse_shape
from .measure import CudaMeter, copy_speed, versions


def bench_kda(config: KdaBenchConfig) -> int:
    """Print the tables and add to those in ``output``; returns 0. RunFailed if a result of ours is
    wrong, or if memory does not suffice."""
    check_bounds(config)
    check_peers(config.peers)
    shapes, steps = shapes_of(config)
    if not torch.cuda.is_available():
        raise UserError("bench kda needs a GPU, and torch sees none")
    folder = None if config.output is None else Path(config.output).absolute()
    rows: list[Row] = []

    def take(found: list[Row]) -> None:
        rows.extend(found)
        print(*map(line, found), sep="\n", flush=True)
        if folder is not None:
            write_report(folder, append_rows(folder, found))

    with nullcontext() if folder is None else sole_user(folder):
        if folder is not None:
            append_rows(folder, [])  # says now what would else be said after the work
        bench = Bench(
            find_sides(config.peers),
            DECODERS,
            CudaMeter(),
            partial(
                Row,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                device=torch.cuda.get_device_name(),
                versions=versions(),
            ),
            config.repeats,
            config.seed,
        )
        run(bench, shapes, steps, config.forward_only_from, take)
    print(tables(rows))
    if folder is not None:
        print(f"added to {folder}")
    return 0


def shapes_of(config: KdaBenchConfig) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Length and heads of sequences, every length of a head count before the next; sequences and
    heads of decode steps. UserError if there is none or one cannot be read."""
    shapes = [(length, heads) for heads in config.heads for length in config.lengths]
    steps = [parse_shape(text, "decode", "SEQUENCES") for text in config.decode]
    if not shapes and not steps:
        raise UserError("nothing to measure: name lengths and heads, or decode shapes")
    return list(dict.fromkeys(shapes)), list(dict.fromkeys(steps))


def run(
    bench: Bench,
    shapes: list[tuple[int, int]],
    steps: list[tuple[int, int]],
    forward_only_from: int,
    take: Callable[[list[Row]], None],
) -> None:
    """Measure one shape after another; ``take`` gets the rows of each."""
    what = ""
    try:
        for length, heads in shapes:
            what = f"lengths={length} heads={heads}"
            take(bench.sequence(length, heads, backward=length < forward_only_from))
        what = "the copy that decode is compared with"
        speed = copy_speed(bench.meter, bench.repeats) if steps else 0.0
        for sequences, heads in steps:
            what = f"decode={sequences}x{heads}"
            take(bench.decode(sequences, heads, speed))
    except torch.OutOfMemoryError:
        raise RunFailed(
            f"{what}: the GPU's memory does not suffice; leave it out, or lower forward_only_from"
        ) from None
