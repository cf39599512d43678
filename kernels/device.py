"""What every launch of a kernel needs of its device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch


def takes_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels for 16-bit data on a GPU run on ``x``, and not their twins in torch."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has the instructions that the Gluon kernels use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make that the one of ``x``."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` of the CPU on ``device``, without waiting for what a GPU still has to do.

    While a CUDA graph is captured the copy waits, which torch refuses then: the graph would read
    the CPU's memory at each replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class Launcher:
    """A Triton kernel, launched by ``launcher[grid](*arguments, **constants)``.

    Triton looks at every argument of every launch, which takes longer than many kernels run. What
    it compiled is kept here by all that it compiles for: types, None, ints that are 1 or multiples
    of 16 or need 64 bits, addresses that are multiples of 16, blocks of descriptors, constants; and
    by the device of tensors, for Triton alone refuses the memory of a CPU. From its second use on
    it is launched as it is; hooks on Triton's launches see the first alone.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple[object, ...], Relaunch] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.run, grid)

    def run(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch the kernel on the current device and stream."""
        device = torch.cuda.current_device()
        kinds: list[object] = []
        values: list[object] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                kinds += (argument.dtype, argument.get_device(), address % 16)
                values.append(address)
            elif argument is None:
                kinds.append(None)
                values.append(None)
            else:
                look_at(argument, kinds, values)
        settings = tuple(constants.values())
        key = (device, tuple(constants), settings, tuple(map(type, settings)), tuple(kinds))
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            fixed = self.constants_behind(len(arguments), constants)
            if fixed is not None:
                self.compiled[key] = Relaunch(compiled, fixed)
            return
        found(device, (*grid, 1, 1)[:3], values)

    def constants_behind(self, count: int, constants: dict[str, Any]) -> tuple[object, ...] | None:
        """Values of all parameters behind the first ``count``; None if any of these is not a
        constant, or one of the first is."""
        first, rest = self.kernel.params[:count], self.kernel.params[count:]
        if any(p.is_constexpr for p in first) or not all(p.is_constexpr for p in rest):
            return None
        return tuple(constants.get(p.name, p.default) for p in rest)


class Relaunch:
    """A compiled kernel and the constants behind its arguments."""

    def __init__(self, compiled: Any, fixed: tuple[object, ...]) -> None:
        from triton.runtime import driver

        active: Any = driver.active
        run = compiled.run
        self.compiled, self.fixed, self.stream = compiled, fixed, active.get_current_stream
        self.start: Any = run
        self.encode: Any = None
        # Triton encodes each descriptor anew for each launch. Where its launcher is made as we know
        # it, the one inside is called, and what it is given is kept with the descriptor.
        blocks = getattr(compiled.metadata, "tensordesc_meta", None)
        inner = getattr(getattr(run, "launch", None), "__closure__", None)
        scratch = getattr(run, "global_scratch_size", 1), getattr(run, "profile_scratch_size", 1)
        if blocks and inner and scratch == (0, 0) and None not in blocks:
            from triton.backends.nvidia import driver as nvidia

            names = run.launch.__code__.co_freevars
            within = dict(zip(names, (cell.cell_contents for cell in inner), strict=True))
            self.encode = getattr(nvidia, "make_tensordesc_arg", None)
            self.start, self.blocks = within.get("launcher"), [(str(b), b) for b in blocks]
            self.extra = run.launch_cooperative_grid, run.launch_pdl, None, None
            if self.start is None or self.encode is None:
                self.start, self.encode = run, None

    def __call__(self, device: int, grid: tuple[int, ...], values: list[object]) -> None:
        compiled, first = self.compiled, (*grid, self.stream(device), self.compiled.function)
        behind = (compiled.packed_metadata, None, None, None)
        if self.encode is None:
            self.start(*first, *behind, *values, *self.fixed)
            return
        given: list[object] = []
        blocks = iter(self.blocks)
        for value in values:
            if not hasattr(value, "block_shape"):
                given.append(value)
                continue
            name, block = next(blocks)
            kept = vars(value)
            if name not in kept:
                kept[name] = self.encode(value, block)
            given += kept[name]
        self.start(*first, *self.extra, *behind, *given, *self.fixed)


def look_at(argument: Any, kinds: list[object], values: list[object]) -> None:
    """Add to ``kinds`` what Triton compiles for, and to ``values`` what the kernel is given."""
    if isinstance(argument, torch.Tensor):
        address = argument.data_ptr()
        kinds += (argument.dtype, argument.get_device(), address % 16)
        values.append(address)
        return
    kind = type(argument)
    if argument is None or kind is bool:
        kinds.append(argument)
        values.append(argument)
    elif isinstance(argument, int):
        wide = not -(1 << 31) <= argument < 1 << 31
        huge = argument >= 1 << 63
        kinds.append("1" if argument == 1 else (argument % 16 == 0, wide, huge))
        values.append(argument)
    elif kind is float:
        kinds.append(kind)
        values.append(argument)
    elif kind is tuple:
        kinds += (kind, len(argument))
        inner: list[object] = []
        for part in argument:
            look_at(part, kinds, inner)
        values.append(tuple(inner))
    else:  # a descriptor
        own = vars(argument)
        if "kind" not in own:
            layout = own.get("layout")
            own["kind"] = (kind, argument.base.dtype, tuple(argument.block_shape), layout)
        kinds.append(own["kind"])
        values.append(argument)


_launchers: dict[int, Launcher] = {}


def launch(kernel: Any) -> Any:
    """What takes a grid and launches ``kernel``: its `Launcher`; itself in Triton's interpreter."""
    if not hasattr(kernel, "device_caches"):
        return kernel
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = Launcher(kernel)  # which keeps the kernel, and so its id
    return found
