"""Many episodes at once: environments answer while the generator decodes, nobody waits in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from ..configs.schema import RolloutConfig
from ..envs.base import MessageEnv, succeeded
from ..envs.types import Effort, Message, StopReason, Task
from ..policy.images import Placed
from .calls import EnvCalls, Outcome, answer, build, number, shown
from .sampler import stream_key
from .sight import shifted
from .types import (
    Completion,
    FinishReason,
    Generator,
    Group,
    RolloutStats,
    SamplingParams,
    Segment,
    Trajectory,
    images_of,
)

_NO_LOGPROBS = np.zeros(0, np.float32)
_NO_VERSIONS = np.zeros(0, np.int32)


class Chat(Protocol):
    """How messages become token ids; `farhorizon.policy.tokenizer.ChatFormat` is one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def calls(self) -> bool: ...

    @property
    def effort(self) -> Effort | None: ...

    def prompt(self) -> list[int]: ...

    def render_reply(self, messages: Iterable[Message], room: int | None = None) -> list[int]: ...

    def placed(
        self, token_ids: Sequence[int], messages: Iterable[Message]
    ) -> tuple[Placed, ...]: ...

    def text(self, sampled_ids: Sequence[int]) -> str: ...


def run_groups(
    generator: Generator,
    tasks: Sequence[Task],
    group_size: int,
    env_factory: Callable[[], MessageEnv],
    chat: Chat,
    config: RolloutConfig,
    context: int,
    visible_context: int | None = None,
    calls: EnvCalls | None = None,
) -> tuple[list[Group], RolloutStats]:
    """Play every task ``group_size`` times; groups in the order of ``tasks``.

    A trajectory never exceeds ``context`` tokens. An action that the limit cuts off is not given
    to the environment; the reward of a truncated episode is the sum so far. With
    ``visible_context`` each request sees only that many last tokens, through a fresh state.
    An environment fault is retried ``env_retries`` times with a fresh environment, then the
    episode ends as an error without reward. One whose first prompt is longer than ``context``
    ends at once, without a token. Raises UserError for rewards that are not numbers. ``calls``
    may be shared by rollouts that follow each other.
    """
    own = calls or EnvCalls(config.concurrency, config.env_timeout_s)
    run = _Run(generator, group_size, env_factory, chat, config, context, visible_context, own)
    try:
        return run.play(tasks)
    finally:
        if calls is None:
            own.shutdown()


@dataclass(eq=False, slots=True)
class _Episode:
    """The current try of one sibling."""

    task: Task
    sibling: int
    key: int
    env: MessageEnv | None = None
    session: int | None = None
    segments: list[Segment] = field(default_factory=list)
    length: int = 0
    rewards: list[float] = field(default_factory=list)
    faults: int = 0
    kind: str = ""
    budget: int | None = None

    def append(
        self,
        ids: Sequence[int] | np.ndarray,
        completion: Completion | None = None,
        images: tuple[Placed, ...] = (),
    ) -> None:
        """Add given or sampled tokens."""
        if completion is None:
            given = np.asarray(ids, np.int32)
            segment = Segment(given, False, _NO_LOGPROBS, _NO_VERSIONS, images)
        else:
            segment = Segment(
                completion.token_ids,
                True,
                completion.logprobs,
                completion.versions,
                routes=completion.routes,
            )
        self.segments.append(segment)
        self.length += len(segment.token_ids)


