"""The whole loop on real parts: Ray actors, DeepSpeed, sync, evaluation, checkpoints, resume."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import dump_config, load_config
from farhorizon.configs.schema import (
    AlgorithmConfig,
    EnvConfig,
    LearnerConfig,
    RolloutConfig,
    TrainConfig,
)
from farhorizon.launch.checkpoints import newest, scan
from farhorizon.launch.evaluate import evaluate
from farhorizon.launch.train import train
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.records import read_stage

FAKES = str(Path(__file__).parents[1] / "fakes.py")
pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> TrainConfig:
    """Four steps of four groups of eight."""
    return TrainConfig(
        policy=str(checkpoint),
        context=32,
        steps=4,
        seed=3,
        groups_per_step=4,
        group_size=8,
        env=EnvConfig(id="even-v0", plugins=(FAKES,)),
        eval_episodes=16,
        eval_every=2,
        save_every=1,
        keep=2,
        rollout=RolloutConfig(max_turn_tokens=2),
        learner=LearnerConfig(lr=1e-3),
    )


@pytest.fixture(scope="module")
def finished(base: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of all four steps in one go."""
    config = replace(base, output=str(tmp_path_factory.mktemp("runs") / "whole"))
    assert train(config) == 0
    return config


def rows(config: TrainConfig) -> list[dict[str, float]]:
    text = (Path(config.output) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(config: TrainConfig) -> dict[str, list[float]]:
    found = newest(Path(config.output))
    assert found is not None
    state = load_checkpoint(found.folder).policy.state_dict()
    return {name: tensor.flatten().tolist() for name, tensor in state.items()}


def test_run_folder_is_complete(finished: TrainConfig) -> None:
    folder = Path(finished.output)
    by_step = rows(finished)
    assert [row["step"] for row in by_step] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in by_step if "eval/success" in row] == [0, 2, 4]
    assert all(row["rollout/episodes"] == 32 for row in by_step[1:])
    assert load_config(TrainConfig, str(folder / "config.yaml"), []).steps == 4
    assert (folder / "learning_curve.png").stat().st_size > 1000
    assert list((folder / "tensorboard").glob("events.*"))
    for step in (1, 2, 3, 4):
        lines = (folder / "rollouts" / f"step-{step}.jsonl").read_text().splitlines()
        assert len(lines) == 32
        assert json.loads(lines[0])["versions"] == [by_step[step - 1].get("train/version", 0)] * 2
    complete, torn = scan(folder)
    assert [found.state.step for found in complete] == [3, 4]
    assert torn == []
    stage = read_stage(complete[-1].folder)
    assert stage.parent == finished.policy
    assert stage.tokens_seen == 1000 + sum(row["train/tokens"] for row in by_step[1:])


def test_every_step_learned(finished: TrainConfig) -> None:
    for row in rows(finished)[1:]:
        assert row["train/update_skipped"] == 0
        assert row["train/version"] == row["step"]
        assert math.isfinite(row["learn/loss"])
        assert row["learn/grad_norm"] > 0
    start = load_checkpoint(finished.policy).policy.state_dict()
    end = weights(finished)
    unchanged = [name for name, value in start.items() if end[name] == value.flatten().tolist()]
    # The first mixture has one source: its weight is 1 whatever its query is.
    assert [name for name in unchanged if "layers.0.self_attention_res" not in name] == []


def test_rollout_and_learner_agree(finished: TrainConfig) -> None:
    """C05: on the first pass over on-policy data the ratio is 1, and nothing is clipped."""
    for row in rows(finished)[1:]:
        assert row["learn/clip_fraction"] == 0.0
        assert row["learn/kl_from_0"] == pytest.approx(row["learn/kl"], abs=1e-9)
        assert row["learn/advantage_std"] > 0 and row["learn/staleness_0"] == 1.0
        assert row["learn/log_ratio_abs"] < 1e-5
        assert row["learn/log_ratio_max"] < 1e-4


