"""A training step of a policy whose routing is as odd as it can be: every expert for every token,
one expert for all of them, fewer tokens than experts, no trained token."""

from __future__ import annotations

import math

import pytest
import torch

from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.moe import Experts


def build(experts: int, k: int) -> Policy:
    torch.manual_seed(0)
    sizes = {"num_experts": experts, "num_experts_per_token": k}
    return Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, **sizes))


def trained(policy: Policy, tokens: int, rows: int) -> list[torch.Tensor]:
    """Gradients of the experts behind a step on ``tokens``, of which ``rows`` are trained."""
    ids = torch.randint(0, 64, (1, tokens))
    with policy.routing_statistics():
        out = policy(ids, rows=torch.arange(rows), targets=ids[0, 1 : rows + 1])
    (out.logprobs.sum() + 0.1 * out.entropy.sum()).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in policy.parameters())
    parts = [m for m in policy.modules() if isinstance(m, Experts)]
    return [p.grad for m in parts for p in m.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_every_expert_for_every_token(checkpointing: str) -> None:
    policy = build(4, 4)
    policy.checkpointing = checkpointing
    with torch.no_grad():
        for router in policy.routers():
            router.e_score_correction_bias.copy_(torch.tensor([0.5, 0.0, 0.25, 0.25]))
    grads = trained(policy, 20, 19)
    assert all(bool(grad.flatten(1).any(1).all()) for grad in grads)  # each has learnt
    assert policy.update_thresholds() == [1.0] * len(policy.routers())
    for router in policy.routers():
        found = router.e_score_correction_bias
        torch.testing.assert_close(found, torch.tensor([0.25, -0.25, 0.0, 0.0]))


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_one_expert_for_all_tokens(checkpointing: str) -> None:
    policy = build(8, 1)
    policy.checkpointing = checkpointing
    with torch.no_grad():
        for router in policy.routers():
            router.e_score_correction_bias[3] = 5.0
    others = torch.arange(8) != 3
    for grad in trained(policy, 20, 19):
        assert bool(grad[3].any()) and not bool(grad[others].any())
    assert policy.update_thresholds() == [8.0] * len(policy.routers())
    assert all(float(router.e_score_correction_bias[3]) < 1 for router in policy.routers())


def test_two_tokens_leave_most_experts_without_any() -> None:
    policy = build(8, 2)
    for grad in trained(policy, 2, 1):
        assert 1 <= int(grad.flatten(1).any(1).sum()) <= 4
    assert all(math.isfinite(load) for load in policy.update_thresholds())


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_no_trained_token_gives_gradients_of_zero(checkpointing: str) -> None:
    policy = build(8, 2)
    policy.checkpointing = checkpointing
    assert not any(bool(grad.any()) for grad in trained(policy, 20, 0))
    assert all(p.grad is None or not bool(p.grad.any()) for p in policy.parameters())
    assert all(math.isfinite(load) for load in policy.update_thresholds())
