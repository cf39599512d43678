"""What the warm-up says of a gradient that is not finite, and of memory that does not suffice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.configs.schema import EnvConfig, SftConfig
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.corpus import Demonstration
from farhorizon.rl.sft import train_on_demonstrations

CONFIG = SftConfig(
    policy="", env=EnvConfig(id="echo-v0"), context=56, steps=1, batch_tokens=56, threads=1
)
DATA = [Demonstration(np.arange(56, dtype=np.int32), np.ones(56, np.bool_))]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_tensor_whose_gradient_is_not_finite_is_named(
    tiny_checkpoint: Path, value: float
) -> None:
    start = load_checkpoint(tiny_checkpoint)
    name = "model.layers.1.self_attn.o_proj.weight"
    poisoned = dict(start.policy.named_parameters())[name]
    poisoned.register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(RunFailed, match=f"^sft step 1: the gradient of {name} is not finite"):
        train_on_demonstrations(start.policy, start.tokenizer, DATA, CONFIG, lambda step: None)


def test_memory_that_does_not_suffice_names_the_layer_and_a_way_out(tiny_checkpoint: Path) -> None:
    start = load_checkpoint(tiny_checkpoint)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")

    start.policy.model.layers[1].register_forward_pre_hook(full)
    with pytest.raises(RunFailed) as caught:
        train_on_demonstrations(start.policy, start.tokenizer, DATA, CONFIG, lambda step: None)
    told = str(caught.value)
    assert told.startswith("sft: the GPU's memory does not suffice for 1.50 GiB in model (")
    assert told.endswith("; lower batch_tokens, or raise ranks") and "\n" not in told
