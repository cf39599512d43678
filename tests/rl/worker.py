"""One rank of a learner, run as a process by the tests: ``worker.py RANK RANKS FOLDER``.

Plays every scenario in turn and leaves what came out in FOLDER: ``RANKS-RANK.json`` and, from rank
0, the weights of each scenario. Ranks meet at a file in FOLDER.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_policy import FakePolicy, seeing_config
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig, SyncConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.images import place, prepare
from farhorizon.policy.joint import is_plain
from farhorizon.policy.moe import Router
from farhorizon.policy.routing import Routes
from farhorizon.policy.value import ValueHead
from farhorizon.policy.vision_config import ImageRules
from farhorizon.policy.weights import Publication, digest
from farhorizon.rl import resume
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import shares
from farhorizon.rl.critic import Critic
from farhorizon.rl.engine import join, leave
from farhorizon.rl.learner import Learner
from farhorizon.rl.publish import publish
from farhorizon.rl.reference import Reference
from farhorizon.rl.types import Sample, Share
from farhorizon.rollout.sync import PolicyWeights, WeightReceiver

RANK, RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
LOSS = make_algorithm(AlgorithmConfig()).loss
PACKED, SINGLE = 1000, 1  # micro_batch_tokens: all in one, or one sequence each
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2, "entropy": 0.1},
    "dr_grpo": {"name": "dr_grpo", "length": 10},
    "k15": {"name": "k15", "tau": 0.3},
    "masked": {"correction": "sequence_mask", "correction_low": 0.1},
    "truncated": {"name": "reinforce", "correction": "token_truncate", "correction_high": 1.1},
    "pulled": {"kl": 0.2, "correction": "token_truncate"},
    "charged": {"name": "sapo", "kl": 0.2, "kl_in": "reward"},
}


def samples(step: int, vocab: int = 11) -> list[Sample]:
    """Eight sequences with 1 to 8 trained tokens."""
    random = np.random.default_rng(step)
    made = []
    for number in range(8):
        length, trained = number + 3, number + 1
        mask = np.arange(length) >= length - trained
        made.append(
            Sample(
                number,
                random.integers(0, vocab, length),
                mask,
                np.where(mask, random.normal(-2, 0.3, length), 0).astype(np.float32),
                np.where(mask, random.normal(), 0).astype(np.float32),
            )
        )
    return made


def share(step: int, tokens: int, vocab: int = 11) -> Share:
    return shares(samples(step, vocab), RANKS, tokens)[RANK]


def tiny_policy() -> Policy:
    torch.manual_seed(0)
    return Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2))


def learner(policy: torch.nn.Module, stage: int, **changes: Any) -> Learner:
    config = LearnerConfig(zero_stage=stage, lr=1e-2, ranks=RANKS, **changes)  # type: ignore[arg-type]
    return Learner(policy, config, temperature=0.7)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.engine.gathered_state()}


def digests(learner: Learner) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in learner.engine.gathered_state()}


def keep(name: str, tensors: dict[str, torch.Tensor]) -> None:
    if RANK == 0:
        save_file(tensors, FOLDER / f"{RANKS}-{name}.safetensors")


def train(
    name: str, policy: torch.nn.Module, stage: int, tokens: int, vocab: int, **changes: Any
) -> Any:
    # A large eps: Adam would blow rounding noise in gradients of almost 0 up to full steps.
    own = learner(policy, stage, eps=1e-3, grad_clip=0.15, warmup_steps=5, **changes)
    results = []
    for step in range(3):
        metrics = own.update([share(step, tokens, vocab)], LOSS).metrics
        optimizer = own.engine._engine.optimizer
        groups = getattr(optimizer, "optimizer", optimizer).param_groups  # torch's own, under ZeRO
        results.append({**metrics, "group_lr": [group["lr"] for group in groups]})
    keep(name, state(own))
    return results


def layouts(out: dict[str, Any]) -> None:
    for stage in range(4):
        for layout, tokens in (("packed", PACKED), ("single", SINGLE)):
            name = f"fake-{stage}-{layout}"
            out[name] = train(name, FakePolicy(), stage, tokens, 11)
    for stage in (0, 3):
        name = f"tiny-{stage}"
        out[name] = train(name, tiny_policy(), stage, SINGLE if stage else PACKED, 64)
    policy = tiny_policy()
    train("tiny-3-layers", policy, 3, PACKED, 64, checkpointing="layers")
    kinds = tuple(policy.leaf_modules())
    whole = [
        part for leaf in policy.modules() if isinstance(leaf, kinds) for part in leaf.modules()
    ]
    plain = {name: part for name, part in policy.named_modules() if is_plain(part)}
    out["plain"] = [name for name, part in plain.items() if part not in whole]
    own = learner(tiny_policy(), 0, dtype="bfloat16")
    own.update([share(0, PACKED, 64)], LOSS)
    out["bfloat16"] = {name: str(tensor.dtype) for name, tensor in state(own).items()}
    keep("bfloat16", state(own))


def accumulated(out: dict[str, Any]) -> None:
    """Two steps on equally long sequences, in as many micro-batches as they come."""
    mask = np.arange(6) >= 2
    for count, pieces in ((8, 2), (8, 4), (8, 8), (10, 2), (10, 4), (10, 10)):
        own = learner(FakePolicy(), 0, eps=1e-3, grad_clip=0.05)
        norms = []
        for step in range(2):
            random = np.random.default_rng(step)
            batch = [
                Sample(
                    number,
                    random.integers(0, 11, 6),
                    mask,
                    np.where(mask, random.normal(-2, 0.3, 6), 0).astype(np.float32),
                    np.where(mask, random.normal(), 0).astype(np.float32),
                )
                for number in range(count)
            ]
            mine = shares(batch, RANKS, -(-count // pieces) * 6)[RANK]
            assert len(mine.micro_batches) == pieces // RANKS
            norms.append(own.update([mine], LOSS).metrics["grad_norm"])
        out[f"accumulated-{count}-{pieces}"] = norms
        keep(f"accumulated-{count}-{pieces}", state(own))


def skipped(out: dict[str, Any]) -> None:
    for stage in range(4):
        policy = FakePolicy()
        own = learner(policy, stage, warmup_steps=10)
        own.update([share(0, PACKED)], LOSS)
        before, lr = digests(own), own.engine.scheduled_lr()
        policy.poison = True
        bad = own.update([share(1, SINGLE)], LOSS)
        entry = {
            "same": digests(own) == before,
            "lr": own.engine.scheduled_lr() == lr,
            "counts": int(policy.counts.sum()),
            "version": bad.version,
            "skipped": bad.skipped,
            "skipped_steps": bad.metrics["skipped_steps"],
            "bad_tensor": bad.bad_tensor,
        }
        policy.poison = False
        good = own.update([share(2, PACKED)], LOSS)
        entry |= {"later": digests(own) != before, "later_version": good.version}
        keep(f"after-skip-{stage}", state(own))
        other = learner(FakePolicy(), stage, warmup_steps=10)
        other.update([share(0, PACKED)], LOSS)
        other.update([share(2, PACKED)], LOSS)
        entry["as_if_never_seen"] = digests(other) == digests(own)
        policy.poison = True
        try:
            for _ in range(3):
                own.update([share(3, PACKED)], LOSS)
            entry["stopped"] = None
        except RunFailed as error:
            entry["stopped"] = str(error)
        out[f"skip-{stage}"] = entry


def resumed(out: dict[str, Any]) -> None:
    for stage in range(4):
        own = learner(tiny_policy(), stage, weight_decay=0.1)
        for step in range(2):
            own.update([share(step, PACKED, 64)], LOSS)
        before = digests(own)
        folder = FOLDER / f"state-{RANKS}-{stage}"
        resume.save(own, folder)
        torch.manual_seed(99)
        fresh = learner(
            Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2)),
            stage,
            weight_decay=0.1,
        )
        resume.load(fresh, folder)
        loaded = digests(fresh)
        results = [r.update([share(2, PACKED, 64)], LOSS) for r in (own, fresh)]
        crossed = learner(tiny_policy(), (stage + 3) % 4, weight_decay=0.1)
        resume.load(crossed, folder)
        crossed.update([share(2, PACKED, 64)], LOSS)
        mine, other = state(own), state(crossed)
        out[f"resume-{stage}"] = {
            "bitwise": digests(own) == digests(fresh),
            "loaded": loaded == before,
            "versions": [r.version for r in results],
            "crossed": max(float((mine[n] - other[n]).abs().max()) for n in mine),
        }


def minibatches(out: dict[str, Any]) -> None:
    """Two optimizer steps of unequal size in one update, and in updates of their own."""
    own_samples = samples(0, 64), samples(1, 64)[:3]
    steps = [shares(part, RANKS, PACKED)[RANK] for part in own_samples]
    together = learner(tiny_policy(), 0, grad_clip=0.1).update(steps, LOSS)
    own = learner(tiny_policy(), 0, grad_clip=0.1)
    apart = [own.update([step], LOSS) for step in steps]
    tokens = [step.denominator for step in steps]
    out["minibatches"] = [*(result.metrics for result in (together, *apart)), tokens]


def counting(out: dict[str, Any]) -> None:
    """Two experts, k = 1: scores 0.5 -+ d / 2 for 1000 d spread evenly over [-0.25, 0.75]."""
    own = learner(FakePolicy(), 0)
    d = torch.linspace(-0.25, 0.75, 1001)[:-1] + 0.0005
    scores = torch.stack([0.5 + d / 2, 0.5 - d / 2], 1)
    mine = scores if RANKS == 1 else (scores[:750] if RANK == 0 else scores[750:])
    equal = torch.full((500, 2), 0.5)
    for name, pieces, padding in (("one", 1, False), ("four", 4, False), ("padded", 4, True)):
        router = Router(2, 2, 1)
        with torch.no_grad():
            router.weight.copy_(torch.eye(2))
        for piece in mine.logit().chunk(pieces):
            router.collecting = True
            valid = torch.ones(len(piece), dtype=torch.bool)
            if padding:
                piece = torch.cat([piece, equal.logit()])
                valid = torch.cat([valid, torch.zeros(500, dtype=torch.bool)])
            router.valid = valid
            router(piece)
        router.collecting = False
        own.engine.all_reduce(router.counts())
        load = router.load.float() / router.load.sum()
        router.update()
        after = torch.bincount(router(scores.logit())[0].flatten(), minlength=2)
        out[f"threshold-{name}"] = {
            "bias": router.e_score_correction_bias.tolist(),
            "before": load.tolist(),
            "after": (after / 1000).tolist(),
        }


class Counted(Policy):
    """Keeps how many tokens each optimizer step counted, over all ranks."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.counted: list[int] = []

    def update_thresholds(self) -> list[float]:
        self.counted.append(int(self.routing_counts()[1]))
        return super().update_thresholds()


