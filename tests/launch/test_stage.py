"""Stage training: continuous learning rate, honest transitions, checkpoints one can go on from."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import PRESETS, dump_config, load_config
from farhorizon.configs.schema import EnvConfig, LearnerConfig, Stage, StageConfig
from farhorizon.envs import register
from farhorizon.envs.base import Observation
from farhorizon.envs.echo import Echo
from farhorizon.envs.registry import tasks
from farhorizon.launch import stage as stage_command
from farhorizon.launch.fresh import starting_checkpoint
from farhorizon.launch.stage import learning_rate, run_stages
from farhorizon.launch.stage_data import check_episodes
from farhorizon.launch.stage_record import StageRecorder, StageStep, Transition, stage_folders
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.tokenizer import ChatFormat, load_tokenizer
from farhorizon.rl.types import UpdateResult

STAGES = (
    Stage(context=32, steps=6, batch_tokens=256, lr=1e-3),
    Stage(context=64, steps=5, batch_tokens=256, lr=1e-5, env_kwargs={"turns": 4}),
)


@pytest.fixture
def config(tmp_path: Path) -> StageConfig:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return StageConfig(
        policy="tiny",
        stages=STAGES,
        text=str(text),
        output=str(tmp_path / "out"),
        vocab_size=300,
        env=EnvConfig(id="echo-v0"),
        learner=LearnerConfig(warmup_steps=2),
    )


def transition(**losses: float) -> Transition:
    return replace(Transition(128, 512, 1000, 2.0, 2.0, 2.0, 2.0), **losses)


def test_the_learning_rate_is_continuous_and_ends_at_a_tenth() -> None:
    stages = (
        Stage(context=8, steps=4, batch_tokens=8, lr=1.0),
        Stage(context=16, steps=2, batch_tokens=16, lr=0.6),
    )
    assert [learning_rate(stages, 0, step) for step in range(4)] == pytest.approx(
        [1.0, 0.9, 0.8, 0.7]
    )
    assert [learning_rate(stages, 1, step) for step in range(2)] == pytest.approx([0.6, 0.33])


def test_a_transition_is_smooth_below_two_percent() -> None:
    assert transition(after=2.039).smooth and transition(after=1.961).smooth
    assert transition(after=2.039).change == pytest.approx(0.0195)
    assert not transition(after=2.041).smooth and not transition(after=1.959).smooth
    # Longer sequences and further training may lower the loss by any amount, not raise it.
    assert transition(at_new_context=1.5, settled=1.5).smooth
    assert not transition(at_new_context=2.05).smooth and not transition(settled=2.05).smooth


def test_a_rough_switch_fails_the_run_after_everything_is_written(tmp_path: Path) -> None:
    recorder = StageRecorder(tmp_path, stages=2, fixed_tokens=100)
    for tokens in (100, 200):
        recorder.step(StageStep(1, 128, tokens // 100, 2, tokens, 2.0, 1e-3, 1.0, 1.1, 0.0, 99.0))
        recorder.fixed_text(tokens, 2.0)
    recorder.transition(transition())
    recorder.require_smooth()
    recorder.transition(transition(after=2.2))
    recorder.write()
    with pytest.raises(RunFailed, match=r"context 128 -> 512.*\+10\.00%"):
        recorder.require_smooth()
    written = json.loads((tmp_path / "transitions.json").read_text())
    assert [t["smooth"] for t in written["transitions"]] == [True, False]
    assert written["transitions"][1]["change"] == pytest.approx(0.1)
    assert (tmp_path / "stage.png").read_bytes()[:4] == b"\x89PNG"


def strict(text: str) -> Any:
    """JSON as readers without NaN read it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_in_every_file(tmp_path: Path) -> None:
    """A skipped step has no expert load and an infinite gradient."""
    nan, inf = float("nan"), float("inf")
    step = StageStep(1, 128, 1, 1, 100, nan, 1e-3, inf, nan, 1.0, 99.0)
    recorder = StageRecorder(tmp_path, stages=2, fixed_tokens=100)
    recorder.step(step)
    recorder.fixed_text(0, 2.0)
    recorder.fixed_text(100, nan)
    recorder.transition(transition(tokens=50, after=nan))
    recorder.write()
    again = StageRecorder(tmp_path, stages=2, fixed_tokens=100, finished=1)
    (row,) = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [name for name, value in row.items() if value is None] == [
        "loss",
        "grad_norm",
        "expert_load",
    ]
    written = strict((tmp_path / "transitions.json").read_text())
    assert [point["loss"] for point in written["fixed_text"]] == [2.0, None]
    assert written["transitions"][0]["after"] is written["transitions"][0]["change"] is None
    (kept,) = again.steps
    assert np.isnan([kept.loss, kept.grad_norm, kept.expert_load]).all() and kept.lr == 1e-3
    with pytest.raises(RunFailed, match="context 128 -> 512"):
        again.require_smooth()
    again.write()


