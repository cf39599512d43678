"""How far two policies are apart on sampled tokens: ratios per token and per sequence.

All arrays are per token, [T]. What stands outside of ``mask`` may be anything, NaN included, and
gets a gradient of exactly 0. A log-prob of -inf under the mask is a token that a policy never
gives: it has no ratio, and `possible` takes it out. NaN stays: that is a fault, which must show.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) = 5e8: far beyond any clip range, and still finite when squared in fp32.
MAX_LOG_RATIO = 20.0


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values under the mask, 0 elsewhere, with a gradient of exactly 0 there."""
    return torch.where(mask, values, torch.zeros_like(values))


def possible(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """The mask without tokens whose log-prob is infinite to either policy."""
    return mask & ~logprobs.isinf() & ~reference.isinf()


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio where its exponential is far from overflow, else `MAX_LOG_RATIO`."""
    # Not clamp: that would turn a NaN into a gradient of 0, and the fault would go unseen.
    # And filled there: a number that is sent to a GPU waits for all that it has to do.
    return torch.minimum(log_ratio, log_ratio.new_full((), MAX_LOG_RATIO))


def limited(log_ratio: Tensor) -> Tensor:
    """The log-ratio within `MAX_LOG_RATIO` on both sides, without gradient; NaN stays."""
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def difference(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Log-ratio of the policy to the reference, 0 outside of the mask, as large as it is."""
    return masked(logprobs, mask) - masked(reference, mask)


def sequence_sums(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """For every token the sum over its sequence's masked ``values``, and their number; fp64 [T].

    Sequences must be whole: tokens of one id in two calls would be two sequences.
    """
    # `unique` would wait for a GPU to know how many sequences there are: at most as many as tokens.
    ids, order = sequence_ids.sort(stable=True)
    number = torch.zeros_like(order)
    number[1:] = (ids[1:] != ids[:-1]).cumsum(0)
    index = torch.empty_like(order).scatter_(0, order, number)
    empty = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    sums = empty.index_add(0, index, masked(values, mask).double())
    counts = empty.index_add(0, index, mask.double())
    return sums[index], counts[index]


def sequence_means(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """For every token the mean over its sequence's masked ``values``, 0 where it has none."""
    sums, counts = sequence_sums(values, mask, sequence_ids)
    return (sums / counts.clamp(min=1)).to(values.dtype)


def distance(
    log_ratio: Tensor, mask: Tensor, denominator: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Metrics and maxima of a log-ratio that is 0 outside of the mask, within `MAX_LOG_RATIO`.

    ``ratio``, ``log_ratio_abs``, ``kl`` (of the reference from the policy, the estimator
    ratio - 1 - log ratio) are sums over tokens divided by ``denominator``; ``log_ratio_max``,
    ``ratio_max`` and ``kl_max`` the largest of them, 0 without tokens.
    """
    log_ratio = limited(log_ratio)
    ratio = log_ratio.exp()
    each = {
        "ratio": masked(ratio, mask),
        "log_ratio": log_ratio.abs(),
        "kl": ratio - 1 - log_ratio,
    }
    metrics = {
        "ratio": each["ratio"].sum() / denominator,
        "log_ratio_abs": each["log_ratio"].sum() / denominator,
        "kl": each["kl"].sum() / denominator,
    }
    # Beside a 0: there may be no token at all.
    maxima = {f"{k}_max": torch.cat([x, x.new_zeros(1)]).max() for k, x in each.items()}
    return metrics, maxima


def check(first: Tensor, *others: Tensor) -> None:
    """All arrays are per token, of one length."""
    assert first.ndim == 1 and all(x.shape == first.shape for x in others)
