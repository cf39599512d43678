"""What the benchmarks of kernels share: the GPU's clock and memory, its bounds, and where lines go.

A figure is the median of replays of a CUDA graph of the whole call, so that launch costs of Python
count for nobody. It needs torch alone.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from ..configs.errors import UserError
from .files import json_line

PACKAGES = ("farhorizon", "torch", "triton", "fla-core", "vllm", "liger-kernel")
DENSE = 8192

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


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def copy_speed(meter: Meter, repeats: int, size: int = 2**30) -> float:
    """1e9 bytes per second, read and written, of a copy of ``size`` bytes on the device: by the
    driver or by a kernel that negates them, whichever is faster."""
    source = torch.zeros(size // 4, device=meter.device)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * size / min(meter.milliseconds(copy, repeats) for copy in copies) / 1e6


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
