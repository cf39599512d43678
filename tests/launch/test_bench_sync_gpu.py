"""bench sync between two processes on GPUs: on one in memory that both share, on two by NCCL."""

from __future__ import annotations

import pytest
import torch

from farhorizon.launch import bench_sync
from farhorizon.policy import PolicyConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bucket_mb", [1, 8])
def test_a_sync_between_two_processes(bucket_mb: int) -> None:
    config = PolicyConfig.tiny(vocab_size=4096, hidden_size=256, num_hidden_layers=4)
    found = bench_sync.run(config, bucket_mb, repeats=3, seed=0)
    assert found["transport"] == ("ipc" if torch.cuda.device_count() == 1 else "collective")
    assert found["bytes"] > bucket_mb << 20 and found["share"] > 0
