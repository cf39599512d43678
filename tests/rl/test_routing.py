"""Routing replay, thresholds and the rates of routers: a rollout is learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig, RolloutConfig, SyncConfig
from farhorizon.envs.types import Task
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.routing import Routes
from farhorizon.policy.weights import digest
from farhorizon.rl import batch, resume
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.engine import Engine
from farhorizon.rl.learner import Learner
from farhorizon.rl.publish import publish
from farhorizon.rl.replay import share_recorded
from farhorizon.rl.types import Sample, Share, UpdateResult
from farhorizon.rollout.episode import run_groups
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.sync import PolicyWeights, SyncError, WeightReceiver
from farhorizon.rollout.types import Group, SamplingParams, Trajectory

from ..fakes import ScriptedEnv, WordChat
from ..syncing import bytes_of, receive
from .fake_policy import FakePolicy
from .test_batch import given, sampled, trajectory

CHAT = WordChat([f"w{chr(97 + n)}" for n in range(22)])
LOSS = make_algorithm(AlgorithmConfig()).loss
LAYERS, K = 3, 2


pytestmark = pytest.mark.usefixtures("only_rank")


class KeepingPolicy(Policy):
    """Keeps copies of what each optimizer step counted."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.kept: list[list[torch.Tensor]] = []

    def update_thresholds(self) -> list[float]:
        self.kept.append([count.clone() for count in self.routing_counts()])
        return super().update_thresholds()


def make_policy(noise: float = 0.0) -> KeepingPolicy:
    """A policy whose experts differ enough that a change of routes shows; with ``noise`` its
    routers are not those of the rollout."""
    torch.manual_seed(0)
    config = PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=4)
    policy = KeepingPolicy(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".experts." in name or ".gate." in name:
                parameter.mul_(8)
        for router in policy.routers():
            router.e_score_correction_bias.normal_(0, 0.02, generator=generator)
            router.weight.add_(torch.randn(router.weight.shape, generator=generator) * noise)
    return policy


def play(policy: Policy, record: bool = True) -> list[Group]:
    """Two tasks, three siblings, two turns each."""
    generator = NativeGenerator(policy, record_routes=record, prefill_tokens=8)
    config = RolloutConfig(max_turn_tokens=6)
    tasks = [Task("a", 0), Task("b", 1)]
    words = ["wawbwc", "wdwewfwgwhwi"]
    env = partial(ScriptedEnv, words[0], [words[1]])
    return run_groups(generator, tasks, 3, env, CHAT, config, 64)[0]


def samples(groups: Sequence[Group]) -> list[Sample]:
    """Samples with advantages that differ."""
    made = batch.samples_of_groups(groups, make_algorithm(AlgorithmConfig(name="ppo")).advantages)
    flat = [s for group in made[0] for s in group]
    return [
        replace(
            s,
            advantages=np.where(s.loss_mask, (-1.0) ** s.id * (1 + s.id), 0).astype(np.float32),
            rewards=None,
        )
        for s in flat
    ]


def share(made: Sequence[Sample], tokens: int = 40) -> Share:
    return batch.shares(made, 1, tokens)[0]


def learner(policy: torch.nn.Module, **changes: Any) -> Learner:
    config: dict[str, Any] = {"lr": 1e-2, **changes}
    return Learner(policy, LearnerConfig(**config), 1.0)


def digests(own: Learner) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in own.engine.gathered_state()}


@pytest.fixture(scope="module")
def played() -> list[Group]:
    return play(make_policy())


