"""The algorithms a config can name: an advantage and a loss, with their settings bound."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ..configs.errors import UserError
from ..configs.schema import AlgorithmConfig
from . import advantages, corrections, losses, penalties
from .aggregation import Aggregation
from .credit import Credit
from .critic import Critic
from .objective import LossFunction, Objective
from .options import pull_of, shaping_of
from .shaping import UNSHAPED, Shaping
from .teachers import Distillation

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]  # rewards [N], group ids [N] -> [N]
# Groups whose advantages are all 0: left out; counted by the mean, where others teach; or learned
# from, since more than advantages acts on their tokens.
Flat = Literal["left_out", "counted", "learned"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An advantage over groups of rewards, or a critic instead, and a loss over tokens.

    ``decoupled`` says that the loss wants the log-probs of the policy before the update, ``flat``
    what becomes of groups without an advantage, ``compares`` that siblings are compared,
    ``on_policy`` that nothing in it weighs what another policy sampled, ``extra_rounds`` how many
    times a step may roll out again for groups with an advantage. Rewards are changed by
    ``shaping`` first, and tokens answer for those that ``credit`` names. What teachers say is added
    to advantages as ``distillation`` says.
    """

    advantages: AdvantageFunction | None
    loss: LossFunction
    decoupled: bool = False
    critic: Critic | None = None
    pull: penalties.Pull | None = None
    credit: Credit = "trajectory"
    shaping: Shaping = UNSHAPED
    distillation: Distillation | None = None
    flat: Flat = "left_out"
    compares: bool = True
    on_policy: bool = False
    extra_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a name stands for; ``settings`` are those it has, with its own values for them."""

    advantages: Callable[..., Tensor] | None  # None: those of a critic
    loss: LossFunction
    settings: Mapping[str, Any]
    aggregation: Aggregation = "token"
    pulled: bool = False  # its loss pulls towards the policy that sampled
    whole: bool = False  # its ratio is one of sequences, and so is the advantage that it weighs
    compares: bool = True  # its advantages compare siblings: a group of one has none
    ratio: bool = True  # its loss compares the policy with the one that sampled
    extra_rounds: int = 0

    def __call__(self, config: AlgorithmConfig) -> Algorithm:
        """The algorithm with the settings of a config that names it; UserError for those that do
        not go with it or with each other."""
        own = self._settings(config)
        advantage = {key: own.pop(key) for key in GROUP if key in own}
        critic = {key: own.pop(key) for key in CRITIC if key in own}
        aggregation = config.aggregation or self.aggregation
        if config.length is not None and aggregation != "constant":
            raise UserError(
                f"algorithm.length={config.length} would have no effect: it needs "
                "algorithm.aggregation=constant"
            )
        taught = _distillation(config, "credit" in self.settings)
        compares = self.compares and config.reward_weight > 0
        if not compares and config.extra_rounds:
            cause = f"name={config.name}" if config.reward_weight > 0 else "reward_weight=0"
            raise UserError(
                f"algorithm.extra_rounds={config.extra_rounds} would have no effect with "
                f"algorithm.{cause}: siblings are not compared there, so groups of equal rewards "
                "teach as others do; leave it out"
            )
        rounds = self.extra_rounds if config.extra_rounds is None else config.extra_rounds
        correction = self._correction(config)
        pull = pull_of(config)
        if self.whole and pull is not None and pull.where == "reward":
            raise UserError(
                f"algorithm.kl_in=reward does not go with algorithm.name={config.name}, which has "
                "no advantages of tokens: set algorithm.kl_in=loss"
            )
        acting = self.advantages is None or self.pulled
        acting = acting or config.entropy > 0 or config.kl > 0
        of_rewards = self.advantages and partial(self.advantages, **advantage)
        if of_rewards is not None and config.reward_weight != 1:
            of_rewards = partial(_weighed, of_rewards, config.reward_weight)
        return Algorithm(
            of_rewards,
            Objective(
                partial(self.loss, **own),
                correction,
                aggregation,
                config.length or LENGTH,
                config.entropy,
                pull,
                self.ratio,
            ),
            decoupled=correction is not None and self.ratio,
            critic=Critic(**critic) if critic else None,
            pull=pull,
            credit=config.credit or "trajectory",
            shaping=shaping_of(config),
            flat="learned" if acting else "left_out" if aggregation == "token" else "counted",
            compares=compares,
            on_policy=correction is None and not self.ratio,
            extra_rounds=rounds if compares else 0,
            distillation=taught,
        )

    def _settings(self, config: AlgorithmConfig) -> dict[str, Any]:
        own = dict(self.settings)
        for key in (*GROUP, *CLIP, *CRITIC, "tau", "tau_pos", "tau_neg", "credit"):
            value = getattr(config, key)
            if value is not None and key not in own:
                having = ", ".join(n for n, made in ALGORITHMS.items() if key in made.settings)
                raise UserError(
                    f"algorithm.{key}={value} would have no effect with algorithm.name="
                    f"{config.name}: leave it out, or choose one of {having}"
                )
            if value is not None:
                own[key] = value
        own.pop("credit", None)
        return own

    def _correction(self, config: AlgorithmConfig) -> corrections.CorrectionFunction | None:
        given = {"low": config.correction_low, "high": config.correction_high}
        if config.correction == "none":
            for key, value in given.items():
                if value is not None:
                    raise UserError(
                        f"algorithm.correction_{key}={value} would have no effect: it needs "
                        "algorithm.correction"
                    )
            return None
        if self.pulled:
            raise UserError(
                f"algorithm.correction={config.correction} does not go with algorithm.name="
                f"{config.name}, which pulls towards the policy that sampled: leave it out"
            )
        if self.whole and config.correction in corrections.MASKS_OF_TOKENS:
            raise UserError(
                f"algorithm.correction={config.correction} does not go with algorithm.name="
                f"{config.name}, whose ratio is one of sequences that tokens cannot leave: set "
                "algorithm.correction=sequence_mask"
            )
        function = corrections.CORRECTIONS[config.correction]
        usual = inspect.signature(function).parameters
        low, high = (usual[key].default if end is None else end for key, end in given.items())
        if low >= high:
            raise UserError(
                f"algorithm.correction_low={low} must be below algorithm.correction_high={high}"
            )
        return partial(function, low=low, high=high)


def _weighed(
    advantages: AdvantageFunction, weight: float, rewards: Tensor, group_ids: Tensor
) -> Tensor:
    return weight * advantages(rewards, group_ids)


def _distillation(config: AlgorithmConfig, of_tokens: bool) -> Distillation | None:
    """What teachers add; ``of_tokens`` says whether the loss takes an advantage of each token."""
    if config.distill == 0:
        for key in ("distill_bound", "reward_weight"):
            value = getattr(config, key)
            if value != getattr(AlgorithmConfig(), key):
                raise UserError(
                    f"algorithm.{key}={value:g} would have no effect: it needs algorithm.distill "
                    "above 0"
                )
        return None
    if not of_tokens:
        having = ", ".join(n for n, made in ALGORITHMS.items() if "credit" in made.settings)
        raise UserError(
            f"algorithm.distill={config.distill:g} does not go with algorithm.name={config.name}, "
            f"which has no advantages of tokens: leave it out, or choose one of {having}"
        )
    for key in OF_REWARDS if config.reward_weight == 0 else ():
        value = getattr(config, key)
        if value != getattr(AlgorithmConfig(), key):
            raise UserError(
                f"algorithm.{key}={_written(value)} would have no effect with "
                "algorithm.reward_weight=0: "
                "leave one of them out"
            )
    bound = BOUND if config.distill_bound is None else config.distill_bound
    return Distillation(config.distill, bound)


def _written(value: Any) -> str:
    """A setting as it is given."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {own:g}" for key, own in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


