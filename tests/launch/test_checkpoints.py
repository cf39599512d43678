"""Run checkpoints: whole or absent, the newest whole one is found (C16)."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farhorizon.configs.errors import RunFailed
from farhorizon.launch.checkpoints import RunState, newest, save, scan
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint


def state(step: int) -> RunState:
    return RunState(step, step * 8, "digest")


def fill(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "state" / "optimizer.bin").write_bytes(b"moments")


def test_newest_complete_one_is_found_and_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, state(step), fill, keep=2)
    complete, torn = scan(tmp_path)
    assert [found.state.step for found in complete] == [2, 3]
    assert torn == []
    found = newest(tmp_path)
    assert found is not None
    assert found.state == RunState(3, 24, "digest")
    assert found.folder.name == "step-000003"


def test_failed_write_leaves_the_old_one_with_keep_1(tmp_path: Path) -> None:
    save(tmp_path, state(1), fill, keep=1)

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    name = re.escape(str(tmp_path / "checkpoints" / "step-000002"))
    with pytest.raises(RunFailed, match=f"^{name}: cannot be written: .*No space left on device$"):
        save(tmp_path, state(2), fail, keep=1)
    complete, torn = scan(tmp_path)
    assert [found.state.step for found in complete] == [1]
    assert torn == []  # a full disk has its space back
    (tmp_path / "checkpoints" / ".saving-step-000002").mkdir()  # as a killed process leaves it
    save(tmp_path, state(2), fill, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("damage", ["truncate run.json", "truncate weights", "lose a file"])
def test_damaged_checkpoints_are_skipped(tmp_path: Path, damage: str) -> None:
    save(tmp_path, state(1), fill, keep=3)
    folder = save(tmp_path, state(2), fill, keep=3)
    if damage == "truncate run.json":
        (folder / "run.json").write_text("")
    elif damage == "truncate weights":
        (folder / "model.safetensors").write_bytes(b"wei")
    else:
        (folder / "state" / "optimizer.bin").unlink()
    found = newest(tmp_path)
    assert found is not None
    assert found.state.step == 1
    assert scan(tmp_path)[1] == [folder]


def test_a_step_that_is_there_is_anothers(tmp_path: Path) -> None:
    first = save(tmp_path, state(1), fill, keep=1)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(RunFailed, match=r"step-000001: another process has saved this step"):
        save(tmp_path, state(1), fill, keep=1)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


SAVER = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from farhorizon.launch.checkpoints import RunState, newest, save
run = Path(sys.argv[1])
def fill(folder):
    folder.mkdir()
    for i in range(20):
        (folder / f"part-{{i}}").write_bytes(b"x" * 4096)
        time.sleep(0.0005)
found = newest(run)
step = found.state.step if found else 0
print("from", step, flush=True)
while True:
    step += 1
    save(run, RunState(step, step, ""), fill, keep=1)
"""


def test_killed_at_any_moment_a_complete_one_remains(tmp_path: Path) -> None:
    """C16: keep = 1, kill -9 at many moments, start again each time."""
    script = tmp_path / "saver.py"
    script.write_text(SAVER.format(path=[p for p in sys.path if p]))
    run = tmp_path / "run"
    last = 0
    for attempt in range(8):
        process = subprocess.Popen(
            [sys.executable, str(script), str(run)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == f"from {last}\n"
        deadline = time.time() + 20
        while newest(run) is None and time.time() < deadline:
            time.sleep(0.005)
        time.sleep(0.0037 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = newest(run)
        assert found is not None
        assert found.state.step >= last
        assert len(list(found.folder.glob("part-*"))) == 20
        last = found.state.step
    assert last > 0


def test_a_full_disk_has_its_space_back(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """The real writer, which has a temporary folder of its own, at each size that is too small."""
    loaded = load_checkpoint(tiny_checkpoint)
    config = loaded.policy.config

    def write(folder: Path) -> None:
        save_checkpoint(folder, loaded.policy, config, loaded.tokenizer, loaded.stage)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in (100, 1000, 20_000, 100_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            with pytest.raises(RunFailed, match="cannot be written"):
                save(tmp_path, state(1), write, keep=1)
            assert list((tmp_path / "checkpoints").iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert newest(tmp_path) is None
    save(tmp_path, state(1), write, keep=1)
    assert newest(tmp_path) is not None