def recomputed(out: dict[str, Any]) -> None:
    """Layers whose forward runs again in backward count nothing twice and change no bit."""
    for stage in (0, 2):
        ends = []
        for again in (False, True):
            torch.manual_seed(0)
            policy = Counted(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2))
            runs: list[int] = []
            for layer in policy.model.layers:

                def forward(*args: Any, own: Any = layer.forward, runs: list[int] = runs) -> Any:
                    runs.append(1)
                    return own(*args)

                again_too = partial(checkpoint, forward, use_reentrant=False)
                layer.forward = again_too if again else forward
            own = learner(policy, stage)
            for step in range(2):
                own.update([share(step, SINGLE, 64)], LOSS)
            ends.append((digests(own), policy.counted, len(runs)))
        (plain, counted, once), (same, recounted, twice) = ends
        out[f"recomputed-{stage}"] = {
            "bitwise": plain == same,
            "counted": [counted, recounted],
            "forwards": [once, twice],
        }


def silent(out: dict[str, Any]) -> None:
    """Scoring and evaluation count nothing and change nothing."""
    for stage in (0, 3):
        policy = tiny_policy()
        own = learner(policy, stage)
        own.update([share(0, PACKED, 64)], LOSS)
        before = digests(own)
        scored = own.score(np.arange(20) % 64)
        nll = own.evaluate(share(1, PACKED, 64))
        out[f"silent-{stage}"] = {
            "same": digests(own) == before,
            "counted": sum(int(c.sum()) for c in policy.routing_counts()),
            "nll": nll,
            "score": float(scored.sum()),
            "finite": math.isfinite(nll),
        }
        own.update([share(1, PACKED, 64)], LOSS)
        plain = learner(tiny_policy(), stage)
        plain.update([share(0, PACKED, 64)], LOSS)
        plain.update([share(1, PACKED, 64)], LOSS)
        out[f"silent-{stage}"]["later"] = digests(own) == digests(plain)


