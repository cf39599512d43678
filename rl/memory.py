"""A learner whose GPU is too small says what was too large, and which setting makes it smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..configs.errors import RunFailed
from ..configs.schema import LearnerConfig
from ..policy.memory import lack
from ..policy.moe import Experts
from .types import Share


@contextmanager
def enough_memory(
    policy: nn.Module, shares: Sequence[Share], config: LearnerConfig
) -> Iterator[None]:
    """Around work on ``shares``: memory that does not suffice is a RunFailed of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        batches = [batch for share in shares for batch in share.micro_batches]
        tokens = max((len(batch.input_ids) for batch in batches), default=0)
        several = any(
            len(batch.cu_seqlens) > 2 for batch in batches if len(batch.input_ids) == tokens
        )
        experts = (part.count for part in policy.modules() if isinstance(part, Experts))
        ways = "; ".join(ways_out(tokens, several, config, next(experts, 0)))
        text = f"learner: {lack(error, policy)}"
        raise RunFailed("; ".join(filter(None, (text, ways)))) from None


def ways_out(tokens: int, several: bool, config: LearnerConfig, experts: int = 0) -> Iterator[str]:
    """What to set, the cheapest first, where the largest micro-batch has ``tokens`` of one or of
    ``several`` sequences, none where nothing has been computed yet, and a layer of the policy as
    many ``experts`` or none."""
    if config.checkpointing == "none" and tokens:
        yield "set learner.checkpointing=layers, which keeps little of each layer"
    if several:
        yield f"lower learner.micro_batch_tokens: {tokens:,} tokens were computed at once"
    elif tokens:
        yield f"lower context: one sequence has {tokens:,} tokens"
    muon, divided = config.optimizer == "muon", config.expert_parallel > 1
    highest = 3 if not divided else 0 if muon else 2  # what goes with divided experts
    if config.ranks > 1 and config.zero_stage < highest:
        yield f"raise learner.zero_stage above {config.zero_stage}"
    fits = config.zero_stage < (1 if muon else 3)
    more = range(config.expert_parallel + 1, config.ranks + 1)
    parts = next((n for n in more if config.ranks % n == 0 and experts % n == 0), None)
    if experts and fits and parts is not None:
        yield f"set learner.expert_parallel={parts}"
    if not muon and not (divided and config.zero_stage):
        yield "learner.optimizer=muon keeps less of each weight"
