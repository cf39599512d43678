"""learner.deterministic on a GPU: updates from one start end in the same bits, see
``deterministic_worker.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farhorizon.rl.deterministic import WORKSPACE

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).parent / "deterministic_worker.py"


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_updates_from_one_start_have_the_same_bits(algorithm: str, checkpointing: str) -> None:
    """Within a process, and in another: an update by tokens, and one with sums over sequences."""
    environment = {name: value for name, value in os.environ.items() if name != WORKSPACE}
    found: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(WORKER), algorithm, checkpointing],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout
        found += [line for line in done.stdout.splitlines() if line.startswith("digest ")]
    assert len(found) == 6 and len(set(found)) == 1
