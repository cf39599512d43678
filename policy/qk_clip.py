"""Weight clipping of K2: no head of latent attention keeps logits above a threshold.

After a step whose forwards had a largest logit S of a head above tau, with gamma = tau / S, the
head's rows of the query and key projections are scaled: those without position (``nope``) by
sqrt(gamma) on both sides, the query's ``rope`` rows by gamma, for their keys are shared by all
heads and stay as they are (K2, arXiv:2507.20534 algorithm 1 and equation 1). Every logit of the
head then is gamma times what it was. KDA needs none of it: its queries and keys have norm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .attention import GatedMLA


@contextmanager
def watched_logits(policy: nn.Module) -> Iterator[None]:
    """Keep each head's largest logit of forwards inside; recomputation in backward is outside."""
    layers = [layer for _, layer in _layers(policy)]
    for layer in layers:
        layer.watching = True
    try:
        yield
    finally:
        for layer in layers:
            layer.watching = False


def logit_maxima(policy: nn.Module) -> list[Tensor]:
    """Per layer the largest logit [H] of each head since the last `forget`, at least 0, fp32."""
    for _, layer in _layers(policy):  # one that saw nothing is where it was made
        layer.logit_max = layer.logit_max.to(layer.o_proj.weight.device)
    return [layer.logit_max for _, layer in _layers(policy)]


def forget(policy: nn.Module) -> None:
    """Start again from 0."""
    for _, layer in _layers(policy):
        layer.logit_max.zero_()


def clip_factors(policy: nn.Module, threshold: float) -> dict[str, Tensor]:
    """Factors [rows], by parameter name, of the projections that must be scaled."""
    factors: dict[str, Tensor] = {}
    for name, layer in _layers(policy):
        gamma = (threshold / layer.logit_max).clamp(max=1)[:, None]
        if not bool((gamma < 1).any()):
            continue
        plain = gamma.sqrt().expand(-1, layer.nope)
        query = torch.cat([plain, gamma.expand(-1, layer.rope)], 1)
        key = torch.cat([plain, torch.ones_like(gamma).expand(-1, layer.value)], 1)
        factors[f"{name}.{'q_b_proj' if layer.low_rank_query else 'q_proj'}.weight"] = (
            query.flatten()
        )
        factors[f"{name}.kv_b_proj.weight"] = key.flatten()
    return factors


def _layers(policy: nn.Module) -> Iterator[tuple[str, GatedMLA]]:
    return ((n, module) for n, module in policy.named_modules() if isinstance(module, GatedMLA))
