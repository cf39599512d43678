"""Experts divided over two ranks give what whole ones give: gloo on a CPU, NCCL on two GPUs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("spread_worker.py")


def play(device: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), port, device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0 and "all right" in out, errors[-2000:]


def test_divided_experts_are_whole_ones() -> None:
    """Even and uneven numbers of tokens, none on a rank, all for one expert, and all experts."""
    play("cpu")


@pytest.mark.gpu
def test_divided_experts_are_whole_ones_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    play("cuda")
