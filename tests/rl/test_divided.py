"""Experts divided over ranks, on real DeepSpeed and gloo, beside one rank that holds them all; see
``expert_worker.py`` for the plays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "expert_worker.py"
STAGES, SOME = (0, 1, 2), (0, 2)
PLAYS = ((1, 1), (2, 2), (4, 2))  # ranks, and over how many experts are divided
LOPSIDED = [f"{name}-{stage}" for name in ("first", "last", "apart") for stage in SOME]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one, two and four processes left their results."""
    folder = tmp_path_factory.mktemp("divided")
    for ranks, divided in PLAYS:
        own = ["steps"] if ranks == 4 else []  # where two ranks hold the same experts
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), *map(str, (rank, ranks, divided, folder)), *own],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output
    return folder


def results(folder: Path, name: str, ranks: int = 2) -> Any:
    divided = min(ranks, 2)
    return json.loads((folder / f"{ranks}-{divided}-0.json").read_text())[name]


def check_alike(folder: Path, name: str, ranks: int = 2) -> None:
    """Metrics of every step and the weights after them are those of one rank."""
    for got, want in zip(results(folder, name, ranks), results(folder, name, 1), strict=True):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    check_weights(folder, name, name, ranks)


def check_weights(folder: Path, name: str, reference: str, ranks: int = 2) -> None:
    got = load_file(folder / f"{ranks}-2-{name}.safetensors")
    want = load_file(folder / f"1-1-{reference}.safetensors")
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].shape == tensor.shape, key
        assert float((got[key] - tensor).abs().max()) < 1e-5, key


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_experts_learn_as_whole_ones(played: Path, ranks: int, stage: int) -> None:
    """Loss, gradients by part, loads and weights, where a rank has a batch of padding and gradients
    are clipped; each rank holds four of the eight experts of two layers."""
    assert results(played, f"held-{stage}", ranks) == [4, 4]
    assert results(played, f"held-{stage}", 1) == [8, 8]
    assert all(step["grad_norm"] > 0.15 for step in results(played, f"steps-{stage}", 1))
    check_alike(played, f"steps-{stage}", ranks)
    for name in (f"nll-{stage}", f"score-{stage}"):
        want = results(played, name, 1)
        assert results(played, name, ranks) == pytest.approx(want, abs=1e-5), name


@pytest.mark.parametrize("name", ["again", "muon"])
def test_layers_that_run_again_and_muon_do_not_mind(played: Path, name: str) -> None:
    check_alike(played, name)


def test_bfloat16_divides_as_well(played: Path) -> None:
    """Up to the rounding of products of other sizes."""
    for got, want in zip(results(played, "bfloat16"), results(played, "bfloat16", 1), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-2)
        assert got["grad_norm_experts"] == pytest.approx(want["grad_norm_experts"], rel=0.05)


@pytest.mark.parametrize("stage", SOME)
def test_a_rank_without_trained_tokens_takes_part(played: Path, stage: int) -> None:
    check_alike(played, f"one-{stage}")


@pytest.mark.parametrize("name", LOPSIDED)
def test_experts_and_ranks_without_tokens(played: Path, name: str) -> None:
    """All tokens on the first or last two experts, of one rank, or on one of each."""
    check_alike(played, name)
    assert results(played, name)[0]["replayed_load_max"] == 4.0  # two of eight experts


@pytest.mark.parametrize("stage", SOME)
def test_an_infinite_gradient_of_another_rank_changes_nothing(played: Path, stage: int) -> None:
    bad, same, *versions = results(played, f"skipped-{stage}")
    assert bad == "model.layers.1.block_sparse_moe.experts.w2"
    assert same and versions == [0, 1]
    check_weights(played, f"skipped-{stage}", f"skipped-{stage}")


@pytest.mark.parametrize("stage", SOME)
def test_resuming_continues_bit_for_bit_and_from_whole_experts(played: Path, stage: int) -> None:
    assert results(played, f"resumed-{stage}") == [True, True]
    check_weights(played, f"resumed-{stage}", f"resumed-{stage}")
    check_weights(played, f"crossed-{stage}", f"resumed-{stage}")


@pytest.mark.parametrize("stage", SOME)
def test_whole_experts_are_published(played: Path, stage: int) -> None:
    first, second = results(played, f"published-{stage}")
    assert first[0] == results(played, f"published-{stage}", 1)[0][0] != second[0]
    assert first[1:] == second[1:] == [True, True]  # what arrived is what was there, and all of it


@pytest.mark.parametrize("stage", SOME)
def test_experts_that_were_read_in_part_learn_as_whole_ones(played: Path, stage: int) -> None:
    assert results(played, f"read-{stage}") == [4, 4]
    assert results(played, f"read-{stage}", 1) == [8, 8]
    check_alike(played, f"loaded-{stage}")


def test_what_cannot_be_divided_is_refused(played: Path) -> None:
    three, none = (results(played, f"refused-{name}") for name in ("three", "none"))
    assert three == "learner.expert_parallel=2 must divide the policy's 3 experts"
    assert none.startswith("learner.expert_parallel=2 would have no effect: the policy has no exp")
