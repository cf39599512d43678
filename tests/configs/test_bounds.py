"""Numbers out of range are refused by their dotted key, in whatever command they are given."""

from __future__ import annotations

import pytest

from farhorizon.configs.benchmarks import BenchConfig, KdaBenchConfig, ParityBenchConfig
from farhorizon.configs.bounds import check_bounds
from farhorizon.configs.errors import UserError
from farhorizon.configs.load import load_config, override_config
from farhorizon.configs.schema import (
    EvalConfig,
    PlayConfig,
    RolloutConfig,
    SftConfig,
    StageConfig,
    TrainConfig,
    VllmConfig,
)

ENV = ["env.id=echo-v0"]
BASE = {
    BenchConfig: [],
    KdaBenchConfig: [],
    ParityBenchConfig: [],
    EvalConfig: ENV,
    PlayConfig: ENV,
    SftConfig: ["policy=p", "context=8", *ENV],
    StageConfig: [
        "policy=p",
        "text=stdlib",
        "stages=[{context: 8, steps: 1, batch_tokens: 8, lr: 0.1}]",
    ],
    TrainConfig: ["policy=p", "context=8", *ENV],
}


@pytest.mark.parametrize("schema", BASE)
def test_defaults_are_within_bounds(schema: type) -> None:
    check_bounds(load_config(schema, None, BASE[schema]))
    check_bounds(load_config(schema, None, [*BASE[schema], "seed=4294967295"]))


