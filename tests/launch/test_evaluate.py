"""Evaluation figures by hand: errors stay in the denominator (C25)."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import dump_config, override_config
from farhorizon.configs.schema import (
    EnvConfig,
    EvalConfig,
    RolloutConfig,
    SftConfig,
    Stage,
    StageConfig,
    TrainConfig,
    VllmConfig,
)
from farhorizon.envs.types import StopReason
from farhorizon.launch import checkpoints
from farhorizon.launch import evaluate as evaluate_command
from farhorizon.launch.evaluate import evaluate, output_file, summarise
from farhorizon.launch.origin import evaluation_defaults
from farhorizon.launch.together import check_native
from farhorizon.rollout.pool import RolloutPool
from farhorizon.rollout.types import Group, Segment, Trajectory

EMPTY = np.zeros(0, np.float32), np.zeros(0, np.int32)


def group(index: int, reward: float | None, stop: StopReason, tokens: int = 10) -> Group:
    segment = Segment(np.zeros(tokens, np.int32), False, *EMPTY)
    error = "Boom: broken\ntrace" if reward is None else None
    trajectory = Trajectory(f"t{index}", 0, (segment,), (), reward, reward == 1.0, stop, 2, error)
    return Group(f"t{index}", (trajectory,))


def test_errors_stay_in_the_denominator() -> None:
    outcomes = [(1.0, StopReason.TERMINATED)] * 80 + [(0.0, StopReason.TURN_LIMIT)] * 10
    groups = [group(i, *outcome) for i, outcome in enumerate(outcomes)]
    groups += [group(90 + i, None, StopReason.ERROR, tokens=99) for i in range(10)]
    result = summarise(groups, 100, 3, "c")
    assert result.success == 0.8
    assert (result.ci_low, result.ci_high) == pytest.approx((0.7112, 0.8666), abs=1e-4)
    assert (result.episodes, result.errors, result.seed, result.checkpoint) == (100, 10, 3, "c")
    assert (result.turns_mean, result.tokens_mean) == (2.0, 10.0)
    assert list(asdict(result)) == [
        "success",
        "ci_low",
        "ci_high",
        "episodes",
        "errors",
        "turns_mean",
        "tokens_mean",
        "seed",
        "checkpoint",
    ]


def test_lost_episodes_count_as_errors() -> None:
    result = summarise([group(0, 1.0, StopReason.TERMINATED)], 2, 0, "c")
    assert (result.success, result.errors) == (0.5, 1)


def test_no_figure_when_everything_failed() -> None:
    with pytest.raises(RunFailed, match=r"all 2 episodes failed; first error: Boom: broken$"):
        summarise([group(i, None, StopReason.ERROR) for i in range(2)], 2, 0, "c")


def test_code_named_by_a_stored_run_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    sentinel, plugin = tmp_path / "sentinel", tmp_path / "evil.py"
    plugin.write_text(f"open({str(sentinel)!r}, 'w')\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"policy: x\ncontext: 64\nenv: {{id: 'evil:Env', plugins: [{plugin}]}}\n"
    )
    for name in checkpoint.iterdir():
        (run / name.name).write_bytes(name.read_bytes())
    with pytest.raises(UserError, match=r"names code of its own; to run it, add 'env\.plugins="):
        evaluate(str(run), [])
    assert not sentinel.exists()


def test_plain_checkpoint_needs_an_environment(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"belongs to no run with an environment: name one, env\.id"
    ):
        evaluate(str(checkpoint), [])
    with pytest.raises(UserError, match="context=65 is longer"):
        evaluate(str(checkpoint), ["env.id=echo-v0", "context=65"])
    published = tmp_path / "models" / "stages" / "published"
    shutil.copytree(checkpoint, published)
    (published / "stage.json").unlink()
    for folder in (published, published.parents[1]):  # whatever they are, they are not ours
        (folder / "config.yaml").write_text("layers: 4\n")
    assert evaluation_defaults(published, []) == EvalConfig()


@pytest.fixture
def stages(checkpoint: Path, tmp_path: Path) -> Path:
    """The folder of a stage run that went on from one of two stages."""
    output = tmp_path / "stage"
    shutil.copytree(checkpoint, output)
    for name in ("3-32", "10-64"):
        shutil.copytree(checkpoint, output / "stages" / name)
    config = StageConfig(
        policy="tiny",
        text="stdlib",
        seed=5,
        env=EnvConfig(id="echo-v0", kwargs={"turns": 1}),
        stages=(
            Stage(context=32, steps=1, batch_tokens=32, lr=1e-3),
            Stage(context=64, steps=1, batch_tokens=64, lr=1e-3, env_kwargs={"turns": 3}),
        ),
    )
    (output / "config.yaml").write_text(dump_config(config))
    return output


def test_stages_are_evaluated_at_their_horizon(stages: Path) -> None:
    def turns(checkpoint: Path) -> int:
        env = evaluation_defaults(checkpoint, []).env
        assert env is not None and env.id == "echo-v0"
        return env.kwargs["turns"]

    folders = (stages, stages / "stages" / "3-32", stages / "stages" / "10-64")
    assert [turns(folder) for folder in folders] == [3, 1, 3]
    alone = stages.with_name("alone")  # copied without the stages
    shutil.copytree(stages, alone, ignore=shutil.ignore_patterns("stages"))
    assert turns(alone) == 3
    other = evaluation_defaults(stages, ["env.id=even-v0"])
    assert other == EvalConfig(env=EnvConfig(id="echo-v0"), seed=5)
    with pytest.raises(
        UserError, match=r"^env\.id: echo-v0 -> archive-v0, env\.kwargs: .*: another "
    ):
        evaluate(str(stages), ["env.id=archive-v0", "env.kwargs.pages=1"])


def test_a_warm_up_is_evaluated_on_its_demonstrations(checkpoint: Path, tmp_path: Path) -> None:
    env = EnvConfig(id="echo-v0", kwargs={"turns": 2})
    output = tmp_path / "sft"
    shutil.copytree(checkpoint, output)
    assert evaluation_defaults(output, []) == EvalConfig()
    config = SftConfig(policy="p", env=env, context=16, seed=2)
    (output / "config.yaml").write_text(dump_config(config))
    assert evaluation_defaults(output, []) == EvalConfig(env=env, seed=2)


def test_a_checkpoint_of_a_run_has_its_settings(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    shutil.copytree(checkpoint, folder)
    env = EnvConfig(id="echo-v0", kwargs={"turns": 2})
    rollout = RolloutConfig(max_turn_tokens=3)
    config = TrainConfig(policy="p", env=env, context=32, seed=7, rollout=rollout)
    (folder / "run.json").write_text(json.dumps({"config": dump_config(config)}))
    edited = replace(config, env=EnvConfig(id="archive-v0"), seed=8)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(edited))
    expected = EvalConfig(env=env, seed=7, context=32, rollout=rollout)
    assert evaluation_defaults(folder, []) == expected
    # of a run that shared its GPU: here no learner wants the memory
    asleep = replace(config, rollout=replace(rollout, vllm=VllmConfig(memory=0.3, sleep=True)))
    (folder / "run.json").write_text(json.dumps({"config": dump_config(asleep)}))
    found = evaluation_defaults(folder, []).rollout
    assert found == replace(rollout, vllm=VllmConfig(memory=0.3))
    # on a GPU its native engine computed as its learner
    narrow = replace(config, rollout=replace(rollout, gpus=1.0))
    (folder / "run.json").write_text(json.dumps({"config": dump_config(narrow)}))
    assert evaluation_defaults(folder, []).rollout.dtype == "float32"


def test_evaluation_of_a_stage(stages: Path, ray_local: None) -> None:
    for folder in (stages, stages / "stages" / "3-32"):
        assert evaluate(str(folder), ["episodes=2"]) == 0
        result = json.loads((folder / "eval.json").read_text())
        assert (result["episodes"], result["errors"], result["seed"]) == (2, 0, 5)
    sampled = (stages / "eval.json").read_text()
    assert evaluate(str(stages), ["episodes=1", "greedy=true"]) == 0
    assert json.loads((stages / "eval-greedy.json").read_text())["episodes"] == 1
    assert (stages / "eval.json").read_text() == sampled
    with pytest.raises(UserError, match=r"^rollout\.temperature: 1\.0 -> 0\.5: another kind of"):
        evaluate(str(stages), ["episodes=1", "rollout.temperature=0.5"])


def test_a_folder_in_the_place_of_the_file_is_told_first(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(UserError, match=r"^output .*x\.json: is a folder; name a file$"):
        evaluate(str(checkpoint), ["env.id=echo-v0", f"output={tmp_path}/x.json"])


def test_a_file_that_cannot_be_written_is_told_first(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)  # root may write all
    with pytest.raises(UserError, match=r"^output .*x\.json: is read-only; name another file"):
        evaluate(str(checkpoint), ["env.id=echo-v0", f"output={file}"])
    assert file.read_text() == "{}"


def test_settings_without_effect_are_told(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"^rollout\.keep_states=1 would have no effect: an eval"):
        evaluate(str(checkpoint), ["env.id=echo-v0", "rollout.keep_states=1"])
    asleep = ["env.id=echo-v0", "rollout.engine=vllm", "rollout.vllm.sleep=true"]
    with pytest.raises(
        UserError, match=r"^rollout\.vllm\.sleep=true would have no effect: an eval"
    ):
        evaluate(str(checkpoint), asleep)


def test_figures_are_shown_before_they_are_written(
    checkpoint: Path, tmp_path: Path, ray_local: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder takes the place of the half-written file while the evaluation runs."""
    (tmp_path / "x.json.partial").mkdir()
    settings = ["env.id=echo-v0", "episodes=2", f"output={tmp_path}/x.json"]
    with pytest.raises(
        RunFailed, match=r"^output .*/x\.json: cannot be written \(Is a directory\)$"
    ):
        evaluate(str(checkpoint), settings)
    assert "0/2 = 0.000" in capsys.readouterr().out


