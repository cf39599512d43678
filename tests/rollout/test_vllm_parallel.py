"""The real engine divided over two workers, where vLLM is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from .test_vllm import PYTHON


def run(python: str | Path, folder: Path, kind: str) -> dict[str, Any]:
    """What the script finds. At its end one of its workers is killed, and it ends as it should."""
    script = Path(__file__).with_name("vllm_parallel_worker.py")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {}
    done = subprocess.run(
        [python, script, folder, kind],
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | hidden,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM logs there
    assert found, done.stdout[-3000:] + done.stderr[-6000:]
    out = json.loads(found[-1])
    assert done.returncode == 1
    assert "vllm: a worker has ended, and its engine with it" in done.stderr
    until = time.monotonic() + 30
    while any(Path(f"/proc/{one}").exists() for one in out["processes"]):
        assert time.monotonic() < until, "a worker outlives its engine"
        time.sleep(0.2)
    return out


def check(out: dict[str, Any], largest: float) -> None:
    """What holds on every device."""
    assert len(set(out["processes"])) == 2 and out["listeners"] == []
    assert max(gap for _, gap in [*out["gaps"], out["new_gaps"]]) < largest
    assert len({tuple(tokens) for tokens in out["group"]}) == 3
    assert out["versions"] == [0] * 5 + [1] * 7
    told = [fault for fault in out["faults"] if fault["name"] is not None]
    for fault in told:
        wanted = f"worker {fault['rank']} of 2: {fault['name']}: what is served is not what the"
        assert fault["told"].startswith(f"weight sync of version 1 refused: {wanted}"), fault
        assert fault["moved"] == 0  # after each of them the old weights are served


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: bash launch/vllm-env.sh")
def test_two_workers_serve_a_dense_policy_together(tmp_path: Path) -> None:
    out = run(PYTHON, tmp_path, "cpu")
    check(out, 1e-4)
    assert len(out["faults"]) == 4 and all(fault["name"] for fault in out["faults"])
    assert out["alone"] == out["group"][1]  # company changes no sample


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: bash launch/vllm-env.sh")
def test_an_actor_whose_worker_is_killed_plays_again(tiny_checkpoint: Path) -> None:
    """The same samples, as one process gives them; nothing of the old engine is left."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("vllm_actor_worker.py"), tiny_checkpoint],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert (out["workers"], out["restarted"], out["left"]) == (2, 1, [])
    assert "starts again, 1 of 2 restarts" in out["told"][0]
    assert out["again"] == out["two"] == out["one"] and len(out["one"]) == 8


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_gpus_serve_a_policy_of_ours_together(tmp_path: Path) -> None:
    if find_spec("vllm") is None and not PYTHON.exists():
        pytest.skip("no vLLM: bash launch/vllm-env.sh")
    out = run(sys.executable if find_spec("vllm") else PYTHON, tmp_path, "gpu")
    print(json.dumps(out))
    check(out, 0.5)
    assert max(mean for mean, _ in [*out["gaps"], out["new_gaps"]]) < 0.05
    seen = {fault["name"] for fault in out["faults"]} - {None}
    assert any(name.endswith("e_score_correction_bias") for name in seen) and len(seen) >= 4
    assert all(rows is not None for rows in out["routes"])
