"""bench step: what it refuses, what it counts, and that both sides are of one size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from farhorizon.configs.benchmarks import StepBenchConfig
from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import override_config
from farhorizon.launch.bench_step import bench_step
from farhorizon.launch.plan import read_policy
from farhorizon.launch.step_measure import (
    ALLOWED_GRADIENT,
    OurSide,
    build_policy,
    draw_batch,
    gradient_error,
    model_flops,
    small_config,
    utilisation,
)
from farhorizon.launch.step_peers import (
    ATTENTION,
    KimiSide,
    attention_times,
    kimi_linear,
    shared_config,
)
from farhorizon.policy import Policy

ONE_B = read_policy("1b")[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["peers=[fla]"], "peers: 'fla' is none; known: kimi_linear, or [] for none"),
        (["lengths=[]"], "lengths: name the tokens of at least one document"),
        (["lengths=[8, 8]"], "peers take one document: give one of lengths, or peers=[]"),
        (["lengths=[1]"], "lengths=[1] must be at least 2"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        bench_step(override_config(StepBenchConfig(), overrides))
    assert str(caught.value) == message


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs a GPU"):
        bench_step(StepBenchConfig())


def test_the_measuring_part_needs_no_settings() -> None:
    lacking = ["rich", "omegaconf", "ray", "deepspeed", "matplotlib"]
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking}))"
    code += "; import farhorizon.launch.bench_step"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_operations_by_hand() -> None:
    """488,227,124 active parameters; 5 layers of 12 heads, whose triangle of 10 x 10 scores takes
    2 (192 + 128) operations each, and twice that backward; a second document adds its own."""
    one = 6 * 488_227_124 * 10 + 5 * 12 * 3 * 2 * (192 + 128) * 50
    assert model_flops(ONE_B, [10]) == one
    assert model_flops(ONE_B, [10, 10]) == 2 * one
    assert utilisation(ONE_B, [10], 1.0) == pytest.approx(one / 790e9)


def test_targets_follow_their_rows_within_documents() -> None:
    batch = draw_batch(50, [3, 1, 2], 0, "cpu")
    assert batch.rows.tolist() == [0, 1, 4] and batch.edges.tolist() == [0, 3, 4, 6]
    assert torch.equal(batch.targets, batch.ids[0, torch.tensor([1, 2, 5])])


def test_both_sides_have_the_same_parameters() -> None:
    config = shared_config(ONE_B)
    with torch.device("meta"):
        ours = Policy(config)
    theirs = kimi_linear(config, torch.bfloat16, "meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_a_step_of_either_side_moves_its_weights() -> None:
    config = small_config(shared_config(ONE_B))
    batch = draw_batch(config.vocab_size, [40], 0, "cpu")
    ours = OurSide(build_policy(config, 0, "cpu"), batch, lr=1e-3)
    theirs = KimiSide(kimi_linear(config, torch.float32, "cpu"), batch, lr=1e-3)
    for side in (ours, theirs):
        losses = [float(side()) for _ in range(4)]
        assert 5 < losses[0] < 8 and losses[-1] < losses[0] - 0.1


def test_a_peer_tries_every_attention_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU torch has flash attention alone, for heads whose values are as large as keys."""
    heads = torch.randn(1, 2, 5, 8)

    def time() -> float:
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return 3.0

    assert attention_times(time) == {"flash": 3.0}
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == [
        "kimi_linear without cudnn attention",
        "kimi_linear without efficient attention",
    ]
    more = iter([3.0, 2.0, 1.0])
    assert attention_times(lambda: next(more)) == dict(zip(ATTENTION, (3.0, 2.0, 1.0), strict=True))


@pytest.mark.parametrize("error", [RuntimeError("none"), torch.OutOfMemoryError("full")])
def test_a_peer_without_attention_is_not_measured(error: RuntimeError) -> None:
    def time() -> float:
        raise error

    of_memory = isinstance(error, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError if of_memory else RunFailed):
        attention_times(time)


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_the_gradient_is_near_that_in_fp32(checkpointing: str) -> None:
    error = gradient_error(small_config(ONE_B), 0, checkpointing, "cpu", (70, 1, 50))
    assert 0 < error < ALLOWED_GRADIENT
