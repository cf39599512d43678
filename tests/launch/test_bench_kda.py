"""bench kda: what it refuses, what it checks before it measures, and what becomes of its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from farhorizon.configs.benchmarks import KdaBenchConfig
from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import override_config
from farhorizon.launch import kda_measure
from farhorizon.launch.bench_kda import bench_kda, run, shapes_of
from farhorizon.launch.kda_measure import (
    Bench,
    compare_step,
    draw,
    error_lines,
    judge,
    judge_step,
    step_bytes,
)
from farhorizon.launch.kda_peers import DECODERS, FLA, Decoder, Inputs, Side, ours
from farhorizon.launch.kda_report import tables, write_report
from farhorizon.launch.kda_rows import OURS, Row, append_rows, newest, ratio, read_rows

Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class FakeMeter:
    """The CPU; a call takes as many milliseconds as ``tokens`` says for whoever it runs."""

    calls: list[str] = field(default_factory=list)  # who ran while it looked, in order
    took: dict[str, float] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    device: str = "cpu"

    def wait(self) -> None:
        pass

    def free(self) -> None:
        pass

    def milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        self.running.clear()
        call()
        who = self.running[0] if self.running else ""
        self.calls.append(who)
        return self.took.get(who, 2.0)

    def plain_milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        return self.milliseconds(call, repeats)

    def growth(self, call: Callable[[], object]) -> int:
        call()
        return 2**30


def side(
    meter: FakeMeter,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out,
    trains: bool = True,
) -> Side:
    """Our own computation under a name, with its outputs changed."""

    def call(inputs: Inputs, final: bool) -> Result:
        meter.running.append(name)
        out, state = ours(inputs, final)
        return change(out), state

    return Side(name, call, trains)


def bench(meter: FakeMeter, sides: Sequence[Side]) -> Bench:
    origin = partial(Row, date="2026-01-02T03:04:05+00:00", device="CPU", versions={"torch": "2"})
    return Bench(sides, DECODERS, meter, origin, repeats=1, seed=0)


def row(name: str, shape: str = "64x2", date: str = "2026-01-01T00:00:00", **rest: Any) -> Row:
    values: dict[str, Any] = {"kind": "sequence", "forward_ms": 1.0, **rest}
    return Row(date=date, device="GPU", versions={}, shape=shape, name=name, **values)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["peers=[fla, trl]"], "peers: 'trl' is none; known: fla, flashkda, or [] for none"),
        (["decode=[6x]"], "decode: '6x' is not SEQUENCESxHEADS, for example 64x96"),
        (["decode=[0x64x2]"], "decode: '0x64x2' is not SEQUENCESxHEADS, for example 64x96"),
        (["heads=[]", "decode=[]"], "nothing to measure: name lengths and heads, or decode shapes"),
        (["lengths=[8, 0]"], "lengths=[8, 0] must be at least 1"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_kda(override_config(KdaBenchConfig(), overrides))
    assert str(caught.value) == message


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs a GPU"):
        bench_kda(KdaBenchConfig(output=str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []


def test_a_head_count_is_done_before_the_next() -> None:
    config = KdaBenchConfig(heads=(4, 2, 4), lengths=(8, 16), decode=("3x5",))
    assert shapes_of(config) == ([(8, 4), (16, 4), (8, 2), (16, 2)], [(3, 5)])


def test_the_measuring_part_needs_torch_and_triton_alone() -> None:
    lacking = ["rich", "omegaconf", "yaml", "ray", "transformers", "matplotlib", "gymnasium"]
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking}))"
    code += "; import farhorizon.launch.bench_kda"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sides_take_turns_and_the_first_call_is_marked() -> None:
    meter = FakeMeter(took={OURS: 2.0, FLA: 5.0, "F": 3.0})
    sides = [side(meter, OURS), side(meter, FLA), side(meter, "F", trains=False)]
    one = bench(meter, sides)
    rows = one.sequence(70, 2, backward=True)
    turn, back = [OURS, OURS, FLA, FLA, "F"], ["F", FLA, FLA, OURS, OURS]
    assert meter.calls == [*turn, *back, *turn]
    assert [(r.name, r.forward_ms, r.both_ms) for r in rows] == [
        (OURS, 2.0, 2.0),
        (FLA, 5.0, 5.0),
        ("F", 3.0, None),
    ]
    assert all(r.first_in_process and r.first_s is not None for r in rows)
    assert rows[2].peak_gib is None and rows[0].peak_gib is not None and rows[0].peak_gib > 1
    assert set(rows[0].errors["near -5"]) == {"o", "state", "dq", "dk", "dv", "dg", "dbeta"}
    assert set(rows[2].errors["random"]) == {"o", "state"}
    again = one.sequence(70, 2, backward=False)
    assert not any(r.first_in_process for r in again)
    assert [r.both_ms for r in again] == [None] * 3


def test_the_end_of_a_long_sequence_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """States from before the part that is compared do not count; a mistake in its last token does,
    for a peer as a figure."""
    monkeypatch.setattr(kda_measure, "CHECKED_TOKENS", 96)
    meter = FakeMeter()

    def spoil(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, :-1], out[:, -1:] * 2], 1)

    good, bad = bench(meter, [side(meter, OURS), side(meter, FLA, spoil)]).sequence(
        200, 3, backward=True
    )
    found = [x for errors in good.errors.values() for x in errors.values()]
    assert all(x is not None and x < 4e-3 for x in found)
    for name in ("o", "dq", "dv"):
        assert (bad.errors["random"][name] or 0) > 0.05


def test_nothing_is_timed_when_ours_is_wrong() -> None:
    meter = FakeMeter()
    wrong = side(meter, OURS, lambda out: out * 1.02)
    with pytest.raises(RunFailed, match=r"^70x2, log decays random: o is off by 2.*allowed 4e-03$"):
        bench(meter, [wrong, side(meter, FLA)]).sequence(70, 2, backward=True)
    assert meter.calls == []


def test_bounds_differ_by_quantity_and_inputs() -> None:
    judge("8x1", "random", {"o": 3.9e-3, "state": 3.9e-3, "dg": 5.5e-3})
    judge("8x1", "near -5", {"dg": 4.9e-3, "dq": 5.5e-3})
    for inputs, name, error in (
        ("random", "o", 4.1e-3),
        ("random", "dg", 6.1e-3),
        ("near -5", "dg", 5.1e-3),
        ("random", "state", float("nan")),
    ):
        with pytest.raises(RunFailed, match=f"{name} is off"):
            judge("8x1", inputs, {name: error})
    with pytest.raises(RunFailed, match="recurrent_kda: state is off"):
        judge_step("recurrent_kda", {"o": 1e-3, "state": 1e-4})


def test_what_a_peer_does_better_is_said() -> None:
    found = {OURS: {"o": 3e-3, "dg": 3e-3}, FLA: {"o": 2e-3, "dg": 3e-3}}
    assert error_lines("random", found)[-1].endswith(
        "worse than " + FLA + " in o 3.00e-03 (theirs 2.00e-03)"
    )
    assert len(error_lines("random", found | {FLA: {"o": 3e-3, "dg": float("nan")}})) == 2


def test_a_decode_step_is_checked_then_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_measure, "ROTATION", 1)  # two states
    meter = FakeMeter()
    (found,) = bench(meter, []).decode(3, 4, copy_speed=1.0)
    inputs = {name: x.detach() for name, x in draw(1, 4, 0, "cpu", 3).items()}
    state = torch.ones(3, 4, 128, 128)
    small = 3 * 4 * (5 * 128 + 1) * 2 + 4 * 129 * 4  # q, k, v, g, o and beta; A_log and dt_bias
    assert step_bytes(inputs, state) == 2 * 3 * 4 * 128 * 128 * 4 + small
    assert (found.shape, found.forward_ms) == ("3x4", 1.0)  # 2 ms for two states
    assert found.gb_per_s == pytest.approx(step_bytes(inputs, state) / 1e6)
    assert found.copy_share == found.gb_per_s

    def in_place(given: Inputs, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, after = DECODERS[0].step(given, start)
        return out, start.copy_(after)

    assert compare_step(Decoder("in place", in_place), inputs, state)["state"] < 1e-6
    assert torch.equal(state, torch.ones_like(state))
    late = Decoder("late", lambda given, start: (DECODERS[0].step(given, start)[0], start))
    assert compare_step(late, inputs, state)["state"] > 0.1


def test_memory_that_does_not_suffice_is_one_line() -> None:
    meter = FakeMeter()

    def full(inputs: Inputs, final: bool) -> Result:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    taken: list[Row] = []
    sides = [side(meter, OURS), Side(FLA, full, trains=True)]
    with pytest.raises(RunFailed, match=r"^lengths=70 heads=2: the GPU's memory does not suffice"):
        run(bench(meter, sides), [(70, 2)], [], 100, taken.extend)
    run(bench(meter, sides[:1]), [(70, 2), (64, 2)], [], 70, taken.extend)
    assert [(r.shape, r.both_ms is None) for r in taken] == [("70x2", True), ("64x2", False)]


def test_the_newest_row_wins_and_ratios_stay_within_an_invocation(tmp_path: Path) -> None:
    """Ours was measured again, twice as fast, without the peer."""
    first = [row(OURS, forward_ms=2.0, both_ms=4.0), row(FLA, forward_ms=6.0, both_ms=16.0)]
    first += [row(OURS, "128x2"), row("FlashKDA", "128x2", forward_ms=1.5)]
    later = [row(OURS, date="2026-01-02T00:00:00", forward_ms=1.0), row(OURS, "32x16")]
    append_rows(tmp_path, first)
    rows = append_rows(tmp_path, later)
    assert rows == [*first, *later] == read_rows(tmp_path)
    last = newest(rows)
    assert [(r.shape, r.name) for r in last] == [
        ("64x2", OURS),
        ("64x2", FLA),
        ("128x2", OURS),
        ("128x2", "FlashKDA"),
        ("32x16", OURS),
    ]
    assert last[0].forward_ms == 1.0
    assert [ratio(r, rows, "forward_ms") for r in last] == [None, 3.0, None, 1.5, None]
    assert [ratio(r, rows, "both_ms") for r in last] == [None, 4.0, None, None, None]
    text = tables(rows)
    assert "6.000 (3.00x)" in text and "16.000 (4.00x)" in text and "2.000" not in text


def test_the_folder_has_rows_tables_and_bars(tmp_path: Path) -> None:
    errors: dict[str, dict[str, float | None]] = {"random": {"o": 2.5e-3, "dg": float("nan")}}
    step = row("recurrent_kda", "32x64", kind="decode", gb_per_s=4000.0, copy_share=0.93)
    rows = [
        row(OURS, first_s=12.5, first_in_process=True, errors=errors, both_ms=3.0),
        row(FLA, forward_ms=4.0),
        replace(step, errors={"random": {"o": 1e-3, "state": 1e-7}}),
    ]
    write_report(tmp_path, append_rows(tmp_path, rows))
    text = (tmp_path / "kda.md").read_text()
    for part in (
        "12.50*",
        "| 2.5e-03 |",
        "| nan ",
        "4.000 (4.00x)",
        "| 4000 |",
        "| 93%",
        "1.0e-07",
    ):
        assert part in text, part
    assert (tmp_path / "kda.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "kda.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["errors"] == {"random": {"o": 2.5e-3, "dg": None}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kda.jsonl", "kda.md", "kda.png"]
    write_report(tmp_path, rows[2:])  # decode alone: nothing to draw


def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path: Path) -> None:
    good = append_rows(tmp_path, [row(OURS)])
    file = tmp_path / "kda.jsonl"
    for wrong in (
        "{",
        "[1]",
        '{"date": "today"}',
        json.dumps({**json.loads(file.read_text()), "shape": "wide"}),
    ):
        whole = file.read_text()
        file.write_text(f"{whole}{wrong}\n")
        with pytest.raises(UserError, match="line 2 is no row of bench kda; remove it"):
            append_rows(tmp_path, good)
        assert file.read_text() == f"{whole}{wrong}\n"  # nothing is lost
        file.write_text(whole)
    for name in ("kda.md", "kda.png"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=rf"^output .*{name}: cannot be written \("):
            write_report(tmp_path, good)
        (tmp_path / name).rmdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        append_rows(tmp_path, [])
