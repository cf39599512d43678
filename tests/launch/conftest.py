"""A checkpoint small enough to train in seconds, for the echo environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farhorizon.envs.echo import WORDS
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import save_checkpoint
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy of 64 tokens of trained context."""
    tokenizer = train_tokenizer([], 280, [f" {word}" for word in WORDS])
    torch.manual_seed(0)
    config = PolicyConfig.tiny(vocab_size=280, hidden_size=32, num_hidden_layers=2)
    stage = StageRecord(64, (64,), 1000, tokenizer_sha256(tokenizer))
    folder = tmp_path_factory.mktemp("policy") / "echo"
    return save_checkpoint(folder, Policy(config), config, tokenizer, stage)
