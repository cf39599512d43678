"""A rollout whose GPU is too small says what was too large, and which setting makes it smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..configs.errors import RunFailed, UserError, last_line
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


@contextmanager
def one_line(what: str, sizes: str) -> Iterator[None]:
    """Around what runs in vLLM: whatever it raises is a RunFailed of one line. ``sizes`` are the
    settings that say what it needs."""
    try:
        yield
    except (RunFailed, UserError):
        raise
    except Exception as error:
        # Of what another process raised vLLM has the text.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise RunFailed(
                f"vllm: {what} ran out of memory ({last_line(error)}); lower rollout.vllm.memory, "
                f"which leaves more for it ({sizes})"
            ) from None
        kind = type(error).__name__
        raise RunFailed(f"vllm: {what} failed with {kind}: {last_line(error)}") from error
