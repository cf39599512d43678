"""Bad input of a run is found before Ray starts, in one line each."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from farhorizon.configs.benchmarks import BenchConfig
from farhorizon.configs.errors import UserError
from farhorizon.configs.load import dump_config, load_config, override_config
from farhorizon.configs.schema import EnvConfig, SftConfig, Stage, StageConfig, TrainConfig
from farhorizon.launch import checkpoints
from farhorizon.launch.bench import bench_grpo
from farhorizon.launch.checkpoints import RunState
from farhorizon.launch.evaluate import evaluate
from farhorizon.launch.prepare import find_checkpoint, prepare
from farhorizon.launch.sft import run_sft
from farhorizon.launch.stage import run_stages
from farhorizon.launch.together import check_together, rollout_of, sync_of
from farhorizon.rl.algorithms import ALGORITHMS, make_algorithm
from farhorizon.rollout.engines import build


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        policy=str(checkpoint),
        output=str(tmp_path / "run"),
        context=64,
        env=EnvConfig(id="echo-v0"),
    )


def save_run(config: TrainConfig, step: int) -> Path:
    """A checkpoint of a run as the loop leaves it."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    state = RunState(step, step * 8, dump_config(config))
    return checkpoints.save(folder, state, lambda f: shutil.copytree(config.policy, f) and None, 2)


def test_fresh_run(config: TrainConfig, checkpoint: Path) -> None:
    run = prepare(config)
    assert (run.step, run.tasks, run.saved, run.notes) == (0, 0, None, [])
    assert run.checkpoint == checkpoint
    assert run.stage.tokens_seen == 1000
    assert not run.folder.exists()


