"""Settings that do not go together, or that others leave without effect, and those that follow
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ..configs.bounds import computes_in_fp32
from ..configs.errors import UserError
from ..configs.schema import (
    EnvConfig,
    LearnerConfig,
    RolloutConfig,
    SyncConfig,
    TrainConfig,
    VllmConfig,
)
from ..policy.config import PolicyConfig
from ..rl.algorithms import make_algorithm
from ..rollout.vllm import check_installed

OF_EXPERTS = ("replay", "thresholds", "threshold_decay", "router_lr", "expert_parallel")
# Nats in the mean between engines in bf16. A canary is random ids: a trained policy gives them some
# -15 nats each, and two forwards in bf16 were 0.24 apart, with 4 for one token. What was loaded is
# compared bit for bit before.
LOOSE_TOLERANCE = 0.5


def check_together(config: TrainConfig) -> None:
    """UserError for settings that exclude each other, or that others leave without effect."""
    _check_engine(config)
    _check_transport(config)
    algorithm = make_algorithm(config.algorithm)
    name, learner, rounds = config.algorithm.name, config.learner, config.algorithm.extra_rounds
    if config.group_size < 2:
        if algorithm.compares:
            raise UserError(
                f"group_size={config.group_size} must be at least 2 with algorithm.name={name}, "
                "which compares siblings"
            )
        alone = config.groups_per_step == 1 and algorithm.credit == "trajectory"
        if alone and algorithm.critic is None and config.algorithm.distill == 0:
            raise UserError(
                f"groups_per_step=1 must be at least 2 with group_size=1 and algorithm.name={name},"
                " which compares the episodes of a step"
            )
        reason = "it compares siblings, and group_size is 1; leave it out"
        check_unused("algorithm", config.algorithm, ["length_reward"], reason)
    if config.max_staleness == 0:
        check_unused("rollout", config.rollout, ["keep_states"], "needs max_staleness")
        check_unused("sync", config.sync, ["in_flight"], "needs max_staleness")
    everywhere = [n for n, teacher in enumerate(config.teachers) if not teacher.kinds]
    if rounds and everywhere:
        raise UserError(
            f"algorithm.extra_rounds={rounds} would have no effect: teachers.{everywhere[0]} "
            "teaches every task, whatever its rewards; leave it out, or give the teacher kinds"
        )
    if learner.minibatches == 1 and learner.replay == "learner":
        raise UserError(
            "learner.replay=learner would have no effect: it needs learner.minibatches above 1"
        )
    groups = config.groups_per_step * (1 + algorithm.extra_rounds)
    if learner.minibatches > groups:
        raise UserError(
            f"learner.minibatches={learner.minibatches} would have no effect above the {groups} "
            "groups that a step has at most, which are never divided; lower it, or raise "
            "groups_per_step"
        )
    for key, value, most in (
        ("learner.minibatches", learner.minibatches, 1),
        ("max_staleness", config.max_staleness, 0),
    ):
        if algorithm.on_policy and value > most:
            raise UserError(
                f"{key}={value} does not go with algorithm.name={name}, whose loss has no ratio to "
                f"the policy that sampled: set algorithm.correction=token_truncate, or {key}={most}"
            )


def check_parts(config: TrainConfig, policy: PolicyConfig) -> None:
    """UserError for settings of parts that the policy does not have."""
    layers = range(policy.num_hidden_layers)
    for there, part, names in (
        (not all(map(policy.is_dense, layers)), "experts", OF_EXPERTS),
        (policy.attn_res_block_size is not None, "mixture over depth", ("attnres_lr",)),
        (any(map(policy.is_mla, layers)), "latent attention", ("qk_clip",)),
    ):
        if not there:
            reason = f"the policy has no {part}; leave it out"
            check_unused("learner", config.learner, names, reason)


def rollout_of(rollout: RolloutConfig, learner: LearnerConfig) -> RolloutConfig:
    """The settings of rollout; on a GPU the native engine computes as the learner, unless told."""
    if rollout.engine == "native" and rollout.gpus > 0 and rollout.dtype is None:
        return replace(rollout, dtype=learner.dtype)
    return rollout


def sync_of(config: TrainConfig) -> SyncConfig:
    """The settings of publication, with the tolerance that the rollout engine needs."""
    if config.sync.canary_tolerance is not None or computes_in_fp32(
        rollout_of(config.rollout, config.learner)
    ):
        return config.sync
    return replace(config.sync, canary_tolerance=LOOSE_TOLERANCE)


def check_engine(rollout: RolloutConfig, ray_address: str | None) -> None:
    """UserError if the rollout engine cannot be had."""
    if rollout.engine == "native":
        return
    if rollout.gpus == 0 and rollout.vllm.dtype != "float32":
        raise UserError(
            "rollout.engine=vllm computes in fp32 on a CPU: set rollout.vllm.dtype=float32, or "
            "rollout.gpus=1 or a share of one"
        )
    if ray_address is None:  # what the nodes of a cluster have is for their actors to find out
        check_installed()


def check_native(rollout: RolloutConfig, before: RolloutConfig | None = None) -> None:
    """UserError if settings of another engine are given that are not those of ``before``."""
    before = before or RolloutConfig()
    if rollout.engine == "native" and rollout.vllm != before.vllm:
        names = [field.name for field in fields(VllmConfig)]
        check_unused("rollout.vllm", rollout.vllm, names, "needs rollout.engine=vllm")
    elif rollout.engine == "vllm" and rollout.dtype != before.dtype:
        reason = "it is of rollout.engine=native; set rollout.vllm.dtype"
        check_unused("rollout", rollout, ["dtype"], reason)


def check_sight(env: EnvConfig, rollout: RolloutConfig, vision: bool) -> None:
    """UserError if the environment shows images, and the engine takes none."""
    if vision and rollout.engine == "vllm":
        raise UserError(
            f"rollout.engine=vllm takes no images, and env.id {env.id} shows some; use "
            "rollout.engine=native"
        )


def _check_engine(config: TrainConfig) -> None:
    check_native(config.rollout)
    if config.rollout.engine == "native":
        return
    if config.learner.replay == "rollout" and config.rollout.gpus == 0:
        raise UserError(
            "learner.replay=rollout needs routes, which vLLM does not record on a CPU; set "
            "learner.replay=learner, or rollout.engine=native"
        )
    if config.sync.canary_tokens >= config.context:
        raise UserError(
            f"sync.canary_tokens={config.sync.canary_tokens} must be below context="
            f"{config.context} with rollout.engine=vllm, which takes no longer sequence"
        )
    if config.rollout.vllm.sleep:
        _check_sleep(config)
    check_engine(config.rollout, config.ray_address)


def _check_sleep(config: TrainConfig) -> None:
    """An engine sleeps for the sake of a learner on the same GPU, with which it takes turns."""
    own, other, name = config.rollout.gpus, config.learner.gpus, "rollout.vllm.sleep=true"
    if not (0 < own < 1 and 0 < other < 1 and _on_one_gpu(config)):
        raise UserError(
            f"{name} needs a GPU that learner and rollout share, and learner.gpus={other:g} and "
            f"rollout.gpus={own:g}: set shares that add up to 1 over all ranks and actors, or "
            "leave it out"
        )
    if config.max_staleness > 0:
        raise UserError(
            f"{name} does not go with max_staleness={config.max_staleness}, with which episodes "
            "are played while the learner works: set max_staleness=0, or leave it out"
        )


def _check_transport(config: TrainConfig) -> None:
    """What the settings exclude; where processes land is looked at when they have."""
    rollout, learner, wanted = config.rollout, config.learner, config.sync.transport
    shares = (learner.gpus, rollout.gpus)
    if wanted == "collective" and any(shares) and min(shares) < 1:
        raise UserError(
            f"sync.transport=collective needs a whole GPU on both sides, or none, and learner.gpus="
            f"{learner.gpus:g} and rollout.gpus={rollout.gpus:g}: set sync.transport=auto"
        )
    if wanted != "ipc":
        return
    if rollout.vllm.tensor_parallel > 1:
        raise UserError(
            "sync.transport=ipc needs learner and rollout on one GPU, and rollout.vllm."
            f"tensor_parallel={rollout.vllm.tensor_parallel} has more: set sync.transport=auto"
        )
    if not all(shares) or not _on_one_gpu(config):
        raise UserError(
            "sync.transport=ipc needs learner and rollout on one GPU: set learner.gpus and "
            "rollout.gpus to shares that add up to 1 over all ranks and actors, or "
            "sync.transport=auto"
        )


def _on_one_gpu(config: TrainConfig) -> bool:
    """Whether one GPU holds the shares of all ranks and actors."""
    learner, rollout = config.learner, config.rollout
    return learner.gpus * learner.ranks + rollout.gpus * rollout.actors <= 1 + 1e-9


def check_unused(section: str, given: Any, names: Sequence[str], reason: str) -> None:
    """UserError if one of the settings that have no effect here differs from its default."""
    default = type(given)()
    for name in names:
        value = getattr(given, name)
        if value != getattr(default, name):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{section}.{name}={shown} would have no effect: {reason}")
