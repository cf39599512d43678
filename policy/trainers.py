"""What trainers from elsewhere pass to a forward, and the loss that they ask for."""

from __future__ import annotations

from typing import Any

import torch

from .packing import Packing

# What Hugging Face trainers and `generate` pass besides the names of `Policy.forward`.
_CACHES = ("past_key_values", "cache")
_EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits")
_HINTS = ("use_cache", "return_dict", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def refuse(unused: dict[str, Any]) -> None:
    """TypeError or ValueError for arguments that would have to change what is computed."""
    for name, value in unused.items():
        if name in _CACHES and value is not None:
            raise ValueError(f"{name} is not supported: continue sequences with state=DecodeState")
        if name in _EXTRAS and value:
            raise ValueError(f"{name} is not supported")
        if name not in (*_CACHES, *_EXTRAS, *_HINTS):
            raise TypeError(f"forward got an unexpected argument {name!r}")


def shifted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    packing: Packing,
    num_items: torch.Tensor | int | None,
) -> torch.Tensor:
    """Mean negative log-prob of each token ``[T]`` from the one before it in its sequence."""
    rows = ((packing.offset > 0) & (labels != -100)).nonzero().flatten()
    if len(rows) == 0:
        return logits.sum() * 0.0
    picked = logits[rows - 1].float().log_softmax(-1)
    total = -picked.gather(-1, labels[rows][:, None]).sum()
    return total / (len(rows) if num_items is None else num_items)
