"""Data of one optimizer step: samples, packed micro-batches, loss values and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from ..policy.images import Placed
from ..policy.routing import Routes


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to learn from; all arrays are [T].

    ``token_ids`` int64; ``loss_mask`` bool, true on trained tokens and never on the first one,
    which nothing predicts; ``behavior_logprobs`` and ``advantages`` fp32, 0 where not trained.
    ``id`` numbers the sequence within its batch; ties in packing are broken by it.

    ``images`` are placed among the tokens. A critic wants ``rewards``, fp64 [T], in place of
    advantages, and ``terminated``, without which the future behind the last token has a value.
    ``routes`` are those of the rollout, where it recorded them. ``kind`` is that of the task.

    Example, a prompt of two tokens and a completion of two with advantage -0.5::

        Sample(0, [5, 6, 7, 8], [F, F, T, T], [0, 0, -0.1, -2.3], [0, 0, -0.5, -0.5])
    """

    id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    images: tuple[Placed, ...] = ()
    rewards: np.ndarray | None = None
    terminated: bool = True
    routes: Routes | None = None
    kind: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole sequences packed end to end for one forward; numpy, so that Ray ships it uncopied.

    Five arrays of one length [T]: ``input_ids`` int64, ``loss_mask`` bool, ``behavior_logprobs``
    fp32, ``advantages`` fp32, ``sequence_ids`` int64; ``cu_seqlens`` int32 [N + 1] are the
    sequence borders. ``loss_mask[t]`` marks token t as trained: its log-prob is the prediction
    made at t - 1. ``images`` are placed among all T tokens. ``rewards`` fp64 [T] and
    ``terminated`` bool [N] are there for a critic only, ``routes`` [T] for routing replay, and
    ``kinds`` are those of the sequences' tasks [N], for teachers.

    ``padding`` marks a batch without data of its own: it only keeps its rank in step with the
    others, adds exactly 0 to loss and gradient, and is left out of routing statistics.
    """

    input_ids: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    sequence_ids: np.ndarray
    kinds: tuple[str, ...]
    padding: bool = False
    images: tuple[Placed, ...] = ()
    rewards: np.ndarray | None = None
    terminated: np.ndarray | None = None
    routes: Routes | None = None

    def of_sequences(self, chosen: np.ndarray) -> MicroBatch:
        """The sequences that ``chosen`` bool [N] marks, in their order, and all that is theirs."""
        lengths = np.diff(self.cu_seqlens)
        kept = np.repeat(chosen, lengths)
        place = np.cumsum(kept) - 1
        routes = self.routes
        return replace(
            self,
            input_ids=self.input_ids[kept],
            cu_seqlens=np.cumsum([0, *lengths[chosen]]).astype(self.cu_seqlens.dtype),
            loss_mask=self.loss_mask[kept],
            behavior_logprobs=self.behavior_logprobs[kept],
            advantages=self.advantages[kept],
            sequence_ids=self.sequence_ids[kept],
            images=tuple(
                Placed(int(place[image.start]), image.patches)
                for image in self.images
                if kept[image.start]
            ),
            rewards=None if self.rewards is None else self.rewards[kept],
            terminated=None if self.terminated is None else self.terminated[chosen],
            routes=None if routes is None else Routes(routes.experts[kept], routes.known[kept]),
            kinds=tuple(k for k, own in zip(self.kinds, chosen, strict=True) if own),
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does in one optimizer step.

    Every rank holds equally many ``micro_batches``; ``denominator`` is the number of trained
    tokens of the step over all ranks, ``sequences`` that of sequences with any, both at least 1.
    """

    micro_batches: tuple[MicroBatch, ...]
    denominator: int
    sequences: int


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss`` scalar, and scalar ``metrics`` and ``maxima`` without gradient.

    Loss and metrics are sums over tokens divided by the global denominator, so that adding them
    over micro-batches and ranks gives the mean over all trained tokens; maxima are combined by
    taking the largest.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Outcome of one rollout batch.

    ``version`` is the number of batches that changed the weights so far. ``skipped`` means that
    this one did not (no optimizer step of it was applied): the version stands and there is
    nothing to publish. ``bad_tensor`` names the first tensor whose gradient was not finite.
    """

    metrics: Mapping[str, float]
    version: int
    skipped: bool
    bad_tensor: str | None = None
