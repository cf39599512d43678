"""Values of tokens for PPO: a scalar head on the policy's final hidden state.

It lies beside the policy in a file of its own, in no file of the policy itself, and is neither
exported nor published to rollouts. Names and shapes are those of TRL's and verl's value models.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..configs.errors import UserError
from ..kernels.precision import as_given, widen
from .precision import Change, kept_wide
from .records import listed
from .shards import FLOATS, check_finite, open_shard, read_floats, write_shard

if TYPE_CHECKING:
    from .model import Policy

VALUE_FILE = "value.safetensors"
VALUE_PREFIX = "v_head."  # of its tensors, in a policy as in the file


class ValueHead(nn.Module):
    """``summary`` with weight ``[1, D]`` and bias ``[1]``; at first all values are 0.

    Its parameters are fp32 or wider whatever the module is cast to.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.summary = nn.Linear(hidden, 1, dtype=torch.float32)
        nn.init.zeros_(self.summary.weight)
        nn.init.zeros_(self.summary.bias)

    def _apply(self, fn: Change, recurse: bool = True) -> Any:
        return super()._apply(kept_wide(fn, *self.parameters()), recurse)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values ``[...]`` of final hidden states ``[..., D]``, in fp32 or wider."""
        with as_given(hidden):
            wide = widen(hidden)
            weight, bias = (p.to(wide.dtype) for p in (self.summary.weight, self.summary.bias))
            return F.linear(wide, weight, bias).squeeze(-1)


def token_values(
    policy: Policy, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Values [R] of the states after the tokens ``rows [R]`` of packed ``input_ids [1, T]``.

    The value before token t is that of row t - 1. No logits are made; `Policy.forward` gives the
    same values beside its log-probs. ValueError where the policy has no head.
    """
    if policy.v_head is None:
        raise ValueError("the policy has no value head: set policy.v_head = ValueHead(hidden_size)")
    hidden = policy.model(input_ids, cu_seqlens=cu_seqlens).last_hidden_state
    return policy.v_head(hidden.flatten(0, 1).index_select(0, rows))


def write_value_head(folder: Path, tensors: Mapping[str, torch.Tensor], hidden: int) -> None:
    """Put the head's ``tensors`` into ``folder``, if they are any; ValueError when they are not the
    whole head, or not finite."""
    path = folder / VALUE_FILE
    if not tensors:
        return
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != _shapes(hidden):
        given = [f"{name} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())]
        raise ValueError(f"checkpoint: {listed(given)} is no value head of width {hidden}")
    kept = {name: t.detach().cpu().contiguous() for name, t in sorted(tensors.items())}
    for name, tensor in kept.items():
        check_finite(name, tensor)
    write_shard(path, kept)


def read_value_head(folder: Path, hidden: int) -> ValueHead | None:
    """The head of a checkpoint folder with the bits of its file, None where there is none.

    `UserError` in one line for a damaged file, and for tensors that are missing, unknown, of the
    wrong shape or not finite.
    """
    path = folder / VALUE_FILE
    if not os.path.lexists(path):
        return None
    wanted = _shapes(hidden)
    with ExitStack() as stack:
        stored = {tensor.name: tensor for tensor in open_shard(path, stack)[0]}
        problems = {
            "missing": sorted(wanted.keys() - stored.keys()),
            "unknown": sorted(stored.keys() - wanted.keys()),
            "of the wrong shape": [
                f"{name} {list(stored[name].shape)} instead of {list(shape)}"
                for name, shape in wanted.items()
                if name in stored and stored[name].shape != shape
            ],
        }
        found = [f"tensors {kind}: {listed(names)}" for kind, names in problems.items() if names]
        if found:
            raise UserError(f"{path}: {'; '.join(found)}")
        head, infinite = ValueHead(hidden), []
        for name, shape in wanted.items():
            own = FLOATS.get(stored[name].dtype, torch.float32)
            place = torch.empty(shape, dtype=torch.promote_types(own, torch.float32))
            if not read_floats(stored[name], place):
                infinite.append(name)
            parameter = nn.Parameter(place)
            setattr(head.summary, name.removeprefix(f"{VALUE_PREFIX}summary."), parameter)
    if infinite:
        raise UserError(f"{path}: tensors that are not finite: {listed(infinite)}")
    return head


def _shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{VALUE_PREFIX}summary.weight": (1, hidden), f"{VALUE_PREFIX}summary.bias": (1,)}