def published(out: dict[str, Any]) -> None:
    """What is sent is everything, arrives bit for bit, and follows every later change."""
    for stage in (0, 3):
        own = learner(tiny_policy(), stage)
        rollout = tiny_policy()
        receiver = WeightReceiver(PolicyWeights(rollout))
        own.update([share(0, PACKED, 64)], LOSS)
        _take_over(receiver, own)
        names = list(own.engine.manifest.names)
        first = digests(own)
        changed = {name: t + 0.01 * (i + 1) for i, (name, t) in enumerate(state(own).items())}
        moments = {name: t.clone() for name, t in own.engine.moments()}
        own.engine.restore(changed, moments, own.engine.applied_steps)
        publication = _take_over(receiver, own)
        theirs = {name: digest(t) for name, t in rollout.state_dict().items()}
        mine = digests(own)
        out[f"publish-{stage}"] = {
            "names": names,
            "complete": names == sorted(rollout.state_dict()),
            "changed": sum(theirs[name] != first[name] for name in names) if RANK == 0 else None,
            "equal": theirs == mine if RANK == 0 else None,
            "sent": None if publication is None else list(publication.manifest.names),
            "buckets": None if publication is None else len(publication.buckets),
        }


def _with_images(sample: Sample, rules: ImageRules, seed: int) -> Sample:
    """The sequence after a prompt that shows an image of two tokens and one of one."""
    made = np.random.default_rng(seed)
    shapes = ((4, 8, 3), (3, 3, 3))
    images = [prepare(made.integers(0, 256, s, dtype=np.uint8), rules) for s in shapes]
    prompt = np.array([5, 63, 63, 6, 63, 7])
    none = np.zeros(len(prompt), np.float32)
    return Sample(
        sample.id,
        np.concatenate([prompt, sample.token_ids]),
        np.concatenate([none > 0, sample.loss_mask]),
        np.concatenate([none, sample.behavior_logprobs]),
        np.concatenate([none, sample.advantages]),
        tuple(place(prompt.tolist(), images, 63)),
    )