@dataclass(eq=False, slots=True)
class _Wave:
    """Siblings that started together; they share a prefill once all environments are reset."""

    waiting: int
    ready: list[_Episode] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        generator: Generator,
        group_size: int,
        env_factory: Callable[[], MessageEnv],
        chat: Chat,
        config: RolloutConfig,
        context: int,
        visible_context: int | None,
        calls: EnvCalls,
    ) -> None:
        self.generator, self.chat, self.config = generator, chat, config
        self.group_size, self.env_factory = group_size, env_factory
        self.context, self.visible = context, visible_context
        self.calls, self.env_seconds = calls, -calls.seconds
        self.playing: dict[int, _Episode] = {}  # by session
        self.live: set[_Episode] = set()
        self.finished: dict[str, list[Trajectory]] = {}
        self.env_errors = self.invalid_rewards = self.long_prompts = 0
        self.policy_seconds = 0.0

    def play(self, tasks: Sequence[Task]) -> tuple[list[Group], RolloutStats]:
        start, before = time.perf_counter(), asdict(self.generator.counters)
        self.finished = {task.id: [] for task in tasks}
        if len(self.finished) != len(tasks):
            raise ValueError("tasks: ids are not unique")
        waiting = [(task, sibling) for task in tasks for sibling in range(self.group_size)]
        waiting.reverse()
        try:
            while waiting or self.live:
                self._admit(waiting)
                idle = not self.generator.busy
                for (handler, episode), outcome in self.calls.ready(wait=idle and bool(self.live)):
                    handler(episode, outcome)
                if self.generator.busy:
                    self._step()
        except BaseException:
            self._abandon()
            raise
        self.calls.drain()
        self.env_seconds += self.calls.seconds
        groups = [
            Group(task.id, tuple(sorted(self.finished[task.id], key=lambda t: t.sibling)))
            for task in tasks
        ]
        return groups, self._stats(groups, before, time.perf_counter() - start)

    def _admit(self, waiting: list[tuple[Task, int]]) -> None:
        """Start as many whole groups as fit; a group larger than the limit starts in parts."""
        while waiting:
            task = waiting[-1][0]
            rest = self.group_size - waiting[-1][1]
            size = min(rest, self.config.concurrency)
            if len(self.live) + size > self.config.concurrency:
                return
            wave = _Wave(size)
            for _ in range(size):
                _, sibling = waiting.pop()
                key = stream_key(self.generator.seed, task.id, sibling)
                self._start(_Episode(task, sibling, key), wave)

    def _start(self, episode: _Episode, wave: _Wave) -> None:
        self.live.add(episode)
        self.calls.submit(
            (partial(self._on_reset, wave), episode),
            "reset",
            partial(build, self.env_factory, episode.task, self.chat.calls, self.chat.effort),
        )

    def _on_reset(self, wave: _Wave, episode: _Episode, outcome: Outcome) -> None:
        wave.waiting -= 1
        if outcome.fault is not None:
            self._fail(episode, outcome)
        else:
            env, messages = outcome.value
            episode.env, episode.kind = env, env.kind
            episode.budget = None if env.budget is None else int(env.budget)
            ids = [*self.chat.render_reply(messages, self.context), *self.chat.prompt()]
            if len(ids) > self.context:
                self.long_prompts += 1
                self._finish(episode, StopReason.CONTEXT_LIMIT)
            else:
                episode.append(ids, images=self.chat.placed(ids, messages))
                wave.ready.append(episode)
        if wave.waiting == 0:
            self._open(wave.ready)

    def _open(self, episodes: list[_Episode]) -> None:
        """One prefill for all siblings that were shown the same prompt."""
        by_prompt: dict[bytes, list[_Episode]] = {}
        for episode in episodes:
            if episode.length == self.context:
                self._finish(episode, StopReason.CONTEXT_LIMIT)
            else:
                shown = episode.segments[0].token_ids.tobytes()
                pixels = [i.patches.pixels.tobytes() for i in episode.segments[0].images]
                by_prompt.setdefault(b"".join([shown, *pixels]), []).append(episode)
        for same in by_prompt.values():
            sessions = self._reopen(same[0], [e.key for e in same])
            for episode, session in zip(same, sessions, strict=True):
                episode.session = session
                self.playing[session] = episode

    def _params(self, episode: _Episode) -> SamplingParams:
        budget = min(self.config.max_turn_tokens, self.context - episode.length)
        return SamplingParams(self.config.temperature, budget, self.chat.stop_token_ids)

    def _step(self) -> None:
        start = time.perf_counter()
        completions = self.generator.step()
        self.policy_seconds += time.perf_counter() - start
        for session, completion in completions:
            self._on_completion(self.playing[session], completion)

    def _on_completion(self, episode: _Episode, completion: Completion) -> None:
        episode.append(completion.token_ids, completion)
        if completion.finish is FinishReason.LENGTH and episode.length >= self.context:
            self._finish(episode, StopReason.CONTEXT_LIMIT)
            return
        text = self.chat.text(completion.token_ids.tolist())
        assert episode.env is not None
        self.calls.submit(
            (partial(self._on_answer, completion.finish), episode),
            "step",
            partial(answer, episode.env, text),
            episode.env,
        )

    def _on_answer(self, finish: FinishReason, episode: _Episode, outcome: Outcome) -> None:
        if outcome.fault is not None:
            self._fail(episode, outcome)
            return
        messages, raw_reward, terminated, truncated = outcome.value
        reward = number(raw_reward, episode.env)
        if reward is None:
            self.invalid_rewards += 1
            self._finish(
                episode,
                StopReason.ERROR,
                f"InvalidReward: the environment returned reward {shown(raw_reward)}",
            )
            return
        episode.rewards.append(reward)
        if terminated:
            self._finish(episode, StopReason.TERMINATED)
        elif truncated:
            self._finish(episode, StopReason.ENV_TRUNCATED)
        elif len(episode.rewards) >= self.config.max_turns:
            self._finish(episode, StopReason.TURN_LIMIT)
        else:
            # A message that ran out of tokens is closed for the policy, so that it can be read.
            ids = [] if finish is FinishReason.STOP else list(self.chat.stop_token_ids[:1])
            room = self.context - episode.length
            ids += [*self.chat.render_reply(messages, room), *self.chat.prompt()]
            self._continue(episode, ids, messages)

    def _continue(self, episode: _Episode, ids: list[int], messages: tuple[Message, ...]) -> None:
        if episode.length + len(ids) <= self.context:
            episode.append(ids, images=self.chat.placed(ids, messages))
            if episode.length < self.context:
                self._request(episode)
                return
        self._finish(episode, StopReason.CONTEXT_LIMIT)

    def _request(self, episode: _Episode) -> None:
        params = self._params(episode)
        assert episode.session is not None
        if self.visible is None:
            last = episode.segments[-1]
            self.generator.extend(episode.session, last.token_ids, params, last.images)
            return
        self._leave(episode)
        (episode.session,) = self._reopen(episode, [episode.key])
        self.playing[episode.session] = episode

    def _reopen(self, episode: _Episode, keys: Sequence[int]) -> list[int]:
        """Sessions that begin with all that the policy may see of an episode so far."""
        cut = 0 if self.visible is None else max(0, episode.length - self.visible)
        ids = np.concatenate([s.token_ids for s in episode.segments])[cut:]
        images = shifted(images_of(episode.segments), -cut)
        params = self._params(episode)
        return self.generator.open(ids, keys, params, position=episode.length, images=images)

    def _fail(self, episode: _Episode, outcome: Outcome) -> None:
        """The fault policy: a fresh try while there are any left, then an error."""
        self.env_errors += 1
        if outcome.given_up:
            episode.env = None
        if episode.faults >= self.config.env_retries:
            self._finish(episode, StopReason.ERROR, str(outcome.fault))
            return
        self._leave(episode)
        self._close_env(episode)
        self.live.discard(episode)
        again = _Episode(episode.task, episode.sibling, episode.key, faults=episode.faults + 1)
        self._start(again, _Wave(1))

    def _finish(self, episode: _Episode, stop: StopReason, error: str | None = None) -> None:
        self._leave(episode)
        failed, rewards = stop is StopReason.ERROR, episode.rewards
        env = MessageEnv if episode.env is None else episode.env
        terminated = stop is StopReason.TERMINATED
        self.finished[episode.task.id].append(
            Trajectory(
                task_id=episode.task.id,
                sibling=episode.sibling,
                segments=tuple(episode.segments),
                turn_rewards=tuple(rewards),
                reward=None if failed else float(sum(rewards)),
                success=not failed and succeeded(rewards, env.success_threshold, terminated),
                stop=stop,
                turns=len(rewards),
                error=error,
                kind=episode.kind,
                budget=episode.budget,
            )
        )
        self._close_env(episode)
        self.live.discard(episode)

    def _leave(self, episode: _Episode) -> None:
        if episode.session is not None:
            del self.playing[episode.session]
            self.generator.close(episode.session)
            episode.session = None

    def _close_env(self, episode: _Episode) -> None:
        env, episode.env = episode.env, None
        if env is not None:
            self.calls.submit((_ignore, episode), "close", env.close, env)

    def _abandon(self) -> None:
        """Close every environment, those included that running calls are about to deliver."""
        self.generator.clear()
        for (_, episode), outcome in self.calls.drain():
            if outcome.given_up:
                episode.env = None
            elif episode.env is None and isinstance(outcome.value, tuple):
                episode.env = outcome.value[0]
        for episode in self.live:
            self._close_env(episode)
        self.calls.drain()

    def _stats(self, groups: list[Group], before: dict[str, int], seconds: float) -> RolloutStats:
        played = [t for group in groups for t in group.trajectories]
        counted = asdict(self.generator.counters)
        work = {name: count - before[name] for name, count in counted.items()}
        return RolloutStats(
            episodes=len(played),
            errors=sum(t.stop is StopReason.ERROR for t in played),
            env_errors=self.env_errors,
            invalid_rewards=self.invalid_rewards,
            long_prompts=self.long_prompts,
            turns=sum(t.turns for t in played),
            policy_seconds=self.policy_seconds,
            env_seconds=self.env_seconds,
            seconds=seconds,
            **work,
        )


def _ignore(episode: _Episode, outcome: Outcome) -> None:
    """A fault while closing cannot change an episode that is over."""
