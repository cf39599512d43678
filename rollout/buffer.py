"""Finished groups waiting for the learner, none of them older than the run allows."""

from __future__ import annotations

from collections.abc import Iterable

from .types import Group


class GroupBuffer:
    """First in, first out by group id; groups that are too old are dropped and counted.

    ``max_staleness`` is how many versions the oldest sampled token of a group may lag behind the
    update that it feeds; 0 is synchronous training.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.dropped = 0
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Store groups; ValueError if one of that id is already here."""
        for group in groups:
            if group.task_id in self._groups:
                raise ValueError(f"group {group.task_id} was added twice")
            self._groups[group.task_id] = group

    def take(self, count: int, version: int) -> list[Group]:
        """Up to ``count`` groups, oldest arrivals first, for an update of policy ``version``."""
        taken: list[Group] = []
        for task_id, group in list(self._groups.items()):
            if len(taken) == count:
                break
            del self._groups[task_id]
            oldest = oldest_version(group)
            if oldest is not None and oldest < version - self.max_staleness:
                self.dropped += 1
            else:
                taken.append(group)
        return taken


def oldest_version(group: Group) -> int | None:
    """The oldest weight version that sampled a token of the group; None if nothing was sampled."""
    versions = [
        int(s.versions.min())
        for t in group.trajectories
        for s in t.segments
        if s.sampled and len(s.versions)
    ]
    return min(versions, default=None)
