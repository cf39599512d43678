"""The training loop: evaluate, then rollout, update, publish, record until the steps are done.

Synchronous training is ``max_staleness = 0`` of the same loop: one batch in flight. Sampling is
keyed by run seed, task and sibling, and a checkpoint holds weights, optimizer and the number of
tasks used up, so a resumed synchronous run repeats what an uninterrupted one would have done.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..configs.errors import RunFailed
from ..configs.load import dump_config
from ..configs.schema import TrainConfig
from ..envs.registry import tasks
from ..rl.actor import LearnerGroup
from ..rl.types import UpdateResult
from ..rollout.pool import RolloutPool
from ..rollout.staleness import fresh, stale_tokens
from ..rollout.types import Group, RolloutStats
from . import checkpoints
from .checkpoints import Found
from .cluster import check_gpus, cluster
from .evaluate import measure
from .files import sole_user
from .flat import flat_line
from .interrupt import GivenUp, exit_code, uninterrupted
from .prepare import Run, check_unchanged, prepare
from .progress import Display
from .record import Recorder, read_rows
from .report import (
    Evaluation,
    closing_lines,
    context_line,
    curve_points,
    cut_by_context,
    evaluate_line,
    kinds_line,
    resume_line,
    rounds_line,
    skipped_line,
    unchanged_line,
)
from .together import rollout_of, sync_of


@dataclass(frozen=True, slots=True)
class Played:
    """The rollout of a step: all groups, what of them is not too old, and the rounds it took."""

    groups: list[Group]
    fresh: list[Group]
    stats: RolloutStats
    rounds: int

    @property
    def tokens(self) -> int:
        """Tokens of all trajectories, given ones too."""
        return sum(len(t.token_ids) for group in self.groups for t in group.trajectories)


@dataclass(frozen=True, slots=True)
class Job:
    """A run at work: what is known of it, and the processes that do it."""

    run: Run
    pool: RolloutPool
    learner: LearnerGroup
    recorder: Recorder
    display: Display


def train(config: TrainConfig) -> int:
    """Run or resume a training job; the exit code: 0, or 130 or 143 when it was interrupted."""
    run = prepare(config)
    for note in run.notes:
        print(note)
    if run.step >= run.config.steps and not _evaluation_due(run):
        print(
            f"{run.folder}: finished with {run.step} steps, 0 steps to do; steps=N goes further, "
            f"{evaluate_line(run.folder, run.config.env.plugins)} evaluates it"
        )
        return 0
    config = run.config
    with ExitStack() as stack:
        stack.enter_context(sole_user(run.folder))
        check_unchanged(run)
        stack.enter_context(cluster(config.ray_address))
        check_gpus(config.ray_address, config.rollout, config.learner)
        recorder = Recorder(run.folder, dump_config(config), run.step)
        stack.callback(recorder.close)
        display = stack.enter_context(Display(run.config.steps, run.step))
        job: Job | None = None
        try:
            job = _start(run, recorder, display, stack)
            result = _play(job)
        except KeyboardInterrupt as stop:
            if job is None:
                display.line("interrupted while it started, with nothing new to save")
                _way_on(run, display)
            else:
                _stop(job, stop)
            return exit_code()
    recorder.curve(force=True)
    if (unchanged := unchanged_line(recorder.rows)) is not None:
        print(unchanged)
    before, _ = curve_points(recorder.rows)
    first = before[0] if before and before[0].step == 0 else None
    assert run.saved is not None
    plugins = config.env.plugins
    ends = (None if point is None else point.success for point in (first, result))
    if (cause := flat_line(recorder.rows, *ends)) is not None:
        print(f"flat        {cause}")
    for line in closing_lines(first, result, run.folder, run.saved.folder, run.step, plugins):
        print(line)
    return 0


def _start(run: Run, recorder: Recorder, display: Display, stack: ExitStack) -> Job:
    """Start the processes and give the rollout side the learner's weights, proven equal."""
    config = run.config
    with display.phase("start"):
        learner = LearnerGroup(
            str(run.checkpoint),
            config.learner,
            config.algorithm,
            sync_of(config),
            config.seed,
            config.rollout.temperature,
            run.vision,
            config.reference or config.policy,
            config.teachers,
        )
        stack.callback(learner.close)
        if config.rollout.engine == "vllm" and 0 < config.rollout.gpus < 1:
            learner.ready()  # vLLM takes what is allocated while it starts for its own
        pool = RolloutPool(
            str(run.checkpoint),
            config.env,
            rollout_of(config.rollout, config.learner),
            config.context,
            config.seed,
            record_routes=config.learner.replay == "rollout",
            chat=config.chat,
            in_flight=config.sync.in_flight,
            tell=display.line,
        )
        stack.callback(pool.close)
        if run.saved is not None:
            learner.load(run.saved.folder / "state")
            display.line(f"resumed {run.saved.folder}: {run.step} of {config.steps} steps done")
        pool.sync(learner)
    return Job(run, pool, learner, recorder, display)


