"""What ``farhorizon bench kda`` shows of its rows: tables in Markdown, and bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..configs.errors import UserError
from .kda_rows import OURS, Row, newest, ratio, shapes_of, write_text

ERRORS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta")
NOTES = """\
Milliseconds are medians over replays of a CUDA graph of the whole call: gate, L2 norm and the
sigmoid of beta included, launches from Python not. In brackets: how many times as long as ours in
the same invocation. Peak: of a plain forward and backward, with its inputs. First call: seconds of
the first forward (and backward, where that is measured) at the shape; * is the first of its
process, with whatever was in Triton's cache on disk: set TRITON_CACHE_DIR to an empty folder to see
compilation.

Errors: relative, beside the token recurrence in fp64 on the same bf16 inputs.

Decode: one token of every sequence, states in fp32 that lie outside of the L2 cache; bytes are
those of inputs, outputs, and states read and written once; the copy is of 1 GiB on the device."""


def line(row: Row) -> str:
    """What was measured, for people who wait for the tables."""
    both = "" if row.both_ms is None else f", {row.both_ms:.3f} ms with backward"
    return f"  {row.name:24} {row.forward_ms:.4f} ms{both}"


def write_report(folder: Path, rows: Sequence[Row]) -> None:
    """``kda.md`` and ``kda.png`` of all rows; UserError if they cannot be written."""
    write_text(folder / "kda.md", f"# KDA\n\n{tables(rows)}\n\n{NOTES}\n")
    draw_bars(folder / "kda.png", rows)


def tables(rows: Sequence[Row]) -> str:
    """Speed, errors and decode steps: of every implementation and shape the newest row."""
    last = newest(rows)
    sequences = [row for row in last if row.kind == "sequence"]
    steps = [row for row in last if row.kind == "decode"]
    speed = [
        (
            *(row.shape, row.name, _time(row, rows, "forward_ms"), _time(row, rows, "both_ms")),
            *(_text(row.peak_gib, ".1f"), _first(row), *_origin(row)),
        )
        for row in sequences
    ]
    errors = [
        (row.shape, inputs, row.name, *(_error(found, name) for name in ERRORS))
        for shape in shapes_of(sequences)
        for inputs in dict.fromkeys(i for r in sequences if r.shape == shape for i in r.errors)
        for row in sequences
        if row.shape == shape and (found := row.errors.get(inputs)) is not None
    ]
    decode = [
        (
            *(row.shape, row.name, f"{row.forward_ms:.4f}", _text(row.gb_per_s, ".0f")),
            _text(row.copy_share, ".0%"),
            *(_error(row.errors.get("random", {}), name) for name in ("o", "state")),
            *_origin(row),
        )
        for row in steps
    ]
    parts = [
        (speed, "tokens x heads,,forward ms,forward + backward ms,peak GiB,first call s"),
        (errors, f"tokens x heads,log decays,error of,{','.join(ERRORS)}"),
        (decode, "sequences x heads,decode,ms,GB/s,of a copy,error of o,of the state"),
    ]
    origin = ",date,device"
    return "\n\n".join(
        _table(f"{titles}{'' if lines is errors else origin}".split(","), lines)
        for lines, titles in parts
        if lines
    )


def draw_bars(path: Path, rows: Sequence[Row]) -> None:
    """Milliseconds of forward and of both passes by shape, as PNG; a bar for each implementation,
    and on those of peers how many times as long as ours of the same invocation they took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = [row for row in newest(rows) if row.kind == "sequence"]
    panels: list[tuple[Literal["forward_ms", "both_ms"], str]] = [
        ("forward_ms", "forward"),
        ("both_ms", "forward + backward"),
    ]
    shown = [panel for panel in panels if any(getattr(row, panel[0]) is not None for row in last)]
    if not shown:
        return
    wide = max(6.0, 1.3 * len(shapes_of(last)))
    figure, axes = pyplot.subplots(
        len(shown), figsize=(wide, 3.6 * len(shown)), dpi=120, squeeze=False
    )
    for (key, title), place in zip(shown, axes[:, 0], strict=True):
        _panel(place, last, rows, key)
        place.set(ylabel="ms", title=f"KDA, {title}, tokens x heads", yscale="log")
        place.margins(y=0.15)
        place.grid(alpha=0.3, axis="y")
        place.set_axisbelow(True)
        place.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    try:
        figure.savefig(partial)
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"output {path}: cannot be written ({error.strerror}); choose another output"
        ) from None
    finally:
        pyplot.close(figure)


def _panel(
    axes: Any, last: Sequence[Row], rows: Sequence[Row], key: Literal["forward_ms", "both_ms"]
) -> None:
    """One bar for every row that has the figure, at its shape's place."""
    there = [row for row in last if getattr(row, key) is not None]
    shapes = shapes_of(there)
    everyone = sorted({row.name for row in last}, key=lambda name: (name != OURS, name))
    names = [name for name in everyone if any(row.name == name for row in there)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        mine = [row for row in there if row.name == name]
        offset = (index - (len(names) - 1) / 2) * width
        bars = axes.bar(
            [shapes.index(row.shape) + offset for row in mine],
            [getattr(row, key) for row in mine],
            width,
            label=name,
            color=f"C{everyone.index(name)}",
        )
        times = [ratio(row, rows, key) for row in mine]
        labels = ["" if r is None else f"{r:.2f}x" for r in times]
        axes.bar_label(bars, labels, fontsize=7, padding=1)
    axes.set_xticks(range(len(shapes)), shapes, fontsize=8)


def _table(titles: Iterable[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns also stand below each other as plain text."""
    head = list(titles)
    widths = [max(3, *(len(line[i]) for line in (head, *lines))) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(f"{x:{width}}" for x, width in zip(line, widths, strict=True)) + " |"
        for line in (head, rule, *lines)
    )


def _time(row: Row, rows: Sequence[Row], key: Literal["forward_ms", "both_ms"]) -> str:
    times = ratio(row, rows, key)
    return _text(getattr(row, key), ".3f") + ("" if times is None else f" ({times:.2f}x)")


def _first(row: Row) -> str:
    return _text(row.first_s, ".2f") + ("*" if row.first_in_process else "")


def _origin(row: Row) -> tuple[str, str]:
    return row.date[:10], row.device


def _error(errors: dict[str, float | None], name: str) -> str:
    if name not in errors:
        return "-"
    found = errors[name]
    return "nan" if found is None else f"{found:.1e}"


def _text(value: float | None, style: str) -> str:
    return "-" if value is None else f"{value:{style}}"
