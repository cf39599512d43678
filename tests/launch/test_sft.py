"""Warm-up through TRL: the right tokens are trained, thresholds move with training only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import EnvConfig, SftConfig
from farhorizon.launch.sft import collect, run_sft
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint
from farhorizon.policy.corpus import Demonstration, expert_messages
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import (
    ChatFormat,
    frequent_words,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from farhorizon.rl.sft import train_on_demonstrations

ENV = EnvConfig(id="echo-v0")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from farhorizon.envs.registry import make_config

    env = make_config(ENV)
    texts = [m.content for seed in range(30) for m in expert_messages(env, seed)]
    tokenizer = train_tokenizer(texts, 320, frequent_words(texts, 30))
    config = PolicyConfig.tiny(vocab_size=320, hidden_size=32)
    torch.manual_seed(0)
    return save_checkpoint(
        tmp_path_factory.mktemp("sft") / "parent",
        Policy(config),
        config,
        tokenizer,
        StageRecord(128, (64, 128), 1000, tokenizer_sha256(tokenizer)),
    )


def settings(parent: Path, output: Path, **changes) -> SftConfig:
    config = SftConfig(
        policy=str(parent),
        env=ENV,
        output=str(output),
        context=128,
        steps=12,
        batch_tokens=512,
        lr=5e-3,
        warmup_steps=2,
        threads=1,
    )
    return replace(config, **changes)


def test_a_warm_up_learns_and_leaves_a_whole_checkpoint(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = run_sft(settings(parent, tmp_path / "out"))
    before, after = load_checkpoint(parent), load_checkpoint(output)
    losses = [json.loads(line)["loss"] for line in (output / "metrics.jsonl").open()]
    assert len(losses) == 12 and losses[0] == pytest.approx(np.log(320), abs=0.6)
    assert losses[-1] < 0.5 * losses[0]
    # 12 steps of at most 512 tokens, packed without padding
    assert 0.8 * 12 * 512 < after.stage.tokens_seen - 1000 <= 12 * 512
    assert (after.stage.context, after.stage.stages) == (128, (64, 128))
    assert after.stage.parent == str(parent)
    assert after.policy.config.eos_token_id == before.policy.config.eos_token_id
    for old, new in zip(before.policy.routers(), after.policy.routers(), strict=True):
        assert bool(new.e_score_correction_bias.any()) and not bool(
            old.e_score_correction_bias.any()
        )
        assert abs(float(new.e_score_correction_bias.mean())) < 1e-6
    assert "tokens/s" in capsys.readouterr().out


def test_only_assistant_tokens_are_trained_and_sequences_do_not_mix(parent: Path) -> None:
    """The loss of the first step equals one computed by hand, each sequence on its own."""
    start = load_checkpoint(parent)
    rng = np.random.default_rng(0)
    data = [
        Demonstration(rng.integers(0, 320, n).astype(np.int32), rng.random(n) < 0.5)
        for n in (9, 17, 30)
    ]
    total, count = 0.0, 0
    for ids, mask in data:
        tokens = torch.as_tensor(ids, dtype=torch.long)
        with torch.no_grad():
            logits = start.policy(tokens[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1)
        picked = logprobs.gather(-1, tokens[1:, None])[:, 0][torch.as_tensor(mask[1:])]
        total, count = total - float(picked.sum()), count + len(picked)
    steps = []
    policy = load_checkpoint(parent).policy
    seen = train_on_demonstrations(
        policy,
        start.tokenizer,
        data,
        settings(parent, parent, steps=1, batch_tokens=56),
        steps.append,
    )
    assert steps[0].loss == pytest.approx(total / count, rel=1e-4)
    assert seen == steps[0].tokens == 56
    # What is counted is the training forward, once: 56 tokens in each of three MoE layers.
    fresh = load_checkpoint(parent).policy
    with fresh.routing_statistics():
        for ids, _ in data:
            fresh(torch.as_tensor(ids, dtype=torch.long)[None])
    fresh.update_thresholds()
    for mine, expected in zip(policy.routers(), fresh.routers(), strict=True):
        torch.testing.assert_close(
            mine.e_score_correction_bias, expected.e_score_correction_bias, atol=1e-4, rtol=0
        )
    assert "forward" not in vars(policy)


def test_demonstrations_fill_the_steps_once(parent: Path) -> None:
    chat = ChatFormat(load_tokenizer(parent))
    found = collect(settings(parent, parent, steps=3, batch_tokens=200), chat)
    lengths = [len(d.token_ids) for d in found]
    assert sum(lengths[:-1]) < 600 <= sum(lengths)
    again = collect(settings(parent, parent, steps=3, batch_tokens=200), chat)
    other = collect(settings(parent, parent, steps=3, batch_tokens=200, seed=1), chat)
    ids = [[d.token_ids.tolist() for d in demos] for demos in (found, again, other)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 129}, "context=129 is longer than the 128 tokens"),
        ({"context": 20, "batch_tokens": 20}, "longer than the context of 20"),
        ({"batch_tokens": 100}, "batch_tokens=100 must hold one sequence of context=128"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"policy": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_mistakes_are_told_in_one_line(
    parent: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_sft(settings(parent, tmp_path / "out", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_start_is_never_overwritten(parent: Path) -> None:
    with pytest.raises(UserError, match="is the checkpoint to start from"):
        run_sft(settings(parent, parent))
