"""How old sampled tokens are, and which of them a run still learns from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .types import Group


def fresh(groups: Iterable[Group], version: int, max_staleness: int) -> list[Group]:
    """The groups with what is still learned from, which is sampled at most ``max_staleness``
    versions before ``version``.

    Older tokens leave the loss, while the trajectory keeps its reward: a long episode counts by its
    spans, not by its start. A trajectory that sampled nothing else leaves its group, and a group
    that nobody is left of leaves too.
    """
    oldest = max(0, version - max_staleness)
    kept: list[Group] = []
    for group in groups:
        members = tuple(
            replace(trajectory, oldest=oldest)
            for trajectory in group.trajectories
            if not 0 < trajectory.sampled_tokens == trajectory.tokens_before(oldest)
        )
        if members:
            kept.append(replace(group, trajectories=members))
    return kept


def stale_tokens(groups: Iterable[Group], kept: Iterable[Group]) -> int:
    """Number of sampled tokens of ``groups`` that are too old in what `fresh` ``kept`` of them."""
    played = [t for group in groups for t in group.trajectories]
    left = [t for group in kept for t in group.trajectories]
    young = sum(t.sampled_tokens - t.tokens_before(t.oldest) for t in left)
    return sum(t.sampled_tokens for t in played) - young
