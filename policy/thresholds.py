"""What becomes of routing thresholds after a step: how the quantile of its tokens moves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..kernels.moe.histogram import centred


class ThresholdRule(Protocol):
    """The next thresholds ``[layers, E]`` fp32 from the current ones and from ``solve``, which
    gives those that would have balanced the step's tokens, in each layer with mean zero."""

    def __call__(self, current: Tensor, solve: Callable[[], Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Freeze:
    """They stay, to the bit."""

    def __call__(self, current: Tensor, solve: Callable[[], Tensor]) -> Tensor:
        return current


@dataclass(frozen=True, slots=True)
class Track:
    """Those that would have balanced the step (Kimi K3 report, appendix C)."""

    def __call__(self, current: Tensor, solve: Callable[[], Tensor]) -> Tensor:
        return solve()


@dataclass(frozen=True, slots=True)
class Ema:
    """``decay`` of the current ones and ``1 - decay`` of those that would have balanced the step,
    mean zero: steps count for about 1 / (1 - decay) updates."""

    decay: float

    def __call__(self, current: Tensor, solve: Callable[[], Tensor]) -> Tensor:
        mixed = self.decay * current + (1 - self.decay) * solve()
        return centred(mixed)


TRACK = Track()


def make_rule(name: str, decay: float) -> ThresholdRule:
    """The rule of a name that settings know; ``decay`` is of "ema"."""
    return {"freeze": Freeze(), "track": TRACK, "ema": Ema(decay)}[name]
