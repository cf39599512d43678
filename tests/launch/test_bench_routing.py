"""The simulated router: what it is given, and that both ends of the window cost balance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from farhorizon.configs.benchmarks import RoutingBenchConfig
from farhorizon.configs.errors import UserError
from farhorizon.launch import cli
from farhorizon.launch.bench_routing import Drift, Thresholds, balanced, settings, simulate

SMALL = RoutingBenchConfig(
    experts=(8,), k=2, batches=(512,), windows=(16, 4096, 10**6), sequence=8, drift=0.3, steps=30
)


def test_the_middle_of_one_list_goes_with_all_of_the_other() -> None:
    config = RoutingBenchConfig(experts=(8, 16, 32), batches=(1, 2, 3))
    assert settings(config) == [(8, 2), (16, 2), (32, 2), (16, 1), (16, 3)]


def test_a_router_that_does_not_drift_keeps_its_weights_and_a_drifting_one_its_size() -> None:
    still, moving = (Drift(8, RoutingBenchConfig(drift=drift)) for drift in (0.0, 0.5))
    before = still.weight.clone()
    for _ in range(50):
        still.advance()
        moving.advance()
    assert torch.equal(still.weight, before) and not torch.equal(moving.weight, before)
    assert float(moving.topics.std()) == pytest.approx(1.0, abs=0.1)


def test_balanced_thresholds_balance() -> None:
    drift = Drift(8, RoutingBenchConfig())
    scores = drift.fresh()
    unbalanced = Thresholds(torch.zeros(8), 2, 512, 512)
    own = Thresholds(balanced(scores, 2), 2, 512, 512)
    assert unbalanced.load(scores) > 1.1
    assert own.load(scores) == pytest.approx(1.0, abs=0.02)


def test_a_window_below_the_batch_sees_its_first_tokens_alone() -> None:
    scores = Drift(8, SMALL).scores(512)
    few, same = (Thresholds(torch.zeros(8), 2, b, 16) for b in (512, 16))
    few.update(scores)
    same.update(scores[:16])
    assert torch.equal(few.bias, same.bias)


def test_a_window_above_the_batch_moves_by_their_ratio() -> None:
    scores = Drift(8, SMALL).scores(512)
    track, wide = (Thresholds(torch.zeros(8), 2, 512, w) for w in (512, 2048))
    track.update(scores)
    wide.update(scores)
    assert torch.allclose(wide.bias, track.bias / 4, atol=1e-6)


def test_too_small_a_window_oscillates_and_too_large_a_one_lags() -> None:
    small, right, large = simulate(8, 512, SMALL)
    assert small.load > right.load + 0.05 and large.load > right.load + 0.05
    assert small.moved > 5 * right.moved and large.moved < right.moved / 5
    assert large.load == pytest.approx(large.frozen, abs=0.1)


def test_the_command_writes_what_it_draws(tmp_path: Path) -> None:
    words = ["experts=[4]", "k=1", "batches=[64]", "windows=[16,64]", "steps=4", "sequence=8"]
    assert cli.main(["bench", "routing", *words, f"output={tmp_path}"]) == 0
    told = json.loads((tmp_path / "routing.json").read_text())
    assert [row["window"] for row in told["rows"]] == [16, 64]
    assert (tmp_path / "routing.png").stat().st_size > 1000


def test_more_experts_of_a_token_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "routing", "k=8"]) == 2
    assert "k=8 must be below each of experts=[8, 32, 128]" in capsys.readouterr().err
    with pytest.raises(UserError, match="steps=1 must be at least 2"):
        from farhorizon.launch.bench_routing import bench_routing

        bench_routing(RoutingBenchConfig(steps=1))
