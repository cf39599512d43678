"""The episode loop: token bookkeeping, budgets, faults and rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import RolloutConfig
from farhorizon.envs.base import Step
from farhorizon.envs.types import Message, StopReason, Task
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rl.advantages import group_relative
from farhorizon.rl.batch import samples_of_groups
from farhorizon.rollout.calls import EnvCalls
from farhorizon.rollout.episode import run_groups
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.types import Group, RolloutStats, Trajectory

from ..fakes import ScriptedEnv, ScriptedGenerator, WordChat

CHAT = WordChat(["go", "he", "llo", "hello", "tool", "x"])
GO, HE, LLO, HELLO, TOOL, X = range(2, 8)


def play(
    turns: Sequence[Sequence[int]],
    env: Callable[[], ScriptedEnv],
    *,
    context: int = 64,
    size: int = 1,
    retries: int = 0,
    **config: Any,
) -> tuple[list[Trajectory], RolloutStats, ScriptedGenerator]:
    generator = ScriptedGenerator(turns)
    rollout = RolloutConfig(env_retries=retries, **config)
    groups, stats = run_groups(generator, [Task("t", 0)], size, env, CHAT, rollout, context)
    return list(groups[0].trajectories), stats, generator


def test_sampled_ids_are_never_encoded_again() -> None:
    """C04: [he, llo] stays [he, llo] although the text alone encodes to [hello]."""
    env = ScriptedEnv(replies=["tool"])
    (one,), _, generator = play([[HE, LLO]] * 2, lambda: env, max_turn_tokens=2)
    assert CHAT.ids("hello") == [HELLO] and env.actions == ["hello", "hello"]
    # The first turn ran out of tokens, so the reply begins with the end of that message.
    assert one.token_ids.tolist() == [GO, 1, HE, LLO, 0, TOOL, 1, HE, LLO]
    assert generator.requests[1][0] == [GO, 1, HE, LLO, 0, TOOL, 1]
    assert one.loss_mask.tolist() == [bool(m) for m in [0, 0, 1, 1, 0, 0, 0, 1, 1]]
    assert one.loss_mask.sum() == 4 == sum(len(s.logprobs) for s in one.segments)
    assert one.versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, 0, 0]


def test_other_tool_text_changes_no_mask() -> None:
    masks = [
        play([[HE, 0]] * 2, lambda word=word: ScriptedEnv(replies=[word]))[0][0].loss_mask
        for word in ("tool", "x")
    ]
    assert masks[0].tolist() == masks[1].tolist()


@pytest.mark.parametrize("limit", [64, 2**20])
def test_budget_at_the_context_limit(limit: int) -> None:
    """C27 (a), (b), (c), (e): prompts that leave 4, 0, exactly enough and 1 token."""

    def at(room: int, said: Sequence[int]) -> tuple[Trajectory, ScriptedGenerator, ScriptedEnv]:
        env = ScriptedEnv("x" * (limit - room - 1))
        (one,), _, generator = play([said], lambda: env, context=limit)
        return one, generator, env

    cut, generator, env = at(4, [X] * 16)
    assert generator.requests[0][1] == 4 and len(cut.token_ids) == limit
    assert cut.stop is StopReason.CONTEXT_LIMIT and cut.stop.status == "truncated"
    assert cut.reward == 0.0 and env.actions == []

    full, generator, _ = at(0, [X])
    assert generator.requests == [] and len(full.token_ids) == limit
    assert full.stop is StopReason.CONTEXT_LIMIT and full.reward == 0.0

    answered, _, _ = at(4, [X, X, X, 0])
    assert len(answered.token_ids) == limit
    assert answered.stop is StopReason.TERMINATED and answered.reward == 1.0

    single, generator, _ = at(1, [X] * 16)
    assert generator.requests[0][1] == 1 and len(single.token_ids) == limit


@pytest.mark.parametrize("limit", [64, 2**20])
def test_tool_text_beyond_the_context_limit_ends_the_episode(limit: int) -> None:
    """C27 (d)."""
    text = "x" * (limit - 4)
    assert len(CHAT.ids(text)) == limit - 4
    (one,), _, generator = play([[HE, 0]] * 2, lambda: ScriptedEnv("go", [text]), context=limit)
    assert one.stop is StopReason.CONTEXT_LIMIT and one.turns == 1 and one.reward == 0.0
    assert len(generator.requests) == 1 and one.token_ids.tolist() == [GO, 1, HE, 0]


def test_a_million_tokens_of_room_cost_nothing() -> None:
    (one,), _, generator = play([[HE, 0]], ScriptedEnv, context=2**20, max_turn_tokens=2**20)
    assert one.reward == 1.0 and generator.requests[0][1] == 2**20 - 2


def test_a_first_prompt_beyond_the_context_ends_its_episode_only() -> None:
    words = iter(["x" * 60, "go"])
    two, stats, generator = play(
        [[HE, 0]], lambda: ScriptedEnv(next(words)), context=8, size=2, max_turn_tokens=2
    )
    assert [t.stop for t in two] == [StopReason.CONTEXT_LIMIT, StopReason.TERMINATED]
    assert [t.reward for t in two] == [0.0, 1.0]
    assert [len(t.token_ids) for t in two] == [0, 4]
    assert (stats.long_prompts, stats.errors, len(generator.requests)) == (1, 0, 1)
    assert ScriptedEnv.closed == ScriptedEnv.built == 2


def test_turn_limit_keeps_the_reward_so_far() -> None:
    (one,), stats, _ = play([[HE, 0]] * 5, lambda: ScriptedEnv(replies=["x"] * 9), max_turns=3)
    assert one.stop is StopReason.TURN_LIMIT and one.turns == 3 and one.reward == 0.0
    assert stats.turns == 3 and stats.episodes == 1


class Tries:
    """Builds environments, of which the chosen numbers fail."""

    def __init__(
        self, failing: Sequence[int], kind: type[ScriptedEnv] = ScriptedEnv, **kwargs: Any
    ) -> None:
        self.failing, self.kind, self.kwargs, self.built = failing, kind, kwargs, 0

    def __call__(self) -> ScriptedEnv:
        broken = self.built in self.failing
        self.built += 1
        kwargs: dict[str, Any] = self.kwargs if broken else {**self.kwargs, "fail_at": None}
        return self.kind(**kwargs)


@pytest.fixture(autouse=True)
def count_environments() -> None:
    ScriptedEnv.built = ScriptedEnv.closed = 0


@pytest.mark.parametrize(("fail_at", "turns", "place"), [(3, 2, "in step"), (0, 0, "in reset")])
def test_one_failing_member_leaves_the_others_alone(fail_at: int, turns: int, place: str) -> None:
    """C21: member 2 of 4 raises in step 3 of 5, or in reset."""
    kwargs = {"replies": ["x"] * 4, "fail_at": fail_at}
    four, stats, _ = play([[HE, 0]] * 5, Tries([2], **kwargs), size=4)
    bad = four[2]
    assert bad.stop is StopReason.ERROR and bad.turns == turns and bad.reward is None
    assert not bad.success and bad.loss_mask.sum() == 0
    assert bad.error is not None and "RuntimeError: the sandbox is gone" in bad.error
    assert place in bad.error
    assert [t.reward for t in four] == [1.0, 1.0, None, 1.0]
    assert (stats.env_errors, stats.errors, stats.episodes) == (1, 1, 4)
    assert ScriptedEnv.closed == ScriptedEnv.built == 4
    clean, _, _ = play([[HE, 0]] * 5, Tries([], **kwargs), size=4)
    for i in (0, 1, 3):
        assert four[i].token_ids.tolist() == clean[i].token_ids.tolist()


class Parity(ScriptedEnv):
    """Five steps; the reward is whether the last answer has an even number of characters."""

    def step(self, action: str) -> Any:
        self.reward = float(len(action) % 2 == 0)
        return super().step(action)


@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_failing_member_changes_no_bit_of_other_groups(fail_at: int) -> None:
    """C21, with a policy that samples: what is learned from the other groups stays as it was."""
    torch.manual_seed(0)
    chat = WordChat([chr(ord("a") + i) * (1 + i % 3) for i in range(22)])
    policy = Policy(PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=2))
    tasks = [Task(name, i, metadata={"prompt": "abbccc"}) for i, name in enumerate("abc")]

    def played(failing: Sequence[int]) -> list[Group]:
        tries = Tries(failing, kind=Parity, replies=["a"] * 4, fail_at=fail_at)
        rollout = RolloutConfig(env_retries=0, max_turn_tokens=4)
        return run_groups(NativeGenerator(policy), tasks, 4, tries, chat, rollout, 64)[0]

    clean, hurt = played([]), played([6])
    assert [t.reward is None for t in hurt[1].trajectories] == [False, False, True, False]
    samples = [
        {tuple(s.token_ids): s for group in samples_of_groups(g, group_relative)[0] for s in group}
        for g in ([clean[0], clean[2]], [hurt[0], hurt[2]])
    ]
    assert samples[0].keys() == samples[1].keys() and len(samples[0]) >= 4
    for ids, sample in samples[0].items():
        other = samples[1][ids]
        assert np.array_equal(other.loss_mask, sample.loss_mask)
        assert np.array_equal(other.advantages, sample.advantages)
        # decoded beside fewer rows: matrix products may round otherwise
        np.testing.assert_allclose(other.behavior_logprobs, sample.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_fault_is_retried_with_a_fresh_environment(fail_at: int) -> None:
    (one,), stats, _ = play(
        [[HE, 0]] * 3, Tries([0], replies=["x"] * 2, fail_at=fail_at), retries=1
    )
    assert one.reward == 1.0 and one.turns == 3 and one.error is None
    assert (stats.env_errors, stats.errors) == (1, 0)
    assert ScriptedEnv.closed == ScriptedEnv.built == 2


def test_a_failing_constructor_is_a_fault_too() -> None:
    def build() -> ScriptedEnv:
        raise OSError("no space left")

    (one,), stats, generator = play([[X]], build, retries=1)
    assert one.stop is StopReason.ERROR and one.turns == 0 and len(one.token_ids) == 0
    assert stats.env_errors == 2 and generator.requests == []


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        ("keyword", "NeedsKeyword", "code 7"),
        ("lock", "HoldsLock", "holding a lock"),
        ("unprintable", "Unprintable", "message unavailable"),
        ("exit", "SystemExit", "3"),
    ],
)
def test_awkward_exceptions_become_text(error: str, name: str, text: str) -> None:
    """C12."""
    (one,), _, _ = play([[HE, 0]] * 2, lambda: ScriptedEnv(fail_at=1, error=error))
    assert one.stop is StopReason.ERROR and one.error is not None
    assert one.error.startswith(f"{name}: ") and text in one.error.splitlines()[0]
    assert "Traceback" in one.error


@pytest.mark.parametrize(
    "reward",
    [
        *(float("nan"), float("inf"), -np.inf, None, 1.1e15, -1e200),
        pytest.param(10**5000, id="huge"),
    ],
)
def test_rewards_that_are_no_value_mask_the_episode(reward: Any) -> None:
    """C22."""
    (one,), stats, _ = play([[HE, 0]], lambda: ScriptedEnv(reward=reward))
    assert one.reward is None and one.stop is StopReason.ERROR and one.loss_mask.sum() == 0
    assert stats.invalid_rewards == 1 and stats.errors == 1 and stats.env_errors == 0
    assert ScriptedEnv.closed == 1


@pytest.mark.parametrize("reward", [np.float32(1), np.array(1.0), torch.tensor(1.0), True, 1])
def test_numbers_of_any_kind_are_rewards(reward: Any) -> None:
    """C22."""
    (one,), _, _ = play([[HE, 0]], lambda: ScriptedEnv(reward=reward))
    assert one.reward == 1.0 and type(one.reward) is float and one.success


class NoNumber:
    """Raises whatever is asked of it."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("reward", ["1.0", [1.0], np.ones(1), object(), NoNumber()])
