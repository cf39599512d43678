"""Activation checkpointing: the same gradient, attention run once, nothing counted twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.qk_clip import logit_maxima, watched_logits

IDS = torch.arange(150)[None] * 37 % 512
EDGES = torch.tensor([0, 60, 61, 150])


class Operations(TorchDispatchMode):
    """Counts operations while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def policy(choice: str) -> Policy:
    torch.manual_seed(0)
    made = Policy(PolicyConfig.tiny())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "res_proj" in name:
                parameter.normal_(0, 0.5)
    made.checkpointing = choice
    return made


def step(made: Policy, *, narrow: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients and counts of a step whose backward runs where routes and logits are counted."""
    with made.routing_statistics(), watched_logits(made), made.recorded_routes() as routes:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            out = made(IDS, EDGES, rows=torch.arange(149), targets=IDS[0, 1:])
        (-out.logprobs.mean()).backward()
        recorded = torch.from_numpy(routes.take())
    gradients = [p.grad for p in made.parameters() if p.grad is not None]
    return gradients, [*made.routing_counts(), *logit_maxima(made), recorded]


@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_and_counts_are_the_same_bits(narrow: bool) -> None:
    kept, again = (step(policy(choice), narrow=narrow) for choice in ("none", "layers"))
    for one, other in zip(kept, again, strict=True):
        assert len(one) == len(other) > 3
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_layers_run_again_but_for_attention() -> None:
    seen = []
    for choice in ("none", "layers"):
        made = policy(choice)
        with Operations() as operations:
            step(made)
        seen.append(operations.seen)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert seen[0][attention] == seen[1][attention] > 0
    assert seen[1]["aten.mm.default"] > seen[0]["aten.mm.default"]


def kept_bytes(made: Policy) -> int:
    held: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        held.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        made(IDS, EDGES, rows=torch.arange(149), targets=IDS[0, 1:])
    return sum(held)


def test_less_is_kept() -> None:
    assert kept_bytes(policy("layers")) < kept_bytes(policy("none")) / 4


def test_another_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpointing must be one of none, layers, got 'all'"):
        policy("all")
