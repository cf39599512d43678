"""The policy that training is kept near: a frozen copy beside the learner, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.device import upload
from .penalties import Pull, kl_reward
from .types import MicroBatch


class Reference:
    """Scores what was sampled, without gradient, and says what the distance costs.

    ``policy`` stays whole on each rank, whatever the ZeRO stage, and in its own precision. It is
    a `farhorizon.policy.Policy` or what has its forward.
    """

    def __init__(self, policy: Any, pull: Pull, temperature: float) -> None:
        self.policy = policy.requires_grad_(False)
        self.pull, self.temperature = pull, temperature

    @torch.no_grad()
    def score(self, batch: MicroBatch, positions: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the tokens at ``positions`` [R], none of which is a sequence's first, and
        what to add to the reward of each; None if the KL is in the loss."""
        logprobs = score(self.policy, batch, positions, self.temperature)
        device = logprobs.device
        if self.pull.where == "loss":
            return logprobs, None
        rewards = kl_reward(
            upload(torch.tensor(batch.behavior_logprobs[positions]), device),
            logprobs,
            upload(torch.tensor(batch.loss_mask[positions]), device),
            coefficient=self.pull.coefficient,
            estimator=self.pull.estimator,
        )
        return logprobs, rewards


@torch.no_grad()
def score(policy: Any, batch: MicroBatch, positions: np.ndarray, temperature: float) -> Tensor:
    """Log-probs [R] that a policy of its own gives the tokens at ``positions``, none of which is a
    sequence's first."""
    device = next(policy.parameters()).device
    ids = upload(torch.tensor(batch.input_ids), device)
    rows = upload(torch.tensor(positions - 1), device)
    return policy(
        ids[None],
        torch.tensor(batch.cu_seqlens),
        rows=rows,
        targets=ids[rows + 1],
        temperature=temperature,
        **policy.image_inputs(batch.images),
    ).logprobs
