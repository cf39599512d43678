"""What the sequences of a generator show: images, and the rows that they are in a forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..policy import Policy
from ..policy.images import Placed, normalised

Piece = tuple[int, int, int, int]


class Sight:
    """The images of each open session, placed among all its tokens.

    A piece of a prompt may end within an image: what is read is the part of the image's rows, each
    time made anew from the whole of it by the weights of that moment.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._rules = policy.config.image_rules
        self._placed: dict[int, tuple[Placed, ...]] = {}

    def add(self, session: int, images: Sequence[Placed], offset: int) -> None:
        """Note images that were given ``offset`` tokens after the start of a session."""
        if images:
            known = self._placed.get(session, ())
            self._placed[session] = (*known, *shifted(images, offset))

    def forget(self, session: int) -> None:
        """Drop a session's images."""
        self._placed.pop(session, None)

    def clear(self) -> None:
        """Drop all images."""
        self._placed.clear()

    def inputs(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """What the policy needs for pieces of sessions: ``(session, first token of it, number of
        tokens, place in the flattened input)``."""
        if not self._placed:
            return {}
        seen: list[Placed] = []
        parts: list[tuple[int, int, int]] = []  # rows of the image, place in the input
        for session, first, length, place in pieces:
            for image in self._placed.get(session, ()):
                begin, end = max(image.start, first), min(image.end, first + length)
                if begin < end:
                    seen.append(image)
                    parts.append((begin - image.start, end - image.start, place + begin - first))
        if not seen:
            return {}
        assert self._rules is not None
        patches = [image.patches for image in seen]
        device = next(self._policy.parameters()).device
        features = self._policy.encode_images(
            normalised(patches, self._rules).to(device), [image.grid for image in patches]
        )
        whole = features.split([image.rows for image in patches])
        some = zip(whole, parts, strict=True)
        return {
            "image_features": torch.cat([rows[begin:end] for rows, (begin, end, _) in some]),
            "image_rows": torch.cat(
                [torch.arange(place, place + end - begin) for begin, end, place in parts]
            ).to(device),
        }


def shifted(images: Iterable[Placed], offset: int) -> tuple[Placed, ...]:
    """The images in a sequence that starts ``offset`` tokens earlier; below 0 the start is cut off,
    and what ends before it is left out."""
    moved = (Placed(image.start + offset, image.patches) for image in images)
    return tuple(image for image in moved if image.end > 0)
