"""What the benchmarks of kernels share: the GPU's clock and memory, its bounds, and where lines go.

A figure is the median of replays of a CUDA graph of the whole call, so that launch costs of Python
count for nobody. It needs torch alone.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from ..configs.errors import RunFailed, UserError
from .files import json_line

PACKAGES = ("farhorizon", "torch", "triton", "fla-core", "vllm", "liger-kernel")
DENSE = 8192
COPIED = 2**30
MOST_ELEMENTS = 2**59  # torch counts bytes in 63 bits

Tensor = torch.Tensor


class Meter(Protocol):
    """The device, its clock and its memory."""

    device: str

    def wait(self) -> None:
        """Until all that was started is done."""
        ...

    def free(self) -> None:
        """Give back memory that no tensor uses."""
        ...

    def milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        """The median time of the call."""
        ...

    def plain_milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        """That of a call that waits for the device itself."""
        ...

    def growth(self, call: Callable[[], object]) -> int:
        """The most bytes that the call has allocated at one time."""
        ...


class CudaMeter:
    """The current GPU. Memory is that of a plain call, before and without any graph."""

    device = "cuda"

    def wait(self) -> None:
        torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        """Of replays of a CUDA graph, which is gone afterwards with its memory."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        self.wait()
        self.free()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        took = self.plain_milliseconds(graph.replay, repeats)
        graph.reset()
        del graph
        self.free()
        return took

    def plain_milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        """Between events around the calls, launches from Python included."""
        times: list[float] = []
        for _ in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            self.wait()
            times.append(start.elapsed_time(end))
        return statistics.median(times[3:])

    def growth(self, call: Callable[[], object]) -> int:
        self.free()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before


def versions() -> dict[str, str]:
    """Those of the packages that a figure depends on."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Passes:
    """One implementation on given inputs: its forward pass alone, and with backward. ``captured``
    says whether a CUDA graph can hold them."""

    name: str
    forward: Callable[[], object]
    both: Callable[[], object]
    captured: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds, relative errors and GiB of one implementation."""

    name: str
    forward_ms: float
    both_ms: float | None = None  # forward and backward
    peak_gib: float | None = None  # of forward and backward, on top of the inputs
    errors: dict[str, float] | None = None


def take_turns(
    meter: Meter, sides: Sequence[Passes], errors: Mapping[str, dict[str, float]], repeats: int
) -> list[Measured]:
    """Peaks, and medians over three rounds in alternating order, the forward pass without
    autograd."""
    peaks = {side.name: meter.growth(side.both) / 2**30 for side in sides}
    turns: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for order in (sides, sides[::-1], sides):
        for side in order:
            timed = meter.milliseconds if side.captured else meter.plain_milliseconds
            with torch.no_grad():
                alone = timed(side.forward, repeats)
            turns[side.name].append((alone, timed(side.both, repeats)))
    found: list[Measured] = []
    for name, taken in turns.items():
        alone, both = (statistics.median(times) for times in zip(*taken, strict=True))
        found.append(Measured(name, alone, both, peaks[name], errors[name]))
    return found


def parse_shape(text: str, names: str, key: str) -> list[int]:
    """The numbers of ``text``, one for each of ``names``; UserError names the setting."""
    parts = text.split("x")
    fits = len(parts) == len(names.split("x"))
    if not fits or not all(re.fullmatch("[1-9][0-9]{0,17}", part) for part in parts):
        raise UserError(f"{key}: {text!r} is not {names}")
    numbers = [int(part) for part in parts]
    if math.prod(numbers) > MOST_ELEMENTS:
        raise UserError(f"{key}: {text!r} is more than any memory holds")
    return numbers


def judge(shape: str, found: Mapping[str, float], allowed: float) -> None:
    """RunFailed if an error of ours is above ``allowed``; written so that a NaN fails."""
    for name, error in found.items():
        if not error < allowed:
            raise RunFailed(f"{shape}: {name} is off by {error:.1e}, allowed {allowed:.0e}")


def tell(found: Measured, shares: tuple[float, float, float], of: str) -> dict[str, Any]:
    """Print a side's figures with its ``shares`` ``of`` something, forward, with backward and of
    the difference, and return them."""
    assert found.both_ms is not None and found.errors is not None
    forward, both, backward = shares
    print(
        f"  {found.name:<22} forward {found.forward_ms:8.3f} ms {forward:4.0%} of {of}   "
        f"with backward {found.both_ms:8.3f} ms {both:4.0%} (backward alone {backward:.0%})   "
        f"{found.peak_gib:6.2f} GiB   "
        f"errors up to {max(found.errors.values(), default=float('nan')):.1e}",
        flush=True,
    )
    named = {"forward_share": forward, "both_share": both, "backward_share": backward}
    return named | asdict(found)


def shares(found: Measured, forward: float, both: float) -> tuple[float, float, float]:
    """Of the least milliseconds of both passes: what forward is of its time, both are of theirs,
    and the rest is of what they take longer; nan if that is nothing."""
    assert found.both_ms is not None
    more = found.both_ms - found.forward_ms
    back = (both - forward) / more if more > 0 else math.nan
    return forward / found.forward_ms, both / found.both_ms, back


@contextmanager
def sufficient_memory(bench: str, shape: str) -> Iterator[None]:
    """RunFailed, with a way out, where there is too little memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        from ..policy.memory import lack  # which needs transformers, as no measurement does

        raise RunFailed(
            f"bench {bench}: {lack(error)} of {shape}; lower its tokens, or peers=[]"
        ) from None


def origin(bench: str) -> dict[str, Any]:
    """What every line of an invocation has."""
    return {
        "benchmark": bench,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(),
    }


def random_like(x: Tensor, seed: int) -> Tensor:
    """Random numbers of the shape, type and device of ``x``, other ones than its own seed gives."""
    gen = torch.Generator(x.device).manual_seed(seed + 1)
    return torch.randn(x.shape, generator=gen, device=x.device).to(x.dtype)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def copy_speed(meter: Meter, repeats: int) -> float:
    """1e9 bytes per second, read and written, of a copy of `COPIED` bytes on the device: by the
    driver or by a kernel that negates them, whichever is faster."""
    source = torch.zeros(COPIED // 4, device=meter.device)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * COPIED / min(meter.milliseconds(copy, repeats) for copy in copies) / 1e6


def dense_speed(meter: Meter, repeats: int) -> float:
    """Operations per second of torch's product of two square bf16 matrices of size `DENSE`."""
    left, right = (
        torch.randn(DENSE, DENSE, device=meter.device, dtype=torch.bfloat16) for _ in range(2)
    )
    return 2 * DENSE**3 / meter.milliseconds(lambda: left @ right.T, repeats) * 1e3


@contextmanager
def lines_to(output: str | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that adds a JSON line to ``output``, or to nothing; UserError if that cannot be
    written."""
    if output is None:
        yield lambda values: None
        return
    with ExitStack() as stack:
        try:
            Path(output).absolute().parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(Path(output).open("a", encoding="utf-8"))
        except OSError as error:
            raise UserError(f"output {output}: cannot be written ({error.strerror})") from None

        def take(values: Mapping[str, Any]) -> None:
            file.write(json_line(values))
            file.flush()

        yield take
