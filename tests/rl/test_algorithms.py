"""Every algorithm can be named, and a setting has an effect or is refused."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.load import override_config
from farhorizon.configs.schema import AlgorithmConfig, TeacherConfig
from farhorizon.rl.advantages import group_relative
from farhorizon.rl.algorithms import ALGORITHMS, CLIP, CRITIC, GROUP, make_algorithm
from farhorizon.rl.batch import samples_of_groups
from farhorizon.rl.corrections import CORRECTIONS
from farhorizon.rl.critic import Critic, judge, with_values
from farhorizon.rl.penalties import kl_reward
from farhorizon.rl.shaping import Shaping
from farhorizon.rl.teachers import Taught, Teachers
from farhorizon.rl.types import LossOutput
from farhorizon.rollout.types import Group

from .test_batch import given, sampled, trajectory
from .test_critic import packed

HINTS = get_type_hints(AlgorithmConfig)
SETTINGS = [name for name in HINTS if name not in ("name", "extra_rounds")]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_alone_has_the_settings_of_its_algorithm(name: str) -> None:
    recipe = ALGORITHMS[name]
    own = inspect.signature(recipe.loss).parameters
    shared = {key: value for key, value in recipe.settings.items() if key in own}
    assert shared == {key: own[key].default for key in shared}


NUMBERS = {
    **{"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.5, "tau": 0.3, "entropy": 0.1},
    **{"gamma": 0.9, "lam": 0.5, "value_coefficient": 0.3, "value_clip": 0.05, "kl": 0.1},
    **{"overlong": 6, "overlong_buffer": 5, "budget": 4, "length_reward": 0.5},
    **{"tau_pos": 2.0, "tau_neg": 3.0, "efforts": "{low: 0.5}"},
    **{"distill": 0.5, "distill_bound": 0.7, "reward_weight": 0.3},
}
NEEDS = {
    "overlong_buffer": ["overlong=6"],
    "efforts": ["budget=8"],
    "distill_bound": ["distill=0.5"],
    "reward_weight": ["distill=0.5"],
    "kl_in": ["kl=0.1"],
    "kl_estimator": ["kl=0.1"],
    "kl_gradient": ["kl=0.1"],
    "length": ["aggregation=constant"],
    "correction_low": ["correction=icepop"],
    "correction_high": ["correction=icepop"],
}


def others(setting: str) -> list[Any]:
    """Values beside the default: all of a choice, one of a number."""
    default, hint = getattr(AlgorithmConfig(), setting), HINTS[setting]
    for option in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(option) is Literal:
            return [value for value in get_args(option) if value != default]
    return [{"length": 7, "correction_low": 0.9, "correction_high": 1.1, **NUMBERS}[setting]]


def episodes() -> list[Group]:
    """Two turns each, of 2 to 8 tokens together; three siblings and a task of its own."""
    own = [(1.0, 0.0), (0.0, 0.0), (-0.3, 0.6), (0.3, 0.0)]
    made = [
        replace(
            trajectory("a" if i < 3 else "b", i, sum(rewards), *(given([1]), sampled([2] * (i + 1)))
            * 2),
            turn_rewards=rewards,
            kind="low",
        )
        for i, rewards in enumerate(own)
    ]  # fmt: skip
    return [Group("a", tuple(made[:3])), Group("b", tuple(made[3:]))]


def outcome(config: AlgorithmConfig) -> list[float]:
    """Advantages, loss and gradient on rewards and ratios of every kind."""
    algorithm = make_algorithm(config)
    kept, _ = samples_of_groups(
        episodes(), algorithm.advantages, credit=algorithm.credit, shaping=algorithm.shaping
    )
    samples = [s for group in kept for s in group]
    credited = np.concatenate([s.advantages if s.rewards is None else s.rewards for s in samples])
    logprobs = torch.tensor([0.3, 0.85, 1.0, 1.15, 3.0]).repeat(2).log().requires_grad_()
    entropy = logprobs.exp()
    everywhere = torch.ones(10, dtype=torch.bool)
    token_advantages = torch.tensor([1.0, -1.0]).repeat_interleave(5)
    pulled = {}
    if (pull := algorithm.pull) is not None:
        reference = pulled["reference_logprobs"] = torch.linspace(-0.5, 0.5, 10)
        if pull.where == "reward":
            token_advantages += kl_reward(
                torch.zeros(10),
                reference,
                everywhere,
                coefficient=pull.coefficient,
                estimator=pull.estimator,
            )
    if (setting := algorithm.distillation) is not None:
        teachers = Teachers([TeacherConfig(policy="t")], {"t": torch.nn.Linear(1, 1)}, setting, 1.0)
        taught = Taught(torch.linspace(-2.0, 0.5, 10), everywhere)
        token_advantages += teachers.teach(logprobs, taught, everywhere, 10)[0]
    loss = algorithm.loss(
        logprobs,
        torch.zeros(10),
        token_advantages,
        everywhere,
        sequence_ids=torch.tensor([0, 1, 1, 2, 2, 3, 4, 4, 4, 5]),
        denominator=10,
        entropy=entropy,
        **pulled,
    ).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    seen = [*credited.tolist(), loss.item(), *gradient.tolist()]
    return seen if algorithm.critic is None else seen + criticised(algorithm.critic)


def criticised(critic: Critic) -> list[float]:
    """Advantages, loss and gradient of a critic whose values have moved."""
    values = torch.tensor([0.5, 1.0, 1.0, 2.0, 3.0])
    judged = judge(packed(), values, torch.tensor([9.0, 8.0]), critic)
    now = (values + torch.tensor([0.3, -0.1, 0.1, -0.3, 0.0])).requires_grad_()
    none = LossOutput(torch.zeros(()), {})
    loss = with_values(none, critic, now, judged, torch.ones(5, dtype=torch.bool), 5).loss
    (gradient,) = torch.autograd.grad(loss, now)
    return [*judged.advantages.tolist(), loss.item(), *gradient.tolist()]


def test_what_a_config_may_name_is_what_there_is() -> None:
    assert set(ALGORITHMS) == set(get_args(HINTS["name"]))


def test_the_default_is_grpo_as_it_always_was() -> None:
    """To the bit: clip 0.2 on both sides, deviation of the group, token mean."""
    algorithm = make_algorithm(AlgorithmConfig())
    random = torch.Generator().manual_seed(0)
    behavior, noise, advantages = torch.randn(3, 50, generator=random)
    rewards, groups = torch.rand(50, generator=random), torch.arange(50) // 8
    assert algorithm.advantages is not None and algorithm.critic is None
    assert torch.equal(algorithm.advantages(rewards, groups), group_relative(rewards, groups))
    logprobs = (behavior + 0.3 * noise).requires_grad_()
    mask = torch.rand(50, generator=random) < 0.8
    whole = {"sequence_ids": groups, "denominator": 33}
    got = algorithm.loss(logprobs, behavior, advantages, mask, **whole).loss
    log_ratio = torch.where(mask, logprobs, 0.0) - torch.where(mask, behavior, 0.0)
    ratio = torch.minimum(log_ratio, torch.tensor(20.0)).exp()
    own = torch.where(mask, advantages, 0.0)
    want = -torch.minimum(ratio * own, ratio.clamp(0.8, 1.2) * own).sum() / 33
    assert got.item() == want.item() and got.dtype == torch.float32
    gradients = [torch.autograd.grad(x, logprobs)[0] for x in (got, want)]
    assert torch.equal(*gradients)


def allowed(name: str, *texts: str) -> AlgorithmConfig | None:
    """The config, or None where it is refused in one line that names a setting given."""
    config = override_config(AlgorithmConfig(), [f"name={name}", *texts])
    try:
        make_algorithm(config)
    except UserError as error:
        assert "\n" not in str(error)
        assert any(f"algorithm.{text}" in str(error) for text in texts), str(error)
        return None
    return config


def test_more_rounds_of_rollout_are_for_groups_that_may_teach_nothing() -> None:
    """Those whose advantages compare siblings, whatever else acts on their tokens."""
    for name, recipe in ALGORITHMS.items():
        for more in ([], ["entropy=0.1"], ["kl=0.1"]):
            assert (allowed(name, "extra_rounds=2", *more) is not None) == recipe.compares, name
        made = make_algorithm(override_config(AlgorithmConfig(), [f"name={name}"]))
        assert made.extra_rounds == (2 if name == "dapo" else 0)
    given = [["extra_rounds=0"], ["extra_rounds=3"], ["distill=1", "reward_weight=0"]]
    made = [make_algorithm(override_config(AlgorithmConfig(name="dapo"), texts)) for texts in given]
    assert [algorithm.extra_rounds for algorithm in made] == [0, 3, 0]


def test_lengths_that_exclude_each_other_are_refused() -> None:
    assert allowed("dapo", "overlong=20", "overlong_buffer=21") is None
    assert make_algorithm(AlgorithmConfig(overlong=100)).shaping == Shaping(limit=100, buffer=20)
    assert make_algorithm(AlgorithmConfig()).shaping == Shaping()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_has_an_effect_or_is_refused(name: str, setting: str) -> None:
    """C20, from the command line's text to the numbers."""
    needs = NEEDS.get(setting, [])
    plain = allowed(name, *needs)
    if plain is None:
        of_tokens = ("gspo", "k15", "k25") if setting.startswith("correction_") else ()
        refused = of_tokens or ("ppo", "gspo", "k15")
        assert name in refused and setting in NEEDS
        return
    assert outcome(plain) == outcome(plain)
    own = ALGORITHMS[name]
    standing = {
        "credit": "trajectory",
        "kl_in": "loss",
        "kl_estimator": "k3",
        "kl_gradient": "right",
    }
    usual = {**standing, **own.settings, "aggregation": own.aggregation}.get(setting)
    assert others(setting)
    for value in others(setting):
        changed = allowed(name, *needs, f"{setting}={value}")
        refused = (
            setting in (*GROUP, *CLIP, *CRITIC, "tau", "tau_pos", "tau_neg", "credit")
            and setting not in own.settings
        )
        refused |= setting == "correction" and own.pulled
        refused |= own.whole and value in ("token_mask", "icepop", "reward")
        refused |= setting == "distill" and "credit" not in own.settings
        assert (changed is None) == refused, value
        if changed is not None:
            assert (outcome(changed) != outcome(plain)) == (value != usual), value


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["length=5"], "algorithm.length=5 would have no effect: it needs algorithm.aggregation"),
        (["correction_high=2"], "algorithm.correction_high=2.0 would have no effect: it needs"),
        (
            ["correction=icepop", "correction_low=6"],
            "algorithm.correction_low=6.0 must be below algorithm.correction_high=5.0",
        ),
        (["name=k25", "correction=icepop"], "algorithm.correction=icepop does not go with"),
        (
            ["name=gspo", "correction=icepop"],
            "algorithm.correction=icepop does not go with algorithm.name=gspo, whose ratio is one "
            "of sequences that tokens cannot leave: set algorithm.correction=sequence_mask",
        ),
        (["name=gspo", "correction=token_mask"], "algorithm.correction=token_mask does not go"),
        (
            ["name=gspo", "kl=0.1", "kl_in=reward"],
            "algorithm.kl_in=reward does not go with algorithm.name=gspo, which has no advantages "
            "of tokens: set algorithm.kl_in=loss",
        ),
        (
            ["name=cispo", "dual_clip=3"],
            "algorithm.dual_clip=3.0 would have no effect with algorithm.name=cispo: leave it out, "
            "or choose one of ppo, grpo, dr_grpo, dapo, reinforce_pp, reinforce_pp_baseline",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_algorithm(override_config(AlgorithmConfig(), texts))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_every_correction_can_be_named() -> None:
    assert {"none", *CORRECTIONS} == set(get_args(HINTS["correction"]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_travels_to_other_processes(name: str) -> None:
    """Ray pickles the loss for every rank."""
    correction = "none" if name in ("k15", "k25") else "sequence_mask"
    made = make_algorithm(
        override_config(AlgorithmConfig(), [f"name={name}", f"correction={correction}"])
    )
    again = pickle.loads(pickle.dumps(made.loss))
    assert (again.correction is None) == (correction == "none")
    assert made.decoupled == (correction != "none" and name not in ("rloo", "reinforce"))


@pytest.mark.parametrize("name", ["rloo", "reinforce"])
@pytest.mark.parametrize("before", [None, torch.tensor([-3.0])])
def test_a_loss_without_a_ratio_is_corrected_by_that_of_the_policy_itself(
    name: str, before: torch.Tensor | None
) -> None:
    """Policy / behaviour = 9: the gradient of E_behaviour[ratio A] is 9 A, not A, and that of the
    policy before the update says nothing of it."""
    whole: Any = {"sequence_ids": torch.tensor([0]), "denominator": 1}
    logprobs = torch.tensor([-1.0], requires_grad=True)
    behavior = torch.tensor([-1.0 - math.log(9)])
    own = [f"name={name}", "correction=token_truncate", "correction_high=10"]
    for texts, want in ((own, -4.5), (own[:2], -1.0), (own[:1], -0.5)):
        made = make_algorithm(override_config(AlgorithmConfig(), texts))
        assert made.on_policy == (len(texts) == 1) and not made.decoupled
        out = made.loss(
            logprobs,
            behavior,
            torch.tensor([0.5]),
            torch.tensor([True]),
            proximal_logprobs=before,
            **whole,
        )
        (gradient,) = torch.autograd.grad(out.loss, logprobs)
        assert gradient.item() == pytest.approx(want, rel=1e-5)


def test_after_a_step_a_correction_weighs_by_the_policy_before_it() -> None:
    loss = make_algorithm(override_config(AlgorithmConfig(), ["correction=token_truncate"])).loss
    logprobs = torch.tensor([-1.0], requires_grad=True)
    whole: Any = {"sequence_ids": torch.tensor([0]), "denominator": 1}
    one, yes = torch.tensor([1.0]), torch.tensor([True])
    for before, weight in ((None, 1.5), (torch.tensor([-1.1]), 1.5 * math.exp(-0.1))):
        behavior = torch.tensor([-1.0 - math.log(1.5)])
        out = loss(logprobs, behavior, one, yes, proximal_logprobs=before, **whole)
        (gradient,) = torch.autograd.grad(out.loss, logprobs)
        ratio = 1.0 if before is None else math.exp(0.1)
        assert gradient.item() == pytest.approx(-weight * ratio, rel=1e-6)
        assert float(out.metrics["correction_weight"]) == pytest.approx(weight, rel=1e-6)
        assert float(out.metrics["ratio"]) == pytest.approx(1.5, rel=1e-6)
