"""``farhorizon stage``: train a policy through context stages.

A switch of context trains nothing and changes nothing in the policy, which has no positions: the
next batch just holds longer sequences. Two things keep it smooth. The learning rate is continuous
over all stages (linear between the values at their starts), so there is no new warm-up; and the
optimizer goes on with its state. Whether it was smooth is measured: see `Transition`.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..configs.load import dump_config, load_config
from ..configs.schema import AlgorithmConfig, Stage, StageConfig, SyncConfig
from ..configs.text import STDLIB
from ..envs.registry import resolve_plugins
from ..policy.corpus import Packed, cut
from ..policy.records import StageRecord, read_stage
from ..policy.tokenizer import ChatFormat, chat_of, load_tokenizer
from ..rl.actor import LearnerGroup
from .cluster import check_gpus, cluster
from .files import sole_user, write_whole
from .fresh import policy_presets, starting_checkpoint
from .prepare import check_writable
from .report import skipped_line
from .stage_data import check_episodes, corpus_of, fixed_text
from .stage_record import StageRecorder, StageStep, Transition, stage_folders
from .together import check_unused

SETTLING_STEPS = 4
FINAL_LR = 0.1  # of the last stage's rate, reached at its end
UNTRAINED = "0-untrained"  # the folder of a new policy, until the run is done
# A run that goes on keeps these: its data and what was trained so far follow from them.
IDENTITY = (
    *("policy", "stages", "text", "seed", "vocab_size"),
    *("chat", "env", "episode_fraction"),
)


@dataclass(slots=True)
class _Run:
    """A stage run under way."""

    config: StageConfig
    learner: LearnerGroup
    chat: ChatFormat
    fixed: list[np.ndarray]
    recorder: StageRecorder
    tokens: int  # seen so far, those of the start included

    def measure(self, context: int) -> float:
        """Loss of the fixed text in sequences of at most ``context`` tokens."""
        return self.learner.evaluate_nll(cut(self.fixed, context))


def run_stages(config: StageConfig) -> Path:
    """Train all stages; the result is the checkpoint folder ``config.output``, which is returned.

    Each stage leaves a checkpoint of its own under ``stages/`` in it; a run that was stopped goes
    on from the newest. RunFailed when a switch was not smooth: then the stages are all there is.
    """
    config = _absolute(config)
    output = Path(config.output)
    _check(config, output)
    if config.learner.gpus > 0:  # known now, not after the minutes that a new tokenizer takes
        with cluster(config.ray_address):
            check_gpus(config.ray_address, learner=config.learner)
    with sole_user(output):
        return _run_stages(config, output)


def _run_stages(config: StageConfig, output: Path) -> Path:
    """`run_stages` of a checked config, in a folder that is this process's own."""
    finished = _finished_stages(config, output)
    untrained = output / "stages" / UNTRAINED
    start = finished[-1] if finished else starting_checkpoint(config, untrained)
    record = read_stage(start)
    if not finished and config.stages[0].context < record.context:
        raise UserError(
            f"stages: the first context {config.stages[0].context} is shorter than "
            f"the {record.context} tokens that {start} was trained for"
        )
    chat = chat_of(load_tokenizer(start), record, config.chat)
    check_episodes(config, len(finished), chat)
    fixed = fixed_text(config, chat)
    stored = output / "config.yaml"
    (output / "stages").mkdir(parents=True, exist_ok=True)
    write_whole(stored, dump_config(config))
    if finished:
        print(f"stage: goes on from {start}, {len(finished)} of {len(config.stages)} stages done")
    recorder = StageRecorder(output, len(config.stages), sum(map(len, fixed)), len(finished))
    try:
        if len(finished) < len(config.stages):
            start = _train_stages(config, start, len(finished), chat, fixed, recorder)
    except KeyboardInterrupt:
        again = shlex.join(["farhorizon", "stage", str(stored)])
        print(f"stage: interrupted; what goes on from the newest stage: {again}")
        raise
    shutil.rmtree(untrained, ignore_errors=True)
    recorder.require_smooth()
    _publish(start, output)
    print(f"stage: {read_stage(output).tokens_seen} tokens; checkpoint {output}", flush=True)
    return output


