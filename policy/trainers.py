"""What trainers from elsewhere pass to a forward and to a save, and the loss that they ask for."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.precision import widen
from .packing import Packing

# What Hugging Face trainers and `generate` pass besides the names of `Policy.forward`.
_CACHES = ("past_key_values", "cache")
_EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits")
_HINTS = ("use_cache", "return_dict", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

# And to a save, which does just that.
_SAVED = {"is_main_process": (True,), "safe_serialization": (True,), "push_to_hub": (False,)}


def refuse(unused: dict[str, Any]) -> None:
    """TypeError or ValueError for arguments that would have to change what is computed."""
    for name, value in unused.items():
        if name in _CACHES and value is not None:
            raise ValueError(f"{name} is not supported: continue sequences with state=DecodeState")
        if name in _EXTRAS and value:
            raise ValueError(f"{name} is not supported")
        if name not in (*_CACHES, *_EXTRAS, *_HINTS):
            raise TypeError(f"forward got an unexpected argument {name!r}")


def refuse_saving(unused: dict[str, Any]) -> None:
    """TypeError or ValueError for options of a save that would have to change what is written."""
    for name, value in unused.items():
        if name not in _SAVED:
            raise TypeError(f"save_pretrained got an unexpected argument {name!r}")
        if value not in (None, *_SAVED[name]):
            raise ValueError(f"save_pretrained: {name}={value!r} is not supported")


def check_inputs(
    input_ids: torch.Tensor,
    rows: torch.Tensor | None,
    targets: torch.Tensor | None,
    labels: torch.Tensor | None,
) -> None:
    """ValueError naming the argument of `Policy.forward` that contradicts the others."""
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [B, L]")
    if rows is not None and targets is None:
        raise ValueError("rows needs targets: without them logits of all tokens are computed")
    if targets is not None and labels is not None:
        raise ValueError("targets and labels exclude each other: log-probs, or a loss")
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(
            f"labels has shape {list(labels.shape)}, expected that of input_ids, "
            f"{list(input_ids.shape)}"
        )
    if targets is not None:
        wanted = [input_ids.numel()] if rows is None else list(rows.shape)
        if list(targets.shape) != wanted or len(wanted) != 1:
            name = "every token of input_ids" if rows is None else "each of rows"
            raise ValueError(
                f"targets has shape {list(targets.shape)}, expected {wanted}: one for {name}"
            )


def check_ranges(
    input_ids: torch.Tensor,
    rows: torch.Tensor | None,
    targets: torch.Tensor | None,
    labels: torch.Tensor | None,
    vocab_size: int,
) -> None:
    """ValueError naming the argument with an index beyond what it counts. Only of tensors on a CPU:
    on a GPU the host would have to wait."""
    kept = None
    if labels is not None and labels.device.type == "cpu":
        kept = labels[labels != -100]
    for name, indices, count in (
        ("input_ids", input_ids, vocab_size),
        ("rows", rows, input_ids.numel()),
        ("targets", targets, vocab_size),
        ("labels", kept, vocab_size),
    ):
        if indices is None or indices.device.type != "cpu" or not indices.numel():
            continue
        least, most = (int(end) for end in indices.aminmax())
        if least < 0 or most >= count:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} has {wrong}, expected 0 to {count - 1}")


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
    picked = widen(logits[rows - 1]).log_softmax(-1)
    total = -picked.gather(-1, labels[rows][:, None]).sum()
    return total / (len(rows) if num_items is None else num_items)