def seen(out: dict[str, Any]) -> None:
    """One sequence of eight has images; ranks without it take part in the tower's collectives."""
    rules = seeing_config(64, 63).image_rules
    assert rules is not None
    for stage in range(4):
        torch.manual_seed(0)
        policy = Policy(seeing_config(64, 63), vision=True)
        own = learner(policy, stage, eps=1e-3)
        results = []
        for step in range(2):
            batch = samples(step, 63)
            batch[6] = _with_images(batch[6], rules, step)
            own_share = shares(batch, RANKS, SINGLE if stage % 2 else PACKED)[RANK]
            results.append(own.update([own_share], LOSS).metrics)
            blind = Share(
                tuple(replace(b, images=()) for b in own_share.micro_batches),
                own_share.denominator,
                own_share.sequences,
            )
            results[-1] = {**results[-1], "nll": own.evaluate(own_share)}
            results[-1]["blind"] = own.evaluate(blind)
        out[f"seen-{stage}"] = results
        keep(f"seen-{stage}", state(own))


def _take_over(receiver: WeightReceiver, own: Learner) -> Publication | None:
    publication = publish(own, SyncConfig(bucket_mb=1), 0, 64, give=lambda bucket: bucket)
    if publication is not None:
        receiver.begin(publication.announced)
        for bucket in publication.buckets:
            receiver.load(bucket)
        receiver.verify(publication)
        assert receiver.commit() == publication.version
    return publication


def value_step(own: Learner, step: int) -> None:
    """One optimizer step towards values of 1 and likelier tokens, as a critic would take it."""
    given = share(step, SINGLE, 64)
    for number, batch in enumerate(given.micro_batches):
        positions = np.array([1]) if batch.padding else np.flatnonzero(batch.loss_mask)
        ids, rows = torch.tensor(batch.input_ids), torch.tensor(positions - 1)
        out = own.engine.forward(
            ids[None],
            torch.tensor(batch.cu_seqlens),
            rows=rows,
            targets=ids[rows + 1],
            last=number == len(given.micro_batches) - 1,
        )
        total = ((out.value - 1).square() - out.logprobs).sum() / given.denominator
        own.engine.backward(total * (not batch.padding))
    assert own.engine.step().applied


def valued(out: dict[str, Any]) -> None:
    """A value head is trained and resumed with the policy, and stays out of what is published."""
    for stage in range(4):
        policy = tiny_policy()
        policy.v_head = ValueHead(32)
        own = learner(policy, stage, eps=1e-3)
        for step in range(2):
            value_step(own, step)
        keep(f"valued-{stage}", state(own))
        folder = FOLDER / f"valued-{RANKS}-{stage}"
        resume.save(own, folder)
        other = tiny_policy()
        other.v_head = ValueHead(32)
        fresh = learner(other, stage, eps=1e-3)
        resume.load(fresh, folder)
        for each in (own, fresh):
            value_step(each, 2)
        publication = _take_over(WeightReceiver(PolicyWeights(tiny_policy())), own)
        out[f"valued-{stage}"] = {
            "bitwise": digests(own) == digests(fresh),
            "sent": None if publication is None else list(publication.manifest.names),
        }


