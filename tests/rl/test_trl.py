"""Loss and gradient beside TRL's own, on the same tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from farhorizon.configs.schema import AlgorithmConfig
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.corrections import CORRECTIONS
from farhorizon.rl.losses import gspo, ppo_clip

LENGTH = 9  # the longest completion allowed


@dataclass(frozen=True)
class Batch:
    """Four completions of up to seven tokens; all [4, 7] but advantages [4]."""

    logprobs: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor


def batch() -> Batch:
    random = torch.Generator().manual_seed(3)
    old, noise, other, entropy = torch.randn(4, 4, 7, generator=random, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [1], [4], [6]])
    advantages = torch.tensor([1.0, -0.7, 0.4, -1.3], dtype=torch.float64)
    old = old - 3
    return Batch(old + 0.4 * noise, old, old + 0.3 * other, entropy.abs(), mask, advantages)


def trainer(logprobs: Tensor, entropy: Tensor, **changes: Any) -> Any:
    """What TRL's loss reads of a trainer, on one process and without accumulation."""
    arguments = {
        "delta": changes.pop("delta", None),
        "sapo_temperature_pos": changes.pop("sapo_temperature_pos", 1.0),
        "sapo_temperature_neg": changes.pop("sapo_temperature_neg", 1.05),
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
    }
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        sync_gradients=True,
    )
    settings: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "use_vllm": False,
        **changes,
    }
    return SimpleNamespace(
        **settings,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**arguments),
        accelerator=accelerator,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        vllm_importance_sampling_correction=settings["use_vllm"],
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
    )


def theirs(own: Batch, weights: Tensor | None = None, **changes: Any) -> list[Any]:
    logprobs = own.logprobs.clone().requires_grad_()
    entropy = own.entropy.clone().requires_grad_()
    ids = torch.zeros(4, 7, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": own.mask.long(),
        "advantages": own.advantages,
        "old_per_token_logps": own.old,
        "ref_per_token_logps": own.reference,
        "num_items_in_batch": own.mask.sum(),
        "importance_sampling_ratio": weights,
    }
    made = trainer(logprobs, entropy, use_vllm=weights is not None, **changes)
    loss = GRPOTrainer._compute_loss(made, made.model, inputs)
    slopes = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)
    return [loss.item(), *slopes]


def ours(own: Batch, loss: Any, **kwargs: Any) -> list[Any]:
    """The same tokens packed end to end."""
    mask = own.mask
    logprobs = own.logprobs.clone().requires_grad_()
    entropy = own.entropy.clone().requires_grad_()
    count = int(mask.sum())
    yes = torch.ones(count, dtype=torch.bool)
    out = loss(
        logprobs[mask],
        own.old[mask],
        own.advantages[:, None].expand(4, 7)[mask],
        yes,
        sequence_ids=torch.arange(4)[:, None].expand(4, 7)[mask],
        denominator=count,
        entropy=entropy[mask],
        reference_logprobs=own.reference[mask],
        **kwargs,
    ).loss
    slopes = torch.autograd.grad(out, [logprobs, entropy], allow_unused=True)
    return [out.item(), *slopes]


def same(left: list[Any], right: list[Any]) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-9, abs=1e-12)
    for a, b in zip(left[1:], right[1:], strict=True):
        zero = torch.zeros(4, 7, dtype=torch.float64)
        assert torch.allclose(zero if a is None else a, zero if b is None else b, rtol=1e-9)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ({"name": "grpo"}, {"loss_type": "bnpo"}),
        ({"name": "grpo", "aggregation": "sequence"}, {"loss_type": "grpo"}),
        ({"name": "grpo", "dual_clip": 1.3}, {"loss_type": "dapo", "delta": 1.3}),
        ({"name": "dr_grpo", "length": LENGTH}, {"loss_type": "dr_grpo"}),
        ({"name": "cispo", "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
        (
            {"name": "gspo"},
            {
                "importance_sampling_level": "sequence",
                "epsilon_low": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        (
            {"name": "gspo", "clip_low": 0.3, "clip_high": 0.3},
            {
                "importance_sampling_level": "sequence",
                "epsilon_low": 0.3,
                "epsilon_high": 0.3,
            },
        ),
        ({"name": "sapo"}, {"loss_type": "sapo"}),
        (
            {"name": "sapo", "tau_pos": 3.0, "tau_neg": 0.4},
            {"loss_type": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.4},
        ),
        ({"name": "grpo", "entropy": 0.2}, {"loss_type": "dapo", "entropy_coef": 0.2}),
        (
            {"name": "dr_grpo", "entropy": 0.2, "length": LENGTH},
            {"loss_type": "dr_grpo", "entropy_coef": 0.2},
        ),
    ],
)
def test_losses_and_gradients_are_trls(config: dict[str, Any], changes: dict[str, Any]) -> None:
    own = batch()
    same(ours(own, make_algorithm(AlgorithmConfig(**config)).loss), theirs(own, **changes))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"name": "grpo"}, {"loss_type": "dapo"}),
        ({"name": "grpo", "aggregation": "sequence"}, {"loss_type": "grpo"}),
        ({"name": "dr_grpo", "length": LENGTH}, {"loss_type": "dr_grpo"}),
    ],
)
def test_kl_to_the_reference_is_trls(config: dict[str, Any], changes: dict[str, Any]) -> None:
    own = batch()
    made = make_algorithm(AlgorithmConfig(**config, kl=0.1, kl_gradient="own"))
    same(ours(own, made.loss), theirs(own, beta=0.1, **changes))


@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections_are_trls(mode: str, level: str) -> None:
    """TRL's weights by its own few lines, for samples whose log-probs are the reference's here."""
    own = batch()
    apart = (own.old - own.reference) * own.mask
    apart = apart.sum(-1, keepdim=True) if mode.startswith("sequence") else apart
    ratio = apart.exp()
    if mode.endswith("truncate"):
        ratio = ratio.clamp(max=1.1)
    else:
        ratio = ratio.masked_fill(ratio > 1.1, 0.0)
    rows = own.mask
    ids = torch.arange(4)[:, None].expand(4, 7)[rows]
    made = CORRECTIONS[mode](
        own.old[rows],
        own.reference[rows],
        torch.ones(len(ids), dtype=torch.bool),
        sequence_ids=ids,
        denominator=len(ids),
        high=1.1,
    )
    assert torch.allclose(made.weights, ratio.expand(4, 7)[rows], rtol=1e-12)
    function = ppo_clip if level == "token" else gspo

    def weighed(*arguments: Any, entropy: Tensor, reference_logprobs: Tensor, **kwargs: Any) -> Any:
        return function(*arguments, weights=made.weights, clip_low=0.2, clip_high=0.2, **kwargs)

    same(
        ours(own, weighed),
        theirs(own, weights=ratio, loss_type="bnpo", importance_sampling_level=level),
    )
