"""Groups to samples to packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.load import override_config
from farhorizon.configs.schema import AlgorithmConfig
from farhorizon.envs.types import StopReason
from farhorizon.rl.advantages import group_relative
from farhorizon.rl.algorithms import Algorithm, make_algorithm
from farhorizon.rl.batch import deal, samples_of_groups, samples_of_text, shares
from farhorizon.rl.losses import nll, value_loss
from farhorizon.rl.penalties import kl_loss
from farhorizon.rl.shaping import Shaping
from farhorizon.rl.types import MicroBatch, Sample
from farhorizon.rollout.types import Group, Segment, Trajectory


def given(ids: Sequence[int]) -> Segment:
    none = np.zeros(0, np.float32)
    return Segment(np.array(ids, np.int32), False, none, none.astype(np.int32))


def sampled(ids: Sequence[int], logprob: float = -1.0, version: int = 0) -> Segment:
    count = len(ids)
    return Segment(
        np.array(ids, np.int32),
        True,
        np.full(count, logprob, np.float32),
        np.full(count, version, np.int32),
    )


def trajectory(task: str, sibling: int, reward: float | None, *segments: Segment) -> Trajectory:
    return Trajectory(
        task_id=task,
        sibling=sibling,
        segments=segments or (given([1, 2]), sampled([3, 4])),
        turn_rewards=() if reward is None else (reward,),
        reward=reward,
        success=bool(reward is not None and reward >= 1),
        stop=StopReason.ERROR if reward is None else StopReason.TERMINATED,
        turns=1,
    )


def group(task: str, rewards: Sequence[float | None]) -> Group:
    return Group(task, tuple(trajectory(task, i, r) for i, r in enumerate(rewards)))


def sample(number: int, length: int) -> Sample:
    (made,) = samples_of_text([np.full(length, number)])
    return Sample(number, made.token_ids, made.loss_mask, made.behavior_logprobs, made.advantages)


def test_masks_and_logprobs_stand_on_the_sampled_tokens() -> None:
    # 2 prompt, 2 sampled, 3 tool, 2 sampled, 1 tool after the last turn
    made = trajectory(
        "t", 0, 1.0, given([1, 2]), sampled([3, 4], -0.5), given([5, 6, 7]),
        sampled([8, 9], -0.25, version=3), given([10]),
    )  # fmt: skip
    other = trajectory("t", 1, 0.0)
    ((first, second),), stats = samples_of_groups([Group("t", (made, other))], group_relative)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert first.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert first.advantages.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert first.behavior_logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -0.25, -0.25]
    assert second.advantages.tolist() == [0, 0, -1, -1]
    assert stats.trained_tokens == 6 and stats.tokens_of_version == {0: 4, 3: 2}
    assert stats.staleness(4) == {
        **{"staleness_1": pytest.approx(1 / 3), "staleness_4": pytest.approx(2 / 3)},
        "staleness_max": 4,
    }
    (share,) = shares([first], 1, 100)
    assert share.denominator == 4


def test_failed_episodes_leave_their_group_and_are_counted() -> None:
    ((a, b, c),), stats = samples_of_groups([group("t", [1.0, None, 0.0, 1.0])], group_relative)
    values = [s.advantages[-1] for s in (a, b, c)]
    assert values == pytest.approx([0.70711, -1.41421, 0.70711], abs=1e-5)
    assert stats.metrics()["episodes_without_reward"] == 1
    assert stats.reward_mean == pytest.approx(2 / 3) and stats.success == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 1e200, -1.1e15])
def test_a_reward_that_is_none_leaves_loss_and_gradient_to_the_others(bad: float | None) -> None:
    """C22: in the loss of the group too, which is that of its three valid members."""
    algorithm = make_algorithm(AlgorithmConfig(aggregation="sequence"))
    seen = []
    for rewards in ([1.0, bad, 0.0, 1.0], [1.0, 0.0, 1.0]):
        kept, stats = samples_of_groups([group("t", rewards)], algorithm.advantages)
        assert stats.without_reward == len(rewards) - 3
        (share,) = shares(kept[0], 1, 100)
        (batch,) = share.micro_batches
        logprobs = torch.tensor(batch.behavior_logprobs, requires_grad=True)
        loss = algorithm.loss(
            logprobs,
            logprobs.detach(),
            torch.tensor(batch.advantages),
            torch.tensor(batch.loss_mask),
            sequence_ids=torch.tensor(batch.sequence_ids),
            denominator=share.denominator,
            sequences=share.sequences,
        ).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite() and gradient.isfinite().all() and gradient.any()
        seen.append([loss.item(), *gradient.tolist()])
    assert seen[0] == seen[1]
    nothing, stats = samples_of_groups([group("t", [bad] * 4)], algorithm.advantages)
    assert nothing == [] and stats.without_reward == 4


def test_groups_without_variance_are_left_out_and_counted() -> None:
    groups = [group("a", [1.0] * 4), group("b", [0.0, 0.0, 1.0]), group("c", [0.0] * 4)]
    kept, stats = samples_of_groups(groups, group_relative)
    assert [[s.id for s in members] for members in kept] == [[4, 5, 6]]
    assert (stats.groups, stats.groups_without_variance, stats.trajectories) == (3, 2, 11)
    assert stats.metrics()["groups_left_out"] == 2
    alone = [group("a", [None, 1.0, None, None]), group("b", [0.0, 1.0])]  # C13
    kept, stats = samples_of_groups(alone, group_relative)
    assert [[s.id for s in members] for members in kept] == [[4, 5]]
    assert (stats.groups, stats.groups_without_variance, stats.without_reward) == (2, 1, 3)
    kept, stats = samples_of_groups([group("a", [None, math.nan])], group_relative)
    assert kept == [] and stats.without_reward == 2 and math.isnan(stats.reward_mean)
    assert (stats.groups_without_variance, stats.groups_left_out) == (0, 1)
    assert samples_of_groups([], group_relative)[0] == []


FLAT = [group(task, [1.0] * 4) for task in "abc"]
LIVE = group("d", [0.0, 0.0, 1.0, 0.0])


def gradient(algorithm: Algorithm, groups: Sequence[Group]) -> torch.Tensor:
    """On the trained tokens of the group d, of policies that have moved since sampling."""
    kept, _ = samples_of_groups(groups, algorithm.advantages, algorithm.flat)
    (share,) = shares(list(chain(*kept)), 1, 1000)
    (batch,) = share.micro_batches
    mask, ids = torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.sequence_ids)
    behavior = torch.from_numpy(batch.behavior_logprobs)
    logprobs = (behavior + 0.01).requires_grad_()
    loss = algorithm.loss(
        logprobs,
        behavior,
        torch.from_numpy(batch.advantages),
        mask,
        sequence_ids=ids,
        denominator=share.denominator,
        sequences=share.sequences,
    ).loss
    (slopes,) = torch.autograd.grad(loss, logprobs)
    return slopes[mask & (ids >= 4 * (len(groups) - 1))]


@pytest.mark.parametrize("texts", [["name=dr_grpo"], ["name=gspo"], ["aggregation=sequence"]])
def test_groups_without_variance_are_divided_by_where_sequences_are_counted(
    texts: list[str],
) -> None:
    algorithm = make_algorithm(override_config(AlgorithmConfig(), texts))
    alone, among = gradient(algorithm, [LIVE]), gradient(algorithm, [*FLAT, LIVE])
    assert alone.any() and torch.allclose(among, alone / 4, rtol=1e-6)
    kept, stats = samples_of_groups(FLAT, algorithm.advantages, algorithm.flat)
    assert kept == [] and stats.groups_left_out == 3  # nothing to divide


@pytest.mark.parametrize("texts", [["entropy=0.1"], ["name=k15"], ["name=k25"]])
def test_groups_without_variance_stay_where_more_than_advantages_acts(texts: list[str]) -> None:
    algorithm = make_algorithm(override_config(AlgorithmConfig(), texts))
    kept, stats = samples_of_groups(
        [*FLAT, group("e", [None])], algorithm.advantages, algorithm.flat
    )
    assert len(kept) == stats.groups_without_variance == 3 and stats.groups_left_out == 1


def test_the_default_leaves_groups_without_variance_out() -> None:
    algorithm = make_algorithm(AlgorithmConfig())
    assert torch.equal(gradient(algorithm, [LIVE]), gradient(algorithm, [*FLAT, LIVE]))


def test_order_and_pieces_of_arrival_do_not_matter() -> None:
    whole = [group("a", [1.0, 0.0, 0.5]), group("b", [0.0, 0.0, 1.0])]
    pieces = [
        Group("b", (whole[1].trajectories[2], whole[1].trajectories[0])),
        Group("a", whole[0].trajectories[::-1]),
        Group("b", (whole[1].trajectories[1],)),
    ]
    first, second = (samples_of_groups(g, group_relative) for g in (whole, pieces))
    assert first[1] == second[1]
    for left, right in zip(chain(*first[0]), chain(*second[0]), strict=True):
        assert left.id == right.id and left.advantages.tolist() == right.advantages.tolist()


def test_first_token_is_never_trained() -> None:
    both = [trajectory("t", i, float(i), sampled([7, 8])) for i in range(2)]
    ((first, _),), stats = samples_of_groups([Group("t", tuple(both))], group_relative)
    assert first.loss_mask.tolist() == [False, True] and stats.trained_tokens == 2


def test_text_trains_every_token_but_the_first() -> None:
    (only,) = samples_of_text([np.array([5]), np.array([5, 6, 7]), np.array([], np.int64)])
    assert only.id == 1 and only.loss_mask.tolist() == [False, True, True]


def _lengths(batch: MicroBatch) -> list[int]:
    return [] if batch.padding else np.diff(batch.cu_seqlens).tolist()


def test_packing_never_cuts_and_fills_ranks_evenly() -> None:
    samples = [sample(i, n) for i, n in enumerate([9, 30, 5, 4, 3, 2, 8, 7])]
    for ranks in (1, 2, 3):
        made = shares(samples, ranks, 10)
        assert len({len(s.micro_batches) for s in made}) == 1
        assert {s.denominator for s in made} == {68 - 8}
        batches = [b for s in made for b in s.micro_batches]
        assert sorted(n for b in batches for n in _lengths(b)) == [2, 3, 4, 5, 7, 8, 9, 30]
        assert len(batches) <= 6 + ranks  # at least 5 + the long one; no rows of mere padding
        assert all(sum(_lengths(b)) <= 10 or _lengths(b) == [30] for b in batches)
        for b in batches:
            assert len(b.input_ids) == b.cu_seqlens[-1] == len(b.loss_mask) == len(b.sequence_ids)
            assert not b.loss_mask[b.cu_seqlens[:-1]].any()
    shuffled = [samples[i] for i in (3, 7, 0, 2, 6, 1, 5, 4)]
    for left, right in zip(shares(samples, 2, 10), shares(shuffled, 2, 10), strict=True):
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True):
            assert a.input_ids.tolist() == b.input_ids.tolist()


def test_ranks_without_data_get_padding_that_trains_nothing() -> None:
    first, second = shares([sample(0, 5)], 2, 100)
    assert not first.micro_batches[0].padding and second.micro_batches[0].padding
    assert not second.micro_batches[0].loss_mask.any()
    assert first.denominator == second.denominator == 4
    assert shares([], 2, 100)[0].denominator == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mean_over_tokens_is_not_one_of_micro_batches(ranks: int) -> None:
    """C02: 2 tokens of loss 1 and 6 of loss 0, a sequence per micro-batch, are 0.25 and not 0.5, of
    the policy's loss, the critic's, and the KL; so is the gradient of what scales them."""
    made = shares([sample(0, 3), sample(1, 7)], ranks, 1)
    totals = torch.zeros(3)
    scale = torch.ones(3, requires_grad=True)
    for share in made:
        for batch in share.micro_batches:
            mask, ids = torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.sequence_ids)
            own = {"mask": mask, "denominator": share.denominator}
            one, none = (ids == 0).float(), torch.zeros(len(ids))
            away = -(2**0.5) * one  # values are learned from half the square
            parts = [
                nll(-one * scale[0], none, none, sequence_ids=ids, **own),
                value_loss(away * scale[1], none, none, **own, clip=None),
                kl_loss(one * scale[2], none, **own, estimator="k1", gradient="own"),
            ]
            loss = torch.stack([part.loss for part in parts])
            loss.sum().backward()
            totals += loss.detach()
    assert sorted(len(share.micro_batches) for share in made) == ([2] if ranks == 1 else [1, 1])
    assert totals.tolist() == pytest.approx([0.25] * 3)
    assert scale.grad is not None and scale.grad.tolist() == pytest.approx([0.25, 0.5, 0.25])


def test_minibatches_keep_siblings_together() -> None:
    groups = [[sample(2 * i, 3), sample(2 * i + 1, 3)] for i in range(3)]
    assert [[s.id for s in step] for step in deal(groups, 2)] == [[0, 1, 4, 5], [2, 3]]
    assert [len(step) for step in deal(groups, 8)] == [2, 2, 2]


def two_turns(sibling: int, first: float, second: float, lengths: tuple[int, int]) -> Trajectory:
    """Two turns of the given lengths, each after two given tokens."""
    parts = [part for n in lengths for part in (given([1, 2]), sampled([3] * n))]
    made = trajectory("t", sibling, first + second, *parts)
    return replace(made, turn_rewards=(first, second), turns=2)


@pytest.mark.parametrize(
    ("credit", "turns"),
    [
        ("trajectory", [(0.5, 0.5), (-0.5, -0.5)]),  # of 1 and 0
        ("turn", [(0.5, 1.5), (-0.5, -1.5)]),  # to come: 1 and 0, then 2 and -1
        ("step", [(0.5, 1.75), (-0.5, -1.25)]),  # -1, 2, 1, -1 less 0.25, then summed
    ],
)
def test_a_turn_answers_for_what_credit_says(credit: Any, turns: list[tuple[float, float]]) -> None:
    pair = Group("t", (two_turns(0, -1.0, 2.0, (1, 2)), two_turns(1, 1.0, -1.0, (1, 1))))
    centred = partial(group_relative, scale="none")
    ((first, second),), _ = samples_of_groups([pair], centred, credit=credit)
    (a, b), (c, d) = turns
    assert first.advantages.tolist() == pytest.approx([0, 0, a, 0, 0, b, b])
    assert second.advantages.tolist() == pytest.approx([0, 0, c, 0, 0, d])


def test_a_turn_is_compared_with_the_same_turn_and_failures_with_none() -> None:
    alone = trajectory("t", 2, 4.0)  # one turn; so the second of the others is a pair
    failed = trajectory("t", 3, None, given([1]), sampled([2]), given([3]), sampled([4]))
    members = (two_turns(0, 0.0, 1.0, (1, 1)), two_turns(1, 1.0, 0.0, (1, 1)), alone, failed)
    centred = partial(group_relative, scale="none")
    ((a, b, c),), stats = samples_of_groups([Group("t", members)], centred, credit="turn")
    assert a.advantages.tolist() == [0, 0, -1, 0, 0, 0.5]  # 1 of 1, 1, 4; 1 of 1, 0
    assert b.advantages.tolist() == [0, 0, -1, 0, 0, -0.5]
    assert c.advantages.tolist() == [0, 0, 2, 2] and stats.without_reward == 1


@pytest.mark.parametrize("critic", [False, True])
def test_shaped_rewards_make_groups_and_belong_to_the_last_turn(critic: bool) -> None:
    """Equal rewards, but one trajectory is above the budget of three sampled tokens."""
    pair = Group("t", (two_turns(0, 0.5, 0.5, (1, 2)), two_turns(1, 0.5, 0.5, (2, 2))))
    shape = Shaping(budget=3)
    advantages = None if critic else group_relative
    ((first, second),), stats = samples_of_groups([pair], advantages, shaping=shape)
    assert stats.metrics()["reward_shaping"] == -1.0 and stats.reward_mean == 1.0
    if critic:
        assert first.rewards is not None and second.rewards is not None
        assert first.rewards.tolist() == [0, 0, 0.5, 0, 0, 0, 0.5]
        assert second.rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0, -1.5]
    else:
        assert {*first.advantages} == {0.0, 1.0} and {*second.advantages} == {0.0, -1.0}
    assert stats.metrics()["over_budget"] == 1
    without = samples_of_groups([pair], group_relative)[1].metrics()
    assert not {"reward_shaping", "over_budget"} & set(without)


def test_a_task_has_its_own_budget_and_failures_are_not_over_it() -> None:
    """Two sampled tokens each; budgets 1, 3 and 4 of the tasks, and 0.5 * 3 of the run for low."""
    made = [trajectory("t", i, 1.0) for i in range(4)] + [trajectory("t", 4, None)]
    own = [(1, ""), (3, ""), (4, "low"), (None, "low"), (1, "")]
    members = tuple(
        replace(t, budget=budget, kind=kind) for t, (budget, kind) in zip(made, own, strict=True)
    )
    shape = Shaping(budget=3, efforts={"low": 0.5})
    (kept,), stats = samples_of_groups([Group("t", members)], group_relative, shaping=shape)
    assert [s.advantages[-1] for s in kept] == [-1.0, 1.0, 1.0, -1.0]
    assert (stats.over_budget, stats.shaping, stats.reward_mean) == (2, -1.0, 1.0)
    alone = samples_of_groups([Group("t", members[1:2])], group_relative)[1]
    assert (alone.over_budget, alone.shaping) == (0, 0.0)  # within what its task allows


def test_efforts_do_nothing_to_tasks_without_a_budget() -> None:
    shape = Shaping(efforts={"low": 0.5})
    (kept,), stats = samples_of_groups([group("t", [1.0, 0.0])], group_relative, shaping=shape)
    assert [s.advantages[-1] for s in kept] == [1.0, -1.0]
    assert (stats.over_budget, stats.shaping) == (None, None)
    failed = samples_of_groups([group("t", [None])], group_relative, shaping=shape)[1]
    assert failed.over_budget is None  # nothing is known of what could not be built


def test_groups_without_variance_stay_where_they_are_taught() -> None:
    """Of two kinds with equal rewards only the taught one is learned from."""
    groups = [
        Group(kind, tuple(replace(t, kind=kind) for t in group(kind, [1.0, 1.0]).trajectories))
        for kind in ("code", "math")
    ]
    kept, stats = samples_of_groups(groups, group_relative, taught="code".__eq__)
    assert [[s.kind for s in samples] for samples in kept] == [["code", "code"]]
    assert (stats.groups_without_variance, stats.groups_left_out) == (2, 1)


@pytest.mark.parametrize("credit", ["trajectory", "turn", "step"])
@pytest.mark.parametrize("reward", [0.0, 5.0])
def test_an_episode_without_a_token_to_train_is_compared_with_nobody(
    credit: Any, reward: float
) -> None:
    """Its prompt was too long, or all that it sampled is too old; its reward is told all the
    same."""
    own = group("t", [1.0, 0.0]).trajectories
    nothing = replace(trajectory("t", 2, reward), segments=(), turns=0)
    first = replace(trajectory("t", 3, reward), segments=(sampled([3]),))  # nothing predicts it
    old = replace(trajectory("t", 4, reward), oldest=1)
    shape = Shaping(length_reward=1.0)
    for extra in ([], [nothing], [first], [old], [nothing, first, old]):
        played = Group("t", (*own, *extra))
        for shaping in (Shaping(), shape):
            ((a, b),), stats = samples_of_groups(
                [played], group_relative, credit=credit, shaping=shaping
            )
            assert (a.advantages[-1], b.advantages[-1]) == (1.0, -1.0)
        assert stats.metrics()["episodes_without_tokens"] == len(extra)
        assert stats.without_reward == 0
        assert stats.reward_mean == pytest.approx((1 + reward * len(extra)) / (2 + len(extra)))
    alone, stats = samples_of_groups([Group("t", (own[0], nothing))], group_relative)
    assert alone == [] and stats.groups_without_variance == 1
    none, stats = samples_of_groups([Group("t", (nothing, nothing))], group_relative, "learned")
    assert none == [] and stats.groups_left_out == 1 and stats.without_tokens == 2


def test_old_spans_are_not_trained_and_rewards_stay() -> None:
    """Of a trajectory of two turns the first was sampled too long ago."""
    long = trajectory("t", 0, 1.0, given([1]), sampled([2, 3]), given([4]), sampled([5], version=6))
    long = replace(long, oldest=2, turn_rewards=(0.25, 0.75))
    other = trajectory("t", 1, 0.0, given([1]), sampled([2], version=6))
    ((a, b),), stats = samples_of_groups([Group("t", (long, other))], group_relative)
    assert a.loss_mask.tolist() == [False] * 4 + [True] and a.advantages[-1] == 1.0
    assert b.advantages[-1] == -1.0 and stats.trained_tokens == 2
    assert stats.staleness(7) == {"staleness_1": 1.0, "staleness_max": 1}
    ((a, _),), _ = samples_of_groups([Group("t", (long, other))], None)
    assert a.rewards is not None and a.rewards[a.loss_mask].tolist() == [0.75]


def test_a_failed_episode_of_a_teachers_kind_keeps_no_group() -> None:
    """Where nothing teaches, nothing is counted either: a failed episode is taught nothing."""
    failed = Group("b", (replace(trajectory("b", 0, None), kind="x"),))
    given = [group("a", [1.0, 1.0]), failed]
    kept, stats = samples_of_groups(given, group_relative, "counted", taught=lambda k: k == "x")
    assert kept == [] and stats.groups_left_out == 2
