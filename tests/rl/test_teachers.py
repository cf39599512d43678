"""On-policy distillation: who teaches what, and what the policy makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.load import override_config
from farhorizon.configs.schema import AlgorithmConfig, TeacherConfig
from farhorizon.policy.images import Patches, Placed
from farhorizon.policy.routing import Routes
from farhorizon.rl.advantages import distillation
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import samples_of_groups, samples_of_text, shares
from farhorizon.rl.losses import k25, ppo_clip, reinforce
from farhorizon.rl.teachers import Distillation, Taught, Teachers
from farhorizon.rl.types import MicroBatch
from farhorizon.rollout.types import Group

from .fake_policy import FakePolicy
from .test_batch import given, sampled, trajectory

ALONE = Distillation(1.0, 5.0)


def texts(*kinds: str) -> MicroBatch:
    """Sequences of 3, 4, ... tokens, longest first, each of its kind."""
    tokens = np.random.default_rng(0)
    made = samples_of_text([tokens.integers(0, 11, 3 + i) for i in range(len(kinds))])
    samples = [replace(s, kind=kind) for s, kind in zip(made, kinds, strict=True)]
    (share,) = shares(samples, 1, 1000)
    return share.micro_batches[0]


def alone(policy: FakePolicy, batch: MicroBatch, number: int) -> list[float]:
    """Log-probs of every token but the first of one sequence, without company."""
    begin, end = batch.cu_seqlens[number : number + 2]
    ids = torch.tensor(batch.input_ids[begin:end])
    rows = torch.arange(len(ids) - 1)
    edges = torch.tensor([0, len(ids)])
    out = policy(ids[None], edges, rows=rows, targets=ids[1:], temperature=0.7)
    assert out.logprobs is not None
    return out.logprobs.tolist()


def test_each_sequence_is_scored_by_the_teachers_of_its_kind_by_weight() -> None:
    batch = texts("math", "code", "poems", "code")  # lies as code, poems, code, math
    policies = {name: FakePolicy(seed=seed) for seed, name in enumerate(("a", "b"))}
    lessons = [
        TeacherConfig(policy="a", kinds=("math", "code")),
        TeacherConfig(policy="b", kinds=("code",), weight=3.0),
    ]
    taught = Teachers(lessons, policies, ALONE, 0.7).score(batch, np.flatnonzero(batch.loss_mask))
    assert batch.kinds == ("code", "poems", "code", "math")
    a, b = ([alone(policies[n], batch, i) for i in range(4)] for n in ("a", "b"))
    mixed = {i: [(x + 3 * y) / 4 for x, y in zip(a[i], b[i], strict=True)] for i in (0, 2)}
    want = [*mixed[0], *([0.0] * 4), *mixed[2], *a[3]]
    assert taught.logprobs.tolist() == pytest.approx(want, abs=1e-6)
    assert taught.known.tolist() == [True] * 5 + [False] * 4 + [True] * 3 + [True] * 2
    assert not taught.logprobs.requires_grad


def test_a_teacher_without_kinds_teaches_all_and_padding_none() -> None:
    teacher, lesson = {"a": FakePolicy()}, TeacherConfig(policy="a", weight=2.0)
    batch = texts("", "code")
    own = Teachers([lesson], teacher, ALONE, 0.7)
    taught = own.score(batch, np.flatnonzero(batch.loss_mask))
    want = alone(teacher["a"], batch, 0) + alone(teacher["a"], batch, 1)
    assert taught.logprobs.tolist() == pytest.approx(want, abs=1e-6) and taught.known.all()
    padding = shares([], 1, 1000)[0].micro_batches[0]
    nothing = own.score(padding, np.array([1]))
    assert nothing.known.tolist() == [False] and nothing.logprobs.tolist() == [0.0]


def test_sequences_take_all_that_is_theirs_with_them() -> None:
    patches = Patches(np.zeros((4, 3, 2, 2), np.uint8), (1, 2, 2), 1)
    images = tuple(Placed(start, patches) for start in (1, 6))
    experts, known = np.arange(12, dtype=np.uint8)[:, None, None], np.arange(12) % 2 == 0
    rewards, ends = np.arange(12.0), np.array([True, False, True])
    batch = replace(texts("code", "math", "code"), images=images)  # of 5, 4 and 3 tokens
    batch = replace(batch, rewards=rewards, terminated=ends, routes=Routes(experts, known))
    part = batch.of_sequences(np.array([True, False, True]))
    kept = np.array([*range(5), *range(9, 12)])
    for name in ("input_ids", "loss_mask", "behavior_logprobs", "advantages", "sequence_ids"):
        assert getattr(part, name).tolist() == getattr(batch, name)[kept].tolist()
    assert part.cu_seqlens.tolist() == [0, 5, 8] and part.kinds == ("code", "code")
    assert part.rewards is not None and part.rewards.tolist() == kept.tolist()
    assert part.terminated is not None and part.terminated.tolist() == [True, True]
    assert part.routes is not None and part.routes.experts.ravel().tolist() == kept.tolist()
    assert part.routes.known.tolist() == (kept % 2 == 0).tolist()
    assert [image.start for image in part.images] == [1]
    later = batch.of_sequences(np.array([False, True, True]))
    assert [image.start for image in later.images] == [1] and later.cu_seqlens.tolist() == [0, 4, 7]


def test_what_is_taught_by_hand() -> None:
    """Gaps 0.5, -9 (bound 2), none without a teacher, none outside of the mask."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    known = torch.tensor([True, True, False, True])
    taught = Taught(torch.tensor([-0.5, -10.0, 0.0, -0.1]), known)
    mask = torch.tensor([True, True, True, False])
    own = Teachers([TeacherConfig(policy="a")], {"a": FakePolicy()}, Distillation(0.5, 2.0), 1.0)
    advantages, told = own.teach(logprobs, taught, mask, 4)
    assert advantages.tolist() == [0.25, -1.0, 0.0, 0.0] and not advantages.requires_grad
    values = {name: value.item() for name, value in told.items()}
    assert values == {
        "teacher_tokens": 0.5,
        "teacher_kl": (-0.5 + 9.0) / 4,
        "teacher_bounded": 0.25,
    }
    never = Taught(torch.full((4,), -math.inf), torch.ones(4, dtype=torch.bool))
    advantages, told = own.teach(logprobs, never, mask, 4)
    assert advantages.tolist() == [-1.0, -1.0, -1.0, 0.0] and told["teacher_kl"] == 15.0


