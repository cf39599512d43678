"""bench moe: what it refuses, that truths are right, and that nothing wrong is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farhorizon.configs.benchmarks import MoeBenchConfig
from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import override_config
from farhorizon.kernels.moe import Counts, naive_experts, router
from farhorizon.launch import measure, moe_measure
from farhorizon.launch.bench_moe import bench_moe, run, tell
from farhorizon.launch.measure import Measured, lines_to
from farhorizon.launch.moe_measure import (
    RouterShape,
    Shape,
    draw,
    measure_router,
    operations,
    truth_of_expert,
    truth_of_tokens,
)
from farhorizon.launch.moe_peers import OURS, SITU, Bounds, Inputs, Side, grouped_mm, ours

from ..fakes import FakeMeter

SMALL = Shape(tokens=12, width=16, inner=8, experts=4, k=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DENSE", 16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["peers=[megablocks]"],
            "peers: 'megablocks' is none; known: torch, liger, or [] for none",
        ),
        (
            ["peers=[liger]"],
            "peers: liger has SwiGLU alone: add activation=swiglu, or leave it out",
        ),
        (["shapes=[8x4]"], "shapes: '8x4' is not TOKENSxWIDTHxINNERxEXPERTSxK"),
        (["router=[8x4x2x3]"], "router: '8x4x2x3' has fewer experts than k"),
        (["shapes=[]", "router=[]"], "nothing to measure: name shapes, or router shapes"),
        (["repeats=0"], "repeats=0 must be at least 1"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_moe(override_config(MoeBenchConfig(), overrides))
    assert str(caught.value) == message


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs a GPU"):
        bench_moe(MoeBenchConfig())


def test_the_measuring_part_needs_no_settings() -> None:
    lacking = ["rich", "omegaconf", "ray", "deepspeed", "matplotlib", "transformers"]
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking}))"
    code += "; import farhorizon.launch.bench_moe"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("bounds", [SITU, None])
def test_truths_are_those_of_the_definition(bounds: Bounds) -> None:
    given = draw(SMALL, 0, "cpu")
    wide = Inputs(*(x.double() if x.is_floating_point() else x for x in given)).leaves()
    pull = torch.randn(12, 16, dtype=torch.float64)
    out = naive_experts(*wide, bounds)
    dx, dw1, dw2, dw3, d_weights = torch.autograd.grad(out, wide.trained(), pull)
    found = truth_of_tokens(given, bounds, pull, 5)
    found |= truth_of_expert(given, bounds, pull, 3)
    truth = {"out": out[:5], "dx": dx[:5], "dweights": d_weights[:5]}
    truth |= {"dw1": dw1[3], "dw2": dw2[3], "dw3": dw3[3]}
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        torch.testing.assert_close(found[name], expected)


def test_both_sides_run_and_every_line_is_kept(tmp_path: Path) -> None:
    config = MoeBenchConfig(seed=2)

    def of_joined(given: Inputs, bounds: Bounds) -> torch.Tensor:
        assert given.w1.shape == (4, 16, 16) and given.w3.shape == (4, 0, 16)
        w1, w3 = given.w1.chunk(2, 1)
        return ours(given._replace(w1=w1, w3=w3), bounds)

    sides = [
        Side(OURS, ours),
        Side("torch", grouped_mm, captured=False),
        Side("joined", of_joined, joined=True),
    ]
    routers = [RouterShape(9, 16, 6, 2)]
    with lines_to(str(tmp_path / "moe.jsonl")) as take:
        run(FakeMeter(), sides, [SMALL], routers, config, take)
    rows = [json.loads(line) for line in (tmp_path / "moe.jsonl").read_text().splitlines()]
    names = [OURS, "torch", "joined", OURS, "with statistics", "product alone"]
    assert [row["name"] for row in rows] == names
    assert rows[2]["errors"] == rows[0]["errors"]
    assert max(rows[1]["errors"].values()) < 2e-2  # it rounds more often on its way


def test_nothing_is_timed_when_ours_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(given: Inputs, bounds: Bounds) -> torch.Tensor:
        return ours(given, bounds) * 1.02

    rows: list[Any] = []
    with pytest.raises(RunFailed, match=r"out is off by 2\.0e-02, allowed 6e-03"):
        run(FakeMeter(), [Side(OURS, wrong)], [SMALL], [], MoeBenchConfig(), rows.append)
    assert rows == [] and "forward" not in capsys.readouterr().out


def test_a_share_is_of_the_dense_product() -> None:
    """12 tokens of 2 routes through three products of 16 x 8: 18432 operations."""
    assert operations(SMALL) == 18432
    row = tell(SMALL, Measured(OURS, 1.0, 3.0, 0.5, {"out": 0.001}), dense=18432e3 * 2)
    assert row["forward_share"] == 0.5 and row["both_share"] == 0.5


def test_a_router_is_timed_in_three_forms() -> None:
    found = measure_router(FakeMeter(), RouterShape(40, 16, 8, 3), 1, 0)
    assert [one.forward_ms for one in found] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("tokens", [64, 5000])
def test_a_router_that_counts_wrong_is_not_timed(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets the first token, of however many."""

    def forgetful(*given: Any, counts: Counts | None = None) -> Any:
        if counts is not None:
            counts = counts._replace(valid=torch.arange(tokens) > 0)
        return router(*given, counts=counts)

    monkeypatch.setattr(moe_measure, "router", forgetful)
    with pytest.raises(RunFailed, match=f"of {tokens} tokens {tokens - 1} were counted"):
        measure_router(FakeMeter(), RouterShape(tokens, 16, 8, 3), 1, 0)
