"""bench attnres and bench logprob: what they refuse, and that nothing wrong is timed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from farhorizon.configs.benchmarks import AttnResBenchConfig, LogprobBenchConfig
from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import override_config
from farhorizon.launch import bench_attnres, bench_logprob, measure
from farhorizon.launch.bench_attnres import Site

from ..fakes import FakeMeter


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DENSE", 16)
    monkeypatch.setattr(measure, "COPIED", 2**12)
    monkeypatch.setattr(bench_logprob, "ALLOWED_VALUES", 2e-3)  # a CPU rounds logits to bf16


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["peers=[torch]"], "peers: 'torch' is none; known: fla, or [] for none"),
        (["shapes=[8x4]", "peers=[]"], "shapes: '8x4' is not TOKENSxHIDDENxSOURCES"),
        (["shapes=['\u0663x4x4']"], "shapes: '\u0663x4x4' is not TOKENSxHIDDENxSOURCES"),
        (["shapes=[0x4x4]"], "shapes: '0x4x4' is not TOKENSxHIDDENxSOURCES"),
        ([f"shapes=[{2**57}x4x4]"], f"shapes: '{2**57}x4x4' is more than any memory holds"),
        (["shapes=[]", "peers=[]"], "shapes: name at least one, TOKENSxHIDDENxSOURCES"),
    ],
)
def test_mistakes_of_attnres_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_attnres.bench_attnres(override_config(AttnResBenchConfig(), overrides))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["peers=[torch]"], "peers: 'torch' is none; known: trl, liger, or [] for none"),
        (["shapes=[8x4]"], "shapes: '8x4' is not TOKENSxVOCABULARYxHIDDEN"),
        (["shapes=[]"], "shapes: name at least one, TOKENSxVOCABULARYxHIDDEN"),
    ],
)
def test_mistakes_of_logprob_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_logprob.bench_logprob(override_config(LogprobBenchConfig(), overrides))
    assert str(caught.value) == message


def test_without_a_gpu_they_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs a GPU"):
        bench_attnres.bench_attnres(AttnResBenchConfig(peers=()))
    with pytest.raises(UserError, match="needs a GPU"):
        bench_logprob.bench_logprob(LogprobBenchConfig(peers=()))


@pytest.mark.parametrize("module", ["bench_attnres", "bench_logprob"])
def test_the_measuring_parts_need_no_settings(module: str) -> None:
    lacking = ["rich", "omegaconf", "ray", "deepspeed", "matplotlib", "transformers", "trl"]
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking}))"
    code += f"; import farhorizon.launch.{module}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_site_is_checked_and_measured() -> None:
    """More tokens than are checked: the others' gradients do not enter the vectors'."""
    rows: list[Any] = []
    side = bench_attnres.Side(bench_attnres.OURS, bench_attnres.ours)
    shapes = [(600, 24, 3)]
    bench_attnres.run(FakeMeter(), [side], shapes, AttnResBenchConfig(repeats=1), rows.append)
    (row,) = rows
    assert set(row["errors"]) == {
        *("dsource0", "dsource1", "dsource2", "dupdate", "dquery", "dnorm", "dnext", "sum", "out")
    }
    assert max(row["errors"].values()) < 6e-3


@pytest.mark.parametrize("first", [0, 550])
def test_a_wrong_site_is_not_measured(first: int) -> None:
    """Of 600 tokens, of which 512 are checked, all or the last 50 are wrong."""

    def wrong(site: Site) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = bench_attnres.ours(site)
        factor = torch.ones(len(normed), 1)
        factor[first:] = 1.05
        return total, normed * factor

    rows: list[Any] = []
    side = bench_attnres.Side(bench_attnres.OURS, wrong)
    with pytest.raises(RunFailed, match="is off by"):
        bench_attnres.run(FakeMeter(), [side], [(600, 24, 3)], AttnResBenchConfig(), rows.append)
    assert rows == []


def test_the_least_bytes_of_a_site() -> None:
    """Of one token and element in 2 bytes: 2 sources, the update, the sum and the mixture; then 2
    sources and 2 gradients read, 2 written."""
    assert bench_attnres.least_bytes(1, 1, 2) == (10, 22)


def test_a_head_is_checked_and_measured() -> None:
    rows: list[Any] = []
    sides = [bench_logprob.Side(bench_logprob.OURS, bench_logprob.ours)]
    config = LogprobBenchConfig(repeats=1)
    bench_logprob.run(FakeMeter(), sides, [(200, 50, 16)], config, rows.append)
    (row,) = rows
    assert set(row["errors"]) == {"logprobs", "entropy", "dhidden", "dlm_head"}


def test_a_wrong_head_is_not_measured() -> None:
    def wrong(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs, entropy = bench_logprob.ours(*given)
        return logprobs, entropy * 1.05

    rows: list[Any] = []
    side = bench_logprob.Side(bench_logprob.OURS, wrong)
    with pytest.raises(RunFailed, match="entropy is off by"):
        bench_logprob.run(FakeMeter(), [side], [(8, 50, 16)], LogprobBenchConfig(), rows.append)
    assert rows == []


def test_memory_that_does_not_suffice_is_one_line() -> None:
    """With the size and the line of what was too large, and a way out."""

    def full(*_: Any) -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    for bench, shape, config in (
        (bench_logprob, (8, 50, 16), LogprobBenchConfig()),
        (bench_attnres, (8, 24, 3), AttnResBenchConfig()),
    ):
        side, rows = bench.Side(bench.OURS, full), list[Any]()
        with pytest.raises(RunFailed) as caught:
            bench.run(FakeMeter(), [side], [shape], config, rows.append)
        name, text = bench.__name__.rsplit("_")[-1], str(caught.value)
        assert text.startswith(f"bench {name}: the GPU's memory does not suffice for 2.00 GiB (")
        assert text.endswith("; lower its tokens, or peers=[]") and "\n" not in text
        assert f" of {'x'.join(map(str, shape))};" in text and rows == []


def test_peers_compute_the_same() -> None:
    """TRL's as it runs on a CPU."""
    pytest.importorskip("trl")
    (_, theirs) = bench_logprob.find_sides(["trl"])
    given = bench_logprob.draw(20, 64, 16, 0, "cpu")
    assert max(bench_logprob.errors(theirs, given).values()) < 3e-2