def _loop(job: Job) -> Evaluation | None:
    """All steps that are left; the final evaluation."""
    run, config, display = job.run, job.run.config, job.display
    if config.eval_episodes and (run.step == 0 or _evaluation_missed(run)):
        _evaluate(job)
    in_flight: deque[list] = deque()
    while run.step < config.steps:
        with display.phase("rollout"):
            played = _rollout(job, in_flight)
        # From here to the record the step is one piece: Ctrl-C waits.
        with uninterrupted("finishing the step, then saving"):
            with display.phase("learn"):
                job.pool.sleep()
                job.learner.set_lr(learning_rate(config, job.learner.version))
                update = job.learner.update(played.fresh)
            # The learner has left the step before: what is saved from here on is this step.
            run.advance(played.rounds * config.groups_per_step, played.tokens)
            try:
                if not update.skipped:
                    with display.phase("sync"):
                        job.pool.sync(job.learner)
            finally:  # weights that cannot be sent are saved all the same
                _record(job, played, update)
        last = run.step == config.steps
        if last or (config.save_every and run.step % config.save_every == 0):
            with uninterrupted("finishing the checkpoint, then stopping"):
                _save(job)
        due = not last and config.eval_every and run.step % config.eval_every == 0
        if due and config.eval_episodes:
            _evaluate(job)
    return _evaluate(job) if config.eval_episodes else None


def _rollout(job: Job, in_flight: deque[list]) -> Played:
    """The next batch, and those after it while too few of their groups can be learned from.

    A round more is the batch that would have been the next step's, so that the order of tasks
    stays the same however many rounds a step takes.
    """
    run, config, pool = job.run, job.run.config, job.pool
    assert pool.version is not None
    groups: list[Group] = []
    parts: list[RolloutStats] = []
    while True:
        ahead = min(1 + config.max_staleness, config.steps - run.step)
        while len(in_flight) < ahead:
            start = run.tasks + (len(parts) + len(in_flight)) * config.groups_per_step
            batch = tasks(config.env.id, "train", start, config.groups_per_step, config.seed)
            in_flight.append(pool.submit(batch, config.group_size))
        more, stats = pool.collect(in_flight.popleft())
        groups += more
        parts.append(stats)
        kept = fresh(groups, pool.version.number, config.max_staleness)
        if len(parts) > job.learner.algorithm.extra_rounds or (
            job.learner.teaching(kept) >= config.groups_per_step
        ):
            break
    seconds = sum(part.seconds for part in parts)
    return Played(groups, kept, replace(RolloutStats.merge(parts), seconds=seconds), len(parts))


def learning_rate(config: TrainConfig, version: int) -> float:
    """Rate after warm-up of the step on weights of ``version``: constant, then linear to a tenth.

    Like warm-up it follows the updates that changed weights: a step that did not moves nothing.
    """
    decaying = config.learner.decay * config.steps
    left = (config.steps - version) / decaying if decaying else 1.0
    return config.learner.lr * min(1.0, max(0.1, left))


def _evaluation_due(run: Run) -> bool:
    """Whether the step that the run has reached still has to be evaluated."""
    heldout, _ = curve_points(read_rows(run.folder / "metrics.jsonl"))
    measured = any(point.step == run.step for point in heldout)
    return run.config.eval_episodes > 0 and not measured


def _evaluation_missed(run: Run) -> bool:
    """Whether a run was stopped between a checkpoint and the evaluation of its step."""
    every = run.config.eval_every
    within = every > 0 and run.step % every == 0 and run.step < run.config.steps
    return within and _evaluation_due(run)


def _play(job: Job) -> Evaluation | None:
    """The loop; a failure in it keeps the steps that are done."""
    try:
        return _loop(job)
    except Exception:
        _rescue(job)
        raise


def _stop(job: Job, stop: KeyboardInterrupt) -> None:
    """Save an interrupted run, unless its step was given up unfinished; say how to go on."""
    run, display = job.run, job.display
    given_up = isinstance(stop, GivenUp)
    folder, why = (None, "") if given_up else _last_save(job, "saving, then stopping")
    if folder is not None:
        display.line(f"interrupted after step {run.step}, saved {folder}")
        display.line(f"resume      {resume_line(run.folder, run.config.steps)}")
    else:
        display.line(f"stopped at once after step {run.step}, not saved{why}")
        _way_on(run, display)


def _rescue(job: Job) -> None:
    """Save the finished steps of a failing run, as far as that can be done; say how to go on."""
    run, display = job.run, job.display
    if run.step > 0:
        folder, why = _last_save(job, "saving the finished steps")
        outcome = f"saved {folder}" if folder else f"not saved{why or ': interrupted'}"
        display.line(f"failed after step {run.step}, {outcome}")
    _way_on(run, display)


def _last_save(job: Job, title: str) -> tuple[Path | None, str]:
    """Save a run that ends here: its checkpoint, or None and why there is none (nothing where it
    was interrupted again). What goes wrong matters less than what the run ends for."""
    folder: Path | None = None
    why = ""
    try:
        if not job.learner.actors:
            raise RunFailed("the learner has ended, and with it the weights")
        with uninterrupted(title):
            folder = _save(job)
    except KeyboardInterrupt:  # before, while or after it was saved
        pass
    except Exception as error:
        why = ": " + next(iter(str(error).splitlines()), type(error).__name__)
    return folder, why


