"""The algorithms a config can name: an advantage and a loss, with their settings bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..configs.schema import AlgorithmConfig
from . import advantages, losses
from .types import LossOutput

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]  # rewards [N], group ids [N] -> [N]
LossFunction = Callable[..., LossOutput]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An advantage over groups of rewards and a loss over tokens."""

    advantages: AdvantageFunction
    loss: LossFunction


def _grpo(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(
        partial(advantages.group_relative, scale=config.scale, baseline=config.baseline),
        partial(
            losses.grpo,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        ),
    )


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": _grpo}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm ``config.name`` with its settings."""
    return ALGORITHMS[config.name](config)
