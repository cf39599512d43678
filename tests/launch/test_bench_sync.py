"""bench sync: what it refuses and prints, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farhorizon.configs.benchmarks import SyncBenchConfig
from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import override_config
from farhorizon.launch import bench_sync
from farhorizon.policy import PolicyConfig
from farhorizon.policy.weights import WeightManifest

TINY = PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["bucket_mb=[]"], "bucket_mb: name at least one size"),
        (["bucket_mb=[0]"], "bucket_mb=[0] must be at least 1"),
        (["repeats=0"], "repeats=0 must be at least 1"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_sync.bench_sync(override_config(SyncBenchConfig(), overrides))
    assert str(caught.value) == message


def test_it_needs_no_ray_and_no_settings() -> None:
    lacking = ["rich", "omegaconf", "ray", "deepspeed", "matplotlib", "vllm", "trl"]
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking}))"
    code += "; import farhorizon.launch.bench_sync"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sync_between_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "config.json"
    folder.write_text(json.dumps(TINY.to_dict()))
    output = tmp_path / "out" / "sync.jsonl"
    config = SyncBenchConfig(policy=str(folder), bucket_mb=(1, 2), repeats=2, output=str(output))
    assert bench_sync.bench_sync(config) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["bucket_mb"] for row in rows] == [1, 2]
    with torch.device("meta"):
        from farhorizon.policy import Policy

        size = WeightManifest.of(Policy(TINY).state_dict()).nbytes
    for row in rows:
        assert row["transport"] == "collective" and row["benchmark"] == "sync"
        assert row["bytes"] == size and row["share"] == row["link"] / row["moving"] > 0
        assert row["sync"] > row["proof"] > 0 and row["swap"] > row["canary"] > 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 and "collective, 0.00 GiB in buckets of 1 MB: " in told[0]
    assert "% of it (" in told[0] and "reached: 60%)" in told[0]


def test_a_process_that_fails_ends_it_in_one_line() -> None:
    with pytest.raises(RunFailed, match=r"^bench sync: a process failed with .*") as caught:
        bench_sync.run(TINY, 1, 1, seed=-(2**70))
    assert "\n" not in str(caught.value)
