"""From groups of trajectories to packed micro-batches, one share per rank and optimizer step."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..policy.images import Placed
from ..policy.routing import Routes
from ..rollout.types import LARGEST_REWARD, Group, Trajectory
from .advantages import equal
from .algorithms import AdvantageFunction, Flat
from .credit import Credit, turn_advantages
from .shaping import UNSHAPED, Shaping
from .types import MicroBatch, Sample, Share


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a rollout batch held, and what of it could be learned from.

    ``groups_without_variance`` have equal rewards, however they are learned from;
    ``groups_left_out`` teach nothing, those whose episodes all failed among them.
    ``reward_mean`` and ``success`` are over episodes with a reward, nan if there are none.
    """

    groups: int
    groups_without_variance: int
    groups_left_out: int
    trajectories: int
    without_reward: int  # failed, or a reward that is none: masked, never a reward of 0
    without_tokens: int  # with a reward, but nothing to train: compared with nobody
    reward_mean: float
    success: float
    trained_tokens: int
    tokens_of_version: Mapping[int, int]  # trained tokens by the version that sampled them
    shaping: float | None = None  # mean of what shaping added to rewards, None where nothing could
    over_budget: int | None = None  # with a reward and longer than their budget, None without any

    def staleness(self, version: int) -> dict[str, float]:
        """How many versions trained tokens lag behind ``version``: the share of each lag, and the
        largest one."""
        lags = {version - v: n for v, n in sorted(self.tokens_of_version.items(), reverse=True)}
        shares = {f"staleness_{lag}": n / self.trained_tokens for lag, n in lags.items()}
        return {**shares, "staleness_max": max(lags)} if lags else {}

    def metrics(self) -> dict[str, float]:
        """The same as metric names."""
        shaped = {"reward_shaping": self.shaping, "over_budget": self.over_budget}
        return {
            **{name: value for name, value in shaped.items() if value is not None},
            "groups": self.groups,
            "groups_without_variance": self.groups_without_variance,
            "groups_left_out": self.groups_left_out,
            "trajectories": self.trajectories,
            "episodes_without_reward": self.without_reward,
            "episodes_without_tokens": self.without_tokens,
            "reward_mean": self.reward_mean,
            "train_success": self.success,
            "trained_tokens": self.trained_tokens,
        }


def samples_of_groups(
    groups: Sequence[Group],
    advantages: AdvantageFunction | None,
    flat: Flat = "left_out",
    *,
    credit: Credit = "trajectory",
    shaping: Shaping = UNSHAPED,
    taught: Callable[[str], bool] = lambda kind: False,
) -> tuple[list[list[Sample]], BatchStats]:
    """Samples of each group that can be learned from, and statistics over all of them.

    Siblings belong together by task id, in whatever order or pieces they arrive. Episodes that
    failed are left out, and so are those without a token to train, from the baseline of their group
    too. So are groups in which every advantage is 0, which would only dilute the
    token mean, unless they are ``"counted"``: a mean over sequences divides by theirs too, but all
    are left out where no group has an advantage. If ``"learned"`` none is left out, nor without
    ``advantages``: then samples have rewards, for a critic. A kind of task that is ``taught`` by
    others than rewards counts as one with advantages.

    Rewards are changed by ``shaping`` first; of what they then are, each turn has its own share, or
    with ``credit="trajectory"`` all tokens have the same.
    """
    by_task: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_task.setdefault(group.task_id, []).extend(group.trajectories)
    siblings = [sorted(by_task[task], key=lambda t: t.sibling) for task in sorted(by_task)]
    trajectories = [t for group in siblings for t in group]
    told = np.array([_reward(t) for t in trajectories])
    trained = np.array([t.loss_mask[1:].any() for t in trajectories], np.bool_)
    rewards = np.where(trained, told, math.nan)
    ids = np.repeat(np.arange(len(siblings)), [len(group) for group in siblings])
    given, valid = np.isfinite(told), np.isfinite(rewards)
    extra, shaped, over = _shaped(trajectories, ids, rewards, shaping)
    values = _advantages(trajectories, ids, rewards, extra, advantages, credit)
    teach = [bool(v.any()) or taught(t.kind) for v, t in zip(values, trajectories, strict=True)]
    some = any(t for t, v in zip(teach, valid, strict=True) if v)
    everything = advantages is None or flat == "learned" or (flat == "counted" and some)
    equal_rewards = 0
    kept: list[list[Sample]] = []
    versions: Counter[int] = Counter()
    for number in range(len(siblings)):
        members = np.flatnonzero((ids == number) & valid)
        if len(members):
            own = torch.from_numpy((rewards + extra)[members])
            equal_rewards += equal(own.min(), own.max())
        if not (len(members) if everything else any(teach[i] for i in members)):
            continue
        samples = [_sample(int(i), trajectories[i], values[i]) for i in members]
        if advantages is None:
            samples = [_with_rewards(s, trajectories[s.id], extra[s.id]) for s in samples]
        for sample in samples:
            versions.update(
                trajectories[sample.id].versions[: len(sample)][sample.loss_mask].tolist()
            )
        kept.append(samples)
    stats = BatchStats(
        groups=len(siblings),
        groups_without_variance=equal_rewards,
        groups_left_out=len(siblings) - len(kept),
        trajectories=len(trajectories),
        without_reward=int((~given).sum()),
        without_tokens=int((given & ~valid).sum()),
        reward_mean=_mean(told[given].tolist()),
        success=_mean([t.success for t, v in zip(trajectories, given, strict=True) if v]),
        trained_tokens=sum(int(s.loss_mask.sum()) for group in kept for s in group),
        tokens_of_version=dict(versions),
        shaping=_mean(extra[valid].tolist()) if shaped else None,
        over_budget=over,
    )
    return kept, stats


