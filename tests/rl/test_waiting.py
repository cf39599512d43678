"""Between forward and backward of a step nothing waits for what a GPU still has to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farhorizon.configs.schema import AlgorithmConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.routing import Routes
from farhorizon.rl.algorithms import ALGORITHMS, make_algorithm
from farhorizon.rl.corrections import CORRECTIONS
from farhorizon.rl.diagnostics import tally
from farhorizon.rl.losses import gspo, k15, reinforce, value_loss
from farhorizon.rl.objective import Objective
from farhorizon.rl.types import MicroBatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
SIZES = {"nonzero", "unique", "unique_consecutive", "masked_select", "argwhere", "bincount"}
LENGTHS = (5, 4, 3)


class Waiting(TorchFunctionMode):
    """Refuses what makes a CPU wait for a GPU: a number that is read there, a size that is known
    there alone, numbers that are sent from memory that is not pinned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        sent = name == "new_tensor" or (name in ("tensor", "as_tensor") and "device" in kwargs)
        parts = args[1] if name in ("__getitem__", "__setitem__") else ()
        masks = [x for x in (parts if isinstance(parts, tuple) else (parts,)) if is_mask(x)]
        assert not (name in READS | SIZES or sent or masks), f"{name} waits for the device"
        return func(*args, **kwargs)


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """Within it torch's own alarm is set on a GPU, and `Waiting` elsewhere."""
    if device == "cpu":
        with Waiting():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def is_mask(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def tokens(device: str) -> tuple[Tensor, ...]:
    """Log-probs, those of others and advantages of twelve tokens, and which of them count."""
    torch.manual_seed(0)
    values = torch.randn(5, sum(LENGTHS)) - 2
    return (*values.to(device).unbind(), (torch.arange(sum(LENGTHS)) % 4 > 0).to(device))


def run(objective: Callable[..., Any], device: str) -> None:
    logprobs, behavior, proximal, reference, advantages, mask = tokens(device)
    logprobs.requires_grad_()
    ids = torch.repeat_interleave(torch.tensor([7, 2, 5]), torch.tensor(LENGTHS)).to(device)
    with nothing_waits(device):
        out = objective(
            *(logprobs, behavior, advantages, mask),
            sequence_ids=ids,
            denominator=9,
            sequences=3,
            entropy=-logprobs,
            proximal_logprobs=proximal,
            reference_logprobs=reference,
        )
        out.loss.backward()
    assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_objectives(name: Any, aggregation: Any, device: str) -> None:
    config = AlgorithmConfig(name=name, aggregation=aggregation, entropy=0.1, kl=0.1)
    run(make_algorithm(config).loss, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections(name: str, device: str) -> None:
    for loss in (gspo, k15, reinforce):
        run(Objective(loss, CORRECTIONS[name], "sequence"), device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_critic_and_what_a_step_tells(device: str) -> None:
    logprobs, behavior, _, _, advantages, mask = tokens(device)
    total, borders = sum(LENGTHS), np.cumsum([0, *LENGTHS]).astype(np.int32)
    zeros = np.zeros(total, np.float32)
    batch = MicroBatch(
        *(zeros.astype(np.int64), borders, mask.cpu().numpy(), zeros, zeros),
        *(np.repeat(np.arange(3), LENGTHS), ("",) * 3),
    )
    with nothing_waits(device):
        value_loss(logprobs, behavior, advantages, mask, denominator=9)
        tally(batch, np.arange(total), logprobs, behavior, advantages, mask)


@pytest.mark.parametrize("device", DEVICES)
def test_replayed_routes(device: str) -> None:
    policy = Policy(PolicyConfig.tiny()).to(device)  # type: ignore[arg-type] - Module.to
    layers, k = len(policy.routers()), policy.config.num_experts_per_token
    routes = Routes(np.zeros((3, layers, k), np.uint8), np.ones(3, np.bool_))
    with nothing_waits(device), policy.replayed_routes(routes):
        assert policy.routers()[0].given is not None


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.item(),
        lambda x: float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.new_tensor(2.0),
        partial(torch.tensor, [1.0], device="cpu"),
    ],
)
def test_what_waits_is_refused(waits: Callable[..., Any]) -> None:
    with Waiting(), pytest.raises(AssertionError, match="waits for the device"):
        waits(torch.ones(1)) if not isinstance(waits, partial) else waits()
