"""The training loop on stand-ins for its processes: what it asks for, tells and saves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.load import dump_config
from farhorizon.configs.schema import AlgorithmConfig, EnvConfig, LearnerConfig, TrainConfig
from farhorizon.envs.types import StopReason, Task
from farhorizon.launch import train
from farhorizon.launch.checkpoints import RunState, newest, save
from farhorizon.launch.interrupt import GivenUp
from farhorizon.launch.prepare import prepare
from farhorizon.launch.progress import Display
from farhorizon.launch.record import Recorder
from farhorizon.launch.report import curve_points, unchanged_line
from farhorizon.policy.weights import PolicyVersion
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import samples_of_groups
from farhorizon.rl.types import UpdateResult
from farhorizon.rollout.types import Group, RolloutStats, Segment, Trajectory

NOTHING = {"groups": 1.0, "groups_without_variance": 1.0, "groups_left_out": 1.0}


class Pool:
    """Plays nothing; ``failing`` is the number of the batch that fails."""

    def __init__(self, failing: int | None = None) -> None:
        self.version = PolicyVersion(0, "")
        self.submitted: list[str] = []
        self.failing, self.collected, self.synced = failing, 0, 0
        self.checkpoint, self.restarted = "", 0
        self.times: dict[str, float] = {}
        self.slept: list[tuple[int, int, int]] = []  # batches submitted, collected, and syncs

    def sleep(self) -> None:
        self.slept.append((len(self.submitted), self.collected, self.synced))

    def submit(self, tasks: Sequence[Task], group_size: int) -> list[str]:
        self.submitted.append(tasks[0].id)
        return []

    def collect(self, refs: Sequence[Any]) -> tuple[list[Group], RolloutStats]:
        self.collected += 1
        if self.collected == self.failing:
            raise RunFailed("9 of 9 episodes failed")
        return [], RolloutStats()

    def sync(self, learner: Learner) -> None:
        self.synced += 1
        learner.published.append(learner.version)
        self.times = {"bytes": 7.0 + self.synced}


class Learner:
    """Applies one optimizer step of two, but none in the updates ``skips``; ``actors`` is empty
    once it has failed, in the update of number ``stops_at``."""

    actors: tuple[None, ...] = (None,)
    stops_at: int | None = None
    skips: Sequence[int] = ()
    version = 0

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = make_algorithm(algorithm)
        self.rates: list[float] = []
        self.published: list[int] = []

    def set_lr(self, lr: float) -> None:
        self.rates.append(lr)

    def update(self, groups: Sequence[Group]) -> UpdateResult:
        if len(self.rates) == self.stops_at:
            self.actors = ()
            raise RunFailed("learner: 3 optimizer steps in a row had a gradient that is not finite")
        skipped = len(self.rates) in self.skips
        self.version += not skipped
        metrics = {"groups": 2.0, "groups_without_variance": 1.0, "groups_left_out": 1.0}
        return UpdateResult({"skipped_steps": 1.0, **metrics}, self.version, skipped, "mix.weight")

    def save_policy(self, folder: Path, stage: Any) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def save(self, folder: Path) -> None:
        folder.mkdir()


def played(groups: list[Group], stale: int = 0, errors: int = 0, rounds: int = 1) -> train.Played:
    """A rollout whose first ``stale`` groups are too old."""
    return train.Played(groups, groups[stale:], RolloutStats(errors=errors), rounds)


def two_tokens(task: str, reward: float, version: int = 0, sibling: int = 0) -> Trajectory:
    two = np.zeros(2, np.int32)
    sampled = Segment(two, True, np.zeros(2, np.float32), two + version)
    stop = StopReason.TERMINATED
    return Trajectory(task, sibling, (sampled,), (reward,), reward, False, stop, 1)


Start = Callable[..., train.Job]


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    recorders = []

    def make(pool: Pool, **changes: Any) -> train.Job:
        config = TrainConfig(
            policy=str(checkpoint),
            output=str(tmp_path / "run"),
            context=64,
            steps=3,
            groups_per_step=2,
            eval_episodes=0,
            save_every=0,
            env=EnvConfig(id="echo-v0"),
        )
        run = prepare(replace(config, **changes))
        recorders.append(Recorder(run.folder, dump_config(run.config), 0))
        actors: Any = pool
        learner: Any = Learner(run.config.algorithm)
        return train.Job(run, actors, learner, recorders[-1], Display(run.config.steps))

    yield make
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_no_batch_is_played_that_no_step_needs(start: Start, ahead: int) -> None:
    pool = Pool()
    train._loop(start(pool, max_staleness=ahead))
    assert pool.submitted == [f"echo-v0/train/{index}" for index in (0, 2, 4)]


def test_engines_sleep_before_each_update_and_after_all_that_is_played(start: Start) -> None:
    """Steps of 2, 3 and 1 rounds; the second one has no sync."""
    pool = Uneven([1, 2, 0, 0, 1, 2, 0])
    job = start(pool, algorithm=AlgorithmConfig(name="dapo", extra_rounds=2))
    learner: Any = job.learner
    learner.skips = [2]
    advantages = make_algorithm(AlgorithmConfig()).advantages
    learner.teaching = lambda groups: len(samples_of_groups(groups, advantages)[0])
    train._loop(job)
    assert pool.slept == [(2, 2, 0), (5, 5, 1), (6, 6, 1)] and pool.synced == 2


class Uneven(Pool):
    """Batches of two groups of which the given numbers have reward variance."""

    def __init__(self, teaching: Sequence[int]) -> None:
        super().__init__()
        self.teaching = teaching

    def collect(self, refs: Sequence[Any]) -> tuple[list[Group], RolloutStats]:
        flat = 2 - self.teaching[self.collected]
        self.collected += 1
        names = [f"{self.collected}{letter}" for letter in "ab"]
        groups = [
            Group(name, tuple(two_tokens(name, float(i and at >= flat), 0, i) for i in range(2)))
            for at, name in enumerate(names)
        ]
        return groups, RolloutStats(episodes=4, seconds=2.0)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("algorithm", [{"name": "dapo"}, {"name": "grpo", "extra_rounds": 2}])
def test_rollout_goes_on_until_enough_groups_teach_or_the_bound(
    start: Start, capsys: pytest.CaptureFixture[str], ahead: int, algorithm: dict[str, Any]
) -> None:
    """Rounds of 2, 3 (the bound, one group short) and 1: each task is played once, in order."""
    pool = Uneven([1, 2, 0, 0, 1, 2, 0])
    job = start(pool, max_staleness=ahead, algorithm=AlgorithmConfig(**algorithm))
    learner: Any = job.learner
    update, seen = learner.update, []

    def kept(groups: Sequence[Group]) -> int:
        return len(samples_of_groups(groups, make_algorithm(AlgorithmConfig()).advantages)[0])

    def learn(groups: Sequence[Group]) -> UpdateResult:
        seen.append((len(groups), kept(groups)))
        counts = {"groups": len(groups), "groups_without_variance": len(groups) - kept(groups)}
        result = update(groups)
        return replace(result, metrics={**result.metrics, **counts})

    learner.teaching, learner.update = kept, learn
    train._loop(job)
    assert seen == [(4, 3), (6, 1), (2, 2)]
    assert pool.submitted == [f"echo-v0/train/{index}" for index in range(0, 12, 2)]
    assert job.run.tasks == 12 and job.run.state.tasks == 12
    rows = job.recorder.rows
    assert [row["train/rounds"] for row in rows] == [2, 3, 1]
    assert [row["rollout/episodes"] for row in rows] == [8, 12, 4]
    assert [row["rollout/seconds"] for row in rows] == [4.0, 6.0, 2.0]
    told = [line for line in capsys.readouterr().out.splitlines() if "rounds of rollout" in line]
    assert told == [
        "step 1: 2 rounds of rollout, 3 of 4 groups had reward variance",
        "step 2: 3 rounds of rollout, 1 of 6 groups had reward variance, 2 wanted: raise "
        "algorithm.extra_rounds",
    ]


@pytest.mark.parametrize(("allowed", "learned"), [(0, ["new"]), (1, ["older", "new"])])
def test_a_group_that_is_too_old_is_dropped_and_counted(
    start: Start, capsys: pytest.CaptureFixture[str], allowed: int, learned: list[str]
) -> None:
    pool: Any = Pool()
    pool.version = PolicyVersion(4, "")
    ages = {"oldest": 2, "older": 3, "new": 4}
    groups = [Group(name, (two_tokens(name, 0.0, version),)) for name, version in ages.items()]
    pool.collect = lambda refs: (groups, RolloutStats())
    job = start(pool, steps=1, max_staleness=allowed)
    learner: Any = job.learner
    update, seen = learner.update, []
    learner.update = lambda groups: seen.extend(g.task_id for g in groups) or update(groups)
    train._loop(job)
    assert seen == learned
    assert job.recorder.rows[-1]["train/groups_stale"] == 3 - len(learned)
    assert job.recorder.rows[-1]["train/tokens_stale"] == 2 * (3 - len(learned))
    assert f"0 failed episodes, {3 - len(learned)} stale groups" in capsys.readouterr().out


def test_the_rate_falls_over_the_last_share_of_the_steps(start: Start) -> None:
    job = start(Pool(), steps=8, learner=LearnerConfig(lr=2.0, decay=0.5))
    train._loop(job)
    learner: Any = job.learner
    assert learner.rates == [2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    config = job.run.config
    assert train.learning_rate(replace(config, steps=100), 99) == 0.2  # a tenth, never 0
    constant = replace(config, learner=LearnerConfig(lr=2.0))
    assert {train.learning_rate(constant, step) for step in range(8)} == {2.0}


def test_a_skipped_step_moves_neither_the_rate_nor_the_weights_of_the_rollout(
    start: Start,
) -> None:
    """C14: the schedule stands, nothing is published; the run goes on."""
    pool = Pool()
    job = start(pool, steps=8, learner=LearnerConfig(lr=2.0, decay=0.5))
    learner: Any = job.learner
    learner.skips = (2, 7)
    train._loop(job)
    assert learner.rates == [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.5]
    assert pool.synced == 6


def test_nothing_is_published_after_a_skipped_step(start: Start) -> None:
    """C14: the rollout side keeps the version it has."""
    pool = Pool()
    job = start(pool, steps=4)
    learner: Any = job.learner
    learner.skips = (2, 3)
    train._loop(job)
    assert learner.published == [1, 2] and pool.synced == 2
    assert [row.get("sync/bytes") for row in job.recorder.rows] == [8.0, None, None, 9.0]
    assert [row["train/version"] for row in job.recorder.rows] == [1, 1, 1, 2]
    assert [row["train/update_skipped"] for row in job.recorder.rows] == [0, 1, 1, 0]


def test_a_skipped_minibatch_is_told(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """C14: also when other minibatches of the step were applied."""
    train._loop(start(Pool(), steps=1))
    line = "step 1: gradient of mix.weight is not finite, 1 optimizer steps skipped"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rewards", "stale", "line"),
    [
        # the same three rewards, added in another order
        ((0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1), 0, "no group had reward variance, nothing to learn"),
        ((0.0, 1.0), 1, "update skipped, weights stay at version 0"),
    ],
)
def test_rewards_are_equal_when_the_learner_says_so(
    start: Start,
    capsys: pytest.CaptureFixture[str],
    rewards: tuple[float, float],
    stale: int,
    line: str,
) -> None:
    assert rewards[0] != rewards[1]
    job = start(Pool())
    job.run.step = 1
    pair = tuple(two_tokens("t", reward, sibling=i) for i, reward in enumerate(rewards))
    groups = [Group("t", pair)]
    kept, counts = samples_of_groups(groups[stale:], make_algorithm(AlgorithmConfig()).advantages)
    assert kept == []
    result = UpdateResult(counts.metrics(), 0, skipped=True)
    train._record(job, played(groups, stale=stale), result)
    assert f"step 1: {line}" in capsys.readouterr().out.splitlines()[0]
    assert job.recorder.rows[-1]["train/groups_without_variance"] == 1 - stale


def test_a_critic_that_learns_from_equal_rewards_is_not_told_to_learn_nothing(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(Pool())
    pair = tuple(
        Trajectory("t", i, (), (1.0,), 1.0, True, StopReason.TERMINATED, 1) for i in (0, 1)
    )
    result = UpdateResult({**NOTHING, "groups_left_out": 0.0}, 1, skipped=False)
    job.run.step = 1
    train._record(job, played([Group("t", pair)]), result)
    assert "nothing to learn" not in capsys.readouterr().out
    assert job.recorder.rows[-1]["train/groups_without_variance"] == 1


def test_a_failed_episode_is_told_with_its_place(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(Pool())
    error = "KeyError: 'no' (my_envs.py, line 5)\nTraceback"
    failed = Trajectory("t", 0, (), (), None, False, StopReason.ERROR, 0, error)
    result = UpdateResult(NOTHING, 0, skipped=True)
    train._record(job, played([Group("t", (failed,))], errors=1), result)
    line = "1 failed episodes, 0 stale groups; first error: KeyError: 'no' (my_envs.py, line 5)"
    assert f"step 0: {line}" in capsys.readouterr().out.splitlines()


def test_a_step_whose_episodes_all_failed_has_no_reward(start: Start) -> None:
    job = start(Pool(), steps=1)
    failed = Trajectory("t", 0, (), (), None, False, StopReason.ERROR, 0, "gone")
    result = UpdateResult(NOTHING, 0, skipped=True)
    job.run.step = 1
    train._record(job, played([Group("t", (failed,))], errors=1), result)
    (row,) = job.recorder.rows
    assert row["train/reward"] is row["train/success"] is None
    assert curve_points([row]) == ([], [])
    assert "0 of 1 steps changed the policy" in str(unchanged_line([row]))


def test_a_step_that_cannot_be_sent_is_recorded_and_saved(start: Start) -> None:
    pool: Any = Pool()
    job = start(pool)

    def refused(learner: Learner) -> None:
        raise RunFailed("the digest of lm_head.weight differs")

    pool.sync = refused
    with pytest.raises(RunFailed, match="digest"):
        train._play(job)
    assert [row["step"] for row in job.recorder.rows] == [1]
    assert (job.run.folder / "rollouts" / "step-1.jsonl").exists()
    found = newest(job.run.folder)
    assert found is not None and found.state.step == 1


BUSY = """
from pathlib import Path