def test_stages_end_to_end_and_on_from_there(
    config: StageConfig, ray_local: None, capsys: pytest.CaptureFixture
) -> None:
    output = run_stages(config)
    loaded = load_checkpoint(output)
    assert (loaded.stage.context, loaded.stage.stages) == (64, (32, 64))
    assert loaded.stage.tokens_seen == 11 * 256
    assert loaded.policy.config.max_position_embeddings == 64
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert [row["context"] for row in rows] == [32] * 6 + [64] * 5
    assert rows[0]["loss"] == pytest.approx(torch.tensor(300.0).log().item(), rel=0.3)
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert rows[0]["lr"] == pytest.approx(5e-4) and rows[6]["lr"] == pytest.approx(1e-5)
    written = json.loads((output / "transitions.json").read_text())
    assert written["fixed_text_tokens"] == 8192 and len(written["transitions"]) == 1
    assert abs(written["transitions"][0]["change"]) < 0.02
    assert {path.name for path in (output / "stages").iterdir()} == {"1-32", "2-64"}
    assert any(bool(r.e_score_correction_bias.any()) for r in loaded.policy.routers())
    # words of the environment are whole
    ids = load_tokenizer(output).backend_tokenizer.encode(" green", add_special_tokens=False).ids
    assert len(ids) == 1
    assert "tokens/s" in capsys.readouterr().out

    with pytest.raises(UserError, match="holds a finished checkpoint"):
        run_stages(config)
    check_going_on(config, output, capsys)
    further = replace(
        config,
        policy=str(output),
        output=str(output.parent / "further"),
        stages=(Stage(context=128, steps=1, batch_tokens=128, lr=1e-4),),
    )
    record = load_checkpoint(run_stages(further)).stage
    assert (record.context, record.stages) == (128, (32, 64, 128))
    assert record.tokens_seen == 12 * 256 - 128 and record.parent == str(output)
    with pytest.raises(UserError, match="first context 32 is shorter than the 64 tokens"):
        run_stages(replace(config, policy=str(output), output=str(output.parent / "shorter")))


