"""How old groups are, and which of them a run still learns from."""

from __future__ import annotations

from collections.abc import Iterable

from .types import Group


def fresh(groups: Iterable[Group], version: int, max_staleness: int) -> list[Group]:
    """The groups whose oldest sampled token lags at most ``max_staleness`` behind ``version``."""
    kept = []
    for group in groups:
        oldest = oldest_version(group)
        if oldest is None or oldest >= version - max_staleness:
            kept.append(group)
    return kept


def oldest_version(group: Group) -> int | None:
    """The oldest weight version that sampled a token of the group; None if nothing was sampled."""
    versions = [
        int(s.versions.min())
        for t in group.trajectories
        for s in t.segments
        if s.sampled and len(s.versions)
    ]
    return min(versions, default=None)