@contextmanager
def learned_routes(policy: Policy) -> Iterator[list[np.ndarray]]:
    """The routes of every forward with gradients, layer by layer."""
    used: list[np.ndarray] = []

    def listen(module: torch.nn.Module, _: Any, out: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            used.append(out[0].numpy())

    for router in policy.routers():
        router.register_forward_hook(listen)
    yield used


def test_a_rollout_has_the_routes_of_the_whole_sequence(played: list[Group]) -> None:
    policy = make_policy()
    for made in (t for group in played for t in group.trajectories):
        routes = made.routes
        assert routes is not None and routes.experts.dtype == np.uint8
        count = len(made.token_ids)
        assert routes.experts.shape == (count, LAYERS, K)
        assert routes.known.tolist() == [True] * (count - 1) + [False]
        with torch.no_grad(), policy.recorded_routes() as recording:
            policy(torch.tensor(made.token_ids[None].astype(np.int64)))
        assert (recording.take()[:-1] == routes.experts[:-1]).all()


def routes_of(policy: Policy, ids: Sequence[int]) -> np.ndarray:
    """Of all tokens but the last, in one forward."""
    with torch.no_grad(), policy.recorded_routes() as recording:
        policy(torch.tensor([ids]))
    return recording.take()[:-1]


@pytest.mark.parametrize("half_read", [False, True])
@pytest.mark.parametrize("keep_states", [0, 1])
def test_routes_are_those_that_samples_were_drawn_with(half_read: bool, keep_states: int) -> None:
    """Weights change between two turns, or while the second one's prompt is being read."""
    old, new = make_policy(), make_policy(noise=0.2)
    generator = NativeGenerator(
        make_policy(), record_routes=True, prefill_tokens=16, keep_states=keep_states
    )
    params = SamplingParams(max_tokens=5)
    prompt, reply = np.arange(2, 14), np.arange(23, 3, -1)
    sessions = generator.open(prompt, [1, 2], params)
    first = dict(c for _ in range(9) for c in generator.step())
    session = sessions[1]
    if half_read:
        generator.extend(session, reply, params)
        assert generator.step() == []
    with torch.no_grad():
        for name, tensor in generator.policy.state_dict().items():
            tensor.copy_(new.state_dict()[name])
    generator.version += 1
    if not half_read:
        generator.extend(session, reply, params)
    second = dict(c for _ in range(9) for c in generator.step())[session]
    ids = [*prompt, *first[session].token_ids, *reply, *second.token_ids]
    (a, b), start = (first[session].routes, second.routes), len(prompt) + 4
    assert a is not None and b is not None and len(a) == start and start + len(b) == len(ids) - 1
    assert (a == routes_of(old, ids[: start + 1])).all()
    whole = routes_of(new, ids)[start:]
    # what old weights had a part in is not what new ones make of the whole
    assert bool((b == whole).all()) == (keep_states == 0)
    assert (b[0] == routes_of(old, ids)[start]).all() == (half_read and keep_states == 1)


def test_recording_changes_no_sample(played: list[Group]) -> None:
    plain = play(make_policy(), record=False)
    for mine, other in zip(played, plain, strict=True):
        for a, b in zip(mine.trajectories, other.trajectories, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() and b.routes is None
            assert (a.logprobs == b.logprobs).all()


def update(policy: Policy, made: Sequence[Sample], **changes: Any) -> tuple[Learner, UpdateResult]:
    own = learner(policy, **changes)
    return own, own.update([share(made)], LOSS)


def test_replayed_routes_of_the_same_weights_change_nothing(played: list[Group]) -> None:
    made = samples(played)
    (free, plain), (own, got) = (
        update(make_policy(), made, replay=replay) for replay in ("off", "rollout")
    )
    assert digests(own) == digests(free)
    for name, value in plain.metrics.items():
        assert got.metrics[name] == value, name
    assert got.metrics["replayed_load_max"] == plain.metrics["expert_load_max"]
    assert plain.metrics["log_ratio_max"] < 1e-4


def test_other_routers_learn_close_to_the_rollout_only_with_its_routes(
    played: list[Group],
) -> None:
    made = samples(played)
    ratios = {}
    for replay in ("off", "rollout"):
        metrics = update(make_policy(noise=0.02), made, replay=replay)[1].metrics
        ratios[replay] = metrics["log_ratio_abs"]
    assert ratios["off"] > 5 * ratios["rollout"] > 0  # weights of the mixture are the learner's


def test_gradients_flow_through_the_mixing_weights_of_replayed_experts(
    played: list[Group],
) -> None:
    """By hand: the layer's output is linear in w = s_e / sum s, at experts that are given."""
    router = make_policy().routers()[0]
    x = torch.randn(5, 32)
    given_experts = torch.tensor([[7, 0], [1, 2], [3, 3 + 1], [5, 6], [0, 1]], dtype=torch.uint8)
    router.given = given_experts, torch.tensor([True, True, False, True, True])
    experts, weights = router(x)
    router.given = None
    free, _ = router(x)
    assert experts[[0, 1, 3, 4]].tolist() == given_experts[[0, 1, 3, 4]].tolist()
    assert experts[2].tolist() == free[2].tolist()
    scores = torch.sigmoid(x @ router.weight.T).gather(1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))
    (gradient,) = torch.autograd.grad(weights[0, 0], router.weight)
    s, t = scores[0].tolist()
    slope = s * (1 - s) * t / (s + t) ** 2
    torch.testing.assert_close(gradient[7], slope * x[0])
    torch.testing.assert_close(gradient[0], -t * (1 - t) * s / (s + t) ** 2 * x[0])
    assert not gradient[1:7].any()


@pytest.mark.parametrize("rule", ["track", "ema", "freeze"])
def test_statistics_are_those_of_free_routing(played: list[Group], rule: str) -> None:
    """Replayed routes change what every layer above reads; no count of any layer may see it."""
    made = samples(played)
    wrong = np.random.default_rng(0)
    shuffled = []
    for one in made:
        assert one.routes is not None
        experts = wrong.permuted(np.tile(np.arange(8), (len(one), LAYERS, 1)), axis=-1)[..., :K]
        routes = Routes(experts.astype(np.uint8), np.ones(len(one), np.bool_))
        shuffled.append(replace(one, routes=routes))
    kept: list[list[torch.Tensor]] = []
    loads = []
    tokens = 1000 if rule == "freeze" else 40  # thresholds that stay look at one micro-batch
    for replay, given_samples in (("off", made), ("rollout", shuffled)):
        policy = make_policy()
        own = learner(policy, replay=replay, thresholds=rule)
        metrics = own.update([share(given_samples, tokens)], LOSS).metrics
        kept += policy.kept
        loads.append([metrics[f"expert_load_layer_{n}"] for n in range(LAYERS)])
        bias = torch.cat([r.e_score_correction_bias for r in policy.routers()])
        kept[-1].append(bias)
    plain, replayed = kept
    for number, (a, b) in enumerate(zip(plain, replayed, strict=True)):
        of_replay = (
            number % 4 == 3 and number < 4 * LAYERS
        )  # histogram, tokens, load, replayed load
        assert torch.equal(a, b) != of_replay, number
    tokens = sum(map(len, made))
    assert int(plain[1]) == tokens and int(plain[3].sum()) == 0
    assert int(replayed[3].sum()) == K * tokens
    assert loads[0] == loads[1]


@pytest.mark.parametrize(("rule", "counted"), [("track", "all"), ("freeze", "one")])
def test_free_routes_are_computed_as_far_as_something_is_made_of_them(
    played: list[Group], rule: str, counted: str
) -> None:
    """Thresholds that stay have a load to tell, and no more."""
    policy, whole = make_policy(), share(samples(played))
    without_gradient: list[bool] = []
    router = policy.routers()[0]
    router.register_forward_hook(lambda *_: without_gradient.append(not torch.is_grad_enabled()))
    metrics = learner(policy, replay="rollout", thresholds=rule).update([whole], LOSS).metrics
    batches = len(whole.micro_batches)
    assert batches > 1
    assert sum(without_gradient) == (batches if counted == "all" else 1)
    assert len(without_gradient) - sum(without_gradient) == batches
    assert metrics["expert_load_max"] >= 1 and metrics["replayed_load_max"] >= 1


def test_a_forward_for_statistics_is_the_training_forward_to_the_bit() -> None:
    """Without gradients few tokens run through all experts at once, which rounds otherwise."""
    policy, ids = make_policy(), torch.arange(12)[None]
    trained = policy(ids).logits
    with torch.no_grad():
        plain = policy(ids).logits
        with policy.routing_statistics():
            counted = policy(ids).logits
    assert torch.equal(counted, trained) and not torch.equal(plain, trained)


def test_large_forwards_for_statistics_too() -> None:
    """Of so many tokens that each operation has its form for large tensors."""
    policy, ids = make_policy(), torch.arange(900)[None] % 12
    trained = policy(ids).logits
    with torch.no_grad(), policy.routing_statistics():
        assert torch.equal(policy(ids).logits, trained)


def test_the_learners_own_routes_hold_over_the_steps_of_an_update(played: list[Group]) -> None:
    """R2: the first step is that of free routing; later ones take the first one's experts."""
    made = samples(played)
    first, second = share(made[:3]), share(made[3:])
    results = {}
    seen: dict[str, list[np.ndarray]] = {}
    for replay in ("off", "learner"):
        policy = make_policy()
        own = learner(policy, replay=replay, lr=0.05)
        with learned_routes(policy) as seen[replay]:
            results[replay] = own.update([first, second], LOSS)
    before = make_policy()
    old = []
    with torch.no_grad(), before.recorded_routes() as recording:
        for one in (*first.micro_batches, *second.micro_batches):
            before(torch.tensor(one.input_ids[None]), torch.tensor(one.cu_seqlens))
            old += list(recording.take().swapaxes(0, 1))
    count = len(first.micro_batches) * LAYERS
    assert all((a == b).all() for a, b in zip(seen["learner"], old, strict=True))
    same = [(a == b).all() for a, b in zip(seen["off"], old, strict=True)]
    assert all(same[:count]) and not all(same[count:])  # without, the update moves the routes
    one, two = results["off"].metrics, results["learner"].metrics
    assert one["log_ratio_first"] == two["log_ratio_first"]


def test_one_step_with_the_learners_own_routes_is_free(played: list[Group]) -> None:
    made = samples(played)
    (free, plain), (own, got) = (
        update(make_policy(), made, replay=replay) for replay in ("off", "learner")
    )
    assert digests(own) == digests(free) and got.metrics == plain.metrics


def test_unknown_rows_route_freely_and_alone(played: list[Group]) -> None:
    policy = make_policy()
    (one, *_) = samples(played)
    assert one.routes is not None
    known = np.arange(len(one)) % 3 != 0
    other = (one.routes.experts + 1) % 8
    ids = torch.tensor(one.token_ids[None])
    with torch.no_grad(), policy.recorded_routes() as recording:
        policy(ids)
        free = recording.take()
        with policy.replayed_routes(Routes(other.astype(np.uint8), known)):
            policy(ids)
        taken = recording.take()
        policy(ids)
        again = recording.take()
    assert (taken[known] == other[known]).all()
    assert (taken[~known][:, 0] == free[~known][:, 0]).all()  # layers above read other things
    assert (again == free).all()


def test_sequences_without_routes_share_a_batch_with_others() -> None:
    routes = Routes(np.full((3, LAYERS, K), 5, np.uint8), np.array([True, True, False]))
    mask = np.array([False, True, True])
    zeros = np.zeros(3, np.float32)
    with_routes = Sample(0, np.arange(3), mask, zeros, zeros, routes=routes)
    without = Sample(1, np.arange(4), np.arange(4) > 1, np.zeros(4, np.float32), np.zeros(4))
    (packed,) = batch.shares([without, with_routes], 1, 100)[0].micro_batches
    assert packed.sequence_ids.tolist() == [1] * 4 + [0] * 3 and packed.routes is not None
    assert packed.routes.known.tolist() == [False] * 4 + [True, True, False]
    assert (packed.routes.experts[4:6] == 5).all()
    assert share_recorded([[with_routes], [without]]) == 2 / 7
    with pytest.raises(RunFailed, match=r"^learner\.replay=rollout: .*; set learner"):
        share_recorded([[without], [without]])
    assert batch.shares([without], 1, 100)[0].micro_batches[0].routes is None


def rows(count: int) -> np.ndarray:
    return np.arange(count * LAYERS * K, dtype=np.uint8).reshape(count, LAYERS, K)


def two_turns(first: int | None, second: int | None) -> Trajectory:
    """2 given, 2 sampled, 3 given and 2 sampled tokens; 3 and 5 of them are read for the turns."""
    turns = [sampled([3, 4]), sampled([8, 9])]
    turns = [
        replace(turn, routes=None if count is None else rows(count))
        for turn, count in zip(turns, (first, second), strict=True)
    ]
    return trajectory("task-7", 2, 1.0, given([1, 2]), turns[0], given([5, 6, 7]), turns[1])


def test_rows_stand_on_the_tokens_that_were_read() -> None:
    both = two_turns(3, 5).routes
    assert both is not None and both.known.tolist() == [True] * 8 + [False]
    assert (both.experts[:3] == rows(3)).all() and (both.experts[3:8] == rows(5)).all()
    late = two_turns(None, 5).routes
    assert late is not None and late.known.tolist() == [False] * 3 + [True] * 5 + [False]
    assert two_turns(None, None).routes is None


@pytest.mark.parametrize(("first", "second", "told"), [(2, 5, "2 tokens"), (3, 6, "6 tokens")])
def test_rows_of_another_number_of_tokens_name_their_trajectory(
    first: int, second: int, told: str
) -> None:
    with pytest.raises(RunFailed, match=f"task task-7, sibling 2: routes of {told} where") as error:
        batch.samples_of_groups([Group("task-7", (two_turns(first, second),))], None)
    assert "\n" not in str(error.value)


def test_routes_of_another_policy_are_refused() -> None:
    policy = make_policy()
    known = np.ones(4, np.bool_)
    for experts in (np.zeros((4, 2, K), np.uint8), np.zeros((4, LAYERS, 1), np.uint8)):
        replay = policy.replayed_routes(Routes(experts, known))
        with pytest.raises(ValueError, match=r"for 3 routers of \[2\]"), replay:
            pass
    for number in (8, 255, -1):  # of a policy with more experts, or none at all
        odd = np.zeros((4, LAYERS, K), np.int16)
        odd[2, 1, 1] = number
        with (
            pytest.raises(ValueError, match="routers of 8 experts"),
            policy.replayed_routes(Routes(odd, known)),
        ):
            pass
        with policy.replayed_routes(Routes(odd, np.arange(4) != 2)):  # mean nothing
            policy(torch.zeros(1, 4, dtype=torch.long))
    replay = policy.replayed_routes(Routes(rows(4) % 8, known))
    with replay, pytest.raises(ValueError, match="routes of 4 tokens for 5 tokens"):
        policy(torch.zeros(1, 5, dtype=torch.long))
    for setting in ({"replay": "rollout"}, {"thresholds": "freeze"}, {"thresholds": "ema"}):
        ((key, value),) = setting.items()
        with pytest.raises(UserError, match=f"^learner.{key}={value} would have no effect: the po"):
            learner(FakePolicy(), **setting)


def test_recomputed_layers_take_the_same_routes(played: list[Group]) -> None:
    made = samples(played)
    ends = []
    for again in (False, True):
        policy = make_policy(noise=0.02)
        layers: list[Any] = [*policy.model.layers]
        for layer in layers if again else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        with learned_routes(policy) as taken:
            own, result = update(policy, made, replay="rollout")
        ends.append((digests(own), dict(result.metrics), len(taken)))
    (plain, metrics, once), (same, remetrics, twice) = ends
    assert plain == same and metrics == remetrics
    assert once == LAYERS * len(share(made).micro_batches) and twice == 2 * once


@pytest.mark.parametrize("rule", ["freeze", "track", "ema"])
def test_what_a_step_makes_of_thresholds(played: list[Group], rule: str) -> None:
    made = samples(played)
    policy, reference = make_policy(), make_policy()
    old = [r.e_score_correction_bias.clone() for r in policy.routers()]
    own = learner(policy, thresholds=rule, threshold_decay=0.75 if rule == "ema" else None)
    learner(reference).update([share(made)], LOSS)
    own.update([share(made)], LOSS)
    assert own.threshold_version == (rule != "freeze")
    for router, start, other in zip(policy.routers(), old, reference.routers(), strict=True):
        got, solved = router.e_score_correction_bias, other.e_score_correction_bias
        want = {"freeze": start, "track": solved}.get(rule)
        if want is not None:
            assert torch.equal(got, want)
            continue
        mixed = 0.75 * start.double() + 0.25 * solved.double()
        torch.testing.assert_close(got.double(), mixed - mixed.mean(), atol=1e-7, rtol=0)
        assert abs(float(got.mean())) < 1e-7 and abs(float(start.mean())) > 1e-4


def test_resuming_keeps_routes_thresholds_and_their_version(
    played: list[Group], tmp_path: Path
) -> None:
    made = samples(played)
    settings: dict[str, Any] = {
        "thresholds": "ema",
        "replay": "rollout",
        "router_lr": 0.1,
        "attnres_lr": 3.0,
    }
    own = learner(make_policy(), **settings)
    for _ in range(2):
        own.update([share(made)], LOSS)
    resume.save(own, tmp_path)
    fresh = learner(make_policy(), **settings)
    resume.load(fresh, tmp_path)
    assert fresh.threshold_version == own.threshold_version == 2
    for each in (own, fresh):
        each.update([share(made)], LOSS)
    assert digests(own) == digests(fresh)


def test_rates_of_routers_and_of_the_mixture_over_depth(played: list[Group]) -> None:
    """AdamW's first step moves each number by the rate: tiny gradients aside, which eps holds."""
    made = samples(played)
    moved: dict[tuple[float, float], dict[str, float]] = {}
    for factors in ((1.0, 1.0), (0.25, 1.0), (1.0, 2.0), (0.0, 0.0)):
        policy = make_policy()
        before = {n: p.detach().clone() for n, p in policy.named_parameters()}
        router_lr, attnres_lr = factors
        update(policy, made, router_lr=router_lr, attnres_lr=attnres_lr, grad_clip=0.0)
        moved[factors] = {
            n: float((p.detach() - before[n]).abs().max()) for n, p in policy.named_parameters()
        }
    plain = moved[1.0, 1.0]
    routers = {n for n in plain if ".gate." in n}
    depth = {n for n in plain if "_res_" in n}
    assert len(routers) == LAYERS and len(depth) == 4 * 4 + 2
    for (router_lr, attnres_lr), steps in moved.items():
        for name, size in steps.items():
            own = router_lr if name in routers else attnres_lr if name in depth else 1.0
            assert size == pytest.approx(own * plain[name], rel=1e-3, abs=1e-6), name
    config = make_policy().config.to_dict() | {"attn_res_block_size": None}
    with pytest.raises(UserError, match=r"learner.attnres_lr=2 would have no effect: the policy"):
        learner(Policy(PolicyConfig.from_dict(config)), attnres_lr=2.0)


def rounded(bias: torch.Tensor) -> torch.Tensor:
    return bias.bfloat16().float()


class Changing(Engine):
    """An engine that gathers one tensor changed."""

    def __init__(self, engine: Engine, name: str, change: Any) -> None:
        self.__dict__.update(engine.__dict__)
        self.changed, self.change = name, change

    def gathered_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().gathered_state():
            yield name, self.change(tensor) if name == self.changed else tensor


class Sender(Learner):
    """A learner at work, on another engine."""

    def __init__(self, learner: Learner, engine: Engine) -> None:
        self.__dict__.update(learner.__dict__)
        self.engine = engine


@pytest.mark.parametrize("change", [rounded, torch.neg], ids=["bfloat16", "sign"])
@pytest.mark.parametrize("where", ["gathered", "sent"])
def test_thresholds_that_change_on_the_way_out_are_refused_by_name(
    played: list[Group], change: Any, where: str
) -> None:
    """Digests of what is sent agree with what was changed before; those of the learner do not."""
    policy = make_policy()
    own, _ = update(policy, samples(played))
    name = "model.layers.2.block_sparse_moe.gate.e_score_correction_bias"
    rollout = make_policy()
    receiver = WeightReceiver(PolicyWeights(rollout))
    sender = Sender(own, Changing(own.engine, name, change)) if where == "gathered" else own
    publication = publish(sender, SyncConfig(), 0, 24, give=lambda bucket: bucket)
    assert publication is not None and publication.thresholds.number == 1
    if where == "sent":
        sent = bytes_of(publication, name).view(torch.float32)
        sent.copy_(change(sent.clone()))
    with pytest.raises(SyncError, match=name):
        receive(receiver, publication)
    held = rollout.get_buffer(name)
    assert receiver.version is None and torch.equal(held, make_policy().get_buffer(name))
    publication = publish(own, SyncConfig(), 0, 24, give=lambda bucket: bucket)
    assert publication is not None
    receive(receiver, publication)
    assert torch.equal(held, policy.get_buffer(name))
