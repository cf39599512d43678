"""RL on one GPU that learner and rollout share, through each engine, as users run it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from farhorizon.envs.echo import WORDS
from farhorizon.launch.plan import read_policy
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import save_checkpoint
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"  # made by launch/vllm-env.sh
FAKES = Path(__file__).parents[1] / "fakes.py"
PROGRAM = "import sys; from farhorizon.launch.cli import main; sys.exit(main(sys.argv[1:]))"
VOCABULARY = 288
VLLM = [
    *("rollout.engine=vllm", "rollout.vllm.memory=0.2", "rollout.vllm.eager=true"),
    *("learner.dtype=bfloat16", "rollout.concurrency=64"),
]
WAYS = {"native": [], "vllm": VLLM, "vllm that sleeps": [*VLLM, "rollout.vllm.sleep=true"]}
LOST = not PYTHON.exists() and importlib.util.find_spec("vllm") is None
NO_VLLM = pytest.mark.skipif(LOST, reason="no vLLM: bash launch/vllm-env.sh")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy of the preset's sizes and few tokens."""
    tokenizer = train_tokenizer([], VOCABULARY, [f" {word}" for word in WORDS])
    sizes = read_policy("small")[0].to_dict() | {"vocab_size": VOCABULARY}
    config = PolicyConfig.from_dict(sizes)
    torch.manual_seed(0)
    stage = StageRecord(512, (512,), 1000, tokenizer_sha256(tokenizer))
    folder = tmp_path_factory.mktemp("policy") / "small"
    return save_checkpoint(folder, Policy(config), config, tokenizer, stage)


def steps_of(folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """The rows of steps, and held-out success before and after."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval/success"] for row in rows if "eval/success" in row]
    return [row for row in rows if "train/success" in row], held_out


@pytest.mark.parametrize(
    "way", ["native", *(pytest.param(way, marks=NO_VLLM) for way in list(WAYS)[1:])]
)
def test_a_run_on_one_gpu_learns(small: Path, tmp_path: Path, way: str) -> None:
    """An answer of an odd number of characters is worth 1, which few are at first."""
    folder, own = tmp_path / "run", way != "native" and PYTHON.exists()
    done = subprocess.run(
        [
            *(str(PYTHON) if own else sys.executable, "-c", PROGRAM, "train", "quickstart"),
            *(f"policy={small}", f"output={folder}", "context=96", "steps=12", "seed=3"),
            *("env.id=even-v0", f"env.plugins=[{FAKES}]", "env.kwargs={odd: true}"),
            *("groups_per_step=4", "group_size=16", "eval_episodes=64", "save_every=0"),
            *("learner.ranks=1", "learner.gpus=0.5", "learner.lr=3e-4", "learner.decay=0"),
            *("rollout.actors=1", "rollout.gpus=0.5", "rollout.max_turn_tokens=2"),
            *("sync.transport=ipc", *WAYS[way]),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    steps, (before, after) = steps_of(folder)
    print("\n".join(json.dumps(row) for row in steps))
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert after > before + 0.15
    learned = [row for row in steps if not row["train/update_skipped"]]
    assert len(learned) > 8
    # what was sampled is what the learner scores, after every update
    bound = 1e-4 if way == "native" else 0.05
    assert max(row["learn/log_ratio_abs"] for row in learned) < bound
    assert mean(row["sync/bytes_per_second"] for row in learned) > 1e9
