"""The learner on real DeepSpeed and gloo: one process, and two; see ``worker.py`` for the plays."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from farhorizon.policy import Policy, PolicyConfig

from .fake_policy import seeing_config

WORKER = Path(__file__).parent / "worker.py"
STAGES = range(4)
RANKS = (1, 2)
TINY = PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one process and two processes left their results."""
    folder = tmp_path_factory.mktemp("learner")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for ranks in RANKS:
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(ranks), str(folder)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output
        print(outputs[0])
    return folder


def results(folder: Path, ranks: int, name: str) -> Any:
    """What a scenario gave, alike on every rank unless only rank 0 fills it in."""
    return json.loads((folder / f"{ranks}-0.json").read_text())[name]


def weights(folder: Path, ranks: int, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{ranks}-{name}.safetensors")


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", ["packed", "single"])
@pytest.mark.parametrize("ranks", RANKS)
def test_any_split_gives_the_same_loss_gradient_and_weights(
    played: Path, ranks: int, layout: str, stage: int
) -> None:
    reference = results(played, 1, "fake-0-packed")
    assert all(step["grad_norm"] > 0.15 for step in reference)  # so that each step is clipped
    assert [step["lr"] for step in reference] == pytest.approx([0.002, 0.004, 0.006])
    for got, want in zip(results(played, ranks, f"fake-{stage}-{layout}"), reference, strict=True):
        assert set(got["group_lr"]) == {want["lr"]}
        for key in ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "log_ratio_max"):
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
    after = weights(played, ranks, f"fake-{stage}-{layout}")
    assert distance(after, weights(played, 1, "fake-0-packed")) < 1e-5


