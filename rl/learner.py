"""One rank of the learner: forward, loss, backward, step, routing thresholds, metrics.

The routing thresholds are part of the policy but not of its gradient. Their statistics come from
the training forwards of one optimizer step and from nothing else: backward (which may recompute
forwards), scoring and evaluation run outside of the counting context, padding batches too. Under
routing replay they come from a forward of their own, which routes freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..configs.errors import RunFailed, UserError
from ..configs.schema import LearnerConfig
from ..kernels.device import upload
from ..policy.images import Placed
from ..policy.qk_clip import clip_factors, forget, logit_maxima, watched_logits
from ..policy.routing import Routes
from ..policy.thresholds import ThresholdRule, make_rule
from .algorithms import LossFunction
from .critic import Critic, Judged, judge, whiten_over_ranks, with_values
from .deterministic import prepare, same_bits
from .diagnostics import StepMetrics, Tally, loads, over_steps, stacked, tally
from .engine import Engine
from .memory import enough_memory
from .penalties import to_go
from .reference import Reference
from .replay import Replay
from .teachers import Taught, Teachers
from .types import LossOutput, MicroBatch, Share, UpdateResult

DECAY = 0.9  # of thresholds that follow an average


@dataclass(frozen=True, slots=True)
class Rows:
    """Log-probs and entropy of the trained tokens of a micro-batch, [R], and values if there is a
    head for them; of one dummy token in padding."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class Before:
    """What was said of a micro-batch before the update: log-probs of its trained tokens [R] by the
    policy, by the reference and by teachers, what a critic made of their rewards, or what to add to
    their advantages, and the routes, if they are to be replayed."""

    logprobs: Tensor | None = None
    judged: Judged | None = None
    reference: Tensor | None = None
    bonus: Tensor | None = None
    routes: Routes | None = None
    taught: Taught | None = None


