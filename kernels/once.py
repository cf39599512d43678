"""Backward passes that have no derivative of their own, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's of that name: a second derivative is an error. Also where no gradient that
    ``backward`` is given has a derivative, as that of a sum: torch would take the result for a
    constant there, and leave its term out without a word."""
    once = function.once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *upstream: Any) -> Any:
        if torch.is_grad_enabled():  # somebody wants a graph of the backward pass
            upstream = tuple(map(_varying, upstream))
        return once(ctx, *upstream)

    return wrapper


def _varying(x: Any) -> Any:
    numbers = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if numbers else x
