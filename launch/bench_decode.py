"""``farhorizon bench decode``: decode steps of a policy on this GPU, beside what memory allows.

`farhorizon.launch.decode_measure` says what is checked before and how a figure comes about.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.schema import DecodeBenchConfig
from ..policy.decode import takes_steps
from ..policy.memory import lack
from .decode_measure import Timed, check_steps, time_steps
from .files import json_line
from .measure import CudaMeter, copy_speed, versions
from .parity import random_policy
from .step_measure import free


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
    with ExitStack() as stack:
        file = None
        if config.output is not None:
            try:
                Path(config.output).absolute().parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(Path(config.output).open("a", encoding="utf-8"))
            except OSError as error:
                raise UserError(
                    f"output {config.output}: cannot be written ({error.strerror})"
                ) from None
        policy = random_policy(sizes, config.seed, "cuda")
        if not takes_steps(policy):
            raise UserError(f"policy {config.policy}: its gate has no bound, which steps need")
        checked = check_steps(policy, config.seed)
        print(
            f"logits beside fp32: steps {checked.steps:.2%} off, a forward {checked.forward:.2%}; "
            "replays equal their kernels",
            flush=True,
        )
        free()
        speed = copy_speed(CudaMeter(), config.repeats)
        print(f"a copy moves {speed:,.0f} GB/s", flush=True)
        for sequences in config.sequences:
            try:
                found = time_steps(policy, sequences, config.context, config.repeats, config.seed)
            except torch.OutOfMemoryError as error:
                text = f"bench decode: {lack(error, policy)}; lower sequences or context"
                raise RunFailed(text) from None
            print(line(found, speed), flush=True)
            if file is not None:
                file.write(json_line(row(config, found, speed, checked.steps)))
                file.flush()
            free()
    return 0


def line(found: Timed, speed: float) -> str:
    """What is printed of one number of sequences."""
    return (
        f"{found.sequences:5} x {found.context} tokens {found.milliseconds:8.3f} ms a step, "
        f"{found.share(speed):5.1%} of copy, with the host {found.with_host:8.3f} ms, "
        f"{found.sequences / found.with_host * 1e3:9,.0f} tokens/s"
    )


def row(config: DecodeBenchConfig, found: Timed, speed: float, error: float) -> dict[str, Any]:
    """The same and where it comes from, as JSON data."""
    return {
        "benchmark": "decode",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "config": asdict(config),
        "copy_gb_per_s": speed,
        "share_of_copy": found.share(speed),
        "tokens_per_second": found.sequences / found.with_host * 1e3,
        "logits_error": error,
        **asdict(found),
    }