def with_muon(out: dict[str, Any]) -> None:
    """Muon and weight clipping at every ZeRO stage, through a resume."""
    settings = {"optimizer": "muon", "weight_decay": 0.1, "qk_clip": 0.02}
    for stage in range(4):
        own = learner(tiny_policy(), stage, **settings)
        metrics = [own.update([share(step, SINGLE, 64)], LOSS).metrics for step in range(2)]
        keep(f"muon-{stage}", state(own))
        keep(f"muon-moments-{stage}", {n: t.clone() for n, t in own.engine.moments()})
        folder = FOLDER / f"muon-{RANKS}-{stage}"
        resume.save(own, folder)
        fresh, crossed = (learner(tiny_policy(), s, **settings) for s in (stage, (stage + 3) % 4))
        for each in (fresh, crossed):
            resume.load(each, folder)
        kept = {n: t.clone() for n, t in fresh.engine.moments()}
        same = all(torch.equal(kept[n], t) for n, t in own.engine.moments())
        for each in (own, fresh, crossed):
            each.update([share(2, PACKED, 64)], LOSS)
        mine, other = state(own), state(crossed)
        out[f"muon-{stage}"] = {
            "metrics": metrics,
            "moments": same,
            "bitwise": digests(own) == digests(fresh),
            "crossed": max(float((mine[n] - other[n]).abs().max()) for n in mine),
        }
        try:
            resume.load(learner(tiny_policy(), stage), folder)
        except UserError as error:
            out[f"muon-{stage}"]["refused"] = str(error)
    try:
        learner(FakePolicy(), 0, qk_clip=100.0)
    except UserError as error:
        out["no-latent-attention"] = str(error)


def algorithms(out: dict[str, Any]) -> None:
    """Losses that look at whole sequences, at the policy before the steps, and at entropy."""
    for name, changes in ALGORITHMS.items():
        made = make_algorithm(AlgorithmConfig(**changes))  # type: ignore[arg-type]
        for stage in (0, 3):
            for tokens in (PACKED, SINGLE):
                own = learner(FakePolicy(), stage, eps=1e-3)
                if made.pull is not None:
                    own.reference = Reference(FakePolicy(seed=1), made.pull, own.temperature)
                steps = [share(step, tokens) for step in range(2)]
                key = f"{name}-{stage}-{tokens}"
                out[key] = own.update(steps, made.loss, made.decoupled).metrics
                keep(key, state(own))


def with_critic(out: dict[str, Any]) -> None:
    """PPO on rewards at the end of each sequence, some of which were cut off."""
    made = make_algorithm(AlgorithmConfig(name="ppo", gamma=0.9, lam=0.8, kl=0.3, kl_in="reward"))
    assert made.pull is not None
    torch.manual_seed(1)
    other = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    for stage in (0, 3):
        for tokens in (PACKED, SINGLE):
            policy = tiny_policy()
            policy.v_head = ValueHead(32)
            torch.nn.init.normal_(policy.v_head.summary.weight)
            own = learner(policy, stage, eps=1e-3)
            own.reference = Reference(other, made.pull, own.temperature)
            results = []
            for update in range(2):
                steps = [
                    shares([_rewarded(s) for s in samples(2 * update + k, 64)], RANKS, tokens)[RANK]
                    for k in range(2)
                ]
                results.append(own.update(steps, made.loss, made.decoupled, made.critic).metrics)
            out[f"ppo-{stage}-{tokens}"] = results
            keep(f"ppo-{stage}-{tokens}", state(own))


def _routed(sample: Sample) -> Sample:
    """Routes of one layer with 8 experts, 2 per token; every third token has none. Advantages are
    positive, so that every sequence has a gradient."""
    random = np.random.default_rng(sample.id)
    order = random.permuted(np.tile(np.arange(8, dtype=np.uint8), (len(sample), 1, 1)), axis=-1)
    routes = Routes(order[..., :2], np.arange(len(sample)) % 3 != 0)
    return replace(sample, routes=routes, advantages=np.abs(sample.advantages))


