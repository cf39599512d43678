"""The GRPO benchmark: both sides do the same work, and wrong steps of ours are no measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farhorizon.configs.benchmarks import BenchConfig
from farhorizon.configs.errors import RunFailed
from farhorizon.configs.schema import LearnerConfig, RolloutConfig
from farhorizon.envs import Message
from farhorizon.envs.check import check_env
from farhorizon.envs.types import StopReason
from farhorizon.launch import bench, bench_task, cli
from farhorizon.launch.bench_task import COMPLETIONS, GROUP_SIZE, GROUPS, PROMPT_TOKENS, Measurement
from farhorizon.policy.tokenizer import ChatFormat
from farhorizon.rl.types import UpdateResult
from farhorizon.rollout.types import Group, Segment, Trajectory

SMALL = BenchConfig(
    steps=1, runs=1, rollout=RolloutConfig(max_turn_tokens=12), learner=LearnerConfig(lr=1e-3)
)


def groups(length: int = 2, version: int = 0) -> list[Group]:
    prompt = Segment(np.zeros(PROMPT_TOKENS, np.int32), False, np.zeros(0), np.zeros(0))
    answer = Segment(
        np.zeros(length, np.int32), True, np.zeros(length), np.full(length, version, np.int32)
    )
    one = Trajectory("t", 0, (prompt, answer), (0.0,), 0.0, False, StopReason.TERMINATED, 1)
    return [Group(str(i), (one,) * GROUP_SIZE) for i in range(GROUPS)]


def test_both_sides_get_prompts_of_one_length(tmp_path: Path) -> None:
    chat = ChatFormat(bench_task.write_tokenizer(tmp_path / "tokenizer"))
    assert len(chat.tokenizer) == bench_task.VOCABULARY == 128
    assert len(chat.tokenizer(bench_task.prompt(PROMPT_TOKENS))["input_ids"]) == PROMPT_TOKENS == 81
    env = bench_task.CountLetters(bench._environment(tmp_path).kwargs["prompt"])
    messages, _ = env.reset(seed=0)
    assert len([*chat.render_reply(messages), *chat.prompt()]) == PROMPT_TOKENS
    assert chat.text(chat.render(Message("user", "a b~"))[3:]) == "a b~"


def test_reward_counts_the_letter() -> None:
    env = bench_task.CountLetters("x")
    check_env(env)
    env.reset(seed=0)
    assert env.step("banana Aa")[1:4] == (0.4, True, False)


def test_medians_and_ratio_by_hand() -> None:
    """32 completions in 4, 2 and 1 s are 8, 16 and 32 a second; one run has two unequal steps."""
    ours = [Measurement(s, 4096, 5, {}) for s in ((4.0, 4.0), (1.0, 3.0), (1.0, 1.0))]
    theirs = [Measurement((s,), 4096, 6, {}) for s in (32.0, 8.0, 16.0)]
    assert bench.medians(ours) == {
        "completions_per_second": 16.0,
        "tokens_per_second": 2048.0,
        "step_seconds": 2.0,
    }
    assert bench.medians(theirs)["completions_per_second"] == 2.0
    result = bench.record(BenchConfig(), ours, theirs, 0.5)
    assert result["ratio"] == 8.0
    assert json.loads(json.dumps(result))["farhorizon"]["runs"][1]["seconds"] == [1.0, 3.0]


def test_wrong_rollouts_are_no_measurement() -> None:
    bench.check_rollout(groups(), 2, 0)
    with pytest.raises(RunFailed, match=r"segments .*\(81, False\), \(2, True\)"):
        bench.check_rollout(groups(), 3, 0)
    with pytest.raises(RunFailed, match="other weights"):
        bench.check_rollout(groups(version=1), 2, 2)
    with pytest.raises(RunFailed, match=r"groups of \[8, 8, 8\] completions"):
        bench.check_rollout(groups()[1:], 2, 0)


def test_wrong_updates_are_no_measurement() -> None:
    good = UpdateResult({"log_ratio_max": 9e-5, "clip_fraction": 0.0}, 1, False)
    bench.check_update(good, 0)
    for wrong in (
        replace(good, skipped=True),
        replace(good, version=2),
        replace(good, metrics={"log_ratio_max": 2e-4, "clip_fraction": 0.0}),
        replace(good, metrics={"log_ratio_max": 0.0, "clip_fraction": 0.01}),
        replace(good, metrics={"log_ratio_max": float("nan"), "clip_fraction": 0.0}),
    ):
        with pytest.raises(RunFailed, match="bench step 0"):
            bench.check_update(wrong, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "bench nosuch: no such benchmark; known: attnres, decode, grpo, kda,"),
        (["grpo", "runs=0"], "runs=0 must be at least 1"),
        (["grpo", "step=2"], "unknown key step on the command line; did you mean steps?"),
        (["grpo", "learner.minibatches=2"], "learner.minibatches must be 1"),
        (["grpo", "learner.decay=0.5"], "learner.decay=0.5 would have no effect"),
        (["grpo", "learner.replay=learner"], "learner.replay=learner would have no effect"),
        (["grpo", "rollout.keep_states=1"], "rollout.keep_states=1 would have no effect"),
        (["kda", "repeats=0"], "repeats=0 must be at least 1"),
        (["kda", "decode=[64]"], "decode on the command line: 64 is a number"),
        (["kda", "decode=['64']"], "decode: '64' is not SEQUENCESxHEADS"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_step_of_ours(ray_local: None, tmp_path: Path) -> None:
    bench.write_task(tmp_path, SMALL)
    result = bench.measure_ours(tmp_path, SMALL)
    assert len(result.seconds) == 1
    assert result.tokens == COMPLETIONS * 12
    assert sum(result.parts.values()) == pytest.approx(result.seconds[0])


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "bench.jsonl"
    arguments = ["rollout.max_turn_tokens=12", "rollout.actors=1", "learner.ranks=1"]
    for lines in (1, 2):
        assert cli.main(["bench", "grpo", "runs=1", "steps=1", f"output={output}", *arguments]) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == lines
        assert rows[-1]["ratio"] > 0
        assert rows[-1]["trl"]["runs"][0]["tokens"] == COMPLETIONS * 12
    assert "completions/s" in capsys.readouterr().out
