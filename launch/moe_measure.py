"""What ``farhorizon bench moe`` measures at one shape; it needs torch and Triton alone.

Ours is compared with fp64 on the inputs that are timed, before anything is: outputs and gradients
of the inputs and weights at some tokens, gradients of one expert's matrices over all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..configs.errors import RunFailed, UserError
from ..kernels.moe import Counts, QuantileHistogram, naive_router, router
from .measure import (
    Measured,
    Meter,
    Passes,
    judge,
    parse_shape,
    random_like,
    relative,
    take_turns,
)
from .moe_peers import OURS, Bounds, Inputs, Side, activated

CHECKED_TOKENS = 64
ALLOWED, ALLOWED_WEIGHT = 6e-3, 1e-3  # relative; of the router's weights
SAME_ROUTES = 0.999  # share of tokens whose experts are those of fp64: scores may lie closer

Tensor = torch.Tensor


class Shape(NamedTuple):
    tokens: int
    width: int
    inner: int
    experts: int
    k: int


class RouterShape(NamedTuple):
    tokens: int
    width: int
    experts: int
    k: int


def parse(text: str, kind: type[Shape] | type[RouterShape], key: str) -> Any:
    """The numbers of a shape; UserError names the setting."""
    found = kind(*parse_shape(text, "x".join(name.upper() for name in kind._fields), key))
    if found.k > found.experts:
        raise UserError(f"{key}: {text!r} has fewer experts than k")
    return found


def text_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def operations(shape: Shape) -> int:
    """Of the forward pass: the three products of every route."""
    return 2 * 3 * shape.tokens * shape.k * shape.width * shape.inner


def draw(shape: Shape, seed: int, device: str) -> Inputs:
    """Random bf16 inputs and matrices; every token has ``k`` experts of its own."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=gen, device=device) * scale).bfloat16()

    tokens, width, inner, count, k = shape
    scores = torch.rand(tokens, count, generator=gen, device=device)
    weights = torch.rand(tokens, k, generator=gen, device=device) + 0.1
    return Inputs(
        normal(tokens, width),
        normal(count, inner, width, scale=1.5 * width**-0.5),
        normal(count, width, inner, scale=inner**-0.5),
        normal(count, inner, width, scale=1.5 * width**-0.5),
        scores.topk(k).indices,
        weights / weights.sum(1, keepdim=True),
    )


def truth_of_tokens(given: Inputs, bounds: Bounds, pull: Tensor, count: int) -> dict[str, Tensor]:
    """Outputs and gradients of inputs and weights of the first ``count`` tokens, in fp64."""
    x, weights = (
        one[:count].detach().double().requires_grad_() for one in (given.x, given.weights)
    )
    experts = given.experts[:count]
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        w1, w2, w3 = (w[expert].detach().double() for w in (given.w1, given.w2, given.w3))
        rows = F.linear(activated(F.linear(x[token], w1), F.linear(x[token], w3), bounds), w2)
        out = out.index_add(0, token, rows * weights[token, choice, None])
    dx, d_weights = torch.autograd.grad(out, (x, weights), pull[:count].double())
    return {"out": out.detach(), "dx": dx, "dweights": d_weights}


def truth_of_expert(given: Inputs, bounds: Bounds, pull: Tensor, expert: int) -> dict[str, Tensor]:
    """Gradients of the matrices of one expert over all its tokens, in fp64."""
    token, choice = (given.experts == expert).nonzero(as_tuple=True)
    x, scale = given.x[token].detach().double(), given.weights[token, choice].detach().double()
    w1, w2, w3 = (
        w[expert].detach().double().requires_grad_() for w in (given.w1, given.w2, given.w3)
    )
    out = F.linear(activated(F.linear(x, w1), F.linear(x, w3), bounds), w2)
    grads = torch.autograd.grad(out, (w1, w2, w3), pull[token].double() * scale[:, None])
    return dict(zip(("dw1", "dw2", "dw3"), grads, strict=True))


def errors(side: Side, given: Inputs, bounds: Bounds, pull: Tensor) -> dict[str, float]:
    """Relative differences from fp64."""
    count = min(CHECKED_TOKENS, len(given.x))
    expert = int(given.experts[0, 0])
    leaves = (given.joined() if side.joined else given).leaves()
    out = side.call(leaves, bounds)
    dx, dw1, dw2, *dw3, dw = torch.autograd.grad(out, leaves.trained(), pull)
    found = {"out": out.detach()[:count], "dx": dx[:count], "dweights": dw[:count]}
    first, third = dw1[expert].chunk(2) if side.joined else (dw1[expert], dw3[0][expert])
    found |= {"dw1": first, "dw2": dw2[expert], "dw3": third}
    truth = truth_of_tokens(given, bounds, pull, count)
    truth |= truth_of_expert(given, bounds, pull, expert)
    return {name: relative(found[name], truth[name]) for name in truth}


