"""A training step on the GPU: it waits for nothing, and its gradient is the one in fp32."""

from __future__ import annotations

import pytest
import torch

from farhorizon.launch.measure import relative
from farhorizon.launch.step_measure import (
    ALLOWED_GRADIENT,
    OurSide,
    build_policy,
    draw_batch,
    gradient_error,
)
from farhorizon.policy import PolicyConfig

pytestmark = pytest.mark.gpu

LENGTHS = [[700, 1, 300], [512, 512], [1111]]


def config() -> PolicyConfig:
    linear = {
        "num_heads": 2,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    }
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return PolicyConfig.tiny(hidden_size=256, linear_attn_config=linear, **sizes)


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_forward_and_backward_never_wait_for_the_device(checkpointing: str) -> None:
    """Documents of new lengths each time; only the kernels are compiled before."""
    policy = build_policy(config(), 0, "cuda")
    policy.checkpointing = checkpointing
    for lengths in LENGTHS:
        OurSide(policy, draw_batch(512, lengths, 0, "cuda"))()
    for lengths in LENGTHS:
        side = OurSide(policy, draw_batch(512, [lengths[0] + 64, *lengths[1:]], 0, "cuda"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            side.forward().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        policy.clear_routing_counts()


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_the_gradient_is_that_in_fp32(checkpointing: str) -> None:
    assert gradient_error(config(), 0, checkpointing, "cuda") < ALLOWED_GRADIENT


def test_checkpointing_gives_the_same_gradient() -> None:
    found: list[dict[str, torch.Tensor]] = []
    # Attention would otherwise give back sums in any order, which sums that cancel show most.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for choice in ("none", "layers"):
            policy = build_policy(config(), 0, "cuda")
            policy.checkpointing = choice
            side = OurSide(policy, draw_batch(512, [700, 324], 0, "cuda"))
            side.forward().backward()
            named = policy.named_parameters()
            found.append({name: p.grad for name, p in named if p.grad is not None})
    finally:
        torch.use_deterministic_algorithms(False)
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    off = {name: relative(recomputed[name], plain[name]) for name in plain}
    assert max(off.values()) < 5e-3, off
