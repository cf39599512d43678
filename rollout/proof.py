"""Proof that a model serves given weights: its own loader runs again, and where it would write into
what is served, it compares.

So the layout of what is served (fused projections, stacked experts, tensors that are derived from
others) is known from the code that made it, and from nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..policy.weights import THRESHOLD

_COPY = torch.ops.aten.copy_.default
_BLANK = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Proof:
    """Watches what loaders do to the tensors that ``model`` serves.

    A loader is called without arguments, for the same weights each time, and writes with ``copy_``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[str] = set()

    def load(self, loader: Callable[[], None]) -> None:
        """Run a loader, and remember what it wrote."""
        served = tensors(self._model)
        with _Writes(served, compare=False) as writes:
            loader()
        self._written = {name for name, tensor in served.items() if writes.covered(tensor)}

    def difference(self, loader: Callable[[], None]) -> str | None:
        """What is served and is not what the loader's weights give, bit for bit, naming the first
        tensor; None if nothing. Nothing is changed."""
        before = tensors(self._model)
        needed = self._written | {name for name, _ in self._model.named_parameters()}
        with _Writes(before, compare=True) as writes:
            loader()
        after = tensors(self._model)
        wrong: list[str] = []
        for name in sorted(before.keys() | after.keys()):
            old, new = before.get(name), after.get(name)
            if old is None or new is None:
                wrong.append(f"{name}: served only {'after' if old is None else 'before'} a load")
            elif name.endswith(THRESHOLD) and old.dtype != torch.float32:
                kind = str(old.dtype).removeprefix("torch.")
                wrong.append(f"{name}: served in {kind}, which rounds it")
            elif name in writes.different or not (_same(old, new) or equal_bits(old, new)):
                wrong.append(f"{name}: what is served is not what the weights give")
            elif _same(old, new) and name in needed and writes.covered(old) < old.numel():
                wrong.append(f"{name}: served, but no weight was loaded into it")
        if not wrong:
            return None
        return wrong[0] if len(wrong) == 1 else f"{wrong[0]} (and {len(wrong) - 1} more)"


class _Writes(TorchDispatchMode):
    """Counts what is copied into ``served`` tensors; with ``compare`` compares it instead.

    New tensors begin as zeros, so that padding, which no weight fills, is the same each time.
    """

    def __init__(self, served: Mapping[str, Tensor], compare: bool) -> None:
        super().__init__()
        self.different: set[str] = set()
        self._compare = compare
        self._names = {_storage(tensor): name for name, tensor in reversed(list(served.items()))}
        self._covered: Counter[tuple[torch.device, int]] = Counter()

    def covered(self, tensor: Tensor) -> int:
        """How many numbers were copied into its memory."""
        return self._covered[_storage(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _COPY and self._written(args[0], args[1]):
            target, source = args[0], args[1]
            self._covered[_storage(target)] += target.numel()
            if self._compare:
                given = source.to(target.device, target.dtype).expand(target.shape)
                if not equal_bits(target, given):
                    self.different.add(self._names[_storage(target)])
                return target
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _BLANK and not out.is_meta else out

    def _written(self, target: Tensor, source: Tensor) -> bool:
        """Whether served memory gets something new: copied to itself it gets nothing."""
        place = _storage(target)
        return place in self._names and place != _storage(source)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and other tensors that modules have as attributes, by name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    found |= dict(model.named_buffers())
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}".lstrip(".")] = value
    return {name: tensor for name, tensor in found.items() if not tensor.is_meta}


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike in shape, dtype and bytes; NaNs are compared as well."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    words = WORDS.get(one.element_size())
    if words is None:
        return torch.equal(one, other)
    return torch.equal(one.detach().view(words), other.detach().view(words))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    if tensor.is_meta:
        return tensor.device, -1
    return tensor.device, tensor.untyped_storage().data_ptr()