def learning_rate(stages: Sequence[Stage], index: int, applied: int) -> float:
    """Rate of stage ``index`` after ``applied`` of its steps, before warm-up: linear from this
    stage's ``lr`` to the next one's, in the last stage to a tenth of it.

    Like warm-up it follows the steps that changed weights: one that was skipped moves nothing.
    """
    stage = stages[index]
    end = stages[index + 1].lr if index + 1 < len(stages) else FINAL_LR * stage.lr
    return stage.lr + (end - stage.lr) * applied / stage.steps


def _train_stages(
    config: StageConfig,
    start: Path,
    first: int,
    chat: ChatFormat,
    fixed: list[np.ndarray],
    recorder: StageRecorder,
) -> Path:
    """All stages from the 0-based ``first``, each saved at its end; the last one's checkpoint."""
    record = read_stage(start)
    with ExitStack() as stack:
        stack.enter_context(cluster(config.ray_address))
        learner = LearnerGroup(
            str(start),
            replace(config.learner, lr=config.stages[first].lr),
            AlgorithmConfig(),
            SyncConfig(),
            config.seed,
            temperature=1.0,
        )
        stack.callback(learner.close)
        run = _Run(config, learner, chat, fixed, recorder, record.tokens_seen)
        for index in range(first, len(config.stages)):
            _train_stage(run, index)
            context = config.stages[index].context
            record = StageRecord(
                context,
                (*record.stages, context),
                run.tokens,
                record.tokenizer_sha256,
                None if start.name == UNTRAINED else str(start),
                chat.record,
            )
            start = Path(config.output) / "stages" / f"{len(record.stages)}-{context}"
            learner.save_policy(start, record)
    return start


def _train_stage(run: _Run, index: int) -> None:
    """All steps of one stage, with measurements around its start and at its end."""
    stages = run.config.stages
    stage, recorder = stages[index], run.recorder
    old_context = stages[index - 1].context if index else stage.context
    switches = stage.context != old_context
    at_switch, before = run.tokens, run.measure(old_context)
    at_new_context = run.measure(stage.context) if switches else before
    recorder.fixed_text(run.tokens, at_new_context)
    after: list[float] = []
    too_long = applied = 0
    with _batches(run, index) as batches:
        for step, batch in enumerate(batches, start=1):
            run.learner.set_lr(learning_rate(stages, index, applied))
            begin = time.perf_counter()
            update = run.learner.update_nll(batch.pieces)
            seconds = time.perf_counter() - begin
            metrics = update.metrics
            applied += not update.skipped
            if update.bad_tensor is not None:
                print(f"stage step {step}: {skipped_line(update)}", flush=True)
            size = sum(len(piece) for piece in batch.pieces)
            run.tokens += size
            recorder.step(
                StageStep(
                    index + 1,
                    stage.context,
                    step,
                    stage.steps,
                    run.tokens,
                    metrics["loss"],
                    metrics["lr"],
                    metrics["grad_norm"],
                    metrics["expert_load_max"],
                    metrics["skipped_steps"],
                    size / seconds,
                    batch.too_long,
                )
            )
            too_long += batch.too_long
            if switches and step in (1, min(SETTLING_STEPS, stage.steps)):
                after.append(run.measure(old_context))
    if too_long:
        print(
            f"stage {index + 1}: {too_long} episodes were longer than the context of "
            f"{stage.context} tokens, others were drawn instead",
            flush=True,
        )
    at_end = run.measure(stage.context)
    recorder.fixed_text(run.tokens, at_end)
    if switches:
        recorder.transition(
            Transition(
                old_context, stage.context, at_switch, before, at_new_context, after[0], after[-1]
            )
        )
    recorder.write()
    if not math.isfinite(at_end):
        raise RunFailed(
            f"stage {index + 1}: the loss of the fixed text is not finite at its end, so it is not "
            "saved; lower its lr"
        )