def test_other_rewards_are_the_users_mistake(reward: Any) -> None:
    with pytest.raises(UserError, match="environment ScriptedEnv: the reward must be a number"):
        play([[HE, 0]], lambda: ScriptedEnv(reward=reward), size=3)
    assert ScriptedEnv.closed == ScriptedEnv.built == 3


def test_replies_that_are_no_messages_are_a_fault() -> None:
    class Wrong(ScriptedEnv):
        def step(self, action: str) -> Any:
            return "hello", 0.0, False, False, {}

    (one,), _, _ = play([[HE, 0]], Wrong)
    assert one.error is not None and "environments return Message objects, got str" in one.error


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (("tool", 7), "TypeError: content, name, type, tool and thinking of a message are strings"),
        (("owner", "go"), "ValueError: message role 'owner' is none of system, user"),
        (("tool", "\ud800"), "UnicodeEncodeError: 'utf-8' codec can't encode"),
    ],
)
@pytest.mark.parametrize("opening", [True, False])
def test_messages_that_cannot_be_rendered_are_a_fault(
    message: tuple[Any, Any], text: str, opening: bool
) -> None:
    """C21."""

    class Wrong(ScriptedEnv):
        def reset(self, **kwargs: Any) -> Any:
            good, info = super().reset(**kwargs)
            return ((Message(*message),) if opening else good), info

        def step(self, action: str) -> Any:
            return (Message(*message),), 0.0, False, False, {}

    (one,), stats, _ = play([[HE, 0]], Wrong)
    assert one.error is not None and one.error.startswith(text)
    assert stats.errors == 1 and Wrong.closed == Wrong.built == 1