@pytest.mark.parametrize(
    ("schema", "override", "message"),
    [
        (TrainConfig, "learner.lr=nan", "learner.lr=nan must be finite and above 0"),
        (TrainConfig, "learner.lr=inf", "learner.lr=inf must be finite and above 0"),
        (TrainConfig, "learner.lr=0", "learner.lr=0.0 must be above 0"),
        (TrainConfig, "learner.warmup_steps=-1", "learner.warmup_steps=-1 must be at least 0"),
        (
            TrainConfig,
            "learner.betas=[0.9, 1.0]",
            "learner.betas=[0.9, 1.0] must be at least 0 and below 1",
        ),
        (TrainConfig, "learner.eps=0", "learner.eps=0.0 must be above 0"),
        (TrainConfig, "learner.weight_decay=-1", "learner.weight_decay=-1.0 must be at least 0"),
        (TrainConfig, "learner.grad_clip=-1", "learner.grad_clip=-1.0 must be at least 0"),
        (TrainConfig, "learner.qk_clip=0", "learner.qk_clip=0.0 must be above 0"),
        (TrainConfig, "learner.qk_clip=inf", "learner.qk_clip=inf must be finite and above 0"),
        (TrainConfig, "learner.gpus=2", "learner.gpus=2.0 must be between 0 and 1"),
        (TrainConfig, "rollout.gpus=-0.5", "rollout.gpus=-0.5 must be between 0 and 1"),
        (
            TrainConfig,
            "rollout.gpus=2",
            "rollout.gpus=2.0 must be between 0 and 1, or as many as rollout.vllm.tensor_parallel",
        ),
        (TrainConfig, "rollout.gpus=nan", "rollout.gpus=nan must be between 0 and 1"),
        (
            EvalConfig,
            "rollout.vllm.tensor_parallel=0",
            "rollout.vllm.tensor_parallel=0 must be at least 1",
        ),
        (SftConfig, "gpus=1.5", "gpus=1.5 must be between 0 and 1"),
        (
            TrainConfig,
            "learner.expert_parallel=2",
            "learner.expert_parallel=2 must divide learner.ranks=1",
        ),
        (TrainConfig, "learner.ranks=0", "learner.ranks=0 must be at least 1"),
        (TrainConfig, "algorithm.clip_low=0", "algorithm.clip_low=0.0 must be above 0"),
        (
            TrainConfig,
            "algorithm.dual_clip=1",
            "algorithm.dual_clip=1.0 must be above 1 and at most 1000000",
        ),
        (TrainConfig, "algorithm.tau=-1", "algorithm.tau=-1.0 must be between 0 and 1000000"),
        (TrainConfig, "algorithm.length=0", "algorithm.length=0 must be at least 1"),
        (
            TrainConfig,
            "algorithm.entropy=-1",
            "algorithm.entropy=-1.0 must be between 0 and 1000000",
        ),
        (
            TrainConfig,
            "algorithm.correction_low=-1",
            "algorithm.correction_low=-1.0 must be between 0 and 1",
        ),
        (
            TrainConfig,
            "algorithm.correction_high=0",
            "algorithm.correction_high=0.0 must be between 1 and 1000000",
        ),
        (TrainConfig, "algorithm.correction_high=inf", "algorithm.correction_high=inf must be"),
        (TrainConfig, "sync.canary_tolerance=0", "sync.canary_tolerance=0.0 must be above 0"),
        (TrainConfig, "rollout.temperature=0", "rollout.temperature=0.0 must be at least 0.001"),
        (TrainConfig, "rollout.temperature=1e-40", "rollout.temperature=1e-40 must be at least"),
        (TrainConfig, "rollout.env_timeout_s=0", "rollout.env_timeout_s=0.0 must be above 0"),
        (TrainConfig, "rollout.threads=1025", "rollout.threads=1025 must be between 0 and 1024"),
        (TrainConfig, "learner.threads=99999", "learner.threads=99999 must be between 0 and 1024"),
        (SftConfig, "threads=99999", "threads=99999 must be between 0 and 1024"),
        (  # more than a lock can wait
            TrainConfig,
            "rollout.env_timeout_s=1e11",
            "rollout.env_timeout_s=100000000000.0 must be above 0 and at most 9",
        ),
        (
            TrainConfig,
            "rollout.max_error_fraction=1.1",
            "rollout.max_error_fraction=1.1 must be between 0 and 1",
        ),
        (TrainConfig, "steps=0", "steps=0 must be at least 1"),
        (TrainConfig, "seed=-1", "seed=-1 must be between 0 and 4294967295"),
        *(
            (schema, "seed=4294967296", "seed=4294967296 must be between 0 and 4294967295")
            for schema in BASE
        ),
        (TrainConfig, "learner.dtype=bfloat16", "learner.dtype=bfloat16 must be float32 in train"),
        (
            TrainConfig,
            "rollout.vllm.memory=0",
            "rollout.vllm.memory=0.0 must be above 0 and",
        ),
        (EvalConfig, "visible_context=0", "visible_context=0 must be at least 1"),
        (EvalConfig, "visible_context=-5", "visible_context=-5 must be at least 1"),
        (EvalConfig, "episodes=0", "episodes=0 must be at least 1"),
        (EvalConfig, "rollout.temperature=-1", "rollout.temperature=-1.0 must be at least 0"),
        (EvalConfig, "rollout.actors=0", "rollout.actors=0 must be at least 1"),
        (PlayConfig, "rollout.max_turns=0", "rollout.max_turns=0 must be at least 1"),
        (StageConfig, "stages.0.lr=nan", "stages.0.lr=nan must be finite and above 0"),
        (StageConfig, "learner.minibatches=0", "learner.minibatches=0 must be at least 1"),
        (StageConfig, "episode_fraction=1.5", "episode_fraction=1.5 must be between 0 and 1"),
        (SftConfig, "lr=inf", "lr=inf must be finite and above 0"),
        (BenchConfig, "steps=0", "steps=0 must be at least 1"),
        (KdaBenchConfig, "repeats=0", "repeats=0 must be at least 1"),
        (KdaBenchConfig, "heads=[64, 0]", "heads=[64, 0] must be at least 1"),
        (ParityBenchConfig, "lengths=[9, 1]", "lengths=[9, 1] must be at least 2"),
        (BenchConfig, "rollout.temperature=0", "rollout.temperature=0.0 must be above 0"),
    ],
)
def test_out_of_bounds_is_one_line(schema: type, override: str, message: str) -> None:
    config = override_config(load_config(schema, None, BASE[schema]), [override])
    with pytest.raises(UserError) as caught:
        check_bounds(config)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", [TrainConfig, StageConfig])
def test_a_decay_of_thresholds_that_do_not_average_is_refused(schema: type) -> None:
    config = load_config(schema, None, [*BASE[schema], "learner.threshold_decay=0.5"])
    check_bounds(override_config(config, ["learner.thresholds=ema"]))
    with pytest.raises(
        UserError, match=r"^learner.threshold_decay=0.5 is of learner.thresholds=ema"
    ):
        check_bounds(config)