def samples_of_text(sequences: Iterable[np.ndarray]) -> list[Sample]:
    """Samples in which every token but the first is trained; shorter sequences are left out."""
    samples = []
    for number, ids in enumerate(sequences):
        if len(ids) < 2:
            continue
        mask = np.ones(len(ids), np.bool_)
        mask[0] = False
        zeros = np.zeros(len(ids), np.float32)
        samples.append(Sample(number, np.asarray(ids, np.int64), mask, zeros, zeros))
    return samples


def deal(groups: Sequence[list[Sample]], minibatches: int) -> list[list[Sample]]:
    """Split groups over optimizer steps, siblings together; never more steps than groups."""
    count = min(minibatches, len(groups))
    return [[s for group in groups[step::count] for s in group] for step in range(count)]


def shares(samples: Sequence[Sample], ranks: int, micro_batch_tokens: int) -> list[Share]:
    """Pack the samples of one optimizer step, one share per rank.

    Longest first, each sequence goes whole to the emptiest micro-batch, which holds at most
    ``micro_batch_tokens`` unless a single sequence is longer. All ranks get equally many, filled
    up with padding batches. The result depends only on the samples, not on their order.
    """
    bins = _bins(samples, ranks, micro_batch_tokens)
    bins.sort(key=lambda members: -sum(len(s) for s in members))
    trained = [int(s.loss_mask.sum()) for s in samples]
    denominator, sequences = max(sum(trained), 1), max(sum(map(bool, trained)), 1)
    rows = [bins[first : first + ranks] for first in range(0, len(bins), ranks)]
    # Every other row backwards, so that no rank always gets the fullest batch of its row.
    rows = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    return [
        Share(tuple(_pack(row[rank]) for row in rows), denominator, sequences)
        for rank in range(ranks)
    ]


def _reward(trajectory: Trajectory) -> float:
    """The reward to learn from, nan where there is none or one that no gradient can follow."""
    reward = math.nan if trajectory.reward is None else float(trajectory.reward)
    return reward if abs(reward) <= LARGEST_REWARD else math.nan


def _shaped(
    trajectories: Sequence[Trajectory], ids: np.ndarray, rewards: np.ndarray, shaping: Shaping
) -> tuple[np.ndarray, bool, int | None]:
    """What shaping adds to rewards, whether it could add anything, and how many trajectories with
    a reward are over budget, if any has one."""
    budgets = shaping.budgets([t.budget for t in trajectories], [t.kind for t in trajectories])
    valid = np.isfinite(rewards)
    limited = np.isfinite(budgets.numpy())
    if not shaping.acts(budgets):
        return np.zeros(len(rewards)), False, None
    lengths = torch.tensor([t.sampled_tokens for t in trajectories])
    success = torch.tensor([t.success for t in trajectories])
    given = (torch.from_numpy(rewards), lengths, success, torch.from_numpy(ids), budgets)
    over = (lengths > budgets).numpy() & valid
    counted = int(over.sum()) if limited.any() else None
    return shaping(*given).numpy() - rewards, True, counted


