"""Warm-up through TRL: the right tokens are trained, thresholds move with training only."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.load import dump_config, load_config
from farhorizon.configs.schema import EnvConfig, SftConfig
from farhorizon.envs.expert import expert_messages
from farhorizon.envs.registry import make_config
from farhorizon.envs.types import Task
from farhorizon.launch.sft import DATA_FILE, collect, run_sft, train_ranks
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint
from farhorizon.policy.corpus import Demonstration, save_demonstrations
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
    env = make_config(ENV)
    texts = [m.content for seed in range(30) for m in expert_messages(env, Task("", seed))]
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
    assert load_config(SftConfig, str(output / "config.yaml"), []) == settings(parent, output)


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
        (
            {"gpus": 1.0, "ranks": 99, "batch_tokens": 99 * 128},
            "gpus=1 for each of ranks=99 is more than the . GPUs of this machine",
        ),
        ({"gpus": 0.5, "ranks": 2}, "gpus=0.5: several ranks cannot share a GPU"),
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


def test_ranks_together_do_what_one_does_alone(parent: Path, tmp_path: Path) -> None:
    """Two demonstrations fill a step: one row of both, or a row for each rank."""
    rng = np.random.default_rng(1)
    data = [
        Demonstration(rng.integers(0, 320, 28).astype(np.int32), rng.random(28) < share)
        for share in (0.3, 0.9)
    ]
    states = []
    for ranks in (1, 2):
        scratch = tmp_path / f"scratch-{ranks}"
        scratch.mkdir()
        save_demonstrations(scratch / DATA_FILE, data)
        output = tmp_path / f"out-{ranks}"
        config = settings(parent, output, steps=3, batch_tokens=56, ranks=ranks, lr=1e-3)
        train_ranks(config, str(parent), str(scratch))
        checkpoint = load_checkpoint(output)
        assert checkpoint.stage.tokens_seen == 1000 + 3 * 56
        states.append(checkpoint.policy.state_dict())
    start = load_checkpoint(parent).policy.state_dict()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-4, rtol=0, msg=name)
    assert max(float((states[0][k] - start[k]).abs().max()) for k in start) > 1e-3


def test_a_loss_that_is_not_finite_is_told_in_one_line(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^sft step 2: the gradient of .* lower lr$"):
        run_sft(settings(parent, tmp_path / "out", steps=3, lr=1e30, warmup_steps=0))
    assert not (tmp_path / "out").exists()


def test_a_last_step_that_ruins_the_policy_is_told(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^sft: the policy of the last step is not finite; lower"):
        run_sft(settings(parent, tmp_path / "out", steps=1, lr=1e30, warmup_steps=0))
    assert not (tmp_path / "out").exists()


def test_a_mistake_found_by_a_rank_arrives_as_it_was_raised(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^nowhere: no such checkpoint folder$"):
        train_ranks(settings(parent, tmp_path / "out", ranks=2), "nowhere", str(tmp_path))


def test_the_cpu_is_used_unless_gpus_are_asked_for(parent: Path) -> None:
    """Whatever the machine has: TRL is told neither to take a GPU nor to compute in bfloat16."""
    start = load_checkpoint(parent)
    for dtype in ("float32", "bfloat16"):
        policy = load_checkpoint(parent).policy
        config = settings(parent, parent, steps=1, batch_tokens=56, dtype=dtype)
        data = [Demonstration(np.arange(56, dtype=np.int32), np.ones(56, np.bool_))]
        losses: list[float] = []
        seen = train_on_demonstrations(
            policy, start.tokenizer, data, config, lambda step, kept=losses: kept.append(step.loss)
        )
        assert seen == 56 and losses[0] == pytest.approx(np.log(320), abs=0.6)
        assert {p.device.type for p in policy.parameters()} == {"cpu"}
        assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_the_start_is_never_overwritten(parent: Path) -> None:
    with pytest.raises(UserError, match="is the checkpoint to start from"):
        run_sft(settings(parent, parent))


def test_ctrl_c_ends_all_ranks_and_says_what_begins_again(parent: Path, tmp_path: Path) -> None:
    """The signal reaches the command alone, as from ``kill -INT``."""
    file, output = tmp_path / "warm up.yaml", tmp_path / "out"
    config = settings(parent, output, steps=1000, ranks=2, batch_tokens=256, context=64)
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "farhorizon.launch.cli", "sft", str(file), "lr=1e-4"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("sft step"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    again = f"farhorizon sft '{file}' lr=1e-4"
    assert out.splitlines()[-1] == f"sft: interrupted, nothing is saved; what begins again: {again}"
    assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert not output.exists()
