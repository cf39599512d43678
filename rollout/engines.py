"""The engine of a rollout actor, built from a checkpoint as `RolloutConfig.engine` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..configs.bounds import native_dtype
from ..configs.errors import UserError
from ..configs.schema import ChatConfig, InFlight, RolloutConfig
from ..policy import PolicyConfig
from ..policy.checkpoint import load_checkpoint
from ..policy.records import read_config, read_stage
from ..policy.tokenizer import ChatFormat, chat_of, load_tokenizer
from .engine_weights import policy_weights
from .generator import NativeGenerator
from .narrow import NarrowWeights
from .requests import RequestGenerator
from .sync import Holder, PolicyWeights
from .types import Generator
from .vllm import VllmEngine


@dataclass(frozen=True, slots=True)
class Built:
    """What plays, what takes weights over for it, and how its policy speaks."""

    generator: Generator
    holder: Holder
    chat: ChatFormat


def build(
    checkpoint: str,
    rollout: RolloutConfig,
    context: int,
    seed: int,
    chat: ChatConfig,
    *,
    images: bool = False,
    record_routes: bool = False,
    in_flight: InFlight = "keep",
) -> Built:
    """Load the checkpoint into the engine. UserError for what that engine cannot do."""
    if rollout.engine == "native":
        return _native(checkpoint, rollout, seed, chat, images, record_routes, in_flight)
    if images:
        raise UserError("rollout.engine=vllm has no images; use rollout.engine=native")
    folder = Path(checkpoint)
    config = read_config(folder)
    _check_divided(config, rollout.vllm.tensor_parallel)
    routed = [n for n in range(config.num_hidden_layers) if not config.is_dense(n)]
    spoken = chat_of(load_tokenizer(folder), read_stage(folder), chat)
    engine = VllmEngine(
        folder,
        context,
        concurrency=rollout.concurrency,
        memory=rollout.vllm.memory,
        dtype=rollout.vllm.dtype,
        eager=rollout.vllm.eager,
        tensor_parallel=rollout.vllm.tensor_parallel,
        routed_layers=routed if record_routes else (),
        sleeps=rollout.vllm.sleep,
    )
    holder = policy_weights(engine, folder, config, rollout.vllm.dtype == "bfloat16")
    generator = RequestGenerator(engine, seed, rollout.keep_states, in_flight)
    return Built(generator, holder, spoken)


def _check_divided(config: PolicyConfig, size: int) -> None:
    """UserError for a policy that vLLM cannot divide over ``size`` GPUs."""
    linear = config.linear_attn_config or {}
    dense = [config.is_dense(n) for n in range(config.num_hidden_layers)]
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "linear_attn_config.num_heads": linear.get("num_heads", 0),
        "intermediate_size": config.intermediate_size if any(dense) else 0,
        "moe_intermediate_size": 0 if all(dense) else config.moe_intermediate_size,
    }
    odd = [f"{name}={value}" for name, value in sizes.items() if value % size]
    if odd:
        raise UserError(
            f"rollout.vllm.tensor_parallel={size} must divide the policy's {', '.join(odd)}"
        )


def _native(
    checkpoint: str,
    rollout: RolloutConfig,
    seed: int,
    chat: ChatConfig,
    images: bool,
    record_routes: bool,
    in_flight: InFlight,
) -> Built:
    narrow = native_dtype(rollout) == "bfloat16"
    dtype = torch.bfloat16 if narrow else torch.float32
    loaded = load_checkpoint(checkpoint, dtype, vision=images)
    policy = loaded.policy
    policy.v_head = None  # values are the learner's
    if rollout.gpus > 0:
        policy.to(torch.device("cuda"))  # type: ignore[arg-type] - Module.to
    spoken = chat_of(loaded.tokenizer, loaded.stage, chat)
    if images and policy.config.image_rules is not None:
        spoken = spoken.seeing(policy.config.image_rules)
    generator = NativeGenerator(
        policy,
        seed,
        keep_states=rollout.keep_states,
        record_routes=record_routes,
        in_flight=in_flight,
    )
    holder = NarrowWeights(policy) if narrow else PolicyWeights(policy)
    return Built(generator, holder, spoken)