@pytest.mark.parametrize("name", [*(f"fake-{s}-single" for s in STAGES), "tiny-0", "tiny-3"])
@pytest.mark.parametrize("ranks", RANKS)
def test_norms_of_parts_make_the_norm_of_the_gradient(played: Path, ranks: int, name: str) -> None:
    tiny = name.startswith("tiny")
    names = ("kda", "mla", "router", "experts", "attn_res", "rest") if tiny else ("rest",)
    first = results(played, 1, "tiny-0" if tiny else "fake-0-single")
    for step, whole in zip(results(played, ranks, name), first, strict=True):
        parts = {key: value for key, value in step.items() if key.startswith("grad_norm_")}
        assert set(parts) == {f"grad_norm_{part}" for part in names}
        assert math.hypot(*parts.values()) == pytest.approx(step["grad_norm"], rel=1e-5)
        for key, value in parts.items():
            assert value == pytest.approx(whole[key], rel=1e-3) and value > 0, key


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("tokens", [1000, 1])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "name", ["gspo", "dr_grpo", "k15", "masked", "truncated", "pulled", "charged"]
)
def test_other_objectives_are_the_same_under_any_split(
    played: Path, name: str, ranks: int, tokens: int, stage: int
) -> None:
    got, want = (
        results(played, r, f"{name}-{k}") for r, k in ((ranks, f"{stage}-{tokens}"), (1, "0-1000"))
    )
    assert got.keys() == want.keys()
    for key in want.keys() - {"lr", "expert_load_max"}:
        assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key
    if name in ("pulled", "charged"):
        assert abs(want["reference_kl"]) > 0.1  # k1 of random tokens
    if name in ("masked", "truncated"):
        assert 0 < want["correction_removed"] < 1 and want["log_ratio_first"] > 0.1
    after, whole = (
        weights(played, r, f"{name}-{k}") for r, k in ((ranks, f"{stage}-{tokens}"), (1, "0-1000"))
    )
    assert distance(after, whole) < 1e-5


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("tokens", [1000, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_critic_judges_and_learns_alike_under_any_split(
    played: Path, ranks: int, tokens: int, stage: int
) -> None:
    got, want = results(played, ranks, f"ppo-{stage}-{tokens}"), results(played, 1, "ppo-0-1000")
    for mine, other in zip(got, want, strict=True):
        assert mine["value_error"] > 0 and 0 < other["grad_norm"] < 100
        for key in ("loss", "value_error", "value_clip_fraction", "kl", "entropy"):
            assert mine[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    after, whole = weights(played, ranks, f"ppo-{stage}-{tokens}"), weights(played, 1, "ppo-0-1000")
    assert distance(after, whole) < 1e-4


@pytest.mark.parametrize(
    ("replay", "stage"), [*(("rollout", stage) for stage in STAGES), ("learner", 0), ("learner", 3)]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_replayed_routes_are_learned_from_alike_under_any_split(
    played: Path, replay: str, ranks: int, stage: int
) -> None:
    got, want = (results(played, r, f"replayed-{replay}-{s}") for r, s in ((ranks, stage), (1, 0)))
    for key in ("loss", "grad_norm", "entropy", "kl"):
        assert got[key] == pytest.approx(want[key], rel=1e-3, abs=1e-5), key
    for key in ("expert_load_layer_0", "replayed_load_layer_0"):
        assert got[key] == want[key] > 1, key
    free = results(played, 1, "replayed-learner-0")["log_ratio_first"]
    assert (want["log_ratio_first"] != free) == (replay == "rollout")  # its first step is free
    after, whole = (
        weights(played, r, f"replayed-{replay}-{s}") for r, s in ((ranks, stage), (1, 0))
    )
    assert distance(after, whole) < 1e-4


def test_later_steps_are_given_the_log_probs_of_before_the_update(played: Path) -> None:
    got = results(played, 1, "proximal")
    assert got["proximal"] == pytest.approx(got["scored"], abs=1e-5)
    apart = [abs(a - b) for a, b in zip(got["proximal"], got["logprobs"], strict=True)]
    assert min(apart) > 1e-4 and max(apart) > 1e-2


def test_what_was_to_come_is_the_value_behind_the_last_token(played: Path) -> None:
    """Without discount a return is the reward and, where an episode was cut off, that value."""
    got = results(played, 1, "to-come")
    assert got["value_error"] == pytest.approx(got["right"], rel=1e-4)
    assert abs(got["wrong"] - got["right"]) > 0.01 * got["right"]


def test_a_critic_never_goes_without_values(played: Path) -> None:
    assert results(played, 1, "no-value-head") == "a critic needs a value head"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", [8, 10])
def test_accumulation_changes_neither_scale_nor_later_steps(
    played: Path, count: int, ranks: int
) -> None:
    """C15: in equal and unequal pieces; what one step left over would show in the next one."""
    norms = results(played, 1, f"accumulated-{count}-2")
    after = weights(played, 1, f"accumulated-{count}-2")
    assert min(norms) > 0.05  # so that both steps are clipped
    for pieces in (2, 4, count):
        name = f"accumulated-{count}-{pieces}"
        assert results(played, ranks, name) == pytest.approx(norms, rel=1e-3), pieces
        assert distance(weights(played, ranks, name), after) < 1e-5, pieces


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_policy_learns_alike_under_any_split(played: Path, ranks: int, stage: int) -> None:
    reference = results(played, 1, "tiny-0")
    for got, want in zip(results(played, ranks, f"tiny-{stage}"), reference, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    after, want = weights(played, ranks, f"tiny-{stage}"), weights(played, 1, "tiny-0")
    assert distance(after, want) < 1e-4


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_of_parameters_are_whole_where_layers_run_again(played: Path, ranks: int) -> None:
    """And a linear map is taken for its weight alone only where a whole layer is gathered."""
    after, want = weights(played, ranks, "tiny-3-layers"), weights(played, 1, "tiny-0")
    assert distance(after, want) < 1e-4
    assert results(played, ranks, "plain") == []


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_images_of_some_sequences_teach_the_tower_under_any_split(
    played: Path, ranks: int, stage: int
) -> None:
    reference = results(played, 1, "seen-0")
    for got, want in zip(results(played, ranks, f"seen-{stage}"), reference, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
        assert got["nll"] == pytest.approx(want["nll"], abs=1e-5)
        assert abs(got["nll"] - got["blind"]) > 1e-3  # the pixels matter
    after, want = weights(played, ranks, f"seen-{stage}"), weights(played, 1, "seen-0")
    assert distance(after, want) < 1e-4
    tower = [name for name in after if name.startswith(("vision_tower", "mm_projector"))]
    assert len(tower) == 2 + 2 * 6 + 1 + 3
    torch.manual_seed(0)
    before = Policy(seeing_config(64, 63), vision=True).state_dict()
    assert all(float((after[name] - before[name]).abs().max()) > 1e-4 for name in tower)


@pytest.mark.parametrize("ranks", RANKS)
def test_routing_thresholds_pool_over_micro_batches_and_ranks(played: Path, ranks: int) -> None:
    """C07: any split, and padding rows."""
    for name in ("one", "four", "padded"):
        got = results(played, ranks, f"threshold-{name}")
        assert got["bias"] == pytest.approx([-0.125, 0.125], abs=0.004)
        assert got["before"] == pytest.approx([0.75, 0.25])
        assert got["after"] == pytest.approx([0.5, 0.5], abs=0.01)
    name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    want = weights(played, 1, "tiny-0")[name]
    assert float(want.abs().max()) > 0.01
    for stage in (0, 3):
        got_bias = weights(played, ranks, f"tiny-{stage}")[name]
        assert float((got_bias - want).abs().max()) < 0.004


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_recomputed_layers_count_once_and_change_no_bit(
    played: Path, ranks: int, stage: int
) -> None:
    """C07: 52 tokens a step, in one MoE layer of two layers."""
    got = results(played, ranks, f"recomputed-{stage}")
    assert got["bitwise"] and got["counted"] == [[52, 52], [52, 52]]
    once, twice = got["forwards"]
    assert once == 2 * 2 * 8 // ranks and twice == 2 * once


@pytest.mark.parametrize("ranks", RANKS)
def test_scoring_and_evaluation_are_never_counted(played: Path, ranks: int) -> None:
    """C07."""
    for stage in (0, 3):
        got = results(played, ranks, f"silent-{stage}")
        assert got["same"] and got["counted"] == 0 and got["later"]
        want = results(played, 1, "silent-0")
        assert got["nll"] == pytest.approx(want["nll"], abs=1e-5)
        assert got["score"] == pytest.approx(want["score"], abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_an_infinite_gradient_changes_nothing(played: Path, ranks: int, stage: int) -> None:
    got = results(played, ranks, f"skip-{stage}")
    assert got["same"] and got["lr"] and got["counts"] == 0
    assert (got["version"], got["skipped"], got["skipped_steps"]) == (1, True, 1)
    assert got["bad_tensor"] == "mix.weight"
    assert got["later"] and got["later_version"] == 2 and got["as_if_never_seen"]
    assert "3 optimizer steps in a row" in got["stopped"] and "mix.weight" in got["stopped"]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_largest_of_several_steps_is_reported_and_the_first_ratio(
    played: Path, ranks: int
) -> None:
    together, first, second, tokens = results(played, ranks, "minibatches")
    for name in ("log_ratio_max", "expert_load_max"):
        assert first[name] != second[name]
        assert together[name] == max(first[name], second[name]), name
    assert tokens[0] != tokens[1]
    for name in ("loss", "kl", "entropy", "kl_from_0"):
        want = (first[name] * tokens[0] + second[name] * tokens[1]) / sum(tokens)
        assert together[name] == pytest.approx(want, rel=1e-12), name
    assert together["grad_norm"] == (first["grad_norm"] + second["grad_norm"]) / 2
    assert together["log_ratio_first"] == first["log_ratio_abs"] != second["log_ratio_abs"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_resuming_continues_bit_for_bit(played: Path, ranks: int, stage: int) -> None:
    got = results(played, ranks, f"resume-{stage}")
    assert got["loaded"] and got["bitwise"] and got["versions"] == [3, 3]
    assert got["crossed"] < 1e-6  # under another ZeRO stage: up to rounding


def test_bfloat16_keeps_fp32_masters(played: Path) -> None:
    assert set(results(played, 1, "bfloat16").values()) == {"torch.float32"}
    moved = weights(played, 1, "bfloat16")
    torch.manual_seed(0)
    start = Policy(TINY)
    name = "lm_head.weight"
    step = moved[name] - start.state_dict()[name]
    assert 0 < float(step.abs().max()) < 0.02
    assert bool((moved[name] != moved[name].bfloat16().float()).any())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", RANKS)
def test_everything_is_published_and_arrives_bit_for_bit(
    played: Path, ranks: int, stage: int
) -> None:
    got = results(played, ranks, f"publish-{stage}")
    assert got["complete"] and got["equal"] and got["sent"] == got["names"]
    assert got["changed"] == len(got["names"])  # a constant was added to each
    assert got["buckets"] >= 1
    for part in (
        "gate.e_score_correction_bias",
        "self_attention_res_proj.weight",
        "output_attn_res_proj.weight",
        "A_log",
        "dt_bias",
        "q_conv1d.weight",
        "lm_head.weight",
        "experts.w2",
    ):
        assert any(name.endswith(part) for name in got["names"]), part


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_value_head_learns_with_the_policy_and_is_not_published(
    played: Path, ranks: int, stage: int
) -> None:
    after, want = weights(played, ranks, f"valued-{stage}"), weights(played, 1, "valued-0")
    assert distance(after, want) < 1e-4
    assert float(want["v_head.summary.bias"]) > 0.015  # two steps of 0.01 towards 1
    assert bool(want["v_head.summary.weight"].any())
    got = results(played, ranks, f"valued-{stage}")
    assert got["bitwise"]
    assert got["sent"] == sorted(Policy(TINY).state_dict())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_muon_is_the_same_under_any_split_and_resumes_bit_for_bit(
    played: Path, ranks: int, stage: int
) -> None:
    """Under ZeRO heads and experts are cut apart between ranks."""
    for kind in ("muon", "muon-moments"):
        after, want = (weights(played, r, f"{kind}-{s}") for r, s in ((ranks, stage), (1, 0)))
        assert distance(after, want) < 1e-5, kind
    got = results(played, ranks, f"muon-{stage}")
    assert got["moments"] and got["bitwise"] and got["crossed"] < 1e-6
    assert got["refused"].endswith("it is that of another learner.optimizer")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", RANKS)
def test_weight_clipping_pools_logits_over_ranks_and_reaches_the_weights(
    played: Path, ranks: int, stage: int
) -> None:
    first, second = results(played, ranks, f"muon-{stage}")["metrics"]
    want = results(played, 1, "muon-0")["metrics"][0]["attention_logit_max"]
    assert want > 0.5 and first["attention_logit_max"] == pytest.approx(want, rel=1e-5)
    assert first["clipped_heads"] == 2
    assert second["attention_logit_max"] < 0.03  # was clipped to 0.02; another batch, one step on
    refused = json.loads((played / "1-0.json").read_text())["no-latent-attention"]
    assert refused.startswith("learner.qk_clip=100 would have no effect: the policy has no latent")
