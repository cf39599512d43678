"""Every algorithm can be named, and none has a setting without effect."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from farhorizon.configs.load import override_config
from farhorizon.configs.schema import AlgorithmConfig
from farhorizon.rl.algorithms import ALGORITHMS, make_algorithm

HINTS = get_type_hints(AlgorithmConfig)
SETTINGS = [name for name in HINTS if name != "name"]


def others(setting: str) -> list[Any]:
    """Values beside the default: all of a choice, one of a number."""
    default, hint = getattr(AlgorithmConfig(), setting), HINTS[setting]
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if value != default]
    kinds = set(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) - {NoneType}
    assert kinds == {float}, f"{setting}: say here which other value a {hint} may have"
    return [1.5 if default is None else default / 2]


def outcome(config: AlgorithmConfig) -> list[float]:
    """Advantages, loss and gradient on rewards and ratios of every kind."""
    algorithm = make_algorithm(config)
    rewards = torch.tensor([1.0, 0.0, 0.3, 0.3])
    advantages = algorithm.advantages(rewards, torch.tensor([0, 0, 0, 1]))
    logprobs = torch.tensor([0.3, 0.85, 1.0, 1.15, 3.0]).repeat(2).log().requires_grad_()
    loss = algorithm.loss(
        logprobs,
        torch.zeros(10),
        torch.tensor([1.0, -1.0]).repeat_interleave(5),
        torch.ones(10, dtype=torch.bool),
        sequence_ids=torch.arange(10) // 2,
        denominator=10,
    ).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return [*advantages.tolist(), loss.item(), *gradient.tolist()]


def test_what_a_config_may_name_is_what_there_is() -> None:
    assert set(ALGORITHMS) == set(get_args(HINTS["name"]))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_has_an_effect(name: str, setting: str) -> None:
    """C20, from the command line's text to the numbers."""
    plain = override_config(AlgorithmConfig(), [f"name={name}"])
    assert outcome(plain) == outcome(plain)
    assert others(setting)
    for value in others(setting):
        changed = override_config(plain, [f"{setting}={value}"])
        assert outcome(changed) != outcome(plain), value