from farhorizon.envs import register
from farhorizon.envs.echo import Echo
from farhorizon.launch.checkpoints import RunState, newest, save


class Busy(Echo):
    \"\"\"Another process finishes a step of the run while this one looks at its environment.\"\"\"

    def __init__(self, run):
        super().__init__()
        self.run = Path(run)

    def reset(self, **keywords):
        if newest(self.run) is None:
            save(self.run, RunState(1, 2, ""), self.fill, 1)
            (self.run / "metrics.jsonl").write_text("mine")
        return super().reset(**keywords)

    def fill(self, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")


register("busy-v0", Busy)
"""


def test_a_run_that_went_on_meanwhile_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    plugin, run = tmp_path / "busy_plugin.py", tmp_path / "run"
    plugin.write_text(BUSY)
    env = EnvConfig(id="busy-v0", kwargs={"run": str(run)}, plugins=(str(plugin),))
    config = TrainConfig(policy=str(checkpoint), output=str(run), context=64, steps=3, env=env)
    with pytest.raises(UserError, match=f"^output {run}: another process worked in it meanwhile"):
        train.train(config)
    found = newest(run)
    assert found is not None and found.state.step == 1
    assert (run / "metrics.jsonl").read_text() == "mine"


def test_the_checkpoint_of_another_process_is_not_taken_for_the_runs_own(start: Start) -> None:
    job = start(Pool(), steps=1, save_every=1)
    folder = job.run.folder
    learner: Any = job.learner
    save(folder, RunState(1, 2, ""), lambda path: learner.save_policy(path, None), 1)
    with pytest.raises(RunFailed, match="another process has saved this step meanwhile"):
        train._play(job)
    found = newest(folder)
    assert found is not None and found.state.config == ""


def test_a_context_that_cuts_most_episodes_is_told(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(Pool())
    job.run.step = 1
    cut = Trajectory("t", 0, (), (0.0,), 0.0, False, StopReason.CONTEXT_LIMIT, 1)
    result = UpdateResult(NOTHING, 0, skipped=True)
    train._record(job, played([Group("t", (cut, cut))]), result)
    line = "step 1: 2 of 2 episodes did not fit: raise context (now 64)"
    assert line in capsys.readouterr().out.splitlines()


def test_a_failure_keeps_the_finished_steps(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(Pool(failing=3))
    with pytest.raises(RunFailed, match="9 of 9 episodes failed"):
        train._play(job)
    found = newest(job.run.folder)
    assert found is not None and (found.state.step, found.state.tasks) == (2, 4)
    text = capsys.readouterr().out
    assert f"failed after step 2, saved {found.folder}" in text
    assert f"farhorizon train {job.run.folder}/config.yaml steps=3" in text


@pytest.mark.parametrize(("save_every", "newest_step"), [(2, 2), (0, None)])
def test_a_learner_that_stops_the_run_leaves_a_way_on(
    start: Start, capsys: pytest.CaptureFixture[str], save_every: int, newest_step: int | None
) -> None:
    """Its end takes the weights along: what is left is the newest checkpoint, or none."""
    job = start(Pool(), steps=9, save_every=save_every)
    learner: Any = job.learner
    learner.stops_at = 4
    with pytest.raises(RunFailed, match="3 optimizer steps in a row"):
        train._play(job)
    found = newest(job.run.folder)
    assert (found.state.step if found else None) == newest_step
    lines = capsys.readouterr().out.splitlines()[-3:]
    command = f"farhorizon train {job.run.folder}/config.yaml steps=9"
    assert lines[0].startswith("failed after step 3, not saved: the learner has ended")
    assert lines[1] == f"checkpoint  {found.folder if found else 'none is complete yet'}"
    assert lines[2] == ("resume      " if found else "restart     ") + command


def test_a_failure_before_the_first_step_leaves_no_run_behind(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start(Pool(failing=1))
    with pytest.raises(RunFailed):
        train._play(job)
    assert newest(job.run.folder) is None
    assert capsys.readouterr().out.splitlines() == [
        "checkpoint  none is complete yet",
        f"restart     farhorizon train {job.run.folder}/config.yaml steps=3",
    ]


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_step_that_is_given_up_is_not_saved(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, three times: the learner may be ahead of the step that is counted."""
    job = start(Pool(), save_every=1)
    learner: Any = job.learner
    update = learner.update

    def stuck(groups: Sequence[Group]) -> UpdateResult:
        for _ in range(3 if job.run.step == 2 else 0):
            press()
        return update(groups)

    learner.update = stuck
    with pytest.raises(GivenUp) as stopped:
        train._play(job)
    train._stop(job, stopped.value)
    found = newest(job.run.folder)
    assert found is not None and found.state.step == 2
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "stopped at once after step 2, not saved",
        f"checkpoint  {found.folder}",
        f"resume      farhorizon train {job.run.folder}/config.yaml steps=3",
    ]