def test_paths_hold_in_every_folder(
    config: StageConfig,
    checkpoint: Path,
    tmp_path: Path,
    ray_local: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner's processes stand in the folder where Ray was started."""
    shutil.copytree(checkpoint, tmp_path / "start")
    (tmp_path / "my_words.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert config.env is not None
    relative = replace(
        config,
        policy="start",
        text="text",
        output="relative",
        env=replace(config.env, plugins=("my_words.py",)),
        stages=(Stage(context=64, steps=1, batch_tokens=64, lr=1e-3),),
    )
    output = run_stages(relative)
    assert output == tmp_path / "relative"
    assert load_checkpoint(output).stage.parent == str(tmp_path / "start")
    stored = load_config(StageConfig, str(output / "config.yaml"), [])
    assert stored.env is not None and stored.env.plugins == (str(tmp_path / "my_words.py"),)
    monkeypatch.chdir("/")
    assert stored == stage_command._absolute(stored)


class Uneven(Echo):
    """Episodes of 1 or 9 turns: some 20 tokens or far more than 32."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self.turns = 9 if seed is not None and seed // 2 % 3 == 0 else 1
        return super().reset(seed=seed, options=options)


register("uneven-v0", Uneven)


class Learner:
    """Sees batches go by, and skips those whose numbers, from 1, are in ``skips``."""

    def __init__(self, skips: tuple[int, ...] = ()) -> None:
        self.batches: list[list[np.ndarray]] = []
        self.rates: list[float] = []
        self.skips = skips

    def set_lr(self, lr: float) -> None:
        self.rates.append(lr)

    def evaluate_nll(self, sequences: list[np.ndarray]) -> float:
        return 1.0

    def update_nll(self, sequences: list[np.ndarray]) -> UpdateResult:
        self.batches.append(sequences)
        names = ("loss", "lr", "grad_norm", "expert_load_max", "skipped_steps")
        skipped = len(self.batches) in self.skips
        return UpdateResult(dict.fromkeys(names, 1.0), 1, skipped)


def test_a_skipped_step_does_not_move_the_learning_rate(
    config: StageConfig, checkpoint: Path
) -> None:
    config = replace(config, stages=(replace(STAGES[0], steps=4, lr=1.0),), env=None)
    learner, recorder = Learner(skips=(2,)), StageRecorder(Path(config.output), 1, 0)
    chat = ChatFormat(load_tokenizer(checkpoint))
    stage_command._train_stage(stage_command._Run(config, learner, chat, [], recorder, 0), 0)  # type: ignore[arg-type]
    assert learner.rates == pytest.approx([1.0, 0.775, 0.775, 0.55])


def test_overlong_episodes_are_left_out_and_counted(
    config: StageConfig, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage of days must not end by one of them, nor by the first one that is looked at."""
    firsts = [tasks("uneven-v0", "train", 0, 1, seed)[0].seed for seed in range(8)]
    assert any(seed // 2 % 3 == 0 for seed in firsts)
    config = replace(
        config,
        env=EnvConfig(id="uneven-v0"),
        stages=(Stage(context=32, steps=6, batch_tokens=256, lr=1e-3),),
        episode_fraction=1.0,
    )
    chat = ChatFormat(load_tokenizer(checkpoint))
    for seed in range(8):
        check_episodes(replace(config, seed=seed), 0, chat)
    learner, recorder = Learner(), StageRecorder(Path(config.output), 1, 0)
    stage_command._train_stage(stage_command._Run(config, learner, chat, [], recorder, 0), 0)  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (recorder.output / "metrics.jsonl").open()]
    total = sum(row["episodes_too_long"] for row in rows)
    assert len(rows) == 6 and total > 0
    assert all(len(piece) <= 32 for batch in learner.batches for piece in batch)
    line = f"stage 1: {total} episodes were longer than the context of 32 tokens, others were drawn"
    assert line in capsys.readouterr().out


def check_going_on(config: StageConfig, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run killed in its second stage goes on from the first and ends where it would have."""
    killed = finished.parent / "killed"
    (killed / "stages").mkdir(parents=True)
    shutil.copytree(finished / "stages" / "1-32", killed / "stages" / "1-32")
    (killed / "stages" / ".2-64.partial").mkdir()
    for name in ("config.yaml", "transitions.json"):
        shutil.copy(finished / name, killed)
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:20])
    with pytest.raises(UserError, match="stages of a run with another seed, env; choose another"):
        run_stages(replace(config, output=str(killed), seed=1, env=EnvConfig(id="uneven-v0")))
    run_stages(replace(config, output=str(killed)))
    assert f"goes on from {killed}/stages/1-32, 1 of 2 stages done" in capsys.readouterr().out
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").open()]
    before = [json.loads(line) for line in lines]
    assert [(r["stage"], r["step"], r["tokens"]) for r in rows] == [
        (r["stage"], r["step"], r["tokens"]) for r in before
    ]
    assert rows[:6] == before[:6]
    assert rows[6]["loss"] == pytest.approx(before[6]["loss"], rel=1e-4)  # the same batch
    record, whole = load_checkpoint(killed).stage, load_checkpoint(finished).stage
    assert (record.stages, record.tokens_seen) == (whole.stages, whole.tokens_seen)
    written = json.loads((killed / "transitions.json").read_text())
    assert len(written["transitions"]) == 1 and len(written["fixed_text"]) == 4


def test_a_run_with_a_rough_switch_is_never_a_checkpoint(config: StageConfig) -> None:
    """All stages are there, one switch was rough: fails again, as often as it is called."""
    output = killed_in_the_second_stage(config, transition(after=2.2, tokens=50))
    shutil.copytree(output / "stages" / "1-32", output / "stages" / "2-64")
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"context 128 -> 512.*more than 2%"):
            run_stages(config)
        assert not (output / "stage.json").exists() and (output / "stages" / "2-64").is_dir()


def test_a_copy_of_a_stage_is_no_stage(config: StageConfig) -> None:
    """One that counted would be gone on from, and a stage left out."""
    output = killed_in_the_second_stage(config, transition(tokens=50))
    for name in ("2-32.bak", "1-32 (copy)", "x-32", "2-y"):
        shutil.copytree(output / "stages" / "1-32", output / "stages" / name)
    assert stage_folders(output) == [output / "stages" / "1-32"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "transitions.json"])
def test_a_run_that_lost_its_figures_says_how_to_go_on(config: StageConfig, name: str) -> None:
    output = killed_in_the_second_stage(config, transition(tokens=50))
    (output / name).unlink()
    with pytest.raises(UserError, match=r"missing or damaged; go on in another .*/stages/1-32 "):
        run_stages(config)


def test_a_stage_that_ends_without_a_loss_is_not_saved(
    config: StageConfig, ray_local: None
) -> None:
    """Its one step overflows the weights, and no other follows that would show it."""
    one = Stage(context=32, steps=1, batch_tokens=32, lr=1e30)
    config = replace(config, stages=(one,), learner=LearnerConfig())
    with pytest.raises(RunFailed, match=r"^stage 1: the loss of the fixed text is not finite at"):
        run_stages(config)
    assert stage_folders(Path(config.output)) == []
    assert not (Path(config.output) / "stage.json").exists()


def test_ctrl_c_prints_the_command_that_goes_on(
    config: StageConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> Path:
        raise KeyboardInterrupt

    config = replace(config, output=f"{config.output} of two")
    output = killed_in_the_second_stage(config, transition(tokens=50))
    monkeypatch.setattr(stage_command, "_train_stages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stages(config)
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last)[-3:] == ["farhorizon", "stage", f"{output}/config.yaml"]
    assert load_config(StageConfig, shlex.split(last)[-1], []) == config


def killed_in_the_second_stage(config: StageConfig, switch: Transition) -> Path:
    """The folder of such a run, made without training; its parts are told by `check_going_on`."""
    output = Path(config.output)
    start = starting_checkpoint(config, output / "stages" / "1-32")
    for name, trained in (
        ("stage.json", {"context": 32, "stages": [32]}),
        ("config.json", {"max_position_embeddings": 32}),
    ):
        fields = json.loads((start / name).read_text())
        (start / name).write_text(json.dumps(fields | trained))
    (output / "config.yaml").write_text(dump_config(config))
    recorder = StageRecorder(output, stages=2, fixed_tokens=100)
    recorder.step(StageStep(1, 32, 1, 1, 100, 2.0, 1e-3, 1.0, 1.1, 0.0, 99.0))
    recorder.fixed_text(0, 2.0)
    recorder.fixed_text(100, 2.0)
    recorder.transition(switch)
    recorder.write()
    return output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy": "tinny"},
            "policy .*/tinny: no such folder; presets: 1b, 3b, k3, kimi-linear-48b, ",
        ),
        ({"text": "nowhere"}, "text: no such folder .*/nowhere"),
        ({"vocab_size": 268}, "vocab_size=268 is too small"),
        ({"stages": ()}, "at least one stage"),
        ({"learner": LearnerConfig(lr=1e-3)}, "learner.lr=0.001 would have no effect: each stage"),
        ({"learner": LearnerConfig(decay=0.4)}, "learner.decay=0.4 would have no effect"),
        ({"learner": LearnerConfig(minibatches=2)}, "learner.minibatches=2 would have no effect"),
        (
            {"learner": LearnerConfig(replay="rollout")},
            "learner.replay=rollout would have no effect",
        ),
        ({"stages": (replace(STAGES[0], batch_tokens=31),)}, r"stages\[0\].batch_tokens=31 .* 32"),
        ({"stages": (STAGES[1], STAGES[0])}, r"stages\[1\].context=32 is shorter"),
        (
            {"stages": (replace(STAGES[0], context=16, batch_tokens=16),)},
            r"stages\[0\]: env: a demonstration is longer than the context of 16",
        ),
        (
            {"stages": (STAGES[0], replace(STAGES[1], env_kwargs={"turns": 30}))},
            r"stages\[1\]: env: a demonstration is longer than the context of 64",
        ),
        ({"episode_fraction": 1.5}, "between 0 and 1"),
        (
            {"env": None, "stages": (replace(STAGES[0], env_kwargs={"turns": 3}),)},
            r"stages\[0\].env_kwargs={'turns': 3} would have no effect: env is null",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(config: StageConfig, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_stages(replace(config, **changes))
    assert "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_left_alone(config: StageConfig) -> None:
    with pytest.raises(UserError, match="exists and is no stage run"):
        run_stages(replace(config, output=config.text))


def test_a_new_policy_is_fit_for_nothing_yet(config: StageConfig, tmp_path: Path) -> None:
    start = load_checkpoint(starting_checkpoint(config, tmp_path / "start"))
    assert start.stage.context == 0 and len(start.tokenizer) == 300
    again = load_checkpoint(starting_checkpoint(config, tmp_path / "again"))
    assert torch.equal(start.policy.lm_head.weight, again.policy.lm_head.weight)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("small", 0.0587, 0.0421),
        ("1b", 1.116, 0.488),
        ("3b", 3.159, 1.133),
        ("k3", 2778.3, 104.2),
        ("kimi-linear-48b", 48.75, 3.11),
    ],
)
def test_policy_presets_have_the_stated_size(name: str, total: float, active: float) -> None:
    """Billions of parameters without the embedding table; published for the last two."""
    fields = json.loads((PRESETS / "policy" / f"{name}.json").read_text())
    config = PolicyConfig.from_dict(fields)
    with torch.device("meta"):
        policy = Policy(config)
    sizes = {key: p.numel() for key, p in policy.named_parameters() if "embed_tokens" not in key}
    routed = sum(size for key, size in sizes.items() if ".experts." in key)
    share = config.num_experts_per_token / config.num_experts
    assert sum(sizes.values()) / 1e9 == pytest.approx(total, rel=2e-3)
    assert (sum(sizes.values()) - routed * (1 - share)) / 1e9 == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize("name", ["quickstart", "1m"])
def test_shipped_stage_configs_are_valid(name: str) -> None:
    config = load_config(StageConfig, f"stage/{name}", ["text=stdlib"])
    contexts = [stage.context for stage in config.stages]
    assert contexts == sorted(contexts) and (PRESETS / "policy" / f"{config.policy}.json").is_file()
    assert all(stage.batch_tokens % stage.context == 0 for stage in config.stages)
    if name == "1m":
        assert contexts == [8192, 65536, 262144, 1048576]
        assert config.env is not None
        horizons = [{**config.env.kwargs, **stage.env_kwargs}["tokens"] for stage in config.stages]
        assert all(
            n <= 0.75 * stage.context for n, stage in zip(horizons, config.stages, strict=True)
        )