@pytest.mark.parametrize("loss", [reinforce, ppo_clip, k25])
def test_on_average_the_gradient_is_that_of_the_reverse_kl(loss: Any) -> None:
    """Over all three tokens of a vocabulary, each as often as the policy samples it."""
    logits = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    teacher = torch.tensor([-0.2, 0.9, 0.4]).log_softmax(0)
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    (want,) = torch.autograd.grad(kl, logits, retain_graph=True)
    mask, got = torch.ones(1, dtype=torch.bool), torch.zeros(3)
    for token in range(3):
        own = logprobs[token : token + 1]
        gap = distillation(own, teacher[token : token + 1], mask, bound=50.0)
        whole = {"sequence_ids": torch.zeros(1, dtype=torch.int64), "denominator": 1}
        out = loss(own, own.detach(), gap, mask, **whole)
        (gradient,) = torch.autograd.grad(out.loss, logits, retain_graph=True)
        got += own.detach().exp() * gradient
    assert got.tolist() == pytest.approx(want.tolist(), abs=1e-6)


def test_a_sample_has_the_kind_of_its_task() -> None:
    made = replace(trajectory("t", 0, 1.0, given([1]), sampled([2])), kind="code")
    other = trajectory("t", 1, 0.0, given([1]), sampled([2]))
    algorithm = make_algorithm(AlgorithmConfig())
    ((first, second),), _ = samples_of_groups([Group("t", (made, other))], algorithm.advantages)
    assert (first.kind, second.kind) == ("code", "")


def test_rewards_count_as_much_as_asked() -> None:
    pair = Group("t", (trajectory("t", 0, 1.0), trajectory("t", 1, 0.0)))
    for weight, want in ((1.0, 1.0), (0.25, 0.25), (0.0, 0.0)):
        config = AlgorithmConfig(distill=1.0, reward_weight=weight)
        algorithm = make_algorithm(config)
        (kept,), _ = samples_of_groups(
            [pair], algorithm.advantages, algorithm.flat, taught=lambda kind: True
        )
        assert [s.advantages[-1] for s in kept] == [want, -want]
        assert algorithm.compares == (weight > 0)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["distill_bound=3"], "algorithm.distill_bound=3 would have no effect: it needs"),
        (["reward_weight=0"], "algorithm.reward_weight=0 would have no effect: it needs"),
        (["name=ppo", "distill=1"], "algorithm.distill=1 does not go with algorithm.name=ppo, "),
        (["name=gspo", "distill=1"], "algorithm.distill=1 does not go with algorithm.name=gspo"),
        (
            ["distill=1", "reward_weight=0", "budget=3"],
            "algorithm.budget=3 would have no effect with algorithm.reward_weight=0: leave one of",
        ),
        (
            ["distill=1", "reward_weight=0", "extra_rounds=3"],
            "algorithm.extra_rounds=3 would have no effect with algorithm.reward_weight=0",
        ),
    ],
)
def test_what_does_not_go_with_teachers_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_algorithm(override_config(AlgorithmConfig(), texts))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