@contextmanager
def _batches(run: _Run, index: int) -> Iterator[Iterator[Packed]]:
    """The batches of a stage; the next one is made while the learner works on the last.

    What a batch holds depends on the seed and the number of tokens seen before it.
    """
    stage = run.config.stages[index]
    sequences = stage.batch_tokens // stage.context
    seen = [run.tokens + step * sequences * stage.context for step in range(stage.steps)]
    with corpus_of(run.config, index, run.chat, "train") as corpus, ThreadPoolExecutor(1) as pool:

        def make(step: int) -> Future[Packed]:
            return pool.submit(corpus.batch, seen[step], stage.context, sequences)

        def ahead() -> Iterator[Packed]:
            made = make(0)
            for step in range(stage.steps):
                batch = made.result()
                if step + 1 < stage.steps:
                    made = make(step + 1)
                yield batch

        yield ahead()


def _publish(folder: Path, output: Path) -> None:
    """Make ``output`` itself the last stage's checkpoint, sharing its files.

    ``config.json`` and ``stage.json`` come last: without them a folder is no checkpoint.
    """
    last = ("config.json", "stage.json")
    files = sorted(folder.iterdir(), key=lambda file: (file.name in last, file.name))
    for file in files:
        target = output / file.name
        target.unlink(missing_ok=True)
        try:
            os.link(file, target)
        except OSError:  # a file system without hard links
            shutil.copy2(file, target)


def _finished_stages(config: StageConfig, output: Path) -> list[Path]:
    """`stage_folders` of this run; UserError if those in ``output`` are of another."""
    folders = stage_folders(output)
    if not folders:
        return []
    before = load_config(StageConfig, str(output / "config.yaml"), [])
    other = [key for key in IDENTITY if getattr(before, key) != getattr(config, key)]
    if other:
        raise UserError(
            f"output {output}: holds stages of a run with another {', '.join(other)}; "
            "choose another output"
        )
    return folders


def _absolute(config: StageConfig) -> StageConfig:
    """The same run for processes in other folders, and for whoever goes on with it from one."""
    preset, stdlib = config.policy in policy_presets(), config.text == STDLIB
    return replace(
        config,
        policy=config.policy if preset else str(Path(config.policy).resolve()),
        text=config.text if stdlib else str(Path(config.text).expanduser().absolute()),
        output=str(Path(config.output).absolute()),
        env=None if config.env is None else resolve_plugins(config.env),
    )


def _check(config: StageConfig, output: Path) -> None:
    check_bounds(config)
    reason = "each stage has its own lr, and a batch is one optimizer step"
    check_unused("learner", config.learner, ["lr", "decay", "minibatches"], reason)
    check_unused("learner", config.learner, ["replay"], "a batch of text has no rollout")
    if not config.stages:
        raise UserError("stages: give at least one stage")
    for number, stage in enumerate(config.stages):
        if stage.batch_tokens < stage.context:
            raise UserError(
                f"stages[{number}].batch_tokens={stage.batch_tokens} must be at least "
                f"{stage.context}, one sequence"
            )
        if number and stage.context < config.stages[number - 1].context:
            raise UserError(
                f"stages[{number}].context={stage.context} is shorter than that of "
                "the stage before; contexts only grow"
            )
        if config.env is None and stage.env_kwargs:
            raise UserError(
                f"stages[{number}].env_kwargs={stage.env_kwargs} would have no effect: env is null"
            )
    if (output / "stage.json").exists():
        raise UserError(f"output {output}: holds a finished checkpoint; choose another output")
    if (
        output.exists()
        and not (output / "stages").is_dir()
        and (not output.is_dir() or any(output.iterdir()))
    ):
        raise UserError(f"output {output}: exists and is no stage run; choose another output")
    check_writable(output)
