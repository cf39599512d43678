"""A checkpoint small enough to train in seconds, for the echo environment."""

from __future__ import annotations

import json
import shutil
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


@pytest.fixture(scope="session")
def foreign(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with another tokenizer, which nothing beside them tells, as in a published
    folder: two words have changed places."""
    other = shutil.copytree(checkpoint, tmp_path_factory.mktemp("foreign") / "other")
    stage = json.loads((other / "stage.json").read_text())
    (other / "stage.json").write_text(json.dumps({**stage, "tokenizer_sha256": ""}))
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    return other
