"""``farhorizon bench step``: a training step of a policy on this GPU, and one of transformers.

The gradient in bf16 is compared with the one in fp32 first, on a small policy of the same parts.
Then a step of the whole policy is timed, and where a peer is asked for one of ours and one of
theirs on the sizes that both have: `farhorizon.launch.step_peers` says which those are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from ..configs.benchmarks import StepBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..policy import PolicyConfig
from ..policy.memory import lack
from .measure import CudaMeter, lines_to, origin, sufficient_memory
from .step_measure import (
    ALLOWED_GRADIENT,
    Measured,
    OurSide,
    build_policy,
    draw_batch,
    gradient_error,
    measure,
    small_config,
    time_steps,
    utilisation,
)
from .step_peers import (
    ATTENTION,
    KimiSide,
    attention_times,
    bounded_decay,
    check_peers,
    installed,
    kimi_linear,
    missing,
    shared_config,
)

GIB = 2**30
TRIED = 3  # steps behind the median that chooses a peer's attention


def bench_step(config: StepBenchConfig) -> int:
    """Print a line for each side and add it to ``output``; returns 0. RunFailed if a gradient is
    wrong, a loss is not finite, or memory does not suffice."""
    check_bounds(config)
    check_peers(config.peers)
    if not config.lengths:
        raise UserError("lengths: name the tokens of at least one document")
    if config.peers and len(config.lengths) > 1:
        raise UserError("peers take one document: give one of lengths, or peers=[]")
    if not torch.cuda.is_available():
        raise UserError("bench step needs a GPU, and torch sees none")
    from .plan import read_policy

    policy, _ = read_policy(config.policy)
    with lines_to(config.output) as take:
        run(policy, config, take)
    return 0


def run(
    policy: PolicyConfig, config: StepBenchConfig, take: Callable[[dict[str, Any]], None]
) -> None:
    """Check, measure and print; ``take`` gets the figures of each side."""
    check_gradient(policy, config)
    told = origin("step") | {"config": asdict(config)}

    def tell(sizes: str, of: PolicyConfig, found: Measured) -> float:
        """Tokens a second."""
        speed = sum(config.lengths) / found.milliseconds * 1e3
        share = utilisation(of, config.lengths, found.milliseconds)
        print(
            f"{sizes:<8} {found.name:<23} {found.milliseconds:8.1f} ms  {speed:9,.0f} tokens/s  "
            f"MFU {share:5.1%}  peak {found.peak / GIB:6.1f} GiB  loss {found.loss:.4f}",
            flush=True,
        )
        figures = {"sizes": sizes, "tokens_per_second": speed, "utilisation": share}
        take(told | figures | asdict(found))
        return speed

    tell(config.policy, policy, ours(policy, config))
    if not config.peers:
        return
    absent = missing()
    if absent is not None:
        print(f"{absent} is not installed: its step would be another, peers are left out")
        return
    if not installed("causal_conv1d"):
        print("causal_conv1d is not installed: convolutions of the peer run in plain torch")
    shared = shared_config(policy)
    mine = tell("shared", shared, ours(shared, config))
    other = tell("shared", shared, theirs(shared, config))
    print(f"farhorizon has {mine / other:.2f} times the tokens a second of {config.peers[0]}")


def check_gradient(policy: PolicyConfig, config: StepBenchConfig) -> None:
    """RunFailed if the gradient that is going to be timed is not that in fp32."""
    with sufficient_memory("step", "the check of the gradient"):
        error = gradient_error(small_config(policy), config.seed, config.checkpointing, "cuda")
    print(f"gradient of a small policy in bf16, beside fp32: {error:.1%} off", flush=True)
    if not error < ALLOWED_GRADIENT:  # so that nan fails
        raise RunFailed(
            f"the gradient in bf16 is {error:.1%} off, allowed {ALLOWED_GRADIENT:.0%}: nothing is "
            "measured"
        )
    CudaMeter().free()


def ours(policy: PolicyConfig, config: StepBenchConfig) -> Measured:
    """Our step."""
    built = batch = None
    try:
        built = build_policy(policy, config.seed, "cuda")
        built.checkpointing = config.checkpointing
        batch = draw_batch(policy.vocab_size, config.lengths, config.seed, "cuda")
        return measure(OurSide.name, OurSide(built, batch), config.steps)
    except torch.OutOfMemoryError as error:
        ways = "" if config.checkpointing == "layers" else "checkpointing=layers keeps less; "
        text = f"bench step: {lack(error, built)}; {ways}lower lengths"
        raise RunFailed(text) from None
    finally:
        del built, batch
        CudaMeter().free()


def theirs(policy: PolicyConfig, config: StepBenchConfig) -> Measured:
    """The step of transformers with bf16 parameters, which is what its grouped products take, and
    the attention of torch that is the fastest here; with its own checkpointing where ours has it.
    """
    model = batch = side = None
    try:
        model = kimi_linear(policy, torch.bfloat16, "cuda")
        if config.checkpointing == "layers":
            model.gradient_checkpointing_enable()
        batch = draw_batch(policy.vocab_size, config.lengths, config.seed, "cuda")
        side = KimiSide(model, batch)
        with bounded_decay(model):
            times = attention_times(lambda own=side: time_steps(own, TRIED)[0])
            told = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
            print(f"{side.name} by its attention, ms a step: {told}", flush=True)
            best = min(times, key=times.__getitem__)
            with sdpa_kernel(ATTENTION[best]):
                return measure(f"{side.name} ({best})", side, config.steps)
    except torch.OutOfMemoryError as error:
        text = f"bench step: of {KimiSide.name} {lack(error, model)}; lower lengths, or peers=[]"
        raise RunFailed(text) from None
    finally:
        del model, batch, side
        CudaMeter().free()