def test_slow_environments_run_side_by_side() -> None:
    """Twelve waits of 80 ms; the first three prove them slow, the others overlap."""
    _, stats, _ = play([[HE, 0]] * 2, lambda: ScriptedEnv(delay=0.08), size=12)
    assert stats.env_seconds > 0.96 > 0.7 > stats.seconds


def test_what_calls_learned_outlives_a_rollout() -> None:
    calls = EnvCalls(threads=4, timeout_s=60.0)

    def again() -> RolloutStats:
        return run_groups(
            ScriptedGenerator([[HE, 0]]),
            [Task("t", 0)],
            4,
            lambda: ScriptedEnv(delay=0.08),
            CHAT,
            RolloutConfig(),
            64,
            calls=calls,
        )[1]

    again()
    stats = again()
    calls.shutdown()
    assert stats.env_seconds > 0.3 > 0.2 > stats.seconds


def test_groups_keep_to_the_concurrency_and_the_order_of_tasks() -> None:
    tasks = [Task(f"t{i}", i) for i in (3, 1, 2)]
    generator = ScriptedGenerator([[HE, 0]])
    open_now: list[int] = []
    step = generator.step

    def watched() -> Any:
        open_now.append(len(generator._asked))
        return step()

    generator.step = watched  # type: ignore[method-assign]
    groups, stats = run_groups(
        generator, tasks, 4, ScriptedEnv, CHAT, RolloutConfig(concurrency=6), 64
    )
    assert [g.task_id for g in groups] == ["t3", "t1", "t2"]
    assert all([t.sibling for t in g.trajectories] == [0, 1, 2, 3] for g in groups)
    assert open_now == [4, 4, 4] and stats.episodes == 12


