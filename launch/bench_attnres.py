"""``farhorizon bench attnres``: a site of the mixture over depth on this GPU, beside that of
flash-linear-attention.

A site adds an update to the partial sum, mixes the finished blocks and that sum, and norms the
mixture. It is bound by memory: its share is of a copy's bytes per second, at the bytes that it has
to move at least.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..configs.benchmarks import AttnResBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..kernels.attnres import mix_norm
from ..kernels.attnres.naive import naive_mix_norm
from .measure import (
    CudaMeter,
    Measured,
    Meter,
    Passes,
    copy_speed,
    judge,
    lines_to,
    origin,
    parse_shape,
    random_like,
    relative,
    shares,
    sufficient_memory,
    take_turns,
    tell,
)

OURS, FLA = "farhorizon", "flash-linear-attention"
FORM = "TOKENSxHIDDENxSOURCES"
EPS = 1e-5
ALLOWED = 1e-2  # relative, against fp64
CHECKED_TOKENS = 512

Tensor = torch.Tensor
Take = Callable[[Mapping[str, Any]], None]


class Site(NamedTuple):
    """Sources, of which the last is the partial sum, an update, and three vectors."""

    sources: tuple[Tensor, ...]
    update: Tensor
    query: Tensor
    norm_weight: Tensor
    next_weight: Tensor

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Site:
        return Site(tuple(map(change, self.sources)), *map(change, self[1:]))

    def leaves(self) -> list[Tensor]:
        return [*self.sources, *self[1:]]


@dataclass(frozen=True, slots=True)
class Side:
    """``call(site)`` gives the new partial sum and the normed mixture."""

    name: str
    call: Callable[[Site], tuple[Tensor, Tensor]]


def ours(site: Site) -> tuple[Tensor, Tensor]:
    *blocks, partial = site.sources
    return mix_norm(blocks, partial, *site[1:], EPS)[1:]


def specification(site: Site) -> tuple[Tensor, Tensor]:
    *blocks, partial = site.sources
    return naive_mix_norm(blocks, partial, *site[1:], EPS)[1:]


def find_sides(names: Sequence[str]) -> list[Side]:
    """Ours, and the peer where it is asked for and installed; UserError for another name."""
    for name in names:
        if name != "fla":
            raise UserError(f"peers: {name!r} is none; known: fla, or [] for none")
    sides = [Side(OURS, ours)]
    if names:
        spec = importlib.util.find_spec("fla")
        if spec is None or spec.origin is None:
            print(f"{FLA} is not installed: left out")
        else:
            sides.append(Side(FLA, _fla()))
    return sides


def _fla() -> Callable[[Site], tuple[Tensor, Tensor]]:
    from fla.ops.attnres import fused_attnres  # pyright: ignore[reportMissingImports]

    def call(site: Site) -> tuple[Tensor, Tensor]:
        *blocks, partial = site.sources
        partial = partial + site.update
        sources = [*blocks, partial]
        normed = fused_attnres(site.query, sources, site.norm_weight, site.next_weight, rms_eps=EPS)
        return partial, normed

    return call


def draw(tokens: int, hidden: int, sources: int, seed: int, device: str) -> Site:
    """Random bf16 rows and fp32 vectors, leaves that take gradients."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    rows = [normal(tokens, hidden).bfloat16() for _ in range(sources + 1)]
    weights = (1 + normal(hidden) / 4 for _ in range(2))
    site = Site(tuple(rows[:-1]), rows[-1], normal(hidden) / hidden**0.5, *weights)
    return site.mapped(lambda x: x.requires_grad_())


def least_bytes(tokens: int, hidden: int, sources: int) -> tuple[int, int]:
    """Of the forward pass, and of both. Forward reads sources and update and writes the new sum and
    the mixture; backward reads sources and two gradients and writes one for each source, that of
    the partial sum being the update's as well."""
    row = 2 * tokens * hidden
    return (sources + 3) * row, (sources + 3) * row + (2 * sources + 2) * row


def errors(side: Side, site: Site, pull: Tensor) -> dict[str, float]:
    """Beside fp64 on tokens spread over all of them, whose outputs alone have gradients."""
    count = min(CHECKED_TOKENS, len(pull))
    rows = torch.linspace(0, len(pull) - 1, count, device=pull.device).long()
    part = torch.zeros_like(pull)
    part[rows] = pull[rows]
    names = [*(f"dsource{i}" for i in range(len(site.sources))), "dupdate", "dquery", "dnorm"]

    def found(
        call: Callable[[Site], tuple[Tensor, Tensor]], given: Site, weight: Tensor
    ) -> dict[str, Tensor]:
        total, normed = call(given)
        grads = torch.autograd.grad((total, normed), given.leaves(), (weight, weight))
        values = dict(zip([*names, "dnext"], grads, strict=True))
        return values | {"sum": total.detach(), "out": normed.detach()}

    def checked(x: Tensor) -> Tensor:
        return x[rows] if x.dim() == 2 else x

    wide = site.mapped(lambda x: checked(x).detach().double().requires_grad_())
    truth = found(specification, wide, part[rows].double())
    own = found(side.call, site, part)
    return {name: relative(checked(x), truth[name]) for name, x in own.items()}


def bench_attnres(config: AttnResBenchConfig) -> int:
    """Print a line for each side and shape and add it to ``output``; returns 0. RunFailed if a
    result of ours is wrong, or if memory does not suffice."""
    check_bounds(config)
    sides = find_sides(config.peers)
    shapes = [parse_shape(text, FORM, "shapes") for text in config.shapes]
    if not shapes:
        raise UserError(f"shapes: name at least one, {FORM}")
    if not torch.cuda.is_available():
        raise UserError("bench attnres needs a GPU, and torch sees none")
    told = origin("attnres")
    with lines_to(config.output) as write:
        run(CudaMeter(), sides, shapes, config, lambda row: write(told | {**row}))
    return 0


def run(
    meter: Meter,
    sides: Sequence[Side],
    shapes: Sequence[Sequence[int]],
    config: AttnResBenchConfig,
    take: Take,
) -> None:
    """Measure and print; ``take`` gets the figures of each side."""
    speed = copy_speed(meter, config.repeats)
    print(f"a copy: {speed:.0f} GB/s")
    for tokens, hidden, sources in shapes:
        shape = f"{tokens}x{hidden}x{sources}"
        print(f"site {shape}")
        with sufficient_memory("attnres", shape):
            site = draw(tokens, hidden, sources, config.seed, meter.device)
            pull = random_like(site.update.detach(), config.seed)
            off = {side.name: errors(side, site, pull) for side in sides}
            judge(shape, off[OURS], ALLOWED)
            passes = [_passes(side, site, pull) for side in sides]
            for found in take_turns(meter, passes, off, config.repeats):
                shares = shares_of(found, least_bytes(tokens, hidden, sources), speed)
                take({"shape": shape, "copy": speed, **tell(found, shares, "a copy")})
        del site, pull, passes
        meter.free()


def _passes(side: Side, site: Site, pull: Tensor) -> Passes:
    def both() -> object:
        return torch.autograd.grad(side.call(site), site.leaves(), (pull, pull))

    return Passes(side.name, lambda: side.call(site), both)


def shares_of(found: Measured, least: tuple[int, int], speed: float) -> tuple[float, float, float]:
    """Of ``speed``, that of a copy in GB/s: as `farhorizon.launch.measure.shares`."""
    forward, both = (size / speed / 1e6 for size in least)
    return shares(found, forward, both)
