"""``learner.deterministic``: an update has the same bits whenever it is computed again.

Our own kernels add in one order always. In torch it is attention that does not: the gradient of
queries is added up by whoever comes first. Told to be deterministic, torch takes the forms of its
operations that add in one order, and refuses those that have none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

from ..configs.errors import RunFailed, UserError
from ..configs.schema import LearnerConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOWED = (":4096:8", ":16:8")  # with which cuBLAS shares no memory between streams
REFUSED = "does not have a deterministic implementation"  # as torch says it


def prepare(config: LearnerConfig) -> None:
    """What must be set before a process multiplies on its GPU for the first time; UserError for a
    setting that goes with no bits that repeat."""
    if not config.deterministic or config.gpus == 0:
        return
    if config.dtype == "float32":
        raise UserError(
            "learner.deterministic needs learner.dtype=bfloat16 on a GPU: in fp32 KDA runs in "
            "operations of torch that have no deterministic form"
        )
    given = os.environ.setdefault(WORKSPACE, ALLOWED[0])
    if given not in ALLOWED:
        raise UserError(
            f"learner.deterministic needs {WORKSPACE}={' or '.join(ALLOWED)} in the environment, "
            f"which has {given!r}; unset it"
        )


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """If ``wanted`` torch is deterministic within it, in backward too; RunFailed names an operation
    that cannot be."""
    if not wanted:
        yield
        return
    memory: Any = deterministic  # a module whose attributes are made by its class
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    except RuntimeError as error:
        name, found, _ = str(error).partition(REFUSED)
        if not found:
            raise
        raise RunFailed(f"learner.deterministic: {name}{REFUSED}; leave it out") from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]