def measure(
    meter: Meter, sides: Sequence[Side], shape: Shape, bounds: Bounds, repeats: int, seed: int
) -> list[Measured]:
    """Every side on the same inputs, in turns. RunFailed, before a time is taken, if ours is
    wrong."""
    given = draw(shape, seed, meter.device)
    pull = random_like(given.x, seed)
    off: dict[str, dict[str, float]] = {}
    for side in sides:
        off[side.name] = errors(side, given, bounds, pull)
        meter.free()
    judge(text_of(shape), off[OURS], ALLOWED)

    def passes(side: Side) -> Passes:
        own = given.joined() if side.joined else given
        leaves = own.leaves()

        def both() -> object:
            return torch.autograd.grad(side.call(leaves, bounds), leaves.trained(), pull)

        return Passes(side.name, lambda: side.call(own, bounds), both, side.captured)

    return take_turns(meter, [passes(side) for side in sides], off, repeats)


def measure_router(meter: Meter, shape: RouterShape, repeats: int, seed: int) -> list[Measured]:
    """The forward pass without and with what balancing counts, beside torch's product of the same
    bf16 matrices alone. RunFailed if weights, routes or counts of these tokens are wrong."""
    gen = torch.Generator(meter.device).manual_seed(seed)
    tokens, width, count, k = shape
    x = torch.randn(tokens, width, generator=gen, device=meter.device).bfloat16()
    weight = torch.randn(count, width, generator=gen, device=meter.device) * width**-0.5
    weight = weight.bfloat16()
    bias = torch.randn(count, generator=gen, device=meter.device) * 0.1
    histogram = QuantileHistogram(bias, k)
    counts = Counts(torch.zeros(count, dtype=torch.int64, device=meter.device), histogram)

    forms: dict[str, Callable[[], object]] = {
        OURS: lambda: router(x, weight, bias, k),
        "with statistics": lambda: router(x, weight, bias, k, counts=counts),
        "product alone": lambda: F.linear(x, weight),
    }
    with torch.no_grad():
        judge_router(text_of(shape), x, weight, bias, k)
        meter.free()
        return [Measured(name, meter.milliseconds(call, repeats)) for name, call in forms.items()]


def judge_router(shape: str, x: Tensor, weight: Tensor, bias: Tensor, k: int) -> None:
    """RunFailed if routes and weights of these tokens are not what the definition gives in fp64,
    but for tokens whose routes rounding decides, or if counting changes them."""
    found, truth = (
        Counts(torch.zeros_like(bias, dtype=torch.int64), QuantileHistogram(bias, k))
        for _ in range(2)
    )
    experts, weights = router(x, weight, bias, k, counts=found)
    plain = router(x, weight, bias, k)
    true_experts, true_weights = naive_router(
        x.double(), weight.double(), bias.double(), k, counts=truth
    )
    same = (experts == true_experts).all(1)
    share = float(same.double().mean())
    if not share > SAME_ROUTES:
        raise RunFailed(f"{shape}: only {share:.2%} of routes are right")
    judge(shape, {"weights": relative(weights[same], true_weights[same])}, ALLOWED_WEIGHT)
    if not (torch.equal(experts, plain[0]) and torch.equal(weights, plain[1])):
        raise RunFailed(f"{shape}: routes are other ones where they are counted")
    judge_counts(shape, found, truth, len(x), k)


def judge_counts(shape: str, found: Counts, truth: Counts, tokens: int, k: int) -> None:
    """RunFailed if what balancing counts of so many tokens is not what the definition counts, but
    for the tokens whose routes rounding decides, or leads to other biases."""
    own, true = found.histogram, truth.histogram
    assert own is not None and true is not None
    experts = len(own.bias)
    moved = float((found.load - truth.load).abs().sum()) / (2 * k * tokens)
    far = float((own.solve() - true.solve()).abs().max() / own.width)
    whole = int(own.counts.sum()) == tokens * experts or k == experts
    if int(own.tokens) != tokens or not whole or not moved < 1 - SAME_ROUTES or not far < 1:
        raise RunFailed(
            f"{shape}: of {tokens} tokens {int(own.tokens)} were counted, {moved:.2%} of routes "
            f"for other experts, and biases are {far:.1f} bins off"
        )