def _advantages(
    trajectories: Sequence[Trajectory],
    ids: np.ndarray,
    rewards: np.ndarray,
    extra: np.ndarray,
    advantages: AdvantageFunction | None,
    credit: Credit,
) -> list[np.ndarray]:
    """Advantages of the turns of each trajectory, or one for all of them; zeros for a critic. What
    is ``extra`` to a trajectory's reward belongs to its last turn."""
    if advantages is None or not trajectories:
        return [np.zeros(1) for _ in trajectories]
    groups = torch.from_numpy(ids)
    if credit == "trajectory":
        return list(advantages(torch.from_numpy(rewards + extra), groups).numpy()[:, None])
    turns = []
    for trajectory, reward, more in zip(trajectories, rewards, extra, strict=True):
        number = _turns(trajectory)
        sampled = number >= 0
        own = np.bincount(number[sampled], trajectory.rewards[sampled]).astype(np.float64)
        own[-1:] += more
        turns.append(torch.from_numpy(own if np.isfinite(reward) else np.full_like(own, np.nan)))
    return [own.numpy() for own in turn_advantages(turns, groups, advantages, credit)]


def _turns(trajectory: Trajectory) -> np.ndarray:
    """Which turn sampled each token, from 0, and -1 on given ones [T]."""
    number = np.cumsum([segment.sampled for segment in trajectory.segments]) - 1
    own = [n if s.sampled else -1 for n, s in zip(number, trajectory.segments, strict=True)]
    return np.repeat(np.array(own, np.int64), [len(s.token_ids) for s in trajectory.segments])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _sample(number: int, trajectory: Trajectory, advantages: np.ndarray) -> Sample:
    """A trajectory up to its last trained token, with the advantages of its turns, or one."""
    mask = trajectory.loss_mask.copy()
    mask[:1] = False  # nothing predicts the first token
    trained = np.flatnonzero(mask)
    end = int(trained[-1]) + 1 if len(trained) else 0  # nothing after it matters to the loss
    mask = mask[:end]
    routes = trajectory.routes
    of_tokens = advantages if len(advantages) == 1 else advantages[_turns(trajectory)[:end]]
    return Sample(
        id=number,
        token_ids=trajectory.token_ids[:end].astype(np.int64),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, trajectory.logprobs[:end], 0).astype(np.float32),
        advantages=np.where(mask, of_tokens, 0).astype(np.float32),
        images=tuple(image for image in trajectory.images if image.start < end),
        routes=None if routes is None else routes.first(end),
        kind=trajectory.kind,
    )


def _with_rewards(sample: Sample, trajectory: Trajectory, extra: float) -> Sample:
    rewards = trajectory.rewards[: len(sample)]
    rewards[-1:] += extra
    return replace(sample, rewards=rewards, terminated=trajectory.terminated)


def _bins(samples: Sequence[Sample], ranks: int, capacity: int) -> list[list[Sample]]:
    total = sum(min(len(s), capacity) for s in samples)  # a longer one has a batch to itself
    rounds = max(1, math.ceil(total / capacity / ranks))
    bins: list[list[Sample]] = [[] for _ in range(rounds * ranks)]
    emptiest = [(0, number) for number in range(len(bins))]
    for sample in sorted(samples, key=lambda s: (-len(s), s.id)):
        load, number = emptiest[0]
        if load and load + len(sample) > capacity:
            number = len(bins)
            bins += [[] for _ in range(ranks)]
            for extra in range(number, len(bins)):
                heapq.heappush(emptiest, (0, extra))
            load, number = emptiest[0]
        bins[number].append(sample)
        heapq.heapreplace(emptiest, (load + len(sample), number))
    return bins


def _pack(samples: Sequence[Sample]) -> MicroBatch:
    if not samples:
        two = np.zeros(2, np.float32)
        return MicroBatch(
            input_ids=two.astype(np.int64),
            cu_seqlens=np.array([0, 2], np.int32),
            loss_mask=two.astype(np.bool_),
            behavior_logprobs=two,
            advantages=two,
            sequence_ids=np.full(2, -1, np.int64),
            kinds=("",),
            padding=True,
        )
    lengths = [len(s) for s in samples]
    rewards = [s.rewards for s in samples if s.rewards is not None]
    return MicroBatch(
        input_ids=np.concatenate([s.token_ids for s in samples]),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        behavior_logprobs=np.concatenate([s.behavior_logprobs for s in samples]),
        advantages=np.concatenate([s.advantages for s in samples]),
        sequence_ids=np.repeat(np.array([s.id for s in samples], np.int64), lengths),
        images=tuple(
            Placed(int(start) + image.start, image.patches)
            for start, sample in zip(np.cumsum([0, *lengths]), samples, strict=False)
            for image in sample.images
        ),
        rewards=np.concatenate(rewards) if rewards else None,
        terminated=np.array([s.terminated for s in samples]) if rewards else None,
        routes=Routes.join([s.routes for s in samples], lengths),
        kinds=tuple(s.kind for s in samples),
    )