def _way_on(run: Run, display: Display) -> None:
    """The newest complete checkpoint, and the command that goes on from it or begins again."""
    found = checkpoints.newest(run.folder)
    display.line(f"checkpoint  {found.folder if found else 'none is complete yet'}")
    again = "resume " if found else "restart"
    display.line(f"{again}     {resume_line(run.folder, run.config.steps)}")


def _record(job: Job, played: Played, result: UpdateResult) -> None:
    """Write the finished step to the run folder and show it."""
    run, display = job.run, job.display
    groups, stats, tokens = played.groups, played.stats, played.tokens
    stale = len(groups) - len(played.fresh)
    episodes = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in episodes if t.reward is not None]
    # As the learner counts them: of groups that were not stale, and by its idea of equal rewards.
    fresh, flat = (result.metrics[n] for n in ("groups", "groups_without_variance"))
    nothing = 0 < fresh == result.metrics["groups_left_out"]
    seconds = display.take_seconds()
    total = sum(seconds.get(name, 0.0) for name in ("rollout", "learn", "sync"))
    success = sum(t.success for t in episodes) / len(rewards) if rewards else math.nan
    if played.rounds > 1:
        wanted = run.config.groups_per_step
        display.line(f"step {run.step}: {rounds_line(played.rounds, result, wanted)}")
    if nothing:
        display.line(f"step {run.step}: no group had reward variance, nothing to learn from")
    if result.bad_tensor is not None:
        display.line(f"step {run.step}: {skipped_line(result)}")
    elif result.skipped and not nothing:
        display.line(f"step {run.step}: update skipped, weights stay at version {result.version}")
    if stats.errors or stale:
        error = next((f"; first error: {t.error.splitlines()[0]}" for t in episodes if t.error), "")
        display.line(
            f"step {run.step}: {stats.errors} failed episodes, {stale} stale groups{error}"
        )
    if (cut := context_line(groups, run.config.context)) is not None:
        display.line(f"step {run.step}: {cut}")
    if run.step == 1 and (unmet := kinds_line(groups, run.config)) is not None:
        display.line(f"step 1: {unmet}")
    job.recorder.metrics(
        run.step,
        {
            "train/success": success,
            "train/reward": sum(rewards) / len(rewards) if rewards else math.nan,
            "train/rounds": played.rounds,
            "train/groups": len(groups),
            "train/groups_without_variance": flat,
            "train/groups_stale": stale,
            "train/tokens_stale": stale_tokens(groups, played.fresh),
            "train/cut": cut_by_context(groups),
            "train/tokens": tokens,
            "train/tokens_per_second": tokens / max(total, 1e-9),
            "train/version": result.version,
            "train/actors_restarted": job.pool.restarted,
            "train/update_skipped": int(result.skipped),
            **{f"rollout/{name}": value for name, value in asdict(stats).items()},
            **{f"learn/{name}": value for name, value in result.metrics.items()},
            **{f"sync/{n}": value for n, value in job.pool.times.items() if not result.skipped},
            **{f"seconds/{name}": value for name, value in seconds.items()},
        },
    )
    job.recorder.rollouts(run.step, groups, run.tokenizer)
    job.recorder.curve()
    display.step(run.step, total, tokens / max(total, 1e-9), success)


def _evaluate(job: Job) -> Evaluation:
    """Held-out success of the current weights, into the metrics of the current step."""
    config, run = job.run.config, job.run
    with job.display.phase("evaluate"):
        result, groups = measure(job.pool, config.env, config.eval_episodes, config.seed, "")
    seconds = job.display.take_seconds()
    names = ("success", "ci_low", "ci_high", "episodes", "errors", "turns_mean", "tokens_mean")
    job.recorder.metrics(
        run.step,
        {
            **{f"eval/{name}": getattr(result, name) for name in names},
            "seconds/evaluate": seconds["evaluate"],
        },
    )
    job.recorder.rollouts(run.step, groups, run.tokenizer, kind="heldout")
    job.recorder.curve(force=True)
    job.display.line(f"step {run.step}/{config.steps}  held-out success {result}")
    if (cut := context_line(groups, config.context)) is not None:
        job.display.line(f"step {run.step}: {cut}")
    return result


def _save(job: Job) -> Path:
    """A complete checkpoint of this moment."""
    run = job.run
    if run.saved is not None and run.saved.state.step == run.step:
        return run.saved.folder

    def write(folder: Path) -> None:
        job.learner.save_policy(folder, replace(run.stage, parent=run.config.policy))
        job.learner.save(folder / "state")

    with job.display.phase("save"):
        folder = checkpoints.save(run.folder, run.state, write, run.config.keep)
    run.saved = Found(folder, run.state)
    job.pool.checkpoint = str(folder)
    return folder
