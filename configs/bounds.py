"""Allowed ranges of numeric settings, one table for every command."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any

from . import benchmarks, schema
from .errors import UserError


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers between two ends; ``open`` leaves out the low one, ``half`` the high one."""

    low: float
    high: float = math.inf
    open: bool = False
    half: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open else value >= self.low
        below = value < self.high if self.half else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        if self.high < math.inf:
            text = "at least {} and below {}" if self.half else "between {} and {}"
            text = "above {} and at most {}" if self.open else text
            return text.format(self.low, self.high)
        return f"{'above' if self.open else 'at least'} {self.low:g}"


_ANY = _Range(0)
_ONE = _Range(1)
_POSITIVE = _Range(0, open=True)
_MOST = 10**6  # of a ratio or a factor: far from where fp32 ends
_FACTOR = _Range(0, _MOST, open=True)
_THREADS = _Range(0, 1024)  # with millions no process of the machine can start another
_SHARE = _Range(0, 1)
_SEED = _Range(0, 2**32 - 1)  # all that numpy.random.seed takes, and with it TRL

# A dotted key narrows, for one command, what the component itself allows.
_TABLE: dict[type, dict[str, _Range]] = {
    schema.VllmConfig: {"memory": _Range(0, 1, open=True), "tensor_parallel": _ONE},
    schema.RolloutConfig: {
        "actors": _ONE,
        "threads": _THREADS,
        "concurrency": _ONE,
        "temperature": _ANY,
        "max_turn_tokens": _ONE,
        "max_turns": _ONE,
        "keep_states": _ANY,
        "env_retries": _ANY,
        "restarts": _ANY,
        "env_timeout_s": _Range(0, threading.TIMEOUT_MAX, open=True),
        "max_error_fraction": _SHARE,
    },
    schema.AlgorithmConfig: {
        "clip_low": _FACTOR,
        "clip_high": _FACTOR,
        "dual_clip": _Range(1, _MOST, open=True),
        "gamma": _SHARE,
        "lam": _SHARE,
        "value_coefficient": _FACTOR,
        "value_clip": _Range(0, _MOST),
        "tau": _Range(0, _MOST),
        "tau_pos": _FACTOR,
        "tau_neg": _FACTOR,
        "length": _ONE,
        "entropy": _Range(0, _MOST),
        "overlong": _ONE,
        "overlong_buffer": _ONE,
        "budget": _ONE,
        "efforts": _FACTOR,
        "length_reward": _Range(0, _MOST),
        "distill": _Range(0, _MOST),
        "distill_bound": _FACTOR,
        "reward_weight": _Range(0, _MOST),
        "extra_rounds": _ANY,
        "kl": _Range(0, _MOST),
        "correction_low": _Range(0, 1),
        "correction_high": _Range(1, _MOST),
    },
    schema.LearnerConfig: {
        "ranks": _ONE,
        "threads": _THREADS,
        "gpus": _SHARE,
        "expert_parallel": _ONE,
        "micro_batch_tokens": _ONE,
        "minibatches": _ONE,
        "threshold_decay": _Range(0, 1, half=True),
        "router_lr": _ANY,
        "attnres_lr": _ANY,
        "lr": _POSITIVE,
        "betas": _Range(0, 1, half=True),
        "eps": _POSITIVE,
        "weight_decay": _ANY,
        "qk_clip": _POSITIVE,
        "grad_clip": _ANY,
        "warmup_steps": _ANY,
        "decay": _SHARE,
        "max_skipped_steps": _ONE,
    },
    schema.SyncConfig: {
        "bucket_mb": _ONE,
        "canary_tokens": _Range(2),
        "canary_tolerance": _POSITIVE,
    },
    schema.TeacherConfig: {"weight": _FACTOR},
    schema.TrainConfig: {
        "seed": _SEED,
        "steps": _ONE,
        "context": _ONE,
        "groups_per_step": _ONE,
        "group_size": _ONE,
        "max_staleness": _ANY,
        "eval_every": _ANY,
        "eval_episodes": _ANY,
        "save_every": _ANY,
        "keep": _ONE,
        # Greedy samples have no distribution to learn from, and near 0 fp32 holds none.
        "rollout.temperature": _Range(1e-3),
    },
    schema.Stage: {"context": _Range(2), "steps": _ONE, "batch_tokens": _ONE, "lr": _POSITIVE},
    schema.StageConfig: {"seed": _SEED, "vocab_size": _ONE, "episode_fraction": _SHARE},
    schema.SftConfig: {
        "seed": _SEED,
        "context": _ONE,
        "steps": _ONE,
        "batch_tokens": _ONE,
        "lr": _POSITIVE,
        "warmup_steps": _ANY,
        "grad_clip": _ANY,
        "ranks": _ONE,
        "threads": _THREADS,
        "gpus": _SHARE,
    },
    schema.EvalConfig: {"seed": _SEED, "episodes": _ONE, "context": _ONE, "visible_context": _ONE},
    schema.PlayConfig: {"seed": _SEED, "context": _ONE},
    benchmarks.BenchConfig: {
        "seed": _SEED,
        "steps": _ONE,
        "runs": _ONE,
        "rollout.temperature": _POSITIVE,
    },
    benchmarks.KdaBenchConfig: {
        "seed": _SEED,
        "repeats": _ONE,
        "lengths": _ONE,
        "heads": _ONE,
        "forward_only_from": _ONE,
    },
    benchmarks.MoeBenchConfig: {"seed": _SEED, "repeats": _ONE},
    benchmarks.AttnResBenchConfig: {"seed": _SEED, "repeats": _ONE},
    benchmarks.LogprobBenchConfig: {"seed": _SEED, "repeats": _ONE},
    benchmarks.StepBenchConfig: {"seed": _SEED, "steps": _ONE, "lengths": _Range(2)},
    benchmarks.DecodeBenchConfig: {
        "seed": _SEED,
        "sequences": _ONE,
        "context": _ONE,
        "repeats": _ONE,
    },
    benchmarks.ParityBenchConfig: {"seed": _SEED, "lengths": _Range(2), "sampled": _ONE},
    benchmarks.SyncBenchConfig: {"seed": _SEED, "bucket_mb": _ONE, "repeats": _ONE},
    benchmarks.LearningBenchConfig: {"seeds": _SEED, "steps": _ONE},
    benchmarks.OverlapBenchConfig: {
        "seeds": _SEED,
        "steps": _Range(2),
        "staleness": _ONE,
        "delay": _ANY,
    },
    benchmarks.ThresholdBenchConfig: {
        "steps": _ONE,
        "groups": _ONE,
        "group_size": _Range(2),
        "minibatches": _ONE,
        "lag": _ONE,
        "lr": _POSITIVE,
        "entropy": _Range(0, _MOST),
        "seed": _SEED,
    },
    benchmarks.RoutingBenchConfig: {
        "experts": _Range(2),
        "k": _ONE,
        "batches": _ONE,
        "windows": _ONE,
        "sequence": _ONE,
        "drift": _SHARE,
        "steps": _Range(2),
        "seed": _SEED,
    },
    schema.ServeConfig: {
        "port": _Range(1, 65535),
        "context": _ONE,
        "concurrency": _ONE,
        "tensor_parallel": _ONE,
    },
    schema.PlanConfig: {
        "context": _ONE,
        "batch": _ONE,
        "gpu_gib": _POSITIVE,
        "reserve": _Range(0, 1, half=True),
        "ranks": _ONE,
        "expert_parallel": _ONE,
        "serve_gpus": _ONE,
    },
}