def replayed(out: dict[str, Any]) -> None:
    """Routes of the rollout, and of the pass before the first of two steps; seven sequences, so
    that one of two ranks has a batch of padding beside the other's routes."""
    for replay, stages in (("rollout", range(4)), ("learner", (0, 3))):
        for stage in stages:
            own = learner(tiny_policy(), stage, eps=1e-3, replay=replay, router_lr=0.5)
            steps = [
                shares([_routed(s) for s in samples(step, 64)[:7]], RANKS, SINGLE)[RANK]
                for step in range(2)
            ]
            out[f"replayed-{replay}-{stage}"] = own.update(steps, LOSS).metrics
            keep(f"replayed-{replay}-{stage}", state(own))


def _rewarded(sample: Sample) -> Sample:
    rewards = np.zeros(len(sample))
    rewards[-1] = sample.id % 3
    return replace(sample, rewards=rewards, terminated=sample.id % 2 == 0)


class Spy:
    """The usual loss; keeps the log-probs of each call, and those of before the update."""

    def __init__(self) -> None:
        self.logprobs: list[list[float]] = []
        self.proximal: list[list[float] | None] = []

    def __call__(
        self, logprobs: Any, *arrays: Any, proximal_logprobs: Any = None, **named: Any
    ) -> Any:
        self.logprobs.append(logprobs.tolist())
        self.proximal.append(None if proximal_logprobs is None else proximal_logprobs.tolist())
        return LOSS(logprobs, *arrays, **named)


def known_before(out: dict[str, Any]) -> None:
    """What one process knows of the policy before an update: log-probs, and values to come."""
    if RANKS > 1:
        return
    own, spy = learner(FakePolicy(), 0), Spy()
    steps = [share(step, PACKED) for step in range(2)]
    scored = {s.id: own.score(s.token_ids)[s.loss_mask[1:]].tolist() for s in samples(1)}
    packed = dict.fromkeys(steps[1].micro_batches[0].sequence_ids.tolist())
    own.update(steps, spy, decoupled=True)
    out["proximal"] = {
        "scored": [logprob for number in packed for logprob in scored[number]],
        "proximal": spy.proximal[1],
        "logprobs": spy.logprobs[1],
    }
    policy = tiny_policy()
    policy.v_head = ValueHead(32)
    torch.nn.init.normal_(policy.v_head.summary.weight)
    errors: tuple[list[float], list[float]] = ([], [])  # the value to come, and that a row before
    batch = [_rewarded(sample) for sample in samples(0, 64)]
    for sample in batch:
        ids, edges = torch.tensor(sample.token_ids), torch.tensor([0, len(sample)])
        with torch.no_grad():
            rows = torch.arange(len(ids))
            values = policy(ids[None], edges.int(), rows=rows, targets=ids).value.tolist()
        for row, seen in zip((-1, -2), errors, strict=True):
            end = float(sample.id % 3) + (0.0 if sample.terminated else values[row])
            seen += [(values[p - 1] - end) ** 2 / 2 for p in np.flatnonzero(sample.loss_mask)]
    critic = Critic(gamma=1.0, lam=1.0, value_coefficient=0.1, value_clip=0.2)
    metrics = learner(policy, 0).update(shares(batch, 1, PACKED), LOSS, critic=critic).metrics
    out["to-come"] = {
        "value_error": metrics["value_error"],
        "right": float(np.mean(errors[0])),
        "wrong": float(np.mean(errors[1])),
    }
    own = learner(FakePolicy(), 0)
    try:
        own._optimizer_step(steps[0], LOSS, [None] * len(steps[0].micro_batches), critic)
    except AssertionError as error:
        out["no-value-head"] = str(error)


SCENARIOS: list[Callable[[dict[str, Any]], None]] = [
    layouts,
    accumulated,
    skipped,
    resumed,
    minibatches,
    counting,
    recomputed,
    silent,
    published,
    seen,
    valued,
    with_muon,
    algorithms,
    with_critic,
    replayed,
    known_before,
]


def main() -> None:
    warnings.simplefilter("error", ResourceWarning)
    torch.set_num_threads(1)
    join(RANK, RANKS, f"file://{FOLDER}/rendezvous-{RANKS}" if RANKS > 1 else "", "cpu")
    out: dict[str, Any] = {}
    for scenario in SCENARIOS:
        start = time.perf_counter()
        scenario(out)
        print(f"{scenario.__name__}: {time.perf_counter() - start:.1f} s")
    (FOLDER / f"{RANKS}-{RANK}.json").write_text(json.dumps(out))
    leave()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive the group, and end the interpreter with an abort


if __name__ == "__main__":
    main()
