"""A rollout whose GPU is too small says what was too large, and which setting makes it smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..configs.errors import RunFailed
from ..policy import Policy
from ..policy.memory import lack


@contextmanager
def enough_memory(policy: Policy) -> Iterator[None]:
    """Around decoding: memory that does not suffice is a RunFailed of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"rollout: {lack(error, policy)}; lower rollout.concurrency, of which each sequence "
            "has a state, or context"
        ) from None
