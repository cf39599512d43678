"""Expert parallelism: which parameters lie on several ranks in parts, and how they become whole.

Experts of every layer are divided over ``learner.expert_parallel`` consecutive ranks. Their
gradients then are sums over the tokens of these ranks, and are summed over the ranks that hold the
same experts; all other parameters are on every rank. What leaves the engine has whole experts; what
comes in may have this rank's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..configs.errors import UserError
from ..policy.moe import Experts


def check_divided(policy: nn.Module, number: int) -> None:
    """UserError for a ``learner.expert_parallel`` that the experts of the policy do not allow."""
    experts = [part for part in policy.modules() if isinstance(part, Experts)]
    assert all(part.part[1] in (1, number) for part in experts), "loaded for other ranks"
    counts = {part.count for part in experts}
    if number > 1 and not counts:
        raise UserError(
            f"learner.expert_parallel={number} would have no effect: the policy has no experts; "
            "leave it out"
        )
    for count in sorted(counts):
        if count % number:
            raise UserError(
                f"learner.expert_parallel={number} must divide the policy's {count} experts"
            )


def whole_shapes(policy: nn.Module) -> dict[str, Tensor]:
    """The state dict of the policy, with the shapes of all experts where only some are here."""
    state = dict(policy.state_dict())
    for name, part in policy.named_modules():
        if isinstance(part, Experts) and part.part != (0, 1):
            for own, weight in part.named_parameters():
                shape = (part.count, *weight.shape[1:])
                state[f"{name}.{own}"] = weight.detach().new_empty(shape, device="meta")
    return state


class Divided:
    """The parameters of a policy's experts, by name, of which this rank keeps only its part, marked
    for DeepSpeed with its ``group_name``; none without a ``group``."""

    def __init__(self, policy: nn.Module, group: Any, group_name: str) -> None:
        self.group, self.names = group, set[str]()
        if group is None:
            return
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        for name, part in policy.named_modules():
            if not isinstance(part, Experts):
                continue
            part.group = group
            if part.part == (0, 1):
                part.keep((self._rank, self._ranks))
            assert part.part == (self._rank, self._ranks), "loaded for another rank"
            for own, kept in part.named_parameters():
                self.names.add(f"{name}.{own}")
                kept.allreduce, kept.group_name = False, group_name  # type: ignore[attr-defined]

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor, perhaps of moments, of a parameter."""
        return self._own(tensor) if name in self.names else tensor

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All parts of ``tensor``; a collective for experts."""
        if name not in self.names:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._ranks)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    def pooled(self, names: Sequence[str], sums: Tensor) -> Tensor:
        """``sums`` of numbers of the parameters with these ``names``, one each, over all parts."""
        if self.group is None:
            return sums
        parts = torch.tensor([name in self.names for name in names], device=sums.device)
        theirs = torch.where(parts, sums, 0)
        dist.all_reduce(theirs, group=self.group)
        return torch.where(parts, theirs, sums)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self._ranks)[self._rank]
