"""Activation checkpointing: a layer keeps what it was given, and backward computes the rest again.

Attention is the one part whose work grows with the square of a document: what it made is kept, and
only its inputs are computed again. Everything else is linear in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .attention import GatedMLA
from .moe import Router

CHOICES = ("none", "layers")

# What `farhorizon.kernels.attention` and torch's attention on a CPU come down to.
KEPT = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
        "_cudnn_attention_forward",
    )
}


def recomputed(layer: nn.Module, *given: Any) -> Any:
    """``layer(*given)``, whose results autograd keeps and whose intermediates it does not, but for
    what attention made. Backward runs the layer again, with the same autocast, and counts nothing
    twice: no routes, no logits."""
    return checkpoint(
        layer,
        *given,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing is drawn
        context_fn=partial(_contexts, layer),
    )


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if not any(isinstance(part, GatedMLA) for part in layer.modules()):
        return nullcontext(), _Uncounted(layer, nullcontext())
    first, again = create_selective_checkpoint_contexts(_choose)
    return first, _Uncounted(layer, again)


def _choose(_: Any, op: Callable[..., Any], *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Uncounted(AbstractContextManager[None]):
    """Within it the layer's routers and attention watch nothing, whoever is counting."""

    def __init__(self, layer: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner
        self.watching = [
            (part, name)
            for part in layer.modules()
            for kind, name in ((Router, "collecting"), (Router, "recorded"), (GatedMLA, "watching"))
            if isinstance(part, kind)
        ]

    def __enter__(self) -> None:
        self.inner.__enter__()
        self.before = [getattr(part, name) for part, name in self.watching]
        for part, name in self.watching:
            setattr(part, name, None if name == "recorded" else False)

    def __exit__(self, *error: Any) -> None:
        for (part, name), value in zip(self.watching, self.before, strict=True):
            setattr(part, name, value)
        self.inner.__exit__(*error)
