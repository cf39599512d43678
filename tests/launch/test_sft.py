"""Warm-up through TRL: the right tokens are trained, thresholds move with training only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import dump_config, load_config
from farhorizon.configs.schema import EnvConfig, SftConfig
from farhorizon.envs.expert import expert_messages
from farhorizon.envs.registry import make_config
from farhorizon.envs.types import Task
from farhorizon.launch.files import sole_user
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
from farhorizon.policy.weights import THRESHOLD
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


def test_ranks_together_do_what_one_does_alone(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two demonstrations fill a step: one row of both, or a row for each rank.

    An interpreter that aborts when it ends, as threads of a library can make it, is no failure.
    """
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
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
        # a score that rounding moves over the edge of a bin moves a threshold by its width
        atol = 1e-3 if name.endswith(THRESHOLD) else 1e-4
        torch.testing.assert_close(states[1][name], value, atol=atol, rtol=0, msg=name)
    assert max(float((states[0][k] - start[k]).abs().max()) for k in start) > 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_is_told_in_one_line(
    parent: Path, tmp_path: Path, ranks: int
) -> None:
    with pytest.raises(RunFailed, match=r"^sft step 2: the gradient of .* lower lr$"):
        run_sft(settings(parent, tmp_path / "out", steps=3, lr=1e30, warmup_steps=0, ranks=ranks))
    assert not (tmp_path / "out").exists()


def test_a_last_step_that_ruins_the_policy_is_told(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"^sft: the policy of the last step is not finite; lower"):
        run_sft(settings(parent, tmp_path / "out", steps=1, lr=1e30, warmup_steps=0))
    assert not (tmp_path / "out").exists()


def test_a_mistake_found_by_a_rank_arrives_as_it_was_raised(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^nowhere: no such checkpoint folder$"):
        train_ranks(settings(parent, tmp_path / "out", ranks=2), "nowhere", str(tmp_path))


def test_a_bug_in_a_rank_keeps_its_trace(parent: Path, tmp_path: Path) -> None:
    """The demonstrations are not where they should be."""
    config = settings(parent, tmp_path / "out", ranks=2)
    with pytest.raises(
        ProcessRaisedException, match=r"in load_demonstrations\n(.*\n)*FileNotFound"
    ):
        train_ranks(config, str(parent), str(tmp_path))


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


def test_the_start_is_never_overwritten(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds the policy to start from"):
        run_sft(settings(parent, parent))
    run = tmp_path / "run"
    start = run / "stages" / "2-128"
    shutil.copytree(parent, start)
    shutil.copytree(parent, run, dirs_exist_ok=True)  # as a stage run leaves it
    with pytest.raises(UserError, match=f"^output {run}: holds the policy to start from"):
        run_sft(settings(start, run))
    load_checkpoint(start)


def test_nothing_is_ever_replaced(parent: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()  # empty: as good as free
    config = settings(parent, output, steps=1)
    run_sft(config)
    assert load_checkpoint(output).stage.tokens_seen > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    before = (output / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=f"^output {output}: holds a checkpoint; choose another"):
        run_sft(replace(config, steps=2))
    assert (output / "model.safetensors").read_bytes() == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(UserError, match=f"^output {other}: is not empty; choose another"):
        run_sft(settings(parent, other))
    with pytest.raises(UserError, match=r"^output /proc: is a mount point"):
        run_sft(settings(parent, Path("/proc")))
    with pytest.raises(UserError, match="its name is too long"):
        run_sft(settings(parent, tmp_path / ("x" * 245)))
    loop, file = tmp_path / "loop", tmp_path / "file"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match=f"^output {loop}: Too many levels"):
        run_sft(settings(parent, loop))
    file.touch()
    with pytest.raises(UserError, match=f"^output {file}: {file} is not a directory"):
        run_sft(settings(parent, file))
    with pytest.raises(UserError, match=r"^output .*: embedded null byte"):
        run_sft(settings(parent, tmp_path / "a\0b"))
    link = tmp_path / "link"
    link.symlink_to(output)
    with pytest.raises(UserError, match=f"^output {output}: holds a checkpoint"):
        run_sft(settings(parent, link))


def test_one_warm_up_at_a_time_works_on_an_output(parent: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with (
        sole_user(output, replaced=True),
        pytest.raises(UserError, match=f"^output {output}: another process works in it"),
    ):
        run_sft(settings(parent, output))


Process = subprocess.Popen[str]


@contextmanager
def working(parent: Path, folder: Path) -> Iterator[tuple[Process, list[psutil.Process]]]:
    """A warm-up of two ranks that a shell started in the background; it and its ranks."""
    file = folder / "warm up.yaml"
    config = settings(parent, folder / "out", steps=1000, ranks=2, batch_tokens=256, context=64)
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "farhorizon.launch.cli", "sft", str(file), "lr=1e-4"]
    with subprocess.Popen(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("sft step"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        try:
            yield process, [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        finally:
            for left in [process, *children]:
                with suppress(psutil.NoSuchProcess):
                    left.kill()


def test_sigterm_ends_all_ranks_and_says_what_begins_again(parent: Path, tmp_path: Path) -> None:
    """The signal reaches the command alone, and ranks that inherited an ignored SIGINT."""
    with working(parent, tmp_path) as (process, ranks):
        assert len(ranks) == 2
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
        again = f"farhorizon sft '{tmp_path / 'warm up.yaml'}' lr=1e-4"
        told = f"sft: interrupted, nothing is saved; what begins again: {again}"
        assert out.splitlines()[-1] == told
        assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert not (tmp_path / "out").exists()


def test_ranks_end_with_the_command(parent: Path, tmp_path: Path) -> None:
    with working(parent, tmp_path) as (process, ranks):
        process.kill()
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert not (tmp_path / "out").exists()


def test_a_rank_that_is_killed_is_one_line(parent: Path, tmp_path: Path) -> None:
    with working(parent, tmp_path) as (process, ranks):
        ranks[1].kill()
        err = process.communicate(timeout=60)[1]
        told = "a rank ended while it worked: it was killed, or ran out of memory"
        assert (process.returncode, err.splitlines()[-1]) == (1, f"farhorizon: sft: {told}")
        assert "Traceback" not in err
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