BOUND = 5.0  # nats of a teacher's advantage, unless the config says otherwise
OF_REWARDS = (  # settings that act on rewards alone
    *("scale", "baseline", "credit", "overlong", "overlong_buffer"),
    *("budget", "efforts", "length_reward"),
)
LENGTH = 1024  # tokens that the mean over a constant divides by, unless the config says otherwise
CREDIT: dict[str, Any] = {"credit": "trajectory"}
GROUP: dict[str, Any] = {"scale": "std", "baseline": "mean"}
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
CRITIC: dict[str, Any] = {
    **{"gamma": 1.0, "lam": 1.0, "value_coefficient": 0.1, "value_clip": 0.2},
}
WINDOW: dict[str, Any] = {"clip_low": 0.5, "clip_high": 1.0, "tau": 0.01}

relative = advantages.group_relative
unscaled = partial(relative, scale="none")
peers = partial(unscaled, baseline="leave_one_out")
over_batch = advantages.batch_normalised
centred = partial(over_batch, baseline="mean")

ALGORITHMS: dict[str, Recipe] = {
    "ppo": Recipe(None, losses.ppo_clip, CLIP | CRITIC, compares=False),
    "grpo": Recipe(relative, losses.grpo, GROUP | CLIP | CREDIT),
    "dr_grpo": Recipe(unscaled, losses.dr_grpo, CLIP | CREDIT, "constant"),
    "dapo": Recipe(
        relative, losses.dapo, GROUP | CLIP | CREDIT | {"clip_high": 0.28}, extra_rounds=2
    ),
    "gspo": Recipe(
        *(relative, losses.gspo, GROUP | {"clip_low": 3e-4, "clip_high": 4e-4}, "sequence"),
        whole=True,
    ),
    "cispo": Recipe(relative, losses.cispo, GROUP | CREDIT | {"clip_low": 1.0, "clip_high": 4.0}),
    "sapo": Recipe(
        relative, losses.sapo, GROUP | CREDIT | {"tau_pos": 1.0, "tau_neg": 1.05}, "sequence"
    ),
    "rloo": Recipe(peers, losses.rloo, CREDIT, ratio=False),
    "reinforce": Recipe(
        relative, losses.reinforce, GROUP | CREDIT | {"scale": "none"}, ratio=False
    ),
    "reinforce_pp": Recipe(over_batch, losses.reinforce_pp, CLIP | CREDIT, compares=False),
    "reinforce_pp_baseline": Recipe(centred, losses.reinforce_pp, CLIP | CREDIT),
    "k15": Recipe(unscaled, losses.k15, {"tau": 0.01}, pulled=True),
    "k25": Recipe(unscaled, losses.k25, WINDOW | CREDIT, pulled=True),
}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm ``config.name`` with its settings; those that are None are its own."""
    return ALGORITHMS[config.name](config)