def test_plugins_are_found_from_any_folder(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "any_folder.py").write_text("")
    monkeypatch.chdir(tmp_path)
    env = EnvConfig(id="echo-v0", plugins=("any_folder.py", "json"))
    run = prepare(replace(config, env=env))
    assert run.config.env.plugins == (str((tmp_path / "any_folder.py").resolve()), "json")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy=/nosuch", "/nosuch: no such folder"),
        ("env.id=ecko-v0", r"env\.id 'ecko-v0' is not registered .*echo-v0"),
        (
            "algorithm.tau=0.1",
            r"algorithm\.tau=0\.1 would have no effect with algorithm\.name=grpo",
        ),
        ("env.kwargs.turn=2", "unknown argument 'turn'.*turns"),
        ("env.plugins=[nosuch.py]", r"env\.plugins: no such file"),
        ("context=65", "context=65 is longer than the 64 tokens"),
        ("context=6", r"context=6 is too small: the first prompt of echo-v0 has \d+ tokens"),
        ("resume=required", "resume=required: .* has no complete checkpoint"),
        ("group_size=0", "group_size=0 must be at least 1"),
        ("group_size=1", r"^group_size=1 must be at least 2 with algorithm\.name=grpo, which comp"),
        (
            "group_size=1 groups_per_step=1 algorithm.name=reinforce_pp",
            r"^groups_per_step=1 must be at least 2 with group_size=1 and algorithm\.name=reinf",
        ),
        ("learner.replay=learner", r"learner.replay=learner would have no effect: .*minibatches"),
        (
            "learner.minibatches=9",
            r"learner\.minibatches=9 would have no effect above the 8 groups .*groups_per_step$",
        ),
        (
            "algorithm.extra_rounds=1 learner.minibatches=17",
            r"learner\.minibatches=17 would have no effect above the 16 groups",
        ),
        (
            "group_size=1 algorithm.name=ppo algorithm.length_reward=0.5",
            r"algorithm\.length_reward=0\.5 would have no effect: it compares siblings",
        ),
        (
            "algorithm.extra_rounds=1 algorithm.distill=1 teachers=[{policy: nowhere}]",
            r"algorithm\.extra_rounds=1 would have no effect: teachers\.0 teaches every task",
        ),
        (
            "algorithm.name=rloo learner.minibatches=2",
            r"^learner\.minibatches=2 does not go with algorithm\.name=rloo, .*no ratio .*: set "
            r"algorithm\.correction=token_truncate, or learner\.minibatches=1$",
        ),
        (
            "algorithm.name=reinforce max_staleness=1",
            r"^max_staleness=1 does not go with algorithm\.name=reinforce, .*or max_staleness=0$",
        ),
        ("keep=0", "keep=0 must be at least 1"),
        (
            "rollout.vllm.memory=0.5",
            r"rollout\.vllm\.memory=0\.5 would have no effect: needs rollout\.engine=vllm",
        ),
        ("rollout.engine=sglang", r"rollout\.engine .*'sglang' is not one of native, vllm"),
        ("rollout.keep_states=1", "keep_states=1 would have no effect: needs max_staleness"),
        ("sync.in_flight=wait", "sync.in_flight=wait would have no effect: needs max_staleness"),
        ("rollout.temperature=0", r"rollout\.temperature=0\.0 must be at least 0\.001"),
        ("output=/dev/null", "output /dev/null: /dev/null is not a directory"),
        ("output=/dev/null/run", "output /dev/null/run: /dev/null is not a directory"),
        (f"output={'a' * 300}", "output .*a: File name too long; choose another output"),
        (r'output="a\0b"', "output .*: embedded null byte; choose another output"),
        (f"policy={'a' * 300}", "a: no such folder"),
    ],
)
def test_bad_input_is_one_line(config: TrainConfig, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare(override_config(config, settings(override)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "learner.replay=learner learner.minibatches=2",
        "learner.minibatches=8",
        "algorithm.extra_rounds=1 learner.minibatches=16",
        "algorithm.name=dapo learner.minibatches=24",
        "algorithm.length_reward=0.5",
        "algorithm.name=rloo",
        "group_size=1 groups_per_step=1 algorithm.name=reinforce_pp algorithm.credit=turn",
        "group_size=1 groups_per_step=1 algorithm.name=ppo",
        "algorithm.name=rloo learner.minibatches=2 max_staleness=1 algorithm.correction=icepop",
        "max_staleness=1",
    ],
)
def test_what_goes_together_passes(config: TrainConfig, given: str) -> None:
    prepare(override_config(config, settings(given)))


def settings(text: str) -> list[str]:
    return re.split(r" (?=[a-z_.]+=)", text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "learner.replay=rollout",
            r"^learner\.replay=rollout would .* the policy has no experts; leave it out$",
        ),
        ("learner.thresholds=freeze", r"^learner\.thresholds=freeze would .* no experts; leave it"),
        ("learner.thresholds=ema learner.threshold_decay=0.5", r"^learner\.thresholds=ema would"),
        (
            "learner.router_lr=2",
            r"^learner\.router_lr=2\.0 would .* the policy has no experts",
        ),
        ("learner.attnres_lr=0", r"^learner\.attnres_lr=0\.0 would .* has no mixture over depth"),
    ],
)
def test_settings_of_parts_that_the_policy_lacks(
    config: TrainConfig, tmp_path: Path, given: str, message: str
) -> None:
    prepare(override_config(config, settings(given)))
    folder = tmp_path / "plain"
    shutil.copytree(config.policy, folder)
    content = json.loads((folder / "config.json").read_text())
    content |= {"first_k_dense_replace": 99, "attn_res_block_size": None}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        prepare(override_config(replace(config, policy=str(folder)), settings(given)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"^sync\.canary_tokens=64 must be below context=64 with rollout\.engine=vllm"),
        (
            ["learner.replay=rollout"],
            r"^learner\.replay=rollout needs routes, which vLLM does not record on a CPU; set",
        ),
        (
            ["sync.canary_tokens=8"],
            r"^rollout\.engine=vllm computes in fp32 on a CPU: set rollout\.vllm\.dtype=float32",
        ),
        *(
            (["sync.canary_tokens=8", "rollout.vllm.sleep=true", *shares.split()], named)
            for shares, named in (
                ("", "learner.gpus=0 and rollout.gpus=0: set shares"),
                ("learner.gpus=1 rollout.gpus=1", "learner.gpus=1 and rollout.gpus=1: set"),
                ("learner.gpus=0.5", "learner.gpus=0.5 and rollout.gpus=0: set shares"),
                ("rollout.gpus=0.5", "learner.gpus=0 and rollout.gpus=0.5: set shares"),
                ("learner.gpus=0.6 rollout.gpus=0.6", "rollout.gpus=0.6: set shares that add up"),
                (
                    "learner.gpus=0.5 rollout.gpus=0.5 rollout.actors=2",
                    "rollout.gpus=0.5: set shares that add up to 1 over all ranks and actors",
                ),
                (
                    "learner.gpus=0.5 rollout.gpus=0.5 max_staleness=1",
                    r"sleep=true does not go with max_staleness=1, with which episodes are played",
                ),
            )
        ),
    ],
)
def test_what_vllm_does_not_go_with(
    config: TrainConfig, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(override_config(config, ["rollout.engine=vllm", *overrides]))


@pytest.mark.parametrize(
    ("wanted", "learner", "rollout", "fits"),
    [
        ("collective", "gpus=0", "gpus=0", True),
        ("collective", "gpus=1", "gpus=1", True),
        ("collective", "gpus=0", "gpus=1", False),
        ("collective", "gpus=1", "gpus=0", False),
        ("collective", "gpus=0.5", "gpus=0.5", False),
        ("ipc", "gpus=0.5", "gpus=0.5", True),
        ("ipc", "gpus=0", "gpus=0", False),
        ("ipc", "gpus=1", "gpus=1", False),
        ("ipc", "gpus=0.5", "gpus=0.6", False),
        ("objects", "gpus=0", "gpus=1", True),
        ("auto", "gpus=0", "gpus=1", True),
        ("collective", "gpus=1", "gpus=2", True),
        ("ipc", "gpus=1", "gpus=2", False),
    ],
)
def test_a_transport_that_cannot_be_is_one_line(
    config: TrainConfig, wanted: str, learner: str, rollout: str, fits: bool
) -> None:
    given = [f"sync.transport={wanted}", f"learner.{learner}", f"rollout.{rollout}"]
    own = override_config(config, given)
    if fits:
        return check_together(own)
    with pytest.raises(
        UserError, match=rf"^sync\.transport={wanted} needs .*sync\.transport=auto$"
    ):
        check_together(own)


def test_ipc_is_not_for_an_engine_over_several_gpus(config: TrainConfig) -> None:
    """On a cluster, whose machines may have what is not installed here."""
    given = ["rollout.engine=vllm", "rollout.gpus=2", "rollout.vllm.tensor_parallel=2"]
    given += ["learner.gpus=1", "ray_address=auto", "sync.canary_tokens=8"]
    check_together(override_config(config, given))
    message = r"^sync\.transport=ipc needs .* rollout\.vllm\.tensor_parallel=2 has more: set sync"
    with pytest.raises(UserError, match=message):
        check_together(override_config(config, [*given, "sync.transport=ipc"]))


@pytest.mark.parametrize(("actors", "fits"), [(3, True), (4, False)])
def test_shares_of_a_gpu_count_for_each_actor(config: TrainConfig, actors: int, fits: bool) -> None:
    own = override_config(
        config,
        [
            *("sync.transport=ipc", "learner.gpus=0.7", "rollout.gpus=0.1"),
            f"rollout.actors={actors}",
        ],
    )
    if fits:
        return check_together(own)
    with pytest.raises(UserError, match="add up to 1"):
        check_together(own)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_one_line(config: TrainConfig) -> None:
    given = ["rollout.engine=vllm", "rollout.gpus=1", "sync.canary_tokens=8"]
    with pytest.raises(UserError, match=r"^rollout\.engine=vllm: vllm is not installed here; see"):
        prepare(override_config(config, given))
    engine = replace(config.rollout, engine="vllm", gpus=1.0)
    with pytest.raises(UserError, match=r"^vllm cannot be imported here \(No module named"):
        build(config.policy, engine, 64, 0, config.chat)
    with pytest.raises(UserError, match=r"^rollout\.engine=vllm has no images; use"):
        build(config.policy, engine, 64, 0, config.chat, images=True)


def test_the_tolerance_of_the_canary_follows_the_engine(config: TrainConfig) -> None:
    assert sync_of(config).canary_tolerance is None  # which the publisher knows
    served = override_config(config, ["rollout.engine=vllm"])
    assert sync_of(served).canary_tolerance == 0.5
    assert sync_of(override_config(served, ["rollout.vllm.dtype=float32"])) == config.sync
    given = override_config(served, ["sync.canary_tolerance=0.1"])
    assert sync_of(given).canary_tolerance == 0.1
    for native in (["rollout.gpus=1", "learner.dtype=bfloat16"], ["rollout.dtype=bfloat16"]):
        assert sync_of(override_config(config, native)).canary_tolerance == 0.5
    assert sync_of(override_config(config, ["rollout.gpus=1"])) == config.sync


def test_on_a_gpu_the_native_engine_computes_as_the_learner(config: TrainConfig) -> None:
    for given, expected in (
        ([], None),
        (["rollout.gpus=1"], "float32"),
        (["rollout.gpus=1", "learner.dtype=bfloat16"], "bfloat16"),
        (["rollout.gpus=1", "rollout.dtype=bfloat16"], "bfloat16"),
        (["rollout.gpus=1", "rollout.engine=vllm"], None),
    ):
        made = override_config(config, given)
        assert rollout_of(made.rollout, made.learner).dtype == expected


def test_the_dtype_of_the_native_engine_is_none_of_vllm(config: TrainConfig) -> None:
    given = ["rollout.engine=vllm", "rollout.gpus=1", "sync.canary_tokens=8"]
    with pytest.raises(UserError, match=r"^rollout\.dtype=float32 would have no effect: it is of"):
        prepare(override_config(config, [*given, "rollout.dtype=float32"]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_group_of_one_is_allowed_where_siblings_are_not_compared(
    config: TrainConfig, name: str
) -> None:
    config = override_config(config, ["group_size=1", f"algorithm.name={name}"])
    if name in ("ppo", "reinforce_pp"):
        assert prepare(config).config.group_size == 1
    else:
        with pytest.raises(UserError, match=f"^group_size=1 .*algorithm.name={name}, which"):
            prepare(config)
    advantages = make_algorithm(config.algorithm).advantages
    if advantages is not None:
        alone = advantages(torch.tensor([0.0, 1.0, 3.0]), torch.arange(3))
        assert bool(alone.any()) == (name == "reinforce_pp")


def test_context_may_be_longer_when_told(config: TrainConfig) -> None:
    assert prepare(replace(config, context=65, allow_longer_context=True)).config.context == 65


@pytest.mark.parametrize("field", ["hidden_size", "linear_attn_config", "kv_lora_rank"])
def test_checkpoint_without_a_field_names_it(
    config: TrainConfig, tmp_path: Path, field: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(config.policy, folder)
    content = json.loads((folder / "config.json").read_text())
    del content[field]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"config\.json: missing {field}"):
        prepare(replace(config, policy=str(folder)))


def test_resume_takes_the_newest_complete_checkpoint(config: TrainConfig) -> None:
    config = prepare(config).config  # with absolute paths, as a run stores it
    save_run(config, 1)
    newest = save_run(config, 2)
    torn = save_run(config, 3)
    (torn / "run.json").write_text("")
    run = prepare(config)
    assert (run.step, run.tasks) == (2, 16)
    assert run.checkpoint == newest
    assert run.notes == [f"skipped incomplete checkpoint {torn}"]
    assert find_checkpoint(config.output) == newest
    with pytest.raises(UserError, match="already holds a run and resume=never"):
        prepare(replace(config, resume="never"))


def test_changed_settings_are_told_and_another_task_is_refused(config: TrainConfig) -> None:
    config = prepare(config).config
    save_run(config, 1)
    with pytest.raises(UserError, match=r"^algorithm\.name=ppo needs a critic, and .* has none; "):
        prepare(override_config(config, ["algorithm.name=ppo"]))
    run = prepare(override_config(config, ["steps=50", "learner.lr=1e-3"]))
    assert run.notes == [
        "settings changed since the last run: steps: 20 -> 50",
        "settings changed since the last run: learner.lr: 1e-06 -> 0.001",
    ]
    with pytest.raises(UserError, match="holds a run with another seed: 0 -> 1"):
        prepare(replace(config, seed=1))
    with pytest.raises(UserError, match=r"with another learner.optimizer: adamw -> muon; choose"):
        prepare(override_config(config, ["learner.optimizer=muon"]))


def test_an_edited_config_file_is_compared_with_what_was_run(config: TrainConfig) -> None:
    """The file in the run folder is the one that the resume line names, and may be edited."""
    config = prepare(config).config
    save_run(config, 1)
    stored = Path(config.output) / "config.yaml"
    stored.write_text(dump_config(replace(config, save_every=3)))
    assert prepare(load_config(TrainConfig, str(stored), [])).notes == [
        "settings changed since the last run: save_every: 10 -> 3"
    ]
    stored.write_text(dump_config(replace(config, seed=1)))
    with pytest.raises(UserError, match="holds a run with another seed: 0 -> 1"):
        prepare(load_config(TrainConfig, str(stored), []))


def test_a_folder_of_other_files_is_no_output(config: TrainConfig) -> None:
    """Their config.yaml and metrics.jsonl would be overwritten."""
    folder = Path(config.output)
    folder.mkdir()
    prepare(config)
    (folder / "config.yaml").write_text("mine: 1\n")
    with pytest.raises(UserError, match=f"^output {folder}: holds other files and no run; choose"):
        prepare(config)


ODD = """
import time

from farhorizon.envs import MessageEnv, register
from farhorizon.envs.types import Message


class Odd(MessageEnv):
    success_threshold = None if __name__ == "none" else 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        if __name__ == "slow":
            time.sleep(3600)
        if __name__ == "quits":
            raise SystemExit(3)
        return (Message("user", " red"),), {}

    def close(self):
        if __name__ == "unclosed":
            raise RuntimeError("no")


register("odd-v0", Odd)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "slow",
            r"^env\.id odd-v0: reset failed: EnvTimeout: reset took .*=0\.5 \(slow\.py, line 14\)$",
        ),
        ("quits", r"^env\.id odd-v0: reset failed: SystemExit: 3 \(quits\.py, line 16\)$"),
        ("none", r"^environment Odd: success_threshold must be a number, got None"),
        ("unclosed", ""),  # what an episode forgives is no mistake here
    ],
)
def test_an_environment_that_cannot_be_used_is_found_before_ray_starts(
    config: TrainConfig, tmp_path: Path, name: str, message: str
) -> None:
    plugin = tmp_path / f"{name}.py"
    plugin.write_text(ODD)
    rollout = replace(config.rollout, env_timeout_s=0.5)
    config = replace(config, env=EnvConfig(id="odd-v0", plugins=(str(plugin),)), rollout=rollout)
    if not message:
        prepare(config)
        return
    with pytest.raises(UserError, match=message):
        prepare(config)


def test_a_run_goes_on_from_its_own_start_only(config: TrainConfig, tmp_path: Path) -> None:
    """New weights in an old output would be ignored: the run's own are the ones that go on."""
    save_run(prepare(config).config, 1)
    assert prepare(config).step == 1
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(config.policy)
    assert prepare(replace(config, policy=str(link))).step == 1
    shutil.copytree(config.policy, other)
    with pytest.raises(UserError, match=r"holds a run with another policy: .* -> .*/other; choose"):
        prepare(replace(config, policy=str(other)))


def test_a_start_inside_another_run_stays_known(config: TrainConfig, tmp_path: Path) -> None:
    first = prepare(config).config
    save_run(first, 1)
    second = replace(config, policy=config.output, output=str(tmp_path / "second"))
    stored = prepare(second).config
    save_run(stored, 1)
    assert prepare(second).step == 1  # as it was given
    assert prepare(stored).step == 1  # as the resume line gives it


def test_output_is_no_checkpoint(config: TrainConfig) -> None:
    with pytest.raises(UserError, match="is a checkpoint folder; choose another output"):
        prepare(replace(config, output=config.policy))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_is_writable(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="locked is not writable"):
        prepare(replace(config, output=str(tmp_path / "locked" / "run")))


@pytest.mark.parametrize("command", ["stage", "sft", "eval", "bench"])
def test_every_command_looks_at_its_output_before_it_works(
    config: TrainConfig, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    output = str(tmp_path / "file" / "out.json")
    with pytest.raises(UserError, match=r"file is not a directory; choose another output$"):
        if command == "stage":
            one = Stage(context=32, steps=1, batch_tokens=32, lr=1e-3)
            run_stages(StageConfig(policy="tiny", text="stdlib", output=output, stages=(one,)))
        elif command == "sft":
            warm_up = SftConfig(policy=config.policy, env=config.env, output=output, context=32)
            run_sft(warm_up)
        elif command == "eval":
            evaluate(config.policy, ["env.id=echo-v0", f"output={output}"])
        else:
            bench_grpo(BenchConfig(output=output))


def test_resume_needs_no_starting_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(config.policy, start)
    config = prepare(replace(config, policy=str(start))).config
    save_run(config, 4)
    shutil.rmtree(start)
    assert prepare(config).step == 4


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a checkpoint nor a run folder"):
        find_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)
