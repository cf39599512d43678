"""Token log-probs and entropies in plain torch: a block of rows at a time, nothing of it is kept.

With x the logits of a row over the temperature, L = log sum e^x, p = e^(x - L) and the entropy
H = -sum p log p:
    log p = x_target - L        dx = g [v = target] - p (g + h (log p + H))
for upstream gradients g of the log-prob and h of the entropy.
"""

from __future__ import annotations

from typing import Any

import torch

from ..once import once_differentiable
from ..precision import as_given


class LogprobRows(torch.autograd.Function):
    """``hidden [T, D]``, ``lm_head [V, D]``, ``targets [T]``; products in ``dtype``, ``most`` rows
    at once: two tensors of so many rows of logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        lm_head: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        most: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = lm_head.to(dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(2))
        with as_given(hidden):
            for start in range(0, len(hidden), most):
                some = slice(start, start + most)
                known = _log_softmax(hidden[some].to(dtype), weight, temperature, wide)
                logprobs[some] = known.gather(1, targets[some, None])[:, 0]
                entropy[some] = known.exp().mul_(known).sum(1).neg_()
        ctx.save_for_backward(hidden, lm_head, targets, entropy)
        ctx.options = temperature, dtype, most
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, lm_head, targets, entropy = ctx.saved_tensors
        temperature, dtype, most = ctx.options
        weight, wide = lm_head.to(dtype), entropy.dtype
        of_hidden, of_head, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_head = torch.zeros_like(lm_head, dtype=wide) if of_head else None
        with as_given(hidden):
            for start in range(0, len(hidden), most):
                some = slice(start, start + most)
                own, target = hidden[some].to(dtype), targets[some, None]
                g, h = (pull[some, None] for pull in upstream)
                known = _log_softmax(own, weight, temperature, wide)
                p = known.exp()
                dx = known.add_(entropy[some, None]).mul_(h).add_(g).mul_(p).neg_()
                del p
                dx = dx.scatter_add_(1, target, g).div_(temperature).to(dtype)
                if d_hidden is not None:
                    d_hidden[some] = dx @ weight
                if d_head is not None and dtype == wide:
                    d_head.addmm_(dx.T, own)
                elif d_head is not None:
                    d_head += dx.T @ own
        d_head = None if d_head is None else d_head.to(lm_head.dtype)
        return d_hidden, d_head, None, None, None, None


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    """Of all tokens of the vocabulary ``[R, V]``, as `naive_token_logprobs` has it."""
    return (hidden @ weight.T).to(dtype).div_(temperature).log_softmax(-1)
