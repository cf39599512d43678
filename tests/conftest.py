"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's own functions are for the interpreter or not from their import on, and other
    # libraries import them before the tests of kernels do.
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of devices that this machine does not have."""
    if not torch.cuda.is_available():
        lacking = [item for item in items if "gpu" in item.keywords]
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A local Ray on loopback, as a run starts it; one for the whole session."""
    from farhorizon.launch.cluster import cluster

    with cluster(None):
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of an untrained tiny policy that knows the words of `Echo`."""
    from farhorizon.envs.echo import WORDS
    from farhorizon.policy import Policy, PolicyConfig
    from farhorizon.policy.checkpoint import save_checkpoint
    from farhorizon.policy.records import StageRecord
    from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer

    words = [f" {word}" for word in WORDS]
    tokenizer = train_tokenizer(["".join(words)], 288, words)
    torch.manual_seed(0)
    config = PolicyConfig.tiny(vocab_size=288, hidden_size=32, num_hidden_layers=2)
    stage = StageRecord(512, (512,), 0, tokenizer_sha256(tokenizer))
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return save_checkpoint(folder, Policy(config), config, tokenizer, stage)


@pytest.fixture(scope="session")
def seeing_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of an untrained tiny policy with a vision tower."""
    from farhorizon.policy import Policy
    from farhorizon.policy.checkpoint import save_checkpoint
    from farhorizon.policy.records import StageRecord
    from farhorizon.policy.tokenizer import (
        MEDIA_PAD,
        control_id,
        tokenizer_sha256,
        train_tokenizer,
    )

    from .rl.fake_policy import seeing_config

    tokenizer = train_tokenizer(["no picture and now"], 320, style="full")
    torch.manual_seed(0)
    config = seeing_config(320, control_id(tokenizer, MEDIA_PAD))
    policy = Policy(config, vision=True)
    stage = StageRecord(512, (512,), 0, tokenizer_sha256(tokenizer))
    folder = tmp_path_factory.mktemp("checkpoints") / "seeing"
    return save_checkpoint(folder, policy, config, tokenizer, stage)
