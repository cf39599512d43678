"""Thresholds compared under replay: the naive count, and a short run of each kind."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from farhorizon.kernels.moe.histogram import COARSE_BINS, SIDE_BINS
from farhorizon.launch import bench_thresholds, cli
from farhorizon.launch.record import read_rows
from farhorizon.policy.moe import Router

FAKES = str(Path(__file__).parents[1] / "fakes.py")


def _router() -> tuple[Router, torch.Tensor]:
    torch.manual_seed(0)
    router = Router(4, 5, 2)
    torch.nn.init.normal_(router.weight)
    return router, torch.randn(50, 4)


def test_on_its_own_routes_the_naive_count_is_the_routers_own() -> None:
    router, x = _router()
    with torch.no_grad():
        router.collecting = True
        routed = router(x)
        router.collecting = False
    assert router.histogram is not None
    own, load = router.histogram.counts.clone(), router.load.clone()
    router.clear()
    bench_thresholds._count(router, (x,), routed)
    assert torch.equal(router.histogram.counts, own) and torch.equal(router.load, load)


def test_on_other_routes_it_is_not() -> None:
    router, x = _router()
    experts = torch.tensor([[0, 1]]).expand(50, 2)
    bench_thresholds._count(router, (x,), (experts, experts))
    assert router.load.tolist() == [50, 50, 0, 0, 0]
    scores = torch.sigmoid(x @ router.weight.T).detach()
    # what expert 2 requires is 0 or more: nothing that was taken is a bound
    required = scores[:, 2:].amax(1) - scores[:, 2]
    histogram = router.histogram
    assert histogram is not None and int(histogram.counts[2].sum()) == 50
    coarse, fine = histogram.counts[2].split((COARSE_BINS, 2 * SIDE_BINS))
    assert int(coarse[: COARSE_BINS // 2].sum()) == int(fine[:SIDE_BINS].sum()) == 0
    assert float(required.min()) == 0
    assert int(fine[SIDE_BINS]) >= 1  # those that require 0


def test_every_kind_trains_and_a_finished_one_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    more = ("env.id=even-v0", "env.kwargs={}", f"env.plugins=[{FAKES}]", "context=32")
    words = [
        *("bench", "thresholds", f"start={checkpoint}", f"output={tmp_path}", "steps=2"),
        *("groups=4", "group_size=4", "lr=1e-2"),
        "train=[" + ",".join(f'"{s}"' for s in (*more, "rollout.max_turn_tokens=2")) + "]",
    ]
    run = partial(
        subprocess.run, [sys.executable, "-m", "farhorizon.launch.cli", *words], check=True
    )
    run()  # a process of its own: it joins a process group, which a process can do once
    for name in bench_thresholds.KINDS:
        rows = read_rows(tmp_path / f"{name}-0.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        assert rows[0]["replayed_load_max"] >= 1
    written = (tmp_path / "track-0.jsonl").stat().st_mtime_ns
    run()
    assert (tmp_path / "track-0.jsonl").stat().st_mtime_ns == written


def test_more_minibatches_than_groups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "thresholds", "groups=2", "minibatches=3"]) == 2
    assert "minibatches=3 would have no effect above groups=2" in capsys.readouterr().err


def test_thresholds_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "thresholds", "names=[ema]"]) == 2
    assert "no such thresholds ema; known: freeze, track, naive" in capsys.readouterr().err
