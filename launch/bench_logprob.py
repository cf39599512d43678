"""``farhorizon bench logprob``: log-probs and entropies of a vocabulary's head on this GPU.

Peers: TRL's chunked log-probs, which give both as well, and Liger's fused cross entropy, which
gives the sum of log-probs alone and its gradients in the forward pass already.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..configs.benchmarks import LogprobBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..kernels.logprob import naive_token_logprobs, token_logprobs
from .measure import (
    CudaMeter,
    Measured,
    Meter,
    Passes,
    dense_speed,
    judge,
    lines_to,
    origin,
    parse_shape,
    relative,
    shares,
    sufficient_memory,
    take_turns,
    tell,
)

OURS = "farhorizon"
FORM = "TOKENSxVOCABULARYxHIDDEN"
ALLOWED, ALLOWED_VALUES = 6e-3, 1e-5  # relative, against fp64: of gradients, and of log-probs
CHECKED_TOKENS = 128
CHUNK = 32768  # columns of the vocabulary that TRL takes at once, its own default

Tensor = torch.Tensor
Head = tuple[Tensor, Tensor, Tensor]  # hidden [T, D], lm_head [V, D], targets [T]
Take = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Side:
    """``call(hidden, lm_head, targets)`` gives log-probs ``[T]`` and, where it has them, entropies;
    or the sum of log-probs ``[1]``."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    captured: bool = True


def ours(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return token_logprobs(hidden, lm_head, targets)


def _trl() -> Side:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def call(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found: Any = ChunkedLogProbFunction.apply(
            *(hidden, lm_head, None, targets, 1.0, CHUNK, None, 1.0, ("entropy",))
        )
        return found[0], found[1]

    return Side("TRL", call)


def _liger() -> Side:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyFunction as Fused,
    )

    def call(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found = Fused.apply(
            *(hidden, lm_head, targets, None, None, -100, 0.0, 0.0, "sum", None, False),
            torch.float32,
        )
        return (-found[0].reshape(1),)

    return Side("Liger, no entropies", call, captured=False)  # it asks the GPU for a count


PEERS: dict[str, tuple[str, Callable[[], Side]]] = {
    "trl": ("trl", _trl),
    "liger": ("liger_kernel", _liger),
}


def find_sides(names: Sequence[str]) -> list[Side]:
    """Ours, and those of the named peers that are installed; UserError for another name."""
    for name in names:
        if name not in PEERS:
            raise UserError(f"peers: {name!r} is none; known: {', '.join(PEERS)}, or [] for none")
    sides = [Side(OURS, ours)]
    for name in dict.fromkeys(names):
        package, side = PEERS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: left out")
        else:
            sides.append(side())
    return sides


def draw(tokens: int, vocabulary: int, hidden: int, seed: int, device: str) -> Head:
    """Random bf16 rows and a bf16 matrix, leaves that take gradients; logits of deviation 2."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=gen, device=device) * scale).bfloat16()

    rows, head = normal(tokens, hidden), normal(vocabulary, hidden, scale=2 * hidden**-0.5)
    targets = torch.randint(vocabulary, (tokens,), generator=gen, device=device)
    return rows.requires_grad_(), head.requires_grad_(), targets


def pulls(found: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Gradients of the results; where there is a sum alone, of that."""
    ends = ((0.5, 1.5), (-0.1, 0.1))
    weights = [torch.linspace(*e, tokens, device=found[0].device) for e in ends]
    if len(found[0]) != tokens:
        return [torch.ones_like(found[0])]
    return [w.to(one) for w, one in zip(weights, found, strict=False)]


def errors(side: Side, given: Head, count: int = CHECKED_TOKENS) -> dict[str, float]:
    """Beside fp64 on tokens spread over all of them, whose log-probs alone have gradients; of the
    whole matrix's gradient too."""
    hidden, lm_head, targets = given
    rows = torch.linspace(0, len(hidden) - 1, min(count, len(hidden)), device=hidden.device).long()
    names = ("logprobs", "entropy", "dhidden", "dlm_head")
    asked = torch.zeros(len(hidden), device=hidden.device)
    asked[rows] = 1.0

    values = side.call(hidden, lm_head, targets)
    weights = [pull * asked.to(pull) for pull in pulls(values, len(hidden))]
    d_hidden, d_head = torch.autograd.grad(values, (hidden, lm_head), weights)
    found = [*(x.detach()[rows] for x in values), d_hidden[rows], d_head]

    leaves = [x.detach().double().requires_grad_() for x in (hidden[rows], lm_head)]
    true_values = naive_token_logprobs(leaves[0], leaves[1], targets[rows])
    grads = torch.autograd.grad(true_values, leaves, [w.double()[rows] for w in weights])
    truth = [*(x.detach() for x in true_values), *grads]
    return {n: relative(x, y) for n, x, y in zip(names, found, truth, strict=True)}


def bench_logprob(config: LogprobBenchConfig) -> int:
    """Print a line for each side and shape and add it to ``output``; returns 0. RunFailed if a
    result of ours is wrong, or if memory does not suffice."""
    check_bounds(config)
    shapes = [parse_shape(text, FORM, "shapes") for text in config.shapes]
    if not shapes:
        raise UserError(f"shapes: name at least one, {FORM}")
    sides = find_sides(config.peers)
    if not torch.cuda.is_available():
        raise UserError("bench logprob needs a GPU, and torch sees none")
    told = origin("logprob")
    with lines_to(config.output) as write:
        run(CudaMeter(), sides, shapes, config, lambda row: write(told | {**row}))
    return 0


def run(
    meter: Meter,
    sides: Sequence[Side],
    shapes: Sequence[Sequence[int]],
    config: LogprobBenchConfig,
    take: Take,
) -> None:
    """Measure and print; ``take`` gets the figures of each side."""
    dense = dense_speed(meter, config.repeats)
    print(f"bf16 products of a large square: {dense / 1e12:.0f} TFLOP/s")
    for tokens, vocabulary, hidden in shapes:
        shape = f"{tokens}x{vocabulary}x{hidden}"
        print(f"head {shape}")
        with sufficient_memory("logprob", shape):
            given = draw(tokens, vocabulary, hidden, config.seed, meter.device)
            # a sum alone says nothing of single tokens
            off = {side.name: errors(side, given) if side.captured else {} for side in sides}
            values = {name: off[OURS][name] for name in ("logprobs", "entropy")}
            judge(shape, values, ALLOWED_VALUES)
            judge(shape, off[OURS], ALLOWED)
            meter.free()
            passes = [_passes(side, given) for side in sides]
            named = (given[0].nbytes + 2 * given[1].nbytes) / 2**30
            for found in take_turns(meter, passes, off, config.repeats):
                shares = shares_of(found, 2 * tokens * vocabulary * hidden, dense)
                figures = {"named_gib": named, "dense": dense, **tell(found, shares, "dense")}
                take({"shape": shape, **figures})
        del given, passes
        meter.free()


def _passes(side: Side, given: Head) -> Passes:
    def both() -> object:
        found = side.call(*given)
        return torch.autograd.grad(found, given[:2], pulls(found, len(given[0])))

    return Passes(side.name, lambda: side.call(*given), both, side.captured)


def shares_of(found: Measured, flops: int, dense: float) -> tuple[float, float, float]:
    """Of ``dense`` operations a second: as `farhorizon.launch.measure.shares`. Forward has one
    product, backward two and the first once more."""
    unit = flops / dense * 1e3
    return shares(found, unit, 4 * unit)
