"""``farhorizon bench decode``: decode steps of a policy on this GPU, beside what memory allows and
beside those of stock vLLM.

`farhorizon.launch.decode_measure` says what is checked before and how a figure comes about,
`farhorizon.launch.decode_peers` the same of a peer.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ..configs.benchmarks import DecodeBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..policy import Policy
from ..policy.checkpoint import save_policy
from ..policy.decode import takes_steps
from ..policy.memory import lack
from ..rollout.vllm_probe import DecodeEngine
from .decode_measure import Timed, check_steps, time_steps
from .decode_peers import (
    STEPS,
    PeerTimed,
    beside,
    check_peers,
    compare,
    draw_prompts,
    few_tokens,
    prompt_length,
)
from .measure import CudaMeter, copy_speed, lines_to, origin
from .parity import random_policy


def bench_decode(config: DecodeBenchConfig) -> int:
    """Print a line for each number of sequences and add it to ``output``; returns 0. RunFailed if
    a step is wrong or memory does not suffice."""
    check_bounds(config)
    check_peers(config.peers)
    if not config.sequences:
        raise UserError("sequences: name at least one number of them")
    if config.eager and not config.peers:
        raise UserError("eager=true is how vllm runs: set peers=[vllm], or leave it out")
    for sequences in config.sequences if config.peers else ():
        prompt_length(sequences, config.context)
    if not torch.cuda.is_available():
        raise UserError("bench decode needs a GPU, and torch sees none")
    from .plan import read_policy

    sizes, _ = read_policy(config.policy)
    if config.peers:
        sizes.max_position_embeddings = config.context + STEPS  # vLLM takes no longer ones
    told = origin("decode") | {"config": asdict(config)}
    with lines_to(config.output) as write:
        policy = None
        try:
            policy = random_policy(sizes, config.seed, "cuda")
            if not takes_steps(policy):
                raise UserError(f"policy {config.policy}: its gate has no bound, which steps need")
            run(policy, config, lambda figures: write(told | {**figures}))
        except torch.OutOfMemoryError as error:
            text = f"bench decode: {lack(error, policy)}; lower sequences or context"
            raise RunFailed(text) from None
    return 0


def run(
    policy: Policy, config: DecodeBenchConfig, take: Callable[[Mapping[str, Any]], None]
) -> None:
    """Check, measure and print; ``take`` gets the figures of each number of sequences, and of each
    way of a peer."""
    meter = CudaMeter()
    with ExitStack() as stack:
        folder = None
        if config.peers:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="farhorizon-decode-"))
            save_policy(folder, policy)
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
            if folder is not None:
                run_peer(policy, config, sequences, folder, take)


def run_peer(
    policy: Policy,
    config: DecodeBenchConfig,
    sequences: int,
    folder: str,
    take: Callable[[Mapping[str, Any]], None],
) -> None:
    """vLLM on the checkpoint in ``folder``, with CUDA graphs or eager, in turns with ours."""
    length = prompt_length(sequences, config.context)
    prompts = draw_prompts(policy.config.vocab_size, sequences, length, config.seed)
    most = few_tokens(sequences, config.context) + STEPS
    meter = CudaMeter()

    def ours() -> float:
        timed = time_steps(policy, sequences, config.context, config.repeats, config.seed)
        meter.free()
        return timed.with_host

    mode = "eager" if config.eager else "graphs"  # CUDA graphs
    with beside(partial(DecodeEngine, folder, prompts, most, config.eager)) as engine:
        for found in compare(engine, policy, prompts, config.context, mode, ours):
            print(peer_line(found, sequences), flush=True)
            take({"peer": "vllm", "sequences": sequences, **asdict(found)})


def way(found: PeerTimed) -> str:
    """How a peer ran."""
    return f"{found.mode}, {'with' if found.logprobs else 'without'} log-probs"


def ratio(found: PeerTimed) -> float:
    """Its time over ours, taken in turns."""
    return found.milliseconds / statistics.median(found.ours)


def peer_line(found: PeerTimed, sequences: int) -> str:
    """What is printed of one way of a peer."""
    spread = ", ".join(f"{one:.3f}" for one in found.rounds)
    near = "" if found.error is None else f", log-probs {found.error:.4f} nat off"
    return (
        f"vllm, {way(found)}: {found.milliseconds:.3f} ms a step ({spread}), "
        f"{sequences / found.milliseconds * 1e3:,.0f} tokens/s, {ratio(found):.2f} times ours{near}"
    )


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