def test_visible_context_shows_only_the_last_tokens() -> None:
    generator = ScriptedGenerator([[HE, 0]])
    groups: list[Group]
    groups, _ = run_groups(
        generator,
        [Task("t", 0)],
        1,
        lambda: ScriptedEnv(replies=["tool"] * 2),
        CHAT,
        RolloutConfig(),
        64,
        visible_context=3,
    )
    assert [known for known, _ in generator.requests] == [[GO, 1], [0, TOOL, 1], [0, TOOL, 1]]
    assert len(groups[0].trajectories[0].token_ids) == 12


@pytest.mark.parametrize(
    ("threshold", "reward", "context", "stop", "success"),
    [
        (1.0, 0.1, 64, StopReason.TERMINATED, True),  # ten times: 0.9999999999999999
        (1.0, 0.09, 64, StopReason.TERMINATED, False),
        (-1.0, -0.1, 64, StopReason.TERMINATED, True),
        (-1.0, -0.1, 10, StopReason.CONTEXT_LIMIT, False),  # cut off before it could fail
        (-5.0, 0.0, 1, StopReason.CONTEXT_LIMIT, False),  # never played
    ],
)
def test_success_is_of_what_was_played(
    threshold: float, reward: float, context: int, stop: StopReason, success: bool
) -> None:
    class Ten(ScriptedEnv):
        success_threshold = threshold

        def step(self, action: str) -> Step:
            messages, _, terminated, truncated, info = super().step(action)
            return messages, reward, terminated, truncated, info

    (one,), _, _ = play([[X, 0]] * 10, lambda: Ten(replies=["x"] * 9), context=context)
    assert (one.stop, one.success) == (stop, success)


def test_a_trajectory_keeps_the_kind_and_the_budget_of_its_task() -> None:
    class Hard(ScriptedEnv):
        def reset(self, **keywords: Any) -> Any:
            self.kind, self.budget = "hard", np.int64(7)  # type: ignore[assignment]
            return super().reset(**keywords)

    (one,), _, _ = play([[X, 0]], lambda: Hard(replies=[]))
    assert (one.kind, one.budget, one.sampled_tokens) == ("hard", 7, 2)
    (other,), _, _ = play([[X, 0]], lambda: ScriptedEnv(replies=[]))
    assert (other.kind, other.budget) == ("", None)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("kind", 3, "kind must be text, got 3 (int)"),
        ("budget", 0, "budget must be a whole number of at least 1, or None, got 0 (int)"),
        ("budget", 2.5, "got 2.5 (float)"),
        ("budget", True, "got True (bool)"),
    ],
)
def test_what_a_task_says_of_itself_must_fit(name: str, value: Any, told: str) -> None:
    class Wrong(ScriptedEnv):
        def reset(self, **keywords: Any) -> Any:
            setattr(self, name, value)
            return super().reset(**keywords)

    with pytest.raises(UserError, match=re.escape(told)):
        play([[X, 0]], lambda: Wrong(replies=[]))
