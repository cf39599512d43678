"""A policy of a few hundred parameters with what the learner needs of the real one, and the
configuration of a small one that sees images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from farhorizon.policy import PolicyConfig
from farhorizon.policy.images import Placed


@dataclass
class FakeOutput(ModelOutput):
    """Log-probs and entropy of the chosen rows."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None


class FakePolicy(nn.Module):
    """Predicts from this and the previous token of the sequence, through routed experts (k = 1).

    ``poison`` makes the gradient of ``mix.weight`` infinite.
    """

    threshold: Tensor

    def __init__(self, vocab: int = 11, width: int = 6, experts: int = 3, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.experts = nn.Parameter(torch.empty(experts, width, width))
        self.gate = nn.Linear(width, experts, bias=False)
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocab)
        self.register_buffer("threshold", torch.zeros(experts))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=generator)
        self.poison = False
        self.mix.weight.register_hook(lambda g: g * torch.inf if self.poison else g)
        self.collecting = False
        self.counts = torch.zeros(experts, dtype=torch.int64)

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        rows: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
    ) -> FakeOutput:
        ids = input_ids.flatten()
        x = self.embed(ids)
        first = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        first[cu_seqlens[:-1].long()] = True
        before = torch.where(first[:, None], 0.0, x.roll(1, 0))
        x = x + self.mix(before)
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores + self.threshold).argmax(-1)
        if self.collecting:
            self.counts += torch.bincount(chosen, minlength=len(self.counts))
        weight = scores.gather(1, chosen[:, None])
        x = x + weight * torch.einsum("td,tde->te", x, self.experts[chosen])
        logits = self.head(torch.tanh(x[rows]) * self.norm) / temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return FakeOutput(logprobs.gather(1, targets[:, None])[:, 0], entropy)

    def image_inputs(self, images: Sequence[Placed]) -> dict[str, Any]:
        return {}

    @contextmanager
    def routing_statistics(self, valid: Tensor | None = None) -> Iterator[None]:
        self.collecting = True
        yield
        self.collecting = False

    def routing_counts(self) -> list[Tensor]:
        return [self.counts]

    def update_thresholds(self) -> list[float]:
        load = self.counts.float() / self.counts.sum()
        self.threshold.sub_(0.1 * (load - load.mean()))
        self.counts.zero_()
        return [float(load.max() / load.mean())]

    def clear_routing_counts(self) -> None:
        self.counts.zero_()

    @staticmethod
    def leaf_modules() -> list[type[nn.Module]]:
        return []


SEEING: dict[str, Any] = {
    **{"patch_size": 2, "init_pos_emb_height": 4, "init_pos_emb_width": 4},
    **{"vt_num_attention_heads": 2, "vt_num_hidden_layers": 2, "vt_hidden_size": 12},
    **{"vt_intermediate_size": 20, "qkv_hidden_size": 16},
}


def seeing_config(vocab_size: int, media_token: int, **text: Any) -> PolicyConfig:
    """A tiny policy with a vision tower."""
    fields = PolicyConfig.tiny(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, **text
    ).to_dict()
    return PolicyConfig.from_dict(
        {
            "model_type": "kimi_k3",
            "media_placeholder_token_id": media_token,
            "text_config": fields,
            "vision_config": SEEING,
        }
    )
