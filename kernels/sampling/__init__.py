"""Drawing tokens from logits, and what a decode step leaves for the next one, all of it without
moving anything off the device."""

from __future__ import annotations

import numpy as np
import torch

__all__ = [
    "advance_",
    "draw_tokens",
    "naive_advance",
    "naive_draw_tokens",
    "naive_stream_points",
    "stream_points",
]

Tensor = torch.Tensor


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, point: torch.Tensor
) -> torch.Tensor:
    """One token per row by inverse CDF in fp64, and its log-prob at that temperature.

    ``logits [N, V]``; ``temperature`` and ``point`` fp64 [N], the latter in [0, 1): the share of
    the distribution below the token. Temperature 0 takes the most likely token and reports its
    log-prob at temperature 1. Returns fp64 [N, 2], tokens and log-probs; the log-prob is not finite
    where logits are not. On a GPU one Triton kernel, which waits for nothing; its sums, in
    another order than torch's, differ by 1e-15. ValueError names a shape that does not fit.
    """
    for name, x in (("temperature", temperature), ("point", point)):
        if x.shape != logits.shape[:1]:
            raise ValueError(f"{name} must be [{len(logits)}], got {list(x.shape)}")
    with torch.no_grad():
        if logits.is_cuda:
            from .fused import draw

            return draw(logits, temperature, point)
        return naive_draw_tokens(logits, temperature, point)


def naive_draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, point: torch.Tensor
) -> torch.Tensor:
    """`draw_tokens` in torch: the specification."""
    wide = logits.double()
    wide = wide - wide.amax(-1, keepdim=True)
    greedy = (temperature == 0.0)[:, None]
    if (
        temperature != 1.0
    ).any():  # after the subtraction, so that no temperature is too low for it
        wide = wide / torch.where(greedy, 1.0, temperature[:, None])
    cdf = wide.exp().cumsum(-1)
    total = cdf[:, -1:]
    tokens = torch.searchsorted(cdf, point[:, None] * total, right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(greedy, wide.argmax(-1, keepdim=True), tokens)
    logprobs = wide.gather(-1, tokens) - total.log()
    return torch.cat((tokens.double(), logprobs), dim=-1)


def stream_points(keys: Tensor, position: Tensor) -> Tensor:
    """fp64 [N] in [0, 1), 53 random bits each: output number ``position`` int32 [N] of the
    splitmix64 streams (Steele et al., 2014) ``keys`` int64 [N], which hold 64 bits. ValueError if
    they are not as many."""
    if position.shape != keys.shape:
        raise ValueError(f"position must be {list(keys.shape)}, got {list(position.shape)}")
    if keys.is_cuda:
        from .fused import points

        return points(keys, position)
    return naive_stream_points(keys, position)


def naive_stream_points(keys: Tensor, position: Tensor) -> Tensor:
    """`stream_points` in numpy: the specification."""
    number = position.numpy().astype(np.uint64) + np.uint64(1)
    x = keys.numpy().view(np.uint64) + number * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
    return torch.from_numpy(x.astype(np.float64) * 2.0**-53)


def advance_(
    drawn: Tensor,
    stops: Tensor,
    ids: Tensor,
    places: Tensor,
    past: Tensor,
    position: Tensor,
    left: Tensor,
    stop: Tensor,
) -> None:
    """Make of a step's inputs int32 [N], in place, those of the step after it, for the tokens
    ``drawn`` fp64 [N, 2] of `draw_tokens`.

    A sequence is over, its place becomes -1, when row ``stop[n]`` of ``stops`` uint8 [S, V] is not
    0 at its token, or when ``left`` counts down to 0; one that is over stays as it is. ValueError
    for inputs of another number, or that do not lie one behind the other.
    """
    columns = {"ids": ids, "places": places, "past": past, "position": position, "left": left}
    for name, x in (columns | {"stop": stop}).items():
        if x.shape != drawn.shape[:1] or not x.is_contiguous():
            raise ValueError(
                f"{name} must be [{len(drawn)}] without gaps, got {list(x.shape)} with a stride of "
                f"{list(x.stride())}"
            )
    if drawn.is_cuda:
        from .fused import advance

        return advance(drawn, stops, ids, places, past, position, left, stop)
    naive_advance(drawn, stops, ids, places, past, position, left, stop)


def naive_advance(
    drawn: Tensor,
    stops: Tensor,
    ids: Tensor,
    places: Tensor,
    past: Tensor,
    position: Tensor,
    left: Tensor,
    stop: Tensor,
) -> None:
    """`advance_` in torch: the specification."""
    used = places >= 0
    tokens = drawn[:, 0].nan_to_num(0.0).clamp(0, stops.shape[1] - 1).int()
    ids.copy_(torch.where(used, tokens, ids))
    for count, by in ((past, 1), (position, 1), (left, -1)):
        count += by * used.int()
    over = (stops[stop.long(), tokens.long()] != 0) | (left <= 0)
    places.masked_fill_(used & over, -1)
