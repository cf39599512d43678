"""vLLM itself gives its memory to others on its GPU, and samples as if it had never slept."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_vllm import PYTHON

WORKER = Path(__file__).with_name("vllm_sleep_worker.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not PYTHON.exists() and importlib.util.find_spec("vllm") is None,
        reason="no vLLM: bash launch/vllm-env.sh",
    ),
]


@pytest.mark.parametrize("graphs", ["eager", "graphs"])
def test_memory_is_given_away_and_taken_back(tmp_path: Path, graphs: str) -> None:
    done = subprocess.run(
        [str(PYTHON) if PYTHON.exists() else sys.executable, str(WORKER), str(tmp_path), graphs],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    out = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(out))
    same = {"tokens": 0, "logprob": 0.0, "score": 0.0, "reused": 0}
    assert out["awake"] == same and out["apart"]["tokens"] > 6
    # its share, less what no sleep frees: context, graphs, what torch holds outside of the pool
    assert out["freed"] > 0.8 * out["memory"] * out["total"] - (2 << 30)
    assert abs(out["back"]) < 1 << 30
    for name in ("updated", "skipped", "kept"):
        assert out[name] == same, name
    assert out["versions"] == [3]
    assert "weight sync of version 4 refused: canary token" in out["refused"]
