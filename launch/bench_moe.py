"""``farhorizon bench moe``: router and experts on this GPU, beside torch's grouped products.

`farhorizon.launch.moe_measure` says how a figure comes about. With an ``output`` every line is
written as soon as it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..configs.benchmarks import MoeBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from .measure import (
    DENSE,
    CudaMeter,
    Measured,
    Meter,
    dense_speed,
    lines_to,
    origin,
    sufficient_memory,
)
from .moe_measure import (
    RouterShape,
    Shape,
    measure,
    measure_router,
    operations,
    parse,
    text_of,
)
from .moe_peers import SITU, Side, check_peers, find_sides

Take = Callable[[Mapping[str, Any]], None]


def bench_moe(config: MoeBenchConfig) -> int:
    """Print a line for each side and shape and add it to ``output``; returns 0. RunFailed if a
    result of ours is wrong, or if memory does not suffice."""
    check_bounds(config)
    check_peers(config.peers, config.activation)
    shapes = [parse(text, Shape, "shapes") for text in config.shapes]
    routers = [parse(text, RouterShape, "router") for text in config.router]
    if not shapes and not routers:
        raise UserError("nothing to measure: name shapes, or router shapes")
    if not torch.cuda.is_available():
        raise UserError("bench moe needs a GPU, and torch sees none")
    told = origin("moe") | {"activation": config.activation}
    with lines_to(config.output) as write:
        sides = find_sides(config.peers)
        run(CudaMeter(), sides, shapes, routers, config, lambda row: write(told | {**row}))
    return 0


def run(
    meter: Meter,
    sides: Sequence[Side],
    shapes: Sequence[Shape],
    routers: Sequence[RouterShape],
    config: MoeBenchConfig,
    take: Take,
) -> None:
    """Measure and print; ``take`` gets the figures of each side."""
    dense = dense_speed(meter, config.repeats)
    print(f"a bf16 product of {DENSE}^3: {dense / 1e12:.0f} TFLOP/s")
    bounds = SITU if config.activation == "situ" else None
    for shape in shapes:
        print(f"experts {text_of(shape)}")
        with sufficient_memory("moe", text_of(shape)):
            for found in measure(meter, sides, shape, bounds, config.repeats, config.seed):
                take(tell(shape, found, dense))
        meter.free()
    for shape in routers:
        print(f"router {text_of(shape)}")
        with sufficient_memory("moe", text_of(shape)):
            for found in measure_router(meter, shape, config.repeats, config.seed):
                print(f"  {found.name:<18} {found.forward_ms:9.4f} ms", flush=True)
                take({"kind": "router", "shape": text_of(shape), **asdict(found)})


def tell(shape: Shape, found: Measured, dense: float) -> dict[str, Any]:
    """Print a side's figures, and return all of them."""
    assert found.both_ms is not None and found.errors is not None
    forward = operations(shape) / found.forward_ms * 1e3
    both = 3 * operations(shape) / found.both_ms * 1e3
    print(
        f"  {found.name:<18} forward {found.forward_ms:8.3f} ms {forward / 1e12:4.0f} TFLOP/s "
        f"{forward / dense:4.0%}   with backward {found.both_ms:8.3f} ms {both / 1e12:4.0f} "
        f"TFLOP/s {both / dense:4.0%}   {found.peak_gib:6.2f} GiB   "
        f"errors up to {max(found.errors.values()):.1e}",
        flush=True,
    )
    shares = {"forward_share": forward / dense, "both_share": both / dense}
    figures = {"dense_flops": dense, "forward_flops": forward, "both_flops": both, **shares}
    return {"kind": "experts", "shape": text_of(shape), **figures, **asdict(found)}
