"""RL with a vLLM engine over two GPUs, as users run it: the learner on the CPU, or on a third."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from farhorizon.envs.echo import WORDS
from farhorizon.launch.plan import read_policy
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import save_checkpoint
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer

pytestmark = pytest.mark.gpu
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"  # made by launch/vllm-env.sh
FAKES = Path(__file__).parents[1] / "fakes.py"
PROGRAM = "import sys; from farhorizon.launch.cli import main; sys.exit(main(sys.argv[1:]))"
VOCABULARY = 288
# No NVLink multicast: not every machine that lends GPUs bears it.
QUIET = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.skipif(not PYTHON.exists() and find_spec("vllm") is None, reason="no vLLM here")
@pytest.mark.parametrize(("learner", "transport"), [(0, "objects"), (1, "collective")])
def test_a_run_with_an_engine_over_two_gpus(tmp_path: Path, learner: int, transport: str) -> None:
    """What two GPUs sample together is what the learner scores, after every update."""
    if torch.cuda.device_count() < 2 + learner:
        pytest.skip(f"fewer than {2 + learner} GPUs")
    tokenizer = train_tokenizer([], VOCABULARY, [f" {word}" for word in WORDS])
    sizes = read_policy("small")[0].to_dict() | {"vocab_size": VOCABULARY}
    config = PolicyConfig.from_dict(sizes)
    torch.manual_seed(0)
    stage = StageRecord(512, (512,), 1000, tokenizer_sha256(tokenizer))
    policy = save_checkpoint(tmp_path / "small", Policy(config), config, tokenizer, stage)
    folder = tmp_path / "run"
    done = subprocess.run(
        [
            *(str(PYTHON) if PYTHON.exists() else sys.executable, "-c", PROGRAM),
            *("train", "quickstart", f"policy={policy}", f"output={folder}", "context=96"),
            *("env.id=even-v0", f"env.plugins=[{FAKES}]", "env.kwargs={odd: true}", "seed=3"),
            *("steps=4", "groups_per_step=4", "group_size=8", "eval_episodes=32", "save_every=0"),
            *("learner.ranks=1", f"learner.gpus={learner}", "learner.lr=3e-4", "learner.decay=0"),
            *("rollout.actors=1", "rollout.gpus=2", "rollout.vllm.tensor_parallel=2"),
            *("rollout.engine=vllm", "rollout.vllm.memory=0.2", "rollout.vllm.eager=true"),
            *("rollout.max_turn_tokens=2", f"sync.transport={transport}"),
        ],
        env=os.environ | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print("\n".join(map(json.dumps, rows)))
    steps = [row for row in rows if "train/success" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    learned = [row for row in steps if not row["train/update_skipped"]]
    assert learned and max(row["learn/log_ratio_abs"] for row in learned) < 0.05
    assert all(row["sync/prove"] > 0 for row in learned)
