"""What ``farhorizon bench kda`` measures at one shape; it needs torch and Triton alone.

First every side's results are compared with the token recurrence in fp64; only when ours are right
is anything timed. A figure is the median of replays of a CUDA graph of the whole call, so that
launch costs of Python count for nobody; the sides take turns in one process, on the same inputs,
three rounds in alternating order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..configs.errors import RunFailed
from ..kernels.kda import naive_kda
from .kda_peers import FLA, FLAGS, WIDTH, Decoder, Inputs, Side, Tensor
from .kda_rows import OURS, Row, shape_text
from .measure import Meter, relative

# The end of the sequence and the last heads are compared. Where tokens come before those, the
# states they leave are gone after SETTLED tokens: log decays of 2.5 on average, below e^-100.
CHECKED_HEADS, CHECKED_TOKENS, SETTLED = 2, 2048, 64
CHECKED_SEQUENCES = 4  # of a decode step
# Relative error against fp64 on the same bf16 inputs.
ALLOWED_OUT, ALLOWED_GRADIENT, ALLOWED_CLOSED_GATE, ALLOWED_STEP = 4e-3, 6e-3, 5e-3, 1e-5
RANDOM, CLOSED = "random", "near -5"  # the log decays, all of them in the second
LEAVES = ("q", "k", "v", "g", "beta")
ROTATION = 2**29  # bytes of states that decode steps walk through: many times an L2 cache


def draw(tokens: int, heads: int, seed: int, device: str, sequences: int = 1) -> Inputs:
    """Random bf16 inputs ``[N, T, H, ...]``, leaves that take gradients."""
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device, dtype=torch.bfloat16)

    found = {name: normal(sequences, tokens, heads, WIDTH) for name in ("q", "k", "v", "g")}
    found["beta"] = normal(sequences, tokens, heads)
    found["A_log"] = torch.zeros(heads, device=device)
    found["dt_bias"] = torch.zeros(heads * WIDTH, device=device)
    return {name: x.requires_grad_() for name, x in found.items()}


@dataclass(slots=True)
class Bench:
    """One invocation: who is measured and how; ``started`` are those that have run already."""

    sides: Sequence[Side]
    decoders: Sequence[Decoder]
    meter: Meter
    origin: Callable[..., Row]  # a row with the date, device and versions of the invocation
    repeats: int
    seed: int
    started: set[str] = field(default_factory=set)

    def sequence(self, tokens: int, heads: int, *, backward: bool) -> list[Row]:
        """One sequence through every side. RunFailed, before a time is taken, if ours is wrong."""
        inputs = draw(tokens, heads, self.seed, self.meter.device)
        closed = (inputs["g"].detach() + 6).requires_grad_()  # sigmoid 0.9975 in the mean
        errors: dict[str, dict[str, dict[str, float | None]]] = {s.name: {} for s in self.sides}
        first: dict[str, float] = {}
        shape = shape_text(tokens, heads)
        print(f"{tokens} x {heads} heads, errors beside fp64")
        for name, given in ((RANDOM, inputs), (CLOSED, inputs | {"g": closed})):
            found = self._compare(given, backward, first)
            print(*error_lines(name, found), sep="\n", flush=True)
            judge(shape, name, found[OURS])
            for side in self.sides:
                errors[side.name][name] = dict(found[side.name])
        del closed, given
        trained = [side for side in self.sides if backward and side.trains]
        peaks = {side.name: self._peak(side, inputs) for side in trained}
        times = self._times(inputs, backward)
        rows = [
            self.origin(
                kind="sequence",
                shape=shape,
                name=side.name,
                forward_ms=times[side.name][0],
                both_ms=times[side.name][1],
                peak_gib=peaks.get(side.name),
                first_s=first[side.name],
                first_in_process=side.name not in self.started,
                errors=errors[side.name],
            )
            for side in self.sides
        ]
        self.started |= set(first)
        del inputs
        self.meter.free()
        return rows

    def decode(self, sequences: int, heads: int, copy_speed: float) -> list[Row]:
        """A step of one token for every sequence; ``copy_speed`` is that of `copy_speed`."""
        leaves = draw(1, heads, self.seed, self.meter.device, sequences)
        inputs = {name: x.detach() for name, x in leaves.items()}
        gen = torch.Generator(self.meter.device).manual_seed(self.seed)
        size = (sequences, heads, WIDTH, WIDTH)
        state = torch.randn(size, generator=gen, device=self.meter.device)
        print(f"decode {sequences} x {heads} heads, errors beside fp64")
        errors: dict[str, dict[str, float]] = {}
        for decoder in self.decoders:
            errors[decoder.name] = compare_step(decoder, inputs, state)
            print(*error_lines(RANDOM, {decoder.name: errors[decoder.name]}), sep="\n", flush=True)
            judge_step(decoder.name, errors[decoder.name])
        rows: list[Row] = []
        for decoder in self.decoders:
            states = [state.clone() for _ in range(max(2, -(-ROTATION // state.nbytes)))]
            # The new states are kept, each in memory of its own, until the last step.
            steps = partial(_steps, decoder, inputs, states)
            took = self.meter.milliseconds(steps, self.repeats) / len(states)
            speed = step_bytes(inputs, state) / took / 1e6
            rows.append(
                self.origin(
                    kind="decode",
                    shape=shape_text(sequences, heads),
                    name=decoder.name,
                    forward_ms=took,
                    gb_per_s=speed,
                    copy_share=speed / copy_speed,
                    errors={RANDOM: dict(errors[decoder.name])},
                )
            )
            del states, steps
            self.meter.free()
        return rows

    def _compare(
        self, inputs: Inputs, backward: bool, first: dict[str, float]
    ) -> dict[str, dict[str, float]]:
        """Errors of every side; ``first`` gets the seconds of calls that it does not have yet."""
        tokens, heads = inputs["q"].shape[1:3]
        part = Part(min(CHECKED_TOKENS, tokens), min(CHECKED_HEADS, heads), tokens)
        gen = torch.Generator(self.meter.device).manual_seed(self.seed + 1)
        weight = torch.zeros_like(inputs["v"])
        seen = part.out(weight)
        seen.copy_(torch.randn(seen.shape, generator=gen, device=seen.device))
        wide = {name: part.of(name, x) for name, x in inputs.items()}
        wide = {name: x.detach().double().requires_grad_() for name, x in wide.items()}
        truth = results(recurrence, wide, part.of("v", weight).double() if backward else None, part)
        found: dict[str, dict[str, float]] = {}
        for side in self.sides:
            self.meter.free()
            self.meter.wait()
            start = time.perf_counter()
            got = results(side.call, inputs, weight if backward and side.trains else None, part)
            self.meter.wait()
            first.setdefault(side.name, time.perf_counter() - start)
            found[side.name] = {name: relative(x, truth[name]) for name, x in got.items()}
            del got
        return found

    def _times(self, inputs: Inputs, backward: bool) -> dict[str, tuple[float, float | None]]:
        """Milliseconds of forward alone and of both passes; medians over three rounds."""
        turns: dict[str, list[tuple[float, float | None]]] = {side.name: [] for side in self.sides}
        still = {name: x.detach() for name, x in inputs.items()}
        for order in (self.sides, self.sides[::-1], self.sides):
            for side in order:
                with torch.no_grad():
                    alone = self.meter.milliseconds(partial(side.call, still, False), self.repeats)
                both: float | None = None
                if backward and side.trains:
                    both = self.meter.milliseconds(_both(side, inputs), self.repeats)
                turns[side.name].append((alone, both))
        return {
            name: (
                statistics.median(alone for alone, _ in found),
                None if found[0][1] is None else statistics.median(b for _, b in found if b),
            )
            for name, found in turns.items()
        }

    def _peak(self, side: Side, inputs: Inputs) -> float:
        """GiB of one forward and backward, with its inputs and the gradient that it is given."""
        held = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes
        return (held + self.meter.growth(_both(side, inputs))) / 2**30


@dataclass(frozen=True, slots=True)
class Part:
    """The last ``tokens`` of ``total`` and the last ``heads``, which the recurrence repeats."""

    tokens: int
    heads: int
    total: int

    def of(self, name: str, x: Tensor) -> Tensor:
        """That part of an input, of its gradient, or of the final state."""
        if name == "state":
            return x[:, -self.heads :]
        if name in ("A_log", "dt_bias"):
            return x[-self.heads * (WIDTH if name == "dt_bias" else 1) :]
        return x[:, -self.tokens :, -self.heads :]

    def out(self, x: Tensor) -> Tensor:
        """That part of outputs, without those on which earlier tokens have an influence."""
        return self.of("v", x)[:, SETTLED if self.total > self.tokens else 0 :]


def results(
    call: Callable[[Inputs, bool], tuple[Tensor, Tensor | None]],
    inputs: Inputs,
    weight: Tensor | None,
    part: Part,
) -> dict[str, Tensor]:
    """``o``, ``state`` and, with a ``weight`` of the outputs, gradients ``dq`` and so on, fp64."""
    grads: Sequence[Tensor] = ()
    with torch.set_grad_enabled(weight is not None):
        out, state = call(inputs, True)
        if weight is not None:
            grads = torch.autograd.grad(out, [inputs[name] for name in LEAVES], weight)
    found = {"o": part.out(out)}
    if state is not None:
        found["state"] = part.of("state", state)
    found |= {f"d{name}": part.of(name, x) for name, x in zip(LEAVES, grads, strict=False)}
    return {name: x.detach().double() for name, x in found.items()}


def recurrence(inputs: Inputs, final: bool) -> tuple[Tensor, Tensor | None]:
    return naive_kda(**inputs, **FLAGS, output_final_state=final)


def judge(shape: str, inputs: str, errors: dict[str, float]) -> None:
    """RunFailed if an error of ours is above what is allowed; written so that a NaN fails."""
    for name, error in errors.items():
        allowed = ALLOWED_GRADIENT if name.startswith("d") else ALLOWED_OUT
        if (inputs, name) == (CLOSED, "dg"):
            allowed = ALLOWED_CLOSED_GATE
        if not error < allowed:
            raise RunFailed(
                f"{shape}, log decays {inputs}: {name} is off by {error:.1e}, allowed {allowed:.0e}"
            )


def judge_step(decoder: str, errors: dict[str, float]) -> None:
    """RunFailed if a decode step is off: its outputs are in bf16, its states in fp32."""
    for name, allowed in (("o", ALLOWED_OUT), ("state", ALLOWED_STEP)):
        error = errors[name]
        if not error < allowed:
            raise RunFailed(f"{decoder}: {name} is off by {error:.1e}, allowed {allowed:.0e}")


def error_lines(inputs: str, found: dict[str, dict[str, float]]) -> list[str]:
    """A line for each side, and one for what flash-linear-attention does better than ours."""
    lines = [
        f"  log decays {inputs:8} {side:24}"
        + "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
        for side, errors in found.items()
    ]
    worse = [
        f"{name} {found[OURS][name]:.2e} (theirs {error:.2e})"
        for name, error in found.get(FLA, {}).items()
        if found[OURS][name] > 1.01 * error
    ]
    return [*lines, f"  ours is worse than {FLA} in {', '.join(worse)}"] if worse else lines


def compare_step(decoder: Decoder, inputs: Inputs, state: Tensor) -> dict[str, float]:
    """Errors of a step, on the last sequences and heads; ``state`` is not changed."""
    count, part = CHECKED_SEQUENCES, Part(1, min(CHECKED_HEADS, state.shape[1]), 1)

    def cut(name: str, x: Tensor) -> Tensor:
        x = part.of(name, x)
        return (x if name in ("A_log", "dt_bias") else x[-count:]).double()

    with torch.no_grad():
        wide = {name: cut(name, x) for name, x in inputs.items()}
        start = cut("state", state)
        out, last = naive_kda(**wide, **FLAGS, initial_state=start, output_final_state=True)
        assert last is not None
        found, after = decoder.step(inputs, state.clone())
    return {
        "o": relative(cut("v", found), out),
        "state": relative(cut("state", after), last),
    }


def step_bytes(inputs: Inputs, state: Tensor) -> int:
    """What a step has to move: inputs and states read, outputs and new states written."""
    return sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes + 2 * state.nbytes


def _steps(decoder: Decoder, inputs: Inputs, states: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return [decoder.step(inputs, state) for state in states]


def _both(side: Side, inputs: Inputs) -> Callable[[], Any]:
    """Forward and backward as one call, with a gradient of the outputs drawn beforehand."""
    d_out = torch.randn_like(inputs["v"])
    leaves = list(inputs.values())
    return lambda: torch.autograd.grad(side.call(inputs, False)[0], leaves, d_out)