def save_step(checkpoint: Path, run: Path, step: int) -> Path:
    def write(folder: Path) -> None:
        shutil.copytree(checkpoint, folder)

    config = TrainConfig(policy="p", env=EnvConfig(id="echo-v0"), context=32)
    return checkpoints.save(run, checkpoints.RunState(step, 0, dump_config(config)), write, keep=1)


def test_a_checkpoint_that_its_run_removes_is_searched_again(
    checkpoint: Path,
    tmp_path: Path,
    ray_local: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = save_step(checkpoint, tmp_path, 1)

    class Late(RolloutPool):
        """By the time that the first one starts, the run has gone on."""

        def __init__(self, folder: str, *arguments: Any, **settings: Any) -> None:
            if first.exists():
                save_step(checkpoint, tmp_path, 2)
            super().__init__(folder, *arguments, **settings)

    monkeypatch.setattr(evaluate_command, "RolloutPool", Late)
    assert evaluate(str(tmp_path), ["episodes=2"]) == 0
    assert f"{first}: removed by its run before it was loaded" in capsys.readouterr().out
    second = tmp_path / "checkpoints" / "step-000002"
    assert json.loads((tmp_path / "eval.json").read_text())["checkpoint"] == str(second)


def test_a_run_before_its_first_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(UserError, match=r"the run has no complete checkpoint yet$"):
        evaluate(str(tmp_path), [])


def test_a_run_that_removes_checkpoints_all_the_time_is_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(2, 9))
    save_step(checkpoint, tmp_path, 1)

    def late(folder: Path, overrides: list[str]) -> EvalConfig:
        save_step(checkpoint, tmp_path, next(steps))
        return evaluation_defaults(folder, overrides)

    monkeypatch.setattr(evaluate_command, "evaluation_defaults", late)
    with pytest.raises(RunFailed, match="removes checkpoints sooner than they are loaded; wait"):
        evaluate(str(tmp_path), [])
    assert next(steps) == 2 + evaluate_command.TRIES
    with pytest.raises(UserError, match="no such"):  # named by itself, it is what it is
        evaluate(str(tmp_path / "checkpoints" / "step-000001"), [])


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["seed=9", "episodes=3", "rollout.actors=2", "env.plugins=[a.py]"], "eval.json"),
        (["greedy=true"], "eval-greedy.json"),
        (["visible_context=8"], "eval-visible-8.json"),
        (["visible_context=8", "greedy=true"], "eval-visible-8-greedy.json"),
        (["context=64", "rollout.temperature=1", "env.kwargs.turns=2"], "eval.json"),
        (["rollout.temperature=0", "output=RUN/cold.json"], "cold.json"),
        (["context=32", "greedy=true", "output=RUN"], "eval-greedy.json"),
    ],
)
def test_each_kind_of_evaluation_has_its_file(
    tmp_path: Path, overrides: list[str], name: str
) -> None:
    defaults = EvalConfig(env=EnvConfig(id="echo-v0", kwargs={"turns": 2}), context=64)
    given = [text.replace("RUN", str(tmp_path)) for text in overrides]
    assert output_file(tmp_path, defaults, override_config(defaults, given)) == tmp_path / name


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("context=32", "context: 64 -> 32"),
        ("env.kwargs.turns=3", "env.kwargs: {'turns': 2} -> {'turns': 3}"),
        ("env.id=even-v0", "env.id: echo-v0 -> even-v0"),
        ("rollout.max_turns=1", "rollout.max_turns: 64 -> 1"),
    ],
)
def test_another_kind_of_evaluation_needs_a_name(tmp_path: Path, override: str, told: str) -> None:
    defaults = EvalConfig(env=EnvConfig(id="echo-v0", kwargs={"turns": 2}), context=64)
    with pytest.raises(UserError) as caught:
        output_file(tmp_path, defaults, override_config(defaults, [override]))
    assert str(caught.value) == (
        f"{told}: another kind of evaluation than {tmp_path}/eval.json is for; "
        "name a file for it, output=FILE.json"
    )


def test_settings_of_another_engine_may_come_from_the_run_alone() -> None:
    run = RolloutConfig(dtype="bfloat16")
    check_native(replace(run, engine="vllm", gpus=1.0), run)
    check_native(
        RolloutConfig(vllm=VllmConfig(memory=0.5)), RolloutConfig(vllm=VllmConfig(memory=0.5))
    )
    with pytest.raises(UserError, match=r"^rollout\.dtype=float32 would have no effect: it is of"):
        check_native(RolloutConfig(engine="vllm", dtype="float32"), run)
    with pytest.raises(UserError, match=r"^rollout\.vllm\.memory=0\.5 would have no effect: needs"):
        check_native(RolloutConfig(vllm=VllmConfig(memory=0.5)), run)
