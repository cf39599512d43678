"""What a compiled kernel is looked up by when it is launched again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farhorizon.kernels.device import Launcher, look_at

ROWS = torch.zeros(64, dtype=torch.bfloat16)


def kinds(argument: object) -> list[object]:
    found: list[object] = []
    look_at(argument, found, [])
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (16, 17),
        (32, 1 << 32),
        (1 << 32, 1 << 63),
        (0, None),
        (0, False),
        (1, True),
        (2, 2.0),
        (ROWS, ROWS[1:]),  # 2 bytes behind a multiple of 16
        (ROWS, ROWS.view(torch.float16)),
        ((ROWS, 2), (ROWS, 16)),
        ((ROWS, ROWS), (ROWS,)),
    ],
)
def test_what_is_compiled_apart_is_looked_up_apart(one: object, other: object) -> None:
    assert str(kinds(one)) != str(kinds(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [(2, 3), (16, 32), (0.5, 1.0), (ROWS, ROWS[8:]), ((ROWS, 2), (ROWS[8:], 3))],
)
def test_what_is_compiled_once_is_looked_up_once(one: object, other: object) -> None:
    assert kinds(one) == kinds(other)


def test_kernels_get_addresses() -> None:
    values: list[object] = []
    for argument in (ROWS[8:], None, 7, (ROWS, 0.5)):
        look_at(argument, [], values)
    start = ROWS.data_ptr()
    assert values == [start + 16, None, 7, (start, 0.5)]


def test_only_trailing_constants_are_kept() -> None:
    """Of f(x, n, K: constant, L: constant = 3): constants that are given as arguments, and
    arguments that are not, leave the launch to Triton."""

    def parameter(name: str, constant: bool, default: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, is_constexpr=constant, default=default)

    parameters = [parameter("x", False), parameter("n", False)]
    parameters += [parameter("K", True), parameter("L", True, 3)]
    launcher = Launcher(SimpleNamespace(params=parameters))
    assert launcher.constants_behind(2, {"K": 5, "num_warps": 4}) == (5, 3)
    assert launcher.constants_behind(3, {}) is None
    assert launcher.constants_behind(1, {"n": 2, "K": 5}) is None
