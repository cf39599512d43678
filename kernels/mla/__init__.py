"""Latent attention of decode steps (MLA, absorbed): every head reads the same cached latents."""

from __future__ import annotations

import torch

from ..norm import rms_norm
from .naive import naive_latent_attention

__all__ = ["append_latent", "latent_attention", "naive_latent_attention"]


def latent_attention(
    query: torch.Tensor,
    shared: torch.Tensor,
    cache: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Softmax mixture of a sequence's latents for each head of one token of N sequences.

    ``query [N, H, R]`` (absorbed into the latent) and ``shared [N, H, P]`` make scores with
    ``cache [S, C, R + P]``, times ``scale``; values are the first R. Sequence n lies in row
    ``places[n]`` and has ``lengths[n]`` tokens, the newest included, both int [N]. Returns ``[N, H,
    R]`` in query's dtype, zeros where a place is below 0 or a length is 0. Softmax is in fp32 or
    wider; entries from a length on are not used, whatever they hold. Without gradients. ValueError
    names a shape that does not fit, and a cache whose last dimension is not adjacent.

    On a GPU it runs in kernels (in Gluon on Hopper for 16-bit numbers, R = 512 and P = 64) unless
    numbers are fp64, reads every latent once for up to `MOST_HEADS` heads, and waits for nothing. A
    sequence is cut by its own length alone, the parts are merged in their order: it has the same
    bits in any company.
    """
    _check(query, shared, cache, places, lengths)
    with torch.no_grad():
        if query.is_cuda and query.dtype != torch.float64:
            from .fused import attend

            return attend(query, shared, cache, places, lengths, scale)
        return naive_latent_attention(query, shared, cache, places, lengths, scale)


def append_latent(
    entry: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    places: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Write one token of N sequences to ``cache [S, C, R + P]``: ``entry [N, R + P]``, its first R
    normed by `rms_norm` with ``weight [R]``.

    Sequence n lies in row ``places[n]``, below 0 nowhere; ``position[n]`` must lie inside of the
    cache. On a GPU one kernel, unless numbers are fp64. ValueError for an entry of another width,
    and for a cache whose last dimension is not adjacent.
    """
    _check_columns(cache)
    if entry.shape != (len(places), cache.shape[2]) or position.shape != places.shape:
        raise ValueError(
            f"entry must be [{len(places)}, {cache.shape[2]}] and position as long as places, got "
            f"{list(entry.shape)} and {list(position.shape)}"
        )
    with torch.no_grad():
        if entry.is_cuda and entry.dtype != torch.float64:
            from .fused import append

            return append(entry, weight, eps, cache, places, position)
        used = (places >= 0).nonzero().flatten()
        latent, shared = entry[used].split([len(weight), entry.shape[1] - len(weight)], -1)
        line = torch.cat((rms_norm(latent, weight, eps), shared), -1)
        cache[places[used].long(), position[used].long()] = line.to(cache.dtype)


def _check(
    query: torch.Tensor,
    shared: torch.Tensor,
    cache: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    _check_columns(cache)
    if not query.dtype == shared.dtype == cache.dtype:
        raise ValueError(
            f"query, shared and cache must have one type, got {query.dtype}, {shared.dtype} and "
            f"{cache.dtype}"
        )
    count, heads, rank = query.shape
    rest = cache.shape[-1] - rank
    for name, x, shape in (
        ("shared", shared, (count, heads, rest)),
        ("places", places, (count,)),
        ("lengths", lengths, (count,)),
    ):
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {shape}")


def _check_columns(cache: torch.Tensor) -> None:
    # which is too large for a copy
    if cache.stride(2) != 1:
        raise ValueError(f"cache must have a last stride of 1, got {cache.stride()}")
