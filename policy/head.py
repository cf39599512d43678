"""The output head of a policy, and what a forward returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from ..kernels.logprob import token_logprobs
from .state import DecodeState


@dataclass
class PolicyOutput(ModelOutput):
    """What a forward returns; fields that were not asked for are None.

    ``logits [1, T, V]`` (``[B, T, V]`` for rows, ``[N, V]`` with ``last_only``), ``logprobs`` and
    ``entropy`` fp32 [R], ``last_hidden_state [1, T, D]`` or ``[B, T, D]``, ``loss`` scalar,
    ``value`` fp32 of a policy with a value head: [R] with ``rows``, else of all tokens.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    value: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    state: DecodeState | None = None


class LanguageHead(nn.Linear):
    """Output projection that can also score targets without making all logits."""

    def forward(
        self, input: torch.Tensor, targets: torch.Tensor | None = None, temperature: float = 1.0
    ) -> Any:
        """Logits of ``input [..., D]``, or (log-probs, entropy) of ``targets``."""
        if targets is None:
            return super().forward(input)
        return token_logprobs(input, self.weight, targets, temperature)