def check_bounds(config: Any) -> None:
    """UserError naming the first setting, by its dotted key, that is not finite or out of range.

    None passes wherever the schema allows it.
    """
    for prefix, part in _parts(config, ""):
        for key, allowed in _TABLE.get(type(part), {}).items():
            value = attrgetter(key)(part)
            for name, number in _numbers(key, value):
                if number is not None and number not in allowed:
                    finite = "" if math.isfinite(number) else "finite and "
                    shown = number if isinstance(value, dict) else value
                    raise UserError(f"{prefix}{name}={_text(shown)} must be {finite}{allowed}")
        if isinstance(part, schema.LearnerConfig | schema.SftConfig) and 0 < part.gpus < 1:
            _check_shared_gpu(prefix, part)
        if isinstance(part, schema.LearnerConfig):
            _check_decay(prefix, part)
            _check_experts(prefix, part)
        if isinstance(part, schema.RolloutConfig):
            _check_gpus(prefix, part)
    if (
        isinstance(config, schema.TrainConfig)
        and config.learner.dtype != "float32"
        and computes_in_fp32(config.rollout)
    ):
        raise UserError(
            f"learner.dtype={config.learner.dtype} must be float32 in train: rollout computes in "
            "float32, so the log-probs of its samples would not be the learner's; or set "
            f"rollout{'.vllm' if config.rollout.engine == 'vllm' else ''}.dtype=bfloat16"
        )


