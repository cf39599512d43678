"""RL with vLLM as the engine: learner, transfer of weights and sampling as users run them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
FARHORIZON = ROOT / ".venv-vllm" / "bin" / "farhorizon"  # made by launch/vllm-env.sh
FAKES = Path(__file__).parents[1] / "fakes.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [FARHORIZON, *arguments],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not FARHORIZON.exists(), reason="no .venv-vllm: bash launch/vllm-env.sh")
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_through_vllm_learns(checkpoint: Path, tmp_path: Path, staleness: int) -> None:
    """An answer of an odd number of characters is worth 1, which few are at first."""
    folder = tmp_path / "run"
    run(
        *("train", "quickstart", f"policy={checkpoint}", f"output={folder}", "context=32"),
        *(
            "env.id=even-v0",
            f"env.plugins=[{FAKES}]",
            "env.kwargs={odd: true}",
            "steps=24",
            "seed=3",
        ),
        *("groups_per_step=4", "group_size=16", "eval_episodes=64", f"max_staleness={staleness}"),
        *("learner.ranks=1", "learner.lr=2e-2", "learner.warmup_steps=0", "rollout.actors=1"),
        *("rollout.engine=vllm", "rollout.vllm.dtype=float32", "rollout.vllm.eager=true"),
        *("rollout.vllm.memory=0.05", "rollout.max_turn_tokens=2", "sync.canary_tokens=16"),
        *(["algorithm.correction=token_truncate"] if staleness else []),
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/success" in row]
    assert [row["step"] for row in steps] == list(range(1, 25))
    assert max(row["learn/staleness_max"] for row in steps if "learn/ratio" in row) == staleness
    if staleness == 0:  # what vLLM samples is what the learner scores, after every update
        assert max(row["learn/log_ratio_max"] for row in steps if "learn/ratio" in row) < 1e-4
    first, last = (mean(row["train/success"] for row in part) for part in (steps[:4], steps[-4:]))
    assert last > first + 0.2
    before, after = (row["eval/success"] for row in rows if "eval/success" in row)
    assert after > before + 0.2
    assert f"{after:.3f}" in run("eval", str(folder), f"env.plugins=[{FAKES}]", "episodes=64")
