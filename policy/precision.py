"""Parameters that no cast of the policy makes narrower."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Change = Callable[[Tensor], Tensor]


def kept_wide(fn: Change, *kept: Tensor | None) -> Change:
    """``fn``, with which a module moves or casts its tensors, but only moving those ``kept`` and
    their gradients where it would leave them less than fp32."""
    wide = {id(part) for one in kept if one is not None for part in (one, one.grad)}

    def change(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if id(tensor) not in wide or moved.element_size() >= 4:
            return moved
        return tensor.to(moved.device)

    return change