def computes_in_fp32(rollout: schema.RolloutConfig) -> bool:
    """Whether the engine's log-probs are those of fp32."""
    own = native_dtype(rollout) if rollout.engine == "native" else rollout.vllm.dtype
    return own == "float32"


def native_dtype(rollout: schema.RolloutConfig) -> str:
    """What the native engine computes in where no learner says; a GPU has kernels for 16 bits."""
    return rollout.dtype or ("bfloat16" if rollout.gpus > 0 else "float32")


def _numbers(key: str, value: Any) -> list[tuple[str, Any]]:
    """The numbers of a setting, each with the key that an error names."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", number) for name, number in value.items()]
    return [(key, number) for number in (value if isinstance(value, tuple) else (value,))]


def _check_decay(prefix: str, part: schema.LearnerConfig) -> None:
    if part.threshold_decay is not None and part.thresholds != "ema":
        raise UserError(
            f"{prefix}threshold_decay={part.threshold_decay:g} is of {prefix}thresholds=ema, which "
            f"is {part.thresholds}; leave one of them out"
        )


def _check_experts(prefix: str, part: schema.LearnerConfig) -> None:
    name = f"{prefix}expert_parallel={part.expert_parallel}"
    if part.ranks % part.expert_parallel:
        raise UserError(f"{name} must divide {prefix}ranks={part.ranks}")
    if part.expert_parallel == 1:
        return
    if part.zero_stage == 3:
        raise UserError(
            f"{name} does not go with {prefix}zero_stage=3, which cuts experts over all ranks "
            f"already; set {prefix}zero_stage=2, or leave {prefix}expert_parallel out"
        )
    if part.zero_stage > 0 and part.optimizer == "muon":
        raise UserError(
            f"{name} with {prefix}optimizer=muon wants {prefix}zero_stage=0, which is "
            f"{part.zero_stage}; set that, or {prefix}optimizer=adamw"
        )


def _check_shared_gpu(prefix: str, part: schema.LearnerConfig | schema.SftConfig) -> None:
    """Ranks talk through NCCL, which wants a GPU for each."""
    if part.ranks > 1:
        raise UserError(
            f"{prefix}gpus={part.gpus:g}: several ranks cannot share a GPU; "
            f"set {prefix}gpus=1, or {prefix}ranks=1"
        )


def _check_gpus(prefix: str, part: schema.RolloutConfig) -> None:
    """An actor has a share of a GPU, or all those that its engine is divided over."""
    size, gpus = part.vllm.tensor_parallel if part.engine == "vllm" else 1, part.gpus
    if size > 1 and gpus != size:
        raise UserError(
            f"{prefix}vllm.tensor_parallel={size} needs as many GPUs for each actor, and "
            f"{prefix}gpus={gpus:g}: set {prefix}gpus={size}"
        )
    if size == 1 and gpus not in _SHARE:
        raise UserError(
            f"{prefix}gpus={gpus} must be {_SHARE}, or as many as {prefix}vllm.tensor_parallel"
        )


def _parts(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The config and the configs in it, each with what comes before its keys."""
    yield prefix, config
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _parts(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if is_dataclass(item):
                    yield from _parts(item, f"{prefix}{field.name}.{index}.")


def _text(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
