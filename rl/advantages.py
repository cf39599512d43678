"""Advantages: how much better an outcome was than expected.

Those of groups are for outcomes [N], with a spread divided by n. No advantage is clipped.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..rollout.types import LARGEST_REWARD
from .ratio import difference, possible

# Sums of the same turn rewards in another order differ in their last bits; dividing by a spread of
# 1e-17, or of 1e-8 in fp32, would turn them into an advantage. So rewards count as equal when they
# are no further apart than EQUAL_WITHIN of the largest magnitude in the group, which is four steps
# of fp32 (2^-23 each), or than RESIDUE, which is what fp64 terms of order one leave where they
# cancel.
EQUAL_WITHIN = 4 * 2.0**-23
RESIDUE = 1e-12


def group_relative(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: Literal["std", "none"] = "std",
    baseline: Literal["mean", "leave_one_out"] = "mean",
) -> Tensor:
    """Reward minus the baseline of its group, fp32 [N]; ``rewards`` [N], ``group_ids`` int [N].

    As it is that of GRPO and DAPO, arXiv:2402.03300 section 4.1.2 and arXiv:2503.14476 equation 9;
    with ``scale="none"`` Dr. GRPO, arXiv:2503.20783 section 3.2, K1.5 and K2.5, arXiv:2501.12599
    equation 3 and arXiv:2602.02276 equation 1; with ``"leave_one_out"`` too RLOO, arXiv:2402.14740.

    ``baseline="mean"`` compares with the mean of the group, ``"leave_one_out"`` with the mean of
    the other members. ``scale="std"`` divides by the population standard deviation (divided by
    n) of the same members the baseline was taken from. Members that share no spread are not
    divided; a group of equal rewards, or of one member, gives exactly 0. A reward that is not
    finite, or beyond `LARGEST_REWARD`, marks a failed episode: it gets 0 and the group is formed by
    the others.
    """
    assert rewards.ndim == 1 and rewards.shape == group_ids.shape
    values = rewards.detach().to(torch.float64)
    advantages = torch.zeros_like(values)
    valid = values.abs() <= LARGEST_REWARD
    for group in torch.unique(group_ids[valid]):
        members = torch.nonzero(valid & (group_ids == group)).flatten()
        advantages[members] = _one_group(values[members], scale, baseline)
    return advantages.to(torch.float32)


def batch_normalised(
    rewards: Tensor, group_ids: Tensor, *, baseline: Literal["none", "mean"] = "none"
) -> Tensor:
    """Reward, or with ``baseline="mean"`` its distance from the group's mean, normalised over the
    whole batch, fp32 [N]; ``rewards`` [N], ``group_ids`` int [N].

    REINFORCE++, arXiv:2501.03262, plain and with baseline. Every outcome counts once, where the
    paper's implementation counts it once per token. A batch without spread gives exactly 0, a
    reward that is not finite, or beyond `LARGEST_REWARD`, gets 0 and is left out.
    """
    assert rewards.ndim == 1 and rewards.shape == group_ids.shape
    values = rewards.detach().to(torch.float64)
    valid = values.abs() <= LARGEST_REWARD
    advantages = torch.zeros_like(values)
    if baseline == "mean":
        kept = values.clone()
        for group in torch.unique(group_ids[valid]):
            members = torch.nonzero(valid & (group_ids == group)).flatten()
            kept[members] = _one_group(values[members], "none", "mean")
        values = kept
    if valid.any():
        advantages[valid] = _normalised(values[valid])
    return advantages.to(torch.float32)


def distillation(
    logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, bound: float
) -> Tensor:
    """Advantages of tokens from a teacher: how much likelier they are to it, at most ``bound`` up
    or down, without gradient, 0 outside of the mask [T].

    On-policy distillation of K3: clip(log pi_teacher - log pi, -bound, bound). As the advantage of
    a policy gradient it is minus the gradient of KL(policy || teacher), token by token.
    """
    assert logprobs.ndim == 1 and logprobs.shape == teacher_logprobs.shape == mask.shape
    given = possible(logprobs, logprobs, mask)  # what the policy never gives, no loss learns from
    return difference(teacher_logprobs, logprobs, given).detach().clamp(-bound, bound)


def _normalised(values: Tensor) -> Tensor:
    if _equal(values):
        return torch.zeros_like(values)
    return (values - values.mean()) / values.std(correction=0)


def _one_group(rewards: Tensor, scale: str, baseline: str) -> Tensor:
    if _equal(rewards):
        return torch.zeros_like(rewards)
    if baseline == "mean":
        deviation = rewards - rewards.mean()
        return deviation / rewards.std(correction=0) if scale == "std" else deviation
    advantages = torch.empty_like(rewards)
    for i in range(len(rewards)):
        others = torch.cat([rewards[:i], rewards[i + 1 :]])
        advantages[i] = rewards[i] - others.mean()
        if scale == "std" and not _equal(others):
            advantages[i] /= others.std(correction=0)
    return advantages


def equal(low: Tensor, high: Tensor) -> bool:
    """Whether values from ``low`` to ``high`` (scalars) count as equal."""
    largest = max(abs(float(low)), abs(float(high)))
    return float(high - low) <= max(EQUAL_WITHIN * largest, RESIDUE)


def _equal(rewards: Tensor) -> bool:
    return equal(rewards.min(), rewards.max())


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantage estimates, fp32 [T]; all tensors [T], steps of episodes end to end.

    ``terminated`` and ``truncated`` (bool) mark the last step of an episode: after a termination
    the future is worth 0, after a truncation ``bootstrap`` (the value of the state that would
    have come next). The last step of the array is bootstrapped likewise unless terminated.

    arXiv:1506.02438 equation 16. Steps are actions: for tokens give the sampled ones only, since
    what a tool said between two of them is part of the transition. Returns for the critic are
    advantages + values.
    """
    assert rewards.ndim == 1
    assert all(x.shape == rewards.shape for x in (values, terminated, truncated, bootstrap))
    last = len(rewards) - 1
    r, v, b = (x.detach().to(torch.float64).tolist() for x in (rewards, values, bootstrap))
    end, cut = terminated.tolist(), truncated.tolist()
    backwards: list[float] = []  # the advantages, last step first
    for t in range(last, -1, -1):
        if end[t]:
            following, after = 0.0, 0.0
        elif cut[t] or t == last:
            following, after = b[t], 0.0
        else:
            following, after = v[t + 1], backwards[-1]
        backwards.append(r[t] + gamma * following - v[t] + gamma * lam * after)
    return torch.tensor(backwards[::-1], dtype=torch.float32, device=rewards.device)
