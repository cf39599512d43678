"""Advantages of the turns of a trajectory, where each has a reward of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .penalties import to_go

Credit = Literal["trajectory", "turn", "step"]


def turn_advantages(
    turn_rewards: Sequence[Tensor],
    group_ids: Tensor,
    advantages: Callable[[Tensor, Tensor], Tensor],
    credit: Literal["turn", "step"],
) -> list[Tensor]:
    """Advantages of the turns of each trajectory; ``turn_rewards`` are one tensor [turns] per
    trajectory, ``group_ids`` int [N].

    ``"turn"``: what a turn and those after it earned, beside the same turn of siblings; one that
    no sibling reached has 0. ``"step"``: the reward of each turn beside those of all turns of the
    group, summed from the turn on: process supervision, GRPO, arXiv:2402.03300 section 4.1.3.
    """
    lengths = torch.tensor([len(rewards) for rewards in turn_rewards])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rewards = torch.cat(list(turn_rewards))
    groups = group_ids[owner]
    if credit == "step":
        values = to_go(advantages(rewards, groups), owner)
    else:
        number = torch.cat([torch.arange(len(rewards)) for rewards in turn_rewards])
        places = torch.unique(torch.stack([groups, number], 1), dim=0, return_inverse=True)[1]
        values = advantages(to_go(rewards, owner), places)
    return list(values.split(lengths.tolist()))