class Learner:
    """Optimizer steps on packed micro-batches; every rank calls every method, in the same order."""

    def __init__(
        self,
        policy: torch.nn.Module,
        config: LearnerConfig,
        temperature: float,
        reference: Reference | None = None,
        teachers: Teachers | None = None,
        replay: Replay | None = None,
    ) -> None:
        prepare(config)
        self.reference, self.teachers = reference, teachers
        self.engine = Engine(policy, config)
        self.policy: _Policy = policy  # type: ignore[assignment]
        self.config = config
        self.temperature = temperature
        self.version = 0
        self.skipped_in_a_row = 0
        self.threshold_version = 0  # steps that set the routing thresholds
        decay = DECAY if config.threshold_decay is None else config.threshold_decay
        self.policy.threshold_rule = make_rule(config.thresholds, decay)
        if config.qk_clip is not None and not logit_maxima(policy):
            raise UserError(
                f"learner.qk_clip={config.qk_clip:g} would have no effect: the policy has no "
                "latent attention; leave it out"
            )
        self.replay = Replay(policy, config) if replay is None else replay
        self.policy.checkpointing = config.checkpointing

    def update(
        self,
        steps: Sequence[Share],
        loss: LossFunction,
        decoupled: bool = False,
        critic: Critic | None = None,
    ) -> UpdateResult:
        """One optimizer step per share of this rank; metrics are those of the applied steps, or of
        all where none was (`over_steps`). ``log_ratio_first`` is that of the first step, before any
        of them changed the weights. A ``decoupled`` loss gets
        the log-probs of the policy before the first step as well. A ``critic`` gives advantages
        from the rewards of the micro-batches, and learns with the policy.

        A step whose gradient is not finite changes nothing: weights, moments, learning rate
        schedule, thresholds and version stay. RunFailed after ``max_skipped_steps`` of them in
        a row.
        """
        taken: list[StepMetrics] = []
        bad_tensor: str | None = None
        same = self.config.deterministic
        before: Sequence[Sequence[Before | None]]
        # With a single step the forward that learns gives the log-probs itself.
        proximal = (decoupled and len(steps) > 1) or self.replay.wants_pass_before(len(steps))
        others = self.reference is not None or self.teachers is not None
        if critic is not None or others or proximal:
            with same_bits(same), enough_memory(self.engine.policy, steps, self.config):
                before = self._before(steps, critic, proximal)
        else:
            before = [[None] * len(share.micro_batches) for share in steps]
        for share, known in zip(steps, before, strict=True):
            with same_bits(same), enough_memory(self.engine.policy, [share], self.config):
                step, bad = self._optimizer_step(share, loss, known, critic)
            taken.append(step)
            bad_tensor = bad_tensor or bad
        applied = [step for step in taken if step.applied]
        self.version += bool(applied)
        result = over_steps(applied or taken)
        result["optimizer_steps"] = len(taken)
        result["skipped_steps"] = len(taken) - len(applied)
        if "log_ratio_abs" in taken[0].means:
            result["log_ratio_first"] = taken[0].means["log_ratio_abs"]
        return UpdateResult(result, self.version, not applied, bad_tensor)

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Log-probs of tokens 1..n-1 of one sequence at the run's temperature, fp32 [n - 1].

        Never counted; in the precision of an update.
        """
        ids = torch.as_tensor(np.array(token_ids, np.int64), device=self.engine.device)
        rows = torch.arange(len(ids) - 1, device=ids.device)
        edges = torch.tensor([0, len(ids)], dtype=torch.int32)
        narrow = torch.autocast(
            self.engine.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"
        )
        with torch.no_grad(), narrow:
            out = self.engine.policy(
                ids[None], edges, rows=rows, targets=ids[1:], temperature=self.temperature
            )
        return out.logprobs.float().cpu().numpy()

    def evaluate(self, share: Share) -> float:
        """Mean negative log-likelihood per trained token over all ranks, in nats."""
        total = torch.zeros(1, dtype=torch.float64, device=self.engine.device)
        with torch.no_grad(), enough_memory(self.engine.policy, [share], self.config):
            for batch in share.micro_batches:
                logprobs = self._forward(batch, last=False).logprobs
                if not batch.padding:
                    total -= logprobs.double().sum()
        self.engine.all_reduce([total])
        return float(total) / share.denominator

    def _before(
        self, steps: Sequence[Share], critic: Critic | None, proximal: bool
    ) -> list[list[Before]]:
        """What is known before the update of each micro-batch, uncounted and without gradient;
        log-probs of the policy for a critic, or if they are wanted as ``proximal`` ones."""
        with torch.no_grad():
            known = [
                [self._known(b, critic, proximal) for b in share.micro_batches] for share in steps
            ]
        if critic is None:
            return known
        own = [b.judged for part in known for b in part if b.judged is not None]
        white = iter(whiten_over_ranks(own, self.engine.all_reduce, self.engine.device))
        return [
            [replace(b, judged=None if b.judged is None else next(white)) for b in part]
            for part in known
        ]

    def _known(self, batch: MicroBatch, critic: Critic | None, proximal: bool) -> Before:
        positions = _positions(batch)
        reference = rewards = bonus = None
        if self.reference is not None:
            reference, rewards = self.reference.score(batch, positions)
        if critic is None and rewards is not None:
            bonus = to_go(rewards, self._tensor(batch.sequence_ids[positions]))
        taught = None if self.teachers is None else self.teachers.score(batch, positions)
        if critic is None and not proximal:
            return Before(None, None, reference, bonus, taught=taught)
        count = len(positions)
        more = None if critic is None else batch.cu_seqlens[1:] - 1
        out, routes = self.replay.first_pass(
            batch, lambda: self._forward(batch, last=False, more=more)
        )
        if critic is None:
            return Before(out.logprobs, None, reference, bonus, routes, taught)
        assert out.values is not None, "a critic needs a value head"
        judged = None
        if not batch.padding:
            judged = judge(batch, out.values[:count], out.values[count:], critic, rewards)
        return Before(out.logprobs[:count], judged, reference, routes=routes)

    def _optimizer_step(
        self,
        share: Share,
        loss: LossFunction,
        before: Sequence[Before | None],
        critic: Critic | None,
    ) -> tuple[StepMetrics, str | None]:
        outputs: list[LossOutput] = []
        tally = Tally.empty(self.engine.device)
        passed = before[0] is not None and before[0].logprobs is not None
        replaying = self.replay.active(passed)
        for number, (batch, known) in enumerate(zip(share.micro_batches, before, strict=True)):
            last = number == len(share.micro_batches) - 1
            routes = self.replay.routes(batch, None if known is None else known.routes)
            if replaying and self.replay.counts(number):
                self.replay.count_free(batch, routes, lambda b=batch: self._forward(b, last=False))
            with self.replay.taking(routes):  # in backward too, which may compute forwards again
                with ExitStack() as counting:
                    if not batch.padding:
                        counting.enter_context(self.policy.routing_statistics())
                        if self.config.qk_clip is not None:
                            counting.enter_context(watched_logits(self.engine.policy))
                    out = self._forward(batch, last)
                output, advantages = self._loss(batch, out, loss, share, known, critic)
                tally = tally.joined(self._tally(batch, out, advantages))
                self.engine.backward(output.loss)
            outputs.append(output)
        means, metrics = self._reduced(outputs)
        compared = bool(outputs[0].maxima)
        if compared:
            self.engine.all_reduce([tally.ranges, tally.spread])
            self.engine.all_reduce([tally.highest], "max")
        metrics["lr"] = self.engine.scheduled_lr()
        result = self.engine.step()
        metrics["grad_norm"] = result.grad_norm
        metrics |= {f"grad_norm_{part}": norm for part, norm in result.part_norms.items()}
        metrics["skipped_steps"] = float(not result.applied)
        if result.applied:
            self.skipped_in_a_row = 0
            self.engine.all_reduce(self.policy.routing_counts())
            if replaying:
                metrics |= loads("replayed_load", self.policy.replayed_loads())
            metrics |= loads("expert_load", self.policy.update_thresholds())
            self.threshold_version += self.config.thresholds != "freeze"
        else:
            self.policy.clear_routing_counts()
            metrics["expert_load_max"] = float("nan")
            self._skipped(result.bad_tensor)
        if self.config.qk_clip is not None:
            metrics |= self._clip_logits(self.config.qk_clip, result.applied)
        told = StepMetrics(share.denominator, means, metrics, tally if compared else None)
        return told, result.bad_tensor

    def _clip_logits(self, threshold: float, applied: bool) -> dict[str, float]:
        """Scale heads whose largest logit of the step was above ``threshold``, if it was applied;
        that logit, at least 0, and the number of such heads."""
        maxima = logit_maxima(self.engine.policy)
        self.engine.all_reduce(maxima, "max")
        heads = torch.cat(maxima)
        if applied:
            self.engine.scale_rows(clip_factors(self.engine.policy, threshold))
        forget(self.engine.policy)
        clipped = int((heads > threshold).sum()) if applied else 0
        return {"attention_logit_max": float(heads.max()), "clipped_heads": clipped}

    def _skipped(self, bad_tensor: str | None) -> None:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise RunFailed(
                f"learner: {self.skipped_in_a_row} optimizer steps in a row had a gradient that "
                f"is not finite, first in {bad_tensor}, and learner.max_skipped_steps is "
                f"{self.config.max_skipped_steps}; lower learner.lr or look at the rewards"
            )

    def _forward(self, batch: MicroBatch, last: bool, more: np.ndarray | None = None) -> Rows:
        """Forward of a micro-batch; ``more`` are rows whose values follow those of its tokens."""
        ids = self._tensor(batch.input_ids)
        rows = self._tensor(_positions(batch) - 1)
        targets = ids[rows + 1]
        if more is not None:
            rows = torch.cat([rows, self._tensor(more).to(rows.dtype)])
            targets = torch.cat([targets, targets.new_zeros(len(more))])
        out = self.engine.forward(
            ids[None],
            torch.tensor(batch.cu_seqlens),
            rows=rows,
            targets=targets,
            temperature=self.temperature,
            last=last,
            **self.policy.image_inputs(batch.images),
        )
        return Rows(out.logprobs, out.entropy, getattr(out, "value", None))

    def _loss(
        self,
        batch: MicroBatch,
        out: Rows,
        loss: LossFunction,
        share: Share,
        before: Before | None,
        critic: Critic | None,
    ) -> tuple[LossOutput, Tensor]:
        """The objective on the trained tokens alone, with the entropy among its metrics, and the
        advantages that it was given [R]."""
        positions = _positions(batch)
        mask = self._tensor(batch.loss_mask[positions])
        advantages = self._tensor(batch.advantages[positions])
        before = before or Before()
        judged = before.judged
        if judged is not None:
            advantages = judged.advantages.float()
        elif before.bonus is not None:
            advantages = advantages + before.bonus
        lesson: dict[str, Tensor] = {}
        if self.teachers is not None and before.taught is not None:
            more, lesson = self.teachers.teach(out.logprobs, before.taught, mask, share.denominator)
            advantages = advantages + more
        pulled = {} if before.reference is None else {"reference_logprobs": before.reference}
        output = loss(
            out.logprobs,
            self._tensor(batch.behavior_logprobs[positions]),
            advantages,
            mask,
            sequence_ids=self._tensor(batch.sequence_ids[positions]),
            denominator=share.denominator,
            sequences=share.sequences,
            entropy=out.entropy,
            proximal_logprobs=before.logprobs,
            **pulled,
        )
        if critic is not None:
            assert out.values is not None, "a critic needs a value head"
            none = advantages.double()  # in padding, where nothing counts
            known = judged or Judged(none, none, none)
            output = with_values(output, critic, out.values, known, mask, share.denominator)
        spread = torch.where(mask, out.entropy.detach(), 0.0).sum() / share.denominator
        metrics = {**output.metrics, **lesson, "entropy": spread}
        return LossOutput(output.loss, metrics, output.maxima), advantages

    def _tally(self, batch: MicroBatch, out: Rows, advantages: Tensor) -> Tally:
        positions = _positions(batch)
        return tally(
            batch,
            positions,
            out.logprobs,
            self._tensor(batch.behavior_logprobs[positions]),
            advantages,
            self._tensor(batch.loss_mask[positions]),
        )

    def _reduced(self, outputs: Sequence[LossOutput]) -> tuple[dict[str, float], dict[str, float]]:
        """Means and largest values of the step over all micro-batches and ranks."""
        names, values = stacked([{"loss": o.loss.detach(), **o.metrics} for o in outputs])
        sums = values.double().sum(0)
        self.engine.all_reduce([sums])
        maxima: dict[str, float] = {}
        if outputs[0].maxima:
            largest, values = stacked([o.maxima for o in outputs])
            highest = values.amax(0)
            self.engine.all_reduce([highest], "max")
            maxima = dict(zip(largest, highest.tolist(), strict=True))
        return dict(zip(names, sums.tolist(), strict=True)), maxima

    def _tensor(self, array: np.ndarray) -> Tensor:
        # a copy: arrays that Ray shares are read-only
        return upload(torch.tensor(array), self.engine.device)


def _positions(batch: MicroBatch) -> np.ndarray:
    """Trained positions; position 1 of a padding batch, whose mask keeps it out of the loss."""
    return np.array([1]) if batch.padding else np.flatnonzero(batch.loss_mask)


class _Policy(Protocol):
    """What the learner needs of a policy beyond its forward."""

    threshold_rule: ThresholdRule
    checkpointing: str

    def image_inputs(self, images: Sequence[Placed]) -> dict[str, Any]: ...

    def routing_statistics(self, valid: Tensor | None = None) -> AbstractContextManager[None]: ...

    def routing_counts(self) -> list[Tensor]: ...

    def replayed_loads(self) -> list[float]: ...

    def update_thresholds(self) -> list[float]: ...

    def clear_routing_counts(self) -> None: ...
