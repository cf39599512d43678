"""What an algorithm's settings beside its loss come to: the pull of a reference, and what length
does to rewards."""

from __future__ import annotations

from ..configs.errors import UserError
from ..configs.schema import AlgorithmConfig
from .penalties import Pull
from .shaping import Shaping


def pull_of(config: AlgorithmConfig) -> Pull | None:
    """The distance to a reference that is asked for, None if none is. UserError for settings of it
    that have no effect."""
    where, estimator, gradient = config.kl_in, config.kl_estimator, config.kl_gradient
    if config.kl == 0:
        given = {"kl_in": where, "kl_estimator": estimator, "kl_gradient": gradient}
        for key, value in given.items():
            if value is not None:
                raise UserError(
                    f"algorithm.{key}={value} would have no effect: it needs algorithm.kl above 0"
                )
        return None
    if where == "reward" and gradient is not None:
        raise UserError(
            f"algorithm.kl_gradient={gradient} would have no effect: rewards have no gradient; "
            "leave it out, or set algorithm.kl_in=loss"
        )
    if estimator == "k1" and gradient == "own":
        raise UserError(
            "algorithm.kl_gradient=own is 0 on average with algorithm.kl_estimator=k1: leave one "
            "of them out"
        )
    usual = "k1" if where == "reward" else "k3"
    return Pull(config.kl, where or "loss", estimator or usual, gradient or "right")


def shaping_of(config: AlgorithmConfig) -> Shaping:
    """What is made of rewards by length. UserError for settings that have no effect."""
    limit, buffer, budget = config.overlong, config.overlong_buffer, config.budget
    if limit is None and buffer is not None:
        raise UserError(
            f"algorithm.overlong_buffer={buffer} would have no effect: it needs algorithm.overlong"
        )
    if limit is not None:
        buffer = max(1, limit // 5) if buffer is None else buffer  # DAPO's 4096 of 20480
        if buffer > limit:
            raise UserError(
                f"algorithm.overlong_buffer={buffer} must be at most algorithm.overlong={limit}"
            )
    return Shaping(config.length_reward, limit, buffer or 1, budget, config.efforts)
