"""Drawing tokens from logits, without moving them off the device."""

from __future__ import annotations

import torch

__all__ = ["draw_tokens", "naive_draw_tokens"]


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, point: torch.Tensor
) -> torch.Tensor:
    """One token per row by inverse CDF in fp64, and its log-prob at that temperature.

    ``logits [N, V]``; ``temperature`` and ``point`` fp64 [N], the latter in [0, 1): the share of
    the distribution below the token. Temperature 0 takes the most likely token and reports its
    log-prob at temperature 1. Returns fp64 [N, 2], tokens and log-probs; the log-prob is not finite
    where logits are not. On a GPU one Triton kernel, which waits for nothing; its sums, in
    another order than torch's, differ by 1e-15.
    """
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
    # after the subtraction, so that no temperature is too low for it
    wide = wide / torch.where(greedy, 1.0, temperature[:, None])
    cdf = wide.exp().cumsum(-1)
    total = cdf[:, -1:]
    tokens = torch.searchsorted(cdf, point[:, None] * total, right=True)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, wide.argmax(-1, keepdim=True), tokens)
    logprobs = wide.gather(-1, tokens) - total.log()
    return torch.cat((tokens.double(), logprobs), dim=-1)
