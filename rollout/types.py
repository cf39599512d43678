"""Data that leaves the rollout: segments, completions, trajectories and groups of siblings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ..envs.types import StopReason


class FinishReason(StrEnum):
    """Why the generator stopped sampling one completion."""

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # the token budget was used up


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled; log-probs are of the distribution at this temperature.

    Only a pure temperature is offered: filters such as top-p change the support and would make
    the learner's log-probs those of another distribution. ``temperature=0`` is greedy and is
    refused for training.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens of one turn: ``token_ids`` int32 [n], ``logprobs`` fp32 [n], ``versions``
    int32 [n] (weight version that produced each token); the stop token is included."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a trajectory, either given (prompt, tool text) or sampled by the policy.

    ``token_ids`` int32 [n]; for sampled segments ``logprobs`` fp32 [n] and ``versions`` int32 [n]
    as in `Completion`, for given ones both are empty.
    """

    token_ids: np.ndarray
    sampled: bool
    logprobs: np.ndarray
    versions: np.ndarray


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode as token ids; ids of turn k are a prefix of those of turn k + 1.

    ``reward`` is the sum over turns, or None when the episode ended in an error (then nothing of
    it is trained). ``stop`` says why it ended, ``error`` holds class, message and traceback text.
    """

    task_id: str
    sibling: int
    segments: tuple[Segment, ...]
    turn_rewards: tuple[float, ...]
    reward: float | None
    success: bool
    stop: StopReason
    turns: int
    error: str | None = None

    @property
    def token_ids(self) -> np.ndarray:
        """All token ids, int32 [T]."""
        return _cat([s.token_ids for s in self.segments], np.int32)

    @property
    def loss_mask(self) -> np.ndarray:
        """True on sampled tokens of episodes without error, bool [T]."""
        keep = self.reward is not None
        return _cat(
            [np.full(len(s.token_ids), s.sampled and keep) for s in self.segments], np.bool_
        )

    @property
    def logprobs(self) -> np.ndarray:
        """Behaviour log-probs, fp32 [T], 0 on tokens that were not sampled."""
        return _cat(
            [
                s.logprobs if s.sampled else np.zeros(len(s.token_ids), np.float32)
                for s in self.segments
            ],
            np.float32,
        )

    @property
    def versions(self) -> np.ndarray:
        """Weight version per token, int32 [T], -1 on tokens that were not sampled."""
        return _cat(
            [
                s.versions if s.sampled else np.full(len(s.token_ids), -1, np.int32)
                for s in self.segments
            ],
            np.int32,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings that solved one task; incomplete groups keep the siblings they have."""

    task_id: str
    trajectories: tuple[Trajectory, ...]


def _cat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
