"""The algorithms a config can name: an advantage and a loss, with their settings bound."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ..configs.errors import UserError
from ..configs.schema import AlgorithmConfig
from . import advantages, corrections, losses, penalties
from .aggregation import Aggregation, token_weights
from .critic import Critic
from .types import LossOutput

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]  # rewards [N], group ids [N] -> [N]
LossFunction = Callable[..., LossOutput]
# Groups whose advantages are all 0: left out; counted by the mean, where others teach; or learned
# from, since more than advantages acts on their tokens.
Flat = Literal["left_out", "counted", "learned"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss of tokens, and how it becomes that of an optimizer step.

    ``correction`` weighs what another policy sampled; ``aggregation`` and ``length`` say which
    mean the loss is; ``entropy`` is the coefficient of the bonus, a mean over tokens always.
    """

    loss: LossFunction
    correction: corrections.CorrectionFunction | None = None
    aggregation: Aggregation = "token"
    length: int = 1
    entropy: float = 0.0

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
    ) -> LossOutput:
        """The share of these tokens [T] in the loss of a step with ``denominator`` trained tokens
        in ``sequences`` sequences (None: those of this call are all).

        ``entropy`` [T] is for the bonus. ``proximal_logprobs`` [T] are those of the policy before
        the update, for a correction; None: no step was taken yet, they are ``logprobs``.
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
                logprobs if proximal_logprobs is None else proximal_logprobs,
                behavior_logprobs,
                advantages,
                mask,
                **whole,
            )
        if self.entropy == 0:
            return out
        assert entropy is not None, "an entropy bonus needs the entropy of each token"
        bonus = penalties.entropy_bonus(entropy, mask, denominator=denominator)
        return replace(out, loss=out.loss + self.entropy * bonus.loss)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An advantage over groups of rewards, or a critic instead, and a loss over tokens.

    ``decoupled`` says that the loss wants the log-probs of the policy before the update, ``flat``
    what becomes of groups without an advantage, ``compares`` that siblings are compared.
    """

    advantages: AdvantageFunction | None
    loss: LossFunction
    decoupled: bool = False
    critic: Critic | None = None
    flat: Flat = "left_out"
    compares: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a name stands for; ``settings`` are those it has, with its own values for them."""

    advantages: Callable[..., Tensor] | None  # None: those of a critic
    loss: LossFunction
    settings: Mapping[str, Any]
    aggregation: Aggregation = "token"
    pulled: bool = False  # its loss pulls towards the policy that sampled
    compares: bool = True  # its advantages compare siblings: a group of one has none

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
        correction = self._correction(config)
        acting = self.advantages is None or self.pulled or config.entropy > 0
        return Algorithm(
            None if self.advantages is None else partial(self.advantages, **advantage),
            Objective(
                partial(self.loss, **own),
                correction,
                aggregation,
                config.length or LENGTH,
                config.entropy,
            ),
            decoupled=correction is not None,
            critic=Critic(**critic) if critic else None,
            flat="learned" if acting else "left_out" if aggregation == "token" else "counted",
            compares=self.compares,
        )

    def _settings(self, config: AlgorithmConfig) -> dict[str, Any]:
        own = dict(self.settings)
        for key in (*GROUP, *CLIP, *CRITIC, "tau"):
            value = getattr(config, key)
            if value is not None and key not in own:
                having = ", ".join(n for n, made in ALGORITHMS.items() if key in made.settings)
                raise UserError(
                    f"algorithm.{key}={value} would have no effect with algorithm.name="
                    f"{config.name}: leave it out, or choose one of {having}"
                )
            if value is not None:
                own[key] = value
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
        function = corrections.CORRECTIONS[config.correction]
        usual = inspect.signature(function).parameters
        low, high = (usual[key].default if end is None else end for key, end in given.items())
        if low >= high:
            raise UserError(
                f"algorithm.correction_low={low} must be below algorithm.correction_high={high}"
            )
        return partial(function, low=low, high=high)


LENGTH = 1024  # tokens that the mean over a constant divides by, unless the config says otherwise
GROUP: dict[str, Any] = {"scale": "std", "baseline": "mean"}
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
CRITIC: dict[str, Any] = {
    **{"gamma": 1.0, "lam": 0.95, "value_coefficient": 0.1, "value_clip": 0.2},
}
WINDOW: dict[str, Any] = {"clip_low": 0.5, "clip_high": 1.0, "tau": 0.01}

relative = advantages.group_relative
unscaled = partial(relative, scale="none")
peers = partial(unscaled, baseline="leave_one_out")
over_batch = advantages.batch_normalised
centred = partial(over_batch, baseline="mean")

ALGORITHMS: dict[str, Recipe] = {
    "ppo": Recipe(None, losses.ppo_clip, CLIP | CRITIC, compares=False),
    "grpo": Recipe(relative, losses.grpo, GROUP | CLIP),
    "dr_grpo": Recipe(unscaled, losses.dr_grpo, CLIP, "constant"),
    "dapo": Recipe(relative, losses.dapo, GROUP | CLIP | {"clip_high": 0.28}),
    "gspo": Recipe(
        relative, losses.gspo, GROUP | {"clip_low": 3e-4, "clip_high": 4e-4}, "sequence"
    ),
    "cispo": Recipe(relative, losses.cispo, GROUP | {"clip_low": 1.0, "clip_high": 4.0}),
    "rloo": Recipe(peers, losses.rloo, {}),
    "reinforce": Recipe(relative, losses.reinforce, GROUP | {"scale": "none"}),
    "reinforce_pp": Recipe(over_batch, losses.reinforce_pp, CLIP, compares=False),
    "reinforce_pp_baseline": Recipe(centred, losses.reinforce_pp, CLIP),
    "k15": Recipe(unscaled, losses.k15, {"tau": 0.01}, pulled=True),
    "k25": Recipe(unscaled, losses.k25, WINDOW, pulled=True),
}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm ``config.name`` with its settings; those that are None are its own."""
    return ALGORITHMS[config.name](config)
