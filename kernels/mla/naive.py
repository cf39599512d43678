"""Attention of one token a sequence over cached latents, in plain torch: the specification."""

from __future__ import annotations

import torch

from ..precision import widen


def naive_latent_attention(
    query: torch.Tensor,
    shared: torch.Tensor,
    cache: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`farhorizon.kernels.mla.latent_attention` from its formula, sequence by sequence."""
    rank = query.shape[2]
    found = torch.zeros_like(query)
    for n, (place, length) in enumerate(zip(places.tolist(), lengths.tolist(), strict=True)):
        if place < 0 or length == 0:
            continue
        keys = widen(cache[place, :length])
        scores = widen(torch.cat((query[n], shared[n]), -1)) @ keys.t() * scale
        found[n] = scores.softmax(-1) @ keys[:, :rank]
    return found