@pytest.mark.parametrize(("schema", "prefix"), [(TrainConfig, "learner."), (SftConfig, "")])
def test_ranks_do_not_share_a_gpu(schema: type, prefix: str) -> None:
    """A rollout actor may share one, and so may a learner of one rank."""
    config = load_config(schema, None, [*BASE[schema], f"{prefix}gpus=0.5"])
    check_bounds(config)
    check_bounds(override_config(config, [f"{prefix}ranks=2", f"{prefix}gpus=1"]))
    message = f"^{prefix}gpus=0.5: several ranks cannot share a GPU; set {prefix}gpus=1, or "
    with pytest.raises(UserError, match=message):
        check_bounds(override_config(config, [f"{prefix}ranks=2"]))
    rollout = ["rollout.gpus=0.5", "rollout.actors=2"]
    check_bounds(load_config(TrainConfig, None, [*BASE[TrainConfig], *rollout]))


@pytest.mark.parametrize(("gpus", "fits"), [("4", True), ("0", False), ("1", False), ("8", False)])
def test_an_engine_over_several_gpus_has_as_many(gpus: str, fits: bool) -> None:
    given = ["rollout.engine=vllm", "rollout.vllm.tensor_parallel=4", f"rollout.gpus={gpus}"]
    config = load_config(EvalConfig, None, [*BASE[EvalConfig], *given])
    if fits:
        return check_bounds(config)
    message = (
        rf"^rollout\.vllm\.tensor_parallel=4 needs .* rollout\.gpus={gpus}: set rollout.gpus=4$"
    )
    with pytest.raises(UserError, match=message):
        check_bounds(config)


def test_a_learner_in_16_bits_goes_with_an_engine_in_16_bits() -> None:
    given = [*BASE[TrainConfig], "learner.dtype=bfloat16", "rollout.engine=vllm"]
    check_bounds(load_config(TrainConfig, None, given))
    with pytest.raises(UserError, match=r"^learner\.dtype=bfloat16 must be float32 in train"):
        check_bounds(load_config(TrainConfig, None, [*given, "rollout.vllm.dtype=float32"]))
    given[-1] = "rollout.gpus=1"  # the native engine: there in 16 bits by itself
    check_bounds(load_config(TrainConfig, None, given))
    with pytest.raises(UserError, match=r"or set rollout\.dtype=bfloat16$"):
        check_bounds(load_config(TrainConfig, None, [*given, "rollout.dtype=float32"]))
    given[-1] = "rollout.dtype=bfloat16"
    check_bounds(load_config(TrainConfig, None, given))


def test_greedy_evaluation_and_no_visible_context_are_allowed() -> None:
    config = load_config(EvalConfig, None, ENV)
    check_bounds(override_config(config, ["rollout.temperature=0", "visible_context=null"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("learner.zero_stage=3", "learner.expert_parallel=2 does not go with learner.zero_stage=3"),
        (
            "learner.optimizer=muon",
            "learner.expert_parallel=2 with learner.optimizer=muon wants learner.zero_stage=0",
        ),
    ],
)
def test_divided_experts_name_what_they_do_not_go_with(more: str, message: str) -> None:
    given = ["learner.ranks=4", "learner.expert_parallel=2", "learner.zero_stage=1"]
    check_bounds(load_config(TrainConfig, None, [*BASE[TrainConfig], *given]))
    with pytest.raises(UserError) as error:
        check_bounds(load_config(TrainConfig, None, [*BASE[TrainConfig], *given, more]))
    assert str(error.value).startswith(message) and "set " in str(error.value)


def test_gpus_of_an_engine_that_does_not_run_count_for_nothing() -> None:
    """As where a run of one engine is evaluated by the other."""
    vllm = VllmConfig(tensor_parallel=2)
    check_bounds(EvalConfig(rollout=RolloutConfig(vllm=vllm)))
    with pytest.raises(UserError, match=r"^rollout\.gpus=2\.0 must be between 0 and 1"):
        check_bounds(EvalConfig(rollout=RolloutConfig(gpus=2.0, vllm=vllm)))
    with pytest.raises(UserError, match=r"set rollout\.gpus=2$"):
        check_bounds(EvalConfig(rollout=RolloutConfig(engine="vllm", vllm=vllm)))