def test_a_folder_that_cannot_be_written_ends_the_run_and_names_the_file(start: Start) -> None:
    job = start(Pool())
    (job.run.folder / "rollouts").rmdir()
    (job.run.folder / "rollouts").touch()
    with pytest.raises(OSError) as caught:
        train._play(job)
    assert str(caught.value.filename).startswith(str(job.run.folder / "rollouts"))


def test_a_stop_that_cannot_save_leaves_a_way_on(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal to the whole group ends the ranks as well; a disk may be full."""
    job = start(Pool(), save_every=1)
    train._play(job)
    found = newest(job.run.folder)
    assert found is not None
    learner: Any = job.learner
    learner.actors = []
    train._stop(job, KeyboardInterrupt())
    why = "the learner has ended, and with it the weights"
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"stopped at once after step {job.run.step}, not saved: {why}",
        f"checkpoint  {found.folder}",
        f"resume      farhorizon train {job.run.folder}/config.yaml steps=3",
    ]


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_while_a_failing_run_is_saved_hides_no_failure(
    start: Start, capsys: pytest.CaptureFixture[str], presses: int
) -> None:
    job = start(Pool(failing=2))
    learner: Any = job.learner
    save = learner.save

    def slow(folder: Path) -> None:
        for _ in range(presses):
            press()
        save(folder)

    learner.save = slow
    with pytest.raises(RunFailed, match="9 of 9 episodes failed"):
        train._play(job)
    found = newest(job.run.folder)
    assert (found is not None) == (presses < 3)
    outcome = f"saved {found.folder}" if found else "not saved: interrupted"
    assert capsys.readouterr().out.splitlines()[-3] == f"failed after step 1, {outcome}"


def test_ctrl_c_before_it_is_saved(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start(Pool(), steps=1)
    learner: Any = job.learner

    def early(folder: Path, stage: Any) -> None:
        raise KeyboardInterrupt

    learner.save_policy = early
    train._stop(job, KeyboardInterrupt())
    assert capsys.readouterr().out.splitlines()[0] == "stopped at once after step 0, not saved"


@pytest.mark.parametrize("presses", [0, 1, 3])
def test_ctrl_c_while_it_is_saved(
    start: Start, capsys: pytest.CaptureFixture[str], presses: int
) -> None:
    job = start(Pool(), steps=1, save_every=0)
    learner: Any = job.learner
    save = learner.save

    def slow(folder: Path) -> None:
        for _ in range(presses):
            press()
        save(folder)

    learner.save = slow
    train._stop(job, KeyboardInterrupt())
    lines = capsys.readouterr().out.splitlines()
    found = newest(job.run.folder)
    if presses < 3:
        assert found is not None
        assert lines[0] == f"interrupted after step 0, saved {found.folder}"
        assert lines[1].startswith("resume      farhorizon train ")
    else:
        assert found is None
        assert lines[0] == "stopped at once after step 0, not saved"
        assert lines[1:2] == ["checkpoint  none is complete yet"]


def test_a_missed_final_evaluation_is_due(start: Start) -> None:
    job = start(Pool(), steps=1)
    train._loop(job)
    assert not train._evaluation_due(job.run)  # none was asked for
    asked = replace(job.run, config=replace(job.run.config, eval_episodes=8))
    assert train._evaluation_due(asked)
    values = {"eval/success": 0.5, "eval/ci_low": 0.2, "eval/ci_high": 0.8}
    job.recorder.metrics(1, values)
    assert not train._evaluation_due(asked)


def test_an_interrupt_while_a_run_starts_prints_the_way_on(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> train.Job:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "cluster", lambda _: nullcontext())
    monkeypatch.setattr(train, "check_gpus", lambda *_: None)
    monkeypatch.setattr(train, "_start", interrupted)
    run = tmp_path / "run"
    config = TrainConfig(
        policy=str(checkpoint), output=str(run), context=64, steps=3, env=EnvConfig(id="echo-v0")
    )
    assert train.train(config) == 130
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "interrupted while it started, with nothing new to save",
        "checkpoint  none is complete yet",
        f"restart     farhorizon train {run}/config.yaml steps=3",
    ]
