"""``farhorizon bench kda``: KDA forward and backward on this GPU, beside what else is installed.

Peers are flash-linear-attention and FlashKDA (the extension that vLLM ships, forward only); one
that is not installed is left out and named. Every figure is the median of replays of a CUDA graph
of the whole call, so that launch costs of Python count for nobody; the sides take turns in one
process, on the same inputs, three rounds in alternating order. Before anything is timed, our
results on these very inputs are compared with the token recurrence in fp64 on some of the heads.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.schema import KdaBenchConfig
from ..kernels.kda import chunk_kda, naive_kda
from .prepare import check_writable

WIDTH = 128
CHECKED_HEADS, CHECKED_TOKENS = 2, 2048
# Relative error against fp64 on the same bf16 inputs; the last is for everything on the way back.
ALLOWED_OUT, ALLOWED_GRADIENT = 4e-3, 6e-3
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation at one shape: median milliseconds (None: it has no such pass) and GiB."""

    name: str
    tokens: int
    heads: int
    forward_ms: float
    both_ms: float | None
    peak_gib: float


def bench_kda(config: KdaBenchConfig) -> int:
    """Print the table and append it to ``output``; returns 0. RunFailed if a result is wrong."""
    check_bounds(config)
    shapes = [parse_shape(text) for text in config.shapes]
    if not torch.cuda.is_available():
        raise UserError("bench kda needs a GPU, and torch sees none")
    if config.output is not None:
        check_writable(Path(config.output).absolute().parent)
    peers = find_peers(config.peers)
    rows: list[Row] = []
    for tokens, heads in shapes:
        inputs = draw(tokens, heads, config.seed)
        print(f"T {tokens}, {heads} heads: {check(inputs)}")
        print(f"  all log decays near -5: {check(inputs | {'g': inputs['g'].detach() + 6})}")
        sides = (("farhorizon", ours, True), *peers)
        turns = [
            [measure(name, call, trains, inputs, config.repeats) for name, call, trains in order]
            for order in (sides, sides[::-1], sides)
        ]
        for name, _, _ in sides:
            rows.append(middle([row for turn in turns for row in turn if row.name == name]))
        del inputs
        torch.cuda.empty_cache()
    print_table(rows)
    if config.output is not None:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(),
            "versions": versions(),
            "rows": [asdict(row) for row in rows],
        }
        with Path(config.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0


def middle(rows: list[Row]) -> Row:
    """The medians of an implementation's turns."""
    forward = statistics.median(row.forward_ms for row in rows)
    both = [row.both_ms for row in rows if row.both_ms is not None]
    return replace(rows[0], forward_ms=forward, both_ms=statistics.median(both) if both else None)


def parse_shape(text: str) -> tuple[int, int]:
    """Tokens and heads of ``8192x64``."""
    tokens, _, heads = text.partition("x")
    if not (tokens.isdigit() and heads.isdigit() and int(tokens) and int(heads)):
        raise UserError(f"shapes: {text!r} is not TOKENSxHEADS, for example 8192x64")
    return int(tokens), int(heads)


def draw(tokens: int, heads: int, seed: int) -> dict[str, torch.Tensor]:
    """Random bf16 inputs of one sequence, with leaves that take gradients."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda", dtype=torch.bfloat16)

    found = {name: normal(1, tokens, heads, WIDTH) for name in ("q", "k", "v", "g")}
    found["beta"] = normal(1, tokens, heads)
    found["A_log"] = torch.zeros(heads, device="cuda")
    found["dt_bias"] = torch.zeros(heads * WIDTH, device="cuda")
    return {name: x.requires_grad_() for name, x in found.items()}


def ours(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return chunk_kda(**inputs, **FLAGS)[0]


def find_peers(
    wanted: bool,
) -> list[tuple[str, Callable[[dict[str, torch.Tensor]], torch.Tensor], bool]]:
    """Name, call and whether it has a backward pass, of every peer that is installed."""
    if not wanted:
        return []
    peers: list[tuple[str, Callable[[dict[str, torch.Tensor]], torch.Tensor], bool]] = []
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.kda import chunk_kda as theirs  # pyright: ignore[reportMissingImports]

        def fla(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return theirs(**inputs, **FLAGS, safe_gate=True, lower_bound=-5.0)[0]

        peers.append(("flash-linear-attention", fla, True))
    else:
        print("flash-linear-attention is not installed: left out")
    spec = importlib.util.find_spec("vllm")
    library = Path(spec.origin).parent / "_flashkda_C.abi3.so" if spec and spec.origin else None
    if library is not None and library.exists():
        torch.ops.load_library(str(library))
        peers.append(("FlashKDA", flash_kda, False))
    else:
        print("FlashKDA (vllm's _flashkda_C) is not installed: left out")
    return peers


def flash_kda(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    _, tokens, heads, _ = q.shape
    op = torch.ops._flashkda_C
    out = torch.empty_like(q)
    start = torch.zeros(1, heads, WIDTH, WIDTH, device="cuda")
    bounds = torch.zeros(2, dtype=torch.int64, device="cuda")
    bounds[1:].fill_(tokens)  # no copy from the host: a graph is being captured
    space = torch.empty(op.get_workspace_size(tokens, heads, 1), dtype=torch.uint8, device="cuda")
    op.fwd(
        *(q, k, v, g, beta, WIDTH**-0.5, out, space, inputs["A_log"]),
        *(inputs["dt_bias"].view(heads, WIDTH), -5.0, start, torch.empty_like(start)),
        *(bounds, None, None),
    )
    return out


def check(inputs: dict[str, torch.Tensor]) -> str:
    """Errors of our passes over all of the inputs, seen on some heads at the start.

    Tokens after the ones looked at change nothing before them, and heads are independent, so the
    recurrence need not run on the rest.
    """
    tokens = min(CHECKED_TOKENS, inputs["q"].shape[1])
    heads = min(CHECKED_HEADS, inputs["q"].shape[2])
    weight = torch.zeros_like(inputs["v"])
    weight[:, :tokens, :heads] = torch.randn_like(weight[:, :tokens, :heads])
    names = ("q", "k", "v", "g", "beta")
    inputs = inputs | {"g": inputs["g"].detach().requires_grad_()}
    out = ours(inputs)
    grads = torch.autograd.grad(out, [inputs[name] for name in names], weight)
    wide = {
        name: (x.detach()[:, :tokens, :heads] if name in names else x.detach()[: heads * WIDTH])
        for name, x in inputs.items()
    }
    wide["A_log"] = wide["A_log"][:heads]
    wide = {name: x.double().requires_grad_() for name, x in wide.items()}
    expected, _ = naive_kda(**wide, **FLAGS)
    d_out = weight[:, :tokens, :heads].double()
    truths = torch.autograd.grad(expected, [wide[name] for name in names], d_out)
    found = {"o": relative(out[:, :tokens, :heads], expected)}
    for name, grad, truth in zip(names, grads, truths, strict=True):
        found[f"d{name}"] = relative(grad[:, :tokens, :heads], truth)
    for name, error in found.items():
        allowed = ALLOWED_OUT if name == "o" else ALLOWED_GRADIENT
        if not error < allowed:
            raise RunFailed(f"{name} is off by {error:.1e}, allowed {allowed:.0e}")
    return "  ".join(f"{name} {error:.1e}" for name, error in found.items())


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.detach().double() - truth.detach()).norm() / truth.detach().norm())


def measure(
    name: str,
    call: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    trains: bool,
    inputs: dict[str, torch.Tensor],
    repeats: int,
) -> Row:
    """Forward without gradients, then forward and backward where there is one."""
    still = {key: x.detach() for key, x in inputs.items()}
    leaves = list(inputs.values())
    d_out = torch.randn_like(inputs["v"])

    def both() -> None:
        torch.autograd.grad(call(inputs), leaves, d_out)

    with torch.no_grad():
        forward = replayed(lambda: call(still), repeats)
    torch.cuda.reset_peak_memory_stats()
    total = replayed(both, repeats) if trains else None
    peak = torch.cuda.max_memory_allocated() / 2**30
    _, tokens, heads, _ = inputs["q"].shape
    return Row(name, tokens, heads, forward, total, peak)


def replayed(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a CUDA graph of ``call``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("farhorizon", "torch", "triton", "fla-core", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def print_table(rows: list[Row]) -> None:
    """Milliseconds, and how many times as long a peer takes."""
    table = Table()
    for title in ("", "tokens x heads", "forward ms", "forward + backward ms", "peak GiB"):
        table.add_column(title)
    first: Row | None = None
    for row in rows:
        first = row if row.name == "farhorizon" or first is None else first
        both = "-" if row.both_ms is None else f"{row.both_ms:.3f}"
        forward = f"{row.forward_ms:.3f}"
        if row is not first:
            forward += f" ({row.forward_ms / first.forward_ms:.2f}x)"
            if row.both_ms is not None and first.both_ms is not None:
                both += f" ({row.both_ms / first.both_ms:.2f}x)"
        shape = f"{row.tokens} x {row.heads}"
        table.add_row(row.name, shape, forward, both, f"{row.peak_gib:.1f}")
    Console(width=110).print(table)
