"""What was sampled is what is scored: temperatures of rollout, evaluation and learner."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from farhorizon.configs.schema import LearnerConfig, RolloutConfig
from farhorizon.envs.types import Task
from farhorizon.rl.learner import Learner
from farhorizon.rollout.episode import run_groups
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.types import Group

from ..fakes import ScriptedEnv
from .test_routing import CHAT, LOSS, make_policy, samples, share

pytestmark = pytest.mark.usefixtures("only_rank")


def play(generator: NativeGenerator, temperature: float) -> list[Group]:
    """Two tasks, three siblings, two turns each."""
    config = RolloutConfig(max_turn_tokens=6, temperature=temperature)
    env = partial(ScriptedEnv, "wawbwc", ["wdwewfwgwhwi"])
    return run_groups(generator, [Task("a", 0), Task("b", 1)], 3, env, CHAT, config, 64)[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_no_ratio_leaves_one_before_an_update(temperature: float) -> None:
    """C05: on tokens that were sampled after a greedy evaluation."""
    generator = NativeGenerator(make_policy())
    play(generator, 0.0)
    groups = play(generator, temperature)
    alone = play(NativeGenerator(make_policy()), temperature)
    for one, other in zip(groups, alone, strict=True):
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    whole = share(samples(groups))
    agreed, apart = (
        Learner(make_policy(), LearnerConfig(), heat).update([whole], LOSS).metrics
        for heat in (temperature, 2 * temperature)
    )
    assert agreed["log_ratio_max"] < 1e-4 and agreed["clip_fraction"] == 0
    assert apart["log_ratio_max"] > 0.01  # each at a temperature of its own
