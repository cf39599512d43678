"""``farhorizon bench decode``: decode steps of a policy on this GPU, beside what memory allows.

`farhorizon.launch.decode_measure` says what is checked before and how a figure comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..configs.benchmarks import DecodeBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..policy import Policy
from ..policy.decode import takes_steps
from ..policy.memory import lack
from .decode_measure import Timed, check_steps, time_steps
from .measure import CudaMeter, copy_speed, lines_to, origin
from .parity import random_policy


def bench_decode(config: DecodeBenchConfig) -> int:
    """Print a line for each number of sequences and add it to ``output``; returns 0. RunFailed if
    a step is wrong or memory does not suffice."""
    check_bounds(config)
    if not config.sequences:
        raise UserError("sequences: name at least one number of them")
    if not torch.cuda.is_available():
        raise UserError("bench decode needs a GPU, and torch sees none")
    from .plan import read_policy

    sizes, _ = read_policy(config.policy)
    told = origin("decode") | {"config": asdict(config)}
    with lines_to(config.output) as write:
        policy = random_policy(sizes, config.seed, "cuda")
        if not takes_steps(policy):
            raise UserError(f"policy {config.policy}: its gate has no bound, which steps need")
        try:
            run(policy, config, lambda figures: write(told | {**figures}))
        except torch.OutOfMemoryError as error:
            text = f"bench decode: {lack(error, policy)}; lower sequences or context"
            raise RunFailed(text) from None
    return 0


def run(
    policy: Policy, config: DecodeBenchConfig, take: Callable[[Mapping[str, Any]], None]
) -> None:
    """Check, measure and print; ``take`` gets the figures of each number of sequences."""
    meter = CudaMeter()
    checked = check_steps(policy, config.seed)
    print(
        f"logits beside fp32: steps {checked.steps:.2%} off, a forward {checked.forward:.2%}; "
        "replays equal their kernels",
        flush=True,
    )
    meter.free()
    speed = copy_speed(meter, config.repeats)
    print(f"a copy moves {speed:,.0f} GB/s", flush=True)
    for sequences in config.sequences:
        found = time_steps(policy, sequences, config.context, config.repeats, config.seed)
        print(line(found, speed), flush=True)
        take(figures(found, speed, checked.steps))
        meter.free()


def line(found: Timed, speed: float) -> str:
    """What is printed of one number of sequences."""
    return (
        f"{found.sequences:5} x {found.context} tokens {found.milliseconds:8.3f} ms a step, "
        f"{found.share(speed):5.1%} of copy, with the host {found.with_host:8.3f} ms, "
        f"{found.sequences / found.with_host * 1e3:9,.0f} tokens/s"
    )


def figures(found: Timed, speed: float, error: float) -> dict[str, Any]:
    """The same as JSON data."""
    return {
        "copy_gb_per_s": speed,
        "share_of_copy": found.share(speed),
        "tokens_per_second": found.sequences / found.with_host * 1e3,
        "logits_error": error,
        **asdict(found),
    }
