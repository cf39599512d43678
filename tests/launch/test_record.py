"""The run folder: one JSON object per step, readable rollouts, resume without duplicates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from farhorizon.envs.types import StopReason
from farhorizon.launch.files import json_line
from farhorizon.launch.record import Recorder, read_rows
from farhorizon.policy.tokenizer import load_tokenizer
from farhorizon.rollout.types import Group, Segment, Trajectory

EMPTY = np.zeros(0, np.float32), np.zeros(0, np.int32)


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_json_for_every_reader(tmp_path: Path) -> None:
    values = {"a": float("nan"), "b": -float("inf"), "c": 1, "d": "nan", "e": 0.5}
    assert json_line(values) == '{"a": null, "b": null, "c": 1, "d": "nan", "e": 0.5}\n'


def test_one_row_per_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "seed: 0\n", 0)
    recorder.metrics(0, {"eval/success": 0.25})
    recorder.metrics(1, {"train/success": 0.5, "learn/kl": float("nan")})
    recorder.metrics(1, {"eval/success": 0.75})
    recorder.close()
    assert rows(tmp_path) == [
        {"step": 0, "eval/success": 0.25},
        {"step": 1, "train/success": 0.5, "learn/kl": None, "eval/success": 0.75},
    ]
    assert (tmp_path / "config.yaml").read_text() == "seed: 0\n"
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_resume_drops_rows_that_are_done_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "", 0)
    for step in range(4):
        recorder.metrics(step, {"x": step})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')  # torn by a kill
    recorder = Recorder(tmp_path, "", 2)
    recorder.metrics(3, {"x": 30})
    recorder.close()
    assert [(r["step"], r["x"]) for r in rows(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_lines_that_are_no_rows_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n[1]\n5\n{"stage": 2}\n\xff\n{"step": "3"}\n{"step": 4}\n')
    assert [row["step"] for row in read_rows(path)] == [1, 4]


def test_rollouts_are_readable(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    given = np.array(tokenizer.encode(" red", add_special_tokens=False), np.int32)
    trajectory = Trajectory(
        task_id="t",
        sibling=1,
        segments=(
            Segment(given, False, *EMPTY),
            Segment(given, True, np.full(1, -0.5, np.float32), np.full(1, 7, np.int32)),
        ),
        turn_rewards=(1.0,),
        reward=1.0,
        success=True,
        stop=StopReason.TERMINATED,
        turns=1,
        kind="hard",
    )
    recorder = Recorder(tmp_path, "", 0)
    recorder.rollouts(3, [Group("t", (trajectory, trajectory))], tokenizer)
    lines = (tmp_path / "rollouts" / "step-3.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == {
        "task": "t",
        "kind": "hard",
        "sibling": 1,
        "reward": 1.0,
        "success": True,
        "stop": "terminated",
        "turns": 1,
        "tokens": 2,
        "versions": [7, 7],
        "error": None,
        "text": [["given", " red"], ["policy", " red"]],
    }
    monkeypatch.setattr("farhorizon.launch.record.ROLLOUT_CHARACTERS", 10)
    recorder.rollouts(4, [Group("t", (trajectory, trajectory))], tokenizer)
    recorder.close()
    lines = (tmp_path / "rollouts" / "step-4.jsonl").read_text().splitlines()
    assert len(lines) == 1