def test_finished_run_says_so(finished: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """C18."""
    assert train(finished) == 0
    assert "finished with 4 steps, 0 steps to do" in capsys.readouterr().out


def test_stopped_and_resumed_equals_one_go(finished: TrainConfig, tmp_path: Path) -> None:
    """C16, C18: weights and task order of an uninterrupted run, to the bit."""
    config = replace(finished, output=str(tmp_path / "parts"), steps=2)
    assert train(config) == 0
    assert train(replace(config, steps=4)) == 0
    whole, parts = rows(finished), rows(config)
    assert [row["step"] for row in parts] == [0, 1, 2, 3, 4]
    for name in ("train/reward", "train/tokens", "eval/success", "train/version"):
        assert [row.get(name) for row in parts] == [row.get(name) for row in whole], name
    assert weights(config) == weights(finished)
    played = [
        [
            json.loads(line)["task"]
            for line in (Path(c.output) / "rollouts" / f"step-{step}.jsonl")
            .read_text()
            .splitlines()
        ]
        for c in (finished, config)
        for step in (1, 2, 3, 4)
    ]
    assert played[:4] == played[4:]
    assert len({task for tasks in played[:4] for task in tasks}) == 16


def test_ppo_resumes_with_its_critic(base: TrainConfig, tmp_path: Path) -> None:
    config = replace(base, algorithm=AlgorithmConfig(name="ppo"), eval_episodes=0)
    whole, parts = (replace(config, output=str(tmp_path / name)) for name in ("whole", "parts"))
    assert train(whole) == 0
    for steps in (2, 4):
        assert train(replace(parts, steps=steps)) == 0
    assert weights(parts) == weights(whole)
    head = weights(whole)["v_head.summary.weight"]
    assert any(head)
    by_step = rows(whole)
    assert all(row["learn/value_error"] > 0 for row in by_step if row["step"] > 0)
    assert all(row["train/version"] == row["step"] for row in by_step if row["step"] > 0)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_pull_to_the_start_goes_on_after_a_resume(
    finished: TrainConfig, tmp_path: Path, where: Literal["loss", "reward"]
) -> None:
    """The reference is where the run began, not where it went on."""
    pulled = AlgorithmConfig(kl=3.0, kl_in=where, kl_estimator="k2")
    config = replace(finished, algorithm=pulled, eval_episodes=0, steps=2)
    whole, parts = (replace(config, output=str(tmp_path / name)) for name in ("whole", "parts"))
    assert train(whole) == 0
    for steps in (1, 2):
        assert train(replace(parts, steps=steps)) == 0
    assert weights(parts) == weights(whole)
    first, second = (row["learn/reference_kl"] for row in rows(whole))
    assert 0 <= first < 1e-9 < second
    assert "learn/reference_kl" not in rows(finished)[1]


def test_a_reference_that_does_not_fit_is_one_line(
    base: TrainConfig, tmp_path: Path, foreign: Path
) -> None:
    config = replace(base, output=str(tmp_path / "none"), reference=base.policy)
    with pytest.raises(UserError, match=r"^reference=.*it needs algorithm\.kl above 0$"):
        train(config)
    pulled = replace(config, algorithm=AlgorithmConfig(kl=0.1))
    with pytest.raises(UserError, match=r"^algorithm\.kl needs its reference: .*no such folder$"):
        train(replace(pulled, reference=str(tmp_path / "gone")))
    with pytest.raises(UserError, match=r"^reference .*other: has another tokenizer than policy"):
        train(replace(pulled, reference=str(foreign)))


def test_two_actors_and_two_ranks_give_the_same_run(finished: TrainConfig, tmp_path: Path) -> None:
    config = replace(
        finished,
        output=str(tmp_path / "two"),
        steps=2,
        eval_episodes=0,
        rollout=replace(finished.rollout, actors=2),
        learner=replace(finished.learner, ranks=2),
    )
    assert train(config) == 0
    one, two = rows(finished)[1:3], rows(config)
    for left, right in zip(one, two, strict=True):
        assert left["train/reward"] == right["train/reward"]
        assert left["train/tokens"] == right["train/tokens"]
        for name in ("learn/loss", "learn/grad_norm", "learn/entropy"):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name


def test_ctrl_c_saves_and_says_how_to_go_on(
    finished: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        finished, output=str(tmp_path / "stopped"), steps=500, save_every=0, eval_episodes=0
    )
    metrics = Path(config.output) / "metrics.jsonl"

    def press() -> None:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
            if ended.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    thread = threading.Thread(target=press)
    thread.start()
    try:
        assert train(config) == 130
    finally:
        ended.set()
        thread.join()
    found = newest(Path(config.output))
    assert found is not None
    steps = len(rows(config))
    assert found.state.step == steps
    text = capsys.readouterr().out
    assert f"interrupted after step {steps}, saved {found.folder}" in text
    assert f"farhorizon train {config.output}/config.yaml" in text


def test_sigterm_saves_and_says_how_to_go_on(base: TrainConfig, tmp_path: Path) -> None:
    """Of a command that a shell started in the background, with SIGINT ignored."""
    file, run = tmp_path / "run.yaml", tmp_path / "run"
    config = replace(base, output=str(run), steps=500, save_every=0, eval_episodes=0)
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "farhorizon.launch.cli", "train", str(file)]
    with subprocess.Popen(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step 2/"):
                    break
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143, err
    assert "Traceback" not in err and "SIGTERM" not in err
    found = newest(run)
    assert found is not None and found.state.step >= 2
    assert out.splitlines()[-2:] == [
        f"interrupted after step {found.state.step}, saved {found.folder}",
        f"resume      farhorizon train {run}/config.yaml steps=500",
    ]
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_steps_without_reward_variance_are_skipped_and_counted(
    finished: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = EnvConfig(id="echo-v0", kwargs={"turns": 6})  # out of reach: every reward is 0
    config = replace(
        finished, output=str(tmp_path / "flat"), env=env, context=64, steps=1, eval_episodes=4
    )
    assert train(config) == 0
    row = rows(config)[1]
    assert row["train/groups_without_variance"] == row["train/groups"] == 4
    assert (row["train/update_skipped"], row["train/version"]) == (1, 0)
    text = capsys.readouterr().out
    assert "step 1: no group had reward variance" in text
    assert "0 of 1 steps changed the policy (groups without reward variance); warm up" in text
    assert "flat        4 of 4 groups had equal rewards, most of them failed: warm up" in text


FAULTY = """
from farhorizon.envs import MessageEnv, register
from fakes import EvenEnv


class Faulty(EvenEnv):
    def step(self, action):
        if sum(map(ord, action)) % 5 == 0:
            raise RuntimeError("the sandbox is gone")
        return super().step(action)


register("faulty-v0", Faulty)
"""


def test_steps_with_failing_environments_train_on_the_rest(
    finished: TrainConfig, tmp_path: Path
) -> None:
    """C21: failed episodes have no reward, and neither stop the step nor the next one."""
    plugin = tmp_path / "faulty_plugin.py"
    plugin.write_text(FAULTY)
    config = replace(
        finished,
        output=str(tmp_path / "faulty"),
        env=EnvConfig(id="faulty-v0", plugins=(FAKES, str(plugin))),
        steps=2,
        eval_episodes=0,
        rollout=replace(finished.rollout, env_retries=0, max_error_fraction=0.9),
    )
    assert train(config) == 0
    for row in rows(config):
        step = row["step"]
        text = (Path(config.output) / "rollouts" / f"step-{step}.jsonl").read_text()
        played = [json.loads(line) for line in text.splitlines()]
        failed = [one for one in played if one["stop"] == "error"]
        assert 0 < len(failed) < len(played) == 32
        assert {one["reward"] for one in failed} == {None}
        assert all("the sandbox is gone" in one["error"] for one in failed)
        assert row["rollout/errors"] == row["learn/episodes_without_reward"] == len(failed)
        rewards = [one["reward"] for one in played if one["reward"] is not None]
        assert row["train/reward"] == sum(rewards) / len(rewards)
        assert (row["train/update_skipped"], row["train/version"]) == (0, step)
    strict = replace(config.rollout, max_error_fraction=0.0)
    with pytest.raises(
        RunFailed, match=r"max_error_fraction=0.*RuntimeError: the sandbox is gone \(faulty_plugin"
    ):
        train(replace(config, output=str(tmp_path / "strict"), rollout=strict))


def test_evaluation_of_the_run(finished: TrainConfig) -> None:
    folder = Path(finished.output)
    assert evaluate(str(folder), ["episodes=16", f"env.plugins=[{FAKES}]"]) == 0
    result = json.loads((folder / "eval.json").read_text())
    last = rows(finished)[-1]
    assert result["success"] == last["eval/success"]
    assert result["tokens_mean"] == last["eval/tokens_mean"]
    assert (result["episodes"], result["errors"], result["seed"]) == (16, 0, 3)


def test_a_missed_final_evaluation_is_made_up(
    finished: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(finished, output=str(tmp_path / "late"), steps=1, eval_episodes=0)
    assert train(config) == 0
    assert train(replace(config, eval_episodes=8)) == 0
    assert [row["step"] for row in rows(config) if "eval/success" in row] == [1]
    assert "result      held-out success 0" in capsys.readouterr().out
    assert train(replace(config, eval_episodes=8)) == 0
    assert "0 steps to do" in capsys.readouterr().out


def test_an_evaluation_missed_on_the_way_is_made_up(finished: TrainConfig, tmp_path: Path) -> None:
    """A run that ended between the checkpoint of a step and its evaluation."""
    config = replace(finished, output=str(tmp_path / "gap"), steps=2, eval_episodes=0)
    assert train(config) == 0
    assert train(replace(config, steps=3, eval_episodes=16)) == 0
    found = {row["step"]: row.get("eval/success") for row in rows(config)}
    assert list(found) == [1, 2, 3]
    assert found[1] is None and found[3] is not None
    assert found[2] == rows(finished)[2]["eval/success"]


def test_stale_groups_within_bounds(finished: TrainConfig, tmp_path: Path) -> None:
    config = replace(
        finished, output=str(tmp_path / "async"), steps=3, max_staleness=1, eval_episodes=0
    )
    assert train(config) == 0
    assert [row["step"] for row in rows(config)] == [1, 2, 3]
    assert all(row["train/groups_stale"] == 0 for row in rows(config))
    # A batch is on its way while the learner makes the next weights.
    assert max(row["learn/staleness_max"] for row in rows(config)) == 1


def test_a_run_on_the_routes_of_its_rollout_is_the_run_without(
    finished: TrainConfig, tmp_path: Path
) -> None:
    """Both sides have the same weights: the same experts, and one more forward."""
    learner = replace(finished.learner, replay="rollout")
    config = replace(
        finished, output=str(tmp_path / "replay"), steps=2, eval_episodes=0, learner=learner
    )
    assert train(config) == 0
    plain = {row["step"]: row for row in rows(finished)}
    for row in rows(config):
        assert row["learn/routes_known"] > 0.8  # all tokens but the last of each sequence
        assert row["learn/replayed_load_max"] == row["learn/expert_load_max"]
        for name in ("loss", "grad_norm", "entropy", "expert_load_max", "log_ratio_max"):
            assert row[f"learn/{name}"] == plain[row["step"]][f"learn/{name}"], name


def test_a_learner_that_stops_the_run_names_the_checkpoint_to_go_on_from(
    finished: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first minibatch of step 2 overflows the weights, the second has no finite gradient."""
    config = replace(finished, output=str(tmp_path / "burst"), steps=1, eval_episodes=0)
    assert train(config) == 0
    learner = LearnerConfig(lr=1e30, minibatches=2, max_skipped_steps=1)
    with pytest.raises(RunFailed, match=r"not finite.*learner\.max_skipped_steps is 1"):
        train(replace(config, steps=3, learner=learner))
    found = newest(Path(config.output))
    assert found is not None and found.state.step == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"checkpoint  {found.folder}",
        f"resume      farhorizon train {config.output}/config.yaml steps=3",
    ]
