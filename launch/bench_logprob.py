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
    sufficient_memory,
    take_turns,
    tell,
)

OURS = "farhorizon"
FORM = "TOKENSxVOCABULARYxHIDDEN"
ALLOWED = 6e-3  # relative, against fp64
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
    weights = [torch.linspace(0.5, 1.5, tokens), torch.linspace(-0.1, 0.1, tokens)]
    if len(found[0]) != tokens:
        return [torch.ones_like(found[0])]
    return [w.to(one) for w, one in zip(weights, found, strict=False)]


def errors(side: Side, given: Head, count: int = CHECKED_TOKENS) -> dict[str, float]:
    """Beside fp64 on the first tokens by themselves; of the whole matrix's gradient too."""
    hidden, lm_head, targets = given
    rows, targets = hidden[:count].detach(), targets[:count]
    names = ("logprobs", "entropy", "dhidden", "dlm_head")

    def found(call: Callable[..., tuple[Tensor, ...]], wide: bool) -> dict[str, Tensor]:
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in (rows, lm_head)]
        values = call(*leaves, targets)
        grads = torch.autograd.grad(values, leaves, pulls(values, len(rows)))
        return dict(zip(names, [*(x.detach() for x in values), *grads], strict=True))

    truth = found(naive_token_logprobs, wide=True)
    return {name: relative(x, truth[name]) for name, x in found(side.call, wide=False).items()}


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


def shares_of(found: Measured, flops: int, dense: float) -> tuple[float, float]:
    """Of ``dense`` operations a second. Forward has one product, backward two and the first once
    more."""
    assert found.both_ms is not None
    return flops / found.forward_ms * 1e3 / dense, 4 * flops / found.both_ms * 1e3 / dense
