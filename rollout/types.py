"""What rollout exchanges: sampling requests and the generator that serves them, trajectories and
groups of siblings, statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from ..configs.errors import RunFailed
from ..envs.types import LARGEST_REWARD as LARGEST_REWARD
from ..envs.types import StopReason
from ..policy.images import Placed
from ..policy.routing import Routes


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
    int32 [n] (weight version that produced each token); the stop token is included.

    ``routes`` [m, layers, k], packed as in `Routes`, are those of the m tokens that were read since
    the last completion of the session: the last token of that one, what was given, and all of this
    one but its own last token. None where they are not recorded.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: FinishReason
    routes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a trajectory, either given (prompt, tool text) or sampled by the policy.

    ``token_ids`` int32 [n]; for sampled segments ``logprobs`` fp32 [n] and ``versions`` int32 [n]
    as in `Completion`, for given ones both are empty. ``images`` stand in given ones, placed from
    the start of the segment. ``routes`` are in sampled ones, those of their `Completion`.
    """

    token_ids: np.ndarray
    sampled: bool
    logprobs: np.ndarray
    versions: np.ndarray
    images: tuple[Placed, ...] = ()
    routes: np.ndarray | None = None


def images_of(segments: Iterable[Segment]) -> tuple[Placed, ...]:
    """The images of segments that follow each other, placed from the start of the first."""
    placed: list[Placed] = []
    offset = 0
    for segment in segments:
        placed += [Placed(offset + image.start, image.patches) for image in segment.images]
        offset += len(segment.token_ids)
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode as token ids; ids of turn k are a prefix of those of turn k + 1.

    ``reward`` is the sum over turns, or None when the episode ended in an error (then nothing of
    it is trained). ``stop`` says why it ended, ``error`` holds class, message and traceback text.
    ``kind`` and ``budget`` (sampled tokens) are those of its environment. What weights before
    version ``oldest`` sampled is not trained.
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
    kind: str = ""
    budget: int | None = None
    oldest: int = 0

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(s.token_ids) for s in self.segments if s.sampled)

    def tokens_before(self, version: int) -> int:
        """Number of tokens that weights before ``version`` sampled."""
        return sum(int((s.versions < version).sum()) for s in self.segments if s.sampled)

    @property
    def terminated(self) -> bool:
        """Whether the task ended the episode, and not a limit of turns, tokens or steps."""
        return self.stop is StopReason.TERMINATED

    @property
    def rewards(self) -> np.ndarray:
        """Each turn's reward on the last token that the policy sampled in it, fp64 [T]."""
        rewards = np.zeros(sum(len(s.token_ids) for s in self.segments))
        turns, position, last = iter(self.turn_rewards), 0, 0
        for segment in self.segments:
            position += len(segment.token_ids)
            if segment.sampled:
                last = position - 1
                rewards[last] += next(turns, 0.0)
        rewards[last:][:1] += sum(turns)
        return rewards

    @property
    def token_ids(self) -> np.ndarray:
        """All token ids, int32 [T]."""
        return _cat([s.token_ids for s in self.segments], np.int32)

    @property
    def images(self) -> tuple[Placed, ...]:
        """All images, placed among the tokens."""
        return images_of(self.segments)

    @property
    def routes(self) -> Routes | None:
        """Routes of all tokens, unknown where no generator said them, and from the last sampled
        token on: nothing was sampled behind it. None if none are known.

        RunFailed if some are not those of as many tokens as were read.
        """
        read, end = 0, 0
        parts: list[Routes | None] = []
        lengths: list[int] = []
        for segment in self.segments:
            end += len(segment.token_ids)
            if not segment.sampled:
                continue
            rows, count = segment.routes, end - 1 - read
            if rows is not None and len(rows) != count:
                raise RunFailed(
                    f"rollout of task {self.task_id}, sibling {self.sibling}: routes of "
                    f"{len(rows)} tokens where {count} were read up to token {end - 1}"
                )
            parts.append(None if rows is None else Routes(rows, np.ones(count, np.bool_)))
            lengths.append(count)
            read = end - 1
        return Routes.join([*parts, None], [*lengths, end - read])

    @property
    def loss_mask(self) -> np.ndarray:
        """True on sampled tokens of episodes without error, if they are not too old, bool [T]."""
        versions = self.versions
        return (versions >= self.oldest) & (self.reward is not None)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What a rollout did; sums over episodes and actors, except ``seconds``, the longest."""

    episodes: int = 0
    errors: int = 0  # episodes that ended in an error
    env_errors: int = 0  # faults of environments, those of tries that were repeated included
    invalid_rewards: int = 0
    long_prompts: int = 0  # episodes whose first prompt was longer than the context
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0  # given tokens, counted for every sequence that has them
    prefill_tokens: int = 0  # tokens that went through the policy in pieces of more than one
    reused_tokens: int = 0  # prompt tokens whose state was copied from a sibling
    renewed_tokens: int = 0  # tokens that were read again by new weights, prefill tokens too
    stale_tokens: int = 0  # sampled from a state that older weights had a part in
    discarded_tokens: int = 0  # sampled, and thrown away when weights changed
    steps: int = 0  # forward passes
    policy_seconds: float = 0.0
    env_seconds: float = 0.0  # over all threads
    seconds: float = 0.0

    @staticmethod
    def merge(parts: Iterable[RolloutStats]) -> RolloutStats:
        """The statistics of several actors that worked side by side."""
        parts = list(parts)
        total: dict[str, Any] = {
            f.name: sum(getattr(p, f.name) for p in parts) for f in fields(RolloutStats)
        }
        total["seconds"] = max((p.seconds for p in parts), default=0.0)
        return RolloutStats(**total)


@dataclass(slots=True)
class GeneratorCounters:
    """Work done so far, in tokens and forward passes."""

    prompt_tokens: int = 0  # given tokens, counted for every sequence that has them
    prefill_tokens: int = 0  # tokens that went through the policy in pieces of given ones
    reused_tokens: int = 0  # prompt tokens whose state was copied from a sibling
    renewed_tokens: int = 0  # tokens that were read again by new weights, prefill tokens too
    stale_tokens: int = 0  # sampled from a state that older weights had a part in
    discarded_tokens: int = 0  # sampled, and thrown away when weights changed
    sampled_tokens: int = 0
    steps: int = 0


class Generator(Protocol):
    """What the episode loop needs: sequences that grow by given tokens and by sampled ones.

    Ids of sessions are never used again. A request (`open` or `extend`) asks for one completion,
    which a later `step` returns; between its completion and its next request a session waits.
    """

    seed: int
    version: int
    counters: GeneratorCounters

    def open(
        self,
        prompt: np.ndarray,
        keys: Sequence[int],
        params: SamplingParams,
        position: int | None = None,
        images: Sequence[Placed] = (),
    ) -> list[int]:
        """Start ``len(keys)`` sequences with one prompt; returns their session ids. ``images`` are
        placed among its tokens."""
        ...

    def extend(
        self,
        session: int,
        token_ids: np.ndarray,
        params: SamplingParams,
        images: Sequence[Placed] = (),
    ) -> None:
        """Append given tokens to a waiting session and ask for its next completion; ``images`` are
        placed among them."""
        ...

    def step(self) -> list[tuple[int, Completion]]:
        """One forward pass for every session that does not wait; the completions that ended."""
        ...

    def close(self, session: int) -> None:
        """Forget a waiting session."""
        ...

    def clear(self) -> None:
        """Forget every session."""
        ...

    def updating(self, number: int) -> AbstractContextManager[None]:
        """Hold off forward passes: weights may change in the block, to those of version
        ``number``. A waiting thread gets its turn after at most one step, unless it waits for what
        runs to end. RunFailed while another one is in its block, or waits to be."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any session has been asked for a completion."""
        ...


def _cat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
