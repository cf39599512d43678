"""A loss of tokens made that of an optimizer step: correction, mean, pull and entropy around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from . import corrections, penalties
from .aggregation import Aggregation, token_weights
from .types import LossOutput

LossFunction = Callable[..., LossOutput]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss of tokens, and how it becomes that of an optimizer step.

    ``correction`` weighs what another policy sampled; ``aggregation`` and ``length`` say which
    mean the loss is; ``entropy`` is the coefficient of the bonus, a mean over tokens always. The
    KL of a ``pull`` is part of that mean, unless it is in the rewards: then it is only reported.
    A loss without a ``ratio`` of its own is corrected by that of the policy itself.
    """

    loss: LossFunction
    correction: corrections.CorrectionFunction | None = None
    aggregation: Aggregation = "token"
    length: int = 1
    entropy: float = 0.0
    pull: penalties.Pull | None = None
    ratio: bool = True

    def __call__(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        sequence_ids: Tensor,
        denominator: int,
        sequences: int | None = None,
        entropy: Tensor | None = None,
        proximal_logprobs: Tensor | None = None,
        reference_logprobs: Tensor | None = None,
    ) -> LossOutput:
        """The share of these tokens [T] in the loss of a step with ``denominator`` trained tokens
        in ``sequences`` sequences (None: those of this call are all).

        ``entropy`` [T] is for the bonus. ``proximal_logprobs`` [T] are those of the policy before
        the update, for a correction; None: no step was taken yet, they are ``logprobs``. A pull
        needs ``reference_logprobs`` [T].
        """
        if sequences is None:
            sequences = int(sequence_ids[mask].unique().numel())
        weights = token_weights(
            mask,
            sequence_ids,
            aggregation=self.aggregation,
            tokens=denominator,
            sequences=max(sequences, 1),
            length=self.length,
        )
        whole = {"sequence_ids": sequence_ids, "denominator": denominator, "weights": weights}
        if self.correction is None:
            out = self.loss(logprobs, behavior_logprobs, advantages, mask, **whole)
        else:
            out = corrections.decoupled(
                self.loss,
                self.correction,
                logprobs,
                logprobs if proximal_logprobs is None or not self.ratio else proximal_logprobs,
                behavior_logprobs,
                advantages,
                mask,
                **whole,
            )
        if self.pull is not None:
            assert reference_logprobs is not None, "a pull needs the log-probs of its reference"
            out = _pulled(
                out,
                self.pull,
                logprobs,
                behavior_logprobs,
                reference_logprobs,
                mask,
                denominator,
                weights,
            )
        if self.entropy == 0:
            return out
        assert entropy is not None, "an entropy bonus needs the entropy of each token"
        bonus = penalties.entropy_bonus(entropy, mask, denominator=denominator)
        return replace(out, loss=out.loss + self.entropy * bonus.loss)


def _pulled(
    out: LossOutput,
    pull: penalties.Pull,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    denominator: int,
    weights: Tensor | None,
) -> LossOutput:
    """An output with the KL to the reference in its loss, or among its metrics alone."""
    if pull.where == "loss" and pull.gradient == "right":
        own = penalties.sampled_weights(logprobs, behavior_logprobs, mask)
        weights = own if weights is None else own * weights
    kl = penalties.kl_loss(
        logprobs,
        reference_logprobs,
        mask,
        denominator=denominator,
        estimator=pull.estimator,
        gradient=pull.gradient,
        weights=weights,
    )
    loss = out.loss + pull.coefficient * kl.loss if pull.where == "loss" else out.loss
    return replace(out, loss=loss, metrics={**out.metrics, **kl.metrics})
