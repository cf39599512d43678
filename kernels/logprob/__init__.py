"""Token log-probs and entropy of a tempered softmax, in row blocks that never hold all logits."""

from __future__ import annotations

import torch

from ..precision import product_dtype
from .rows import LogprobRows

__all__ = ["naive_token_logprobs", "token_logprobs"]

BLOCK_ELEMENTS = 1 << 25  # logits of a block: 128 MiB in fp32, of which backward has up to seven


def naive_token_logprobs(
    hidden: torch.Tensor, lm_head: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` with all logits at once: the specification."""
    logits = (hidden @ lm_head.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def token_logprobs(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    block_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of the distribution softmax(hidden lm_head^T / T).

    ``hidden [T, D]``, ``lm_head [V, D]``, ``targets [T]`` -> two fp32 ``[T]`` (fp64 for fp64), in
    nats. Give the rows that count and no others. Logits are made ``block_elements`` at a time, in
    backward too: two tensors of that size exist, and up to seven where one block holds all rows.
    Smaller blocks take less memory, and more passes over the gradients. By default a block is 128
    MiB in fp32; the kernels below hold at most 768 MiB, or ``block_elements / V`` rows of 10,240
    logits, once. ValueError names a shape that does not fit, a temperature that is not positive,
    and on the CPU a target outside of the vocabulary.

    On a GPU products of 16 bits, hidden's own or autocast's, run through Triton kernels: logits are
    summed and stay in fp32, so does the gradient of an fp32 ``lm_head``, and only one derivative
    exists. They never wait for the device: a target outside of the vocabulary makes its log-prob
    NaN, and the gradients with it. Everything else runs in plain torch, in more than one block only
    once differentiable.
    """
    if hidden.dim() != 2 or lm_head.dim() != 2 or hidden.shape[1] != lm_head.shape[1]:
        raise ValueError(
            f"lm_head must be [V, D] for hidden [T, D], got {list(lm_head.shape)} for "
            f"{list(hidden.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be {list(hidden.shape[:1])}, got {list(targets.shape)}")
    if not temperature > 0:  # nan is not
        raise ValueError(f"temperature must be positive, got {temperature}")
    dtype = product_dtype(hidden)
    if hidden.is_cuda and dtype in (torch.bfloat16, torch.float16):
        from .fused import token_logprobs_fused

        most = None if block_elements is None else max(1, block_elements // len(lm_head))
        return token_logprobs_fused(hidden, lm_head, targets, temperature, dtype, most)
    if targets.device.type == "cpu" and len(targets):
        low, high = (int(x) for x in targets.aminmax())
        if low < 0 or high >= len(lm_head):
            wrong = low if low < 0 else high
            raise ValueError(f"target {wrong} is outside of the vocabulary of {len(lm_head)}")
    rows = max(1, (block_elements or BLOCK_ELEMENTS) // len(lm_head))
    if len(targets) <= rows:
        return naive_token_logprobs(hidden, lm_head.to(hidden.dtype), targets, temperature)
    return LogprobRows.apply(hidden, lm_head, targets, temperature, dtype, rows)  # type: ignore[no-any-return]
