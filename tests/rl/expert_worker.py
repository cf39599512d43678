"""One rank of a learner whose experts are divided, run as a process by the tests:
``expert_worker.py RANK RANKS EXPERT_PARALLEL FOLDER [SCENARIO ...]``.

Plays scenarios, every one by itself, and leaves what came out in FOLDER:
``RANKS-EXPERT_PARALLEL-RANK.json`` and, from rank 0, the weights of each scenario.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig, SyncConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_policy, save_policy
from farhorizon.policy.moe import Experts
from farhorizon.policy.routing import Routes
from farhorizon.policy.weights import digest
from farhorizon.rl import resume
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import shares
from farhorizon.rl.engine import join, leave
from farhorizon.rl.learner import Learner
from farhorizon.rl.publish import publish
from farhorizon.rl.types import Sample, Share
from farhorizon.rollout.sync import PolicyWeights, WeightReceiver

RANK, RANKS, DIVIDED, FOLDER = *map(int, sys.argv[1:4]), Path(sys.argv[4])
LOSS = make_algorithm(AlgorithmConfig()).loss
K, LAYERS, VOCAB = 2, 3, 64
STAGES, SOME = (0, 1, 2), (0, 2)
SINGLE, PACKED = 1, 1000
OUT: dict[str, Any] = {}


def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(PolicyConfig.tiny(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS))


def samples(step: int, count: int = 7) -> list[Sample]:
    """Sequences with 1, 2, ... trained tokens."""
    random = np.random.default_rng(step)
    made = []
    for number in range(count):
        length, trained = number + 3, number + 1
        mask = np.arange(length) >= length - trained
        made.append(
            Sample(
                number,
                random.integers(0, VOCAB, length),
                mask,
                np.where(mask, random.normal(-2, 0.3, length), 0).astype(np.float32),
                np.where(mask, random.normal(), 0).astype(np.float32),
            )
        )
    return made


def share(batch: Sequence[Sample], tokens: int = SINGLE) -> Share:
    return shares(batch, RANKS, tokens)[RANK]


def learner(stage: int, module: Policy | None = None, **changes: Any) -> Learner:
    # A large eps: Adam would blow rounding noise in gradients of almost 0 up to full steps.
    config = LearnerConfig(
        **{"eps": 1e-3, "lr": 1e-2, "ranks": RANKS, "zero_stage": stage, **changes},
        expert_parallel=DIVIDED,
    )
    return Learner(module or policy(), config, temperature=0.7)


def state(own: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in own.engine.gathered_state()}


def digests(own: Learner) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in own.engine.gathered_state()}


def leave_weights(name: str, own: Learner) -> None:
    found = state(own)
    if RANK == 0:
        save_file(found, FOLDER / f"{RANKS}-{DIVIDED}-{name}.safetensors")


def trained(name: str, stage: int, batches: Sequence[Share], **changes: Any) -> Learner:
    own = learner(stage, grad_clip=0.15, **changes)
    OUT[name] = [own.update([batch], LOSS).metrics for batch in batches]
    leave_weights(name, own)
    return own


def steps() -> None:
    """Two steps; of seven sequences one by one, so that a rank has a batch of padding."""
    for stage in STAGES:
        batches = [share(samples(step)) for step in range(2)]
        own = trained(f"steps-{stage}", stage, batches, weight_decay=0.1, router_lr=0.5)
        held = [len(part.w1) for part in own.engine.policy.modules() if isinstance(part, Experts)]
        OUT[f"held-{stage}"] = held
        OUT[f"nll-{stage}"] = own.evaluate(share(samples(9)))
        OUT[f"score-{stage}"] = own.score(np.arange(9)).tolist()


def other_settings() -> None:
    batches = [share(samples(step), PACKED) for step in range(2)]
    trained("again", 0, batches, checkpointing="layers")
    trained("muon", 0, batches, optimizer="muon")
    trained("bfloat16", 0, batches, dtype="bfloat16")


def one_sequence() -> None:
    """Fewer sequences than ranks: a rank without any trained token."""
    for stage in SOME:
        trained(f"one-{stage}", stage, [share(samples(step, 1)) for step in range(2)])


def routed(sample: Sample, experts: Sequence[int]) -> Sample:
    """All its tokens on these experts in each layer."""
    layers = sum(1 for part in policy().modules() if isinstance(part, Experts))
    given = np.broadcast_to(np.array(experts, np.uint8), (len(sample), layers, K))
    return replace(sample, routes=Routes(given.copy(), np.ones(len(sample), np.bool_)))


def lopsided() -> None:
    """All tokens on two experts, which are one rank's: none arrive at the other."""
    for stage in SOME:
        for name, experts in (("first", (0, 1)), ("last", (7, 6)), ("apart", (7, 0))):
            batch = share([routed(s, experts) for s in samples(0)])
            trained(f"{name}-{stage}", stage, [batch], replay="rollout")


def skipped() -> None:
    """An infinite gradient of an expert that rank 0 does not hold."""
    for stage in SOME:
        own = learner(stage)
        before = digests(own)
        part = next(p for p in own.engine.policy.modules() if isinstance(p, Experts))
        spoilt = torch.zeros_like(part.w2)
        spoilt[-1] = torch.inf if RANK % DIVIDED == DIVIDED - 1 else 0
        hook = part.w2.register_hook(spoilt.add)
        bad = own.update([share(samples(0))], LOSS)
        OUT[f"skipped-{stage}"] = [bad.bad_tensor, digests(own) == before, bad.version]
        hook.remove()
        good = own.update([share(samples(1))], LOSS)
        OUT[f"skipped-{stage}"].append(good.version)
        leave_weights(f"skipped-{stage}", own)


def resumed() -> None:
    for stage in SOME:
        own = learner(stage, weight_decay=0.1)
        for step in range(2):
            own.update([share(samples(step))], LOSS)
        folder = FOLDER / f"state-{RANKS}-{DIVIDED}-{stage}"
        resume.save(own, folder)
        fresh = learner(stage, weight_decay=0.1)
        resume.load(fresh, folder)
        loaded = digests(fresh) == digests(own)
        for one in (own, fresh):
            one.update([share(samples(2))], LOSS)
        OUT[f"resumed-{stage}"] = [loaded, digests(own) == digests(fresh)]
        leave_weights(f"resumed-{stage}", own)
        if RANKS > 1:  # the state of one rank with whole experts
            other = learner(stage, weight_decay=0.1)
            resume.load(other, FOLDER / f"state-1-1-{stage}")
            other.update([share(samples(2))], LOSS)
            leave_weights(f"crossed-{stage}", other)


def published() -> None:
    """Before a step weights are alike in all layouts, and so is the digest."""
    for stage in SOME:
        own = learner(stage)
        found = []
        for _ in range(2):
            sent = publish(own, SyncConfig(bucket_mb=1), 0, VOCAB, give=lambda bucket: bucket)
            mine = digests(own)
            if sent is not None:
                rollout = policy()
                receiver = WeightReceiver(PolicyWeights(rollout))
                receiver.begin(sent.announced)
                for bucket in sent.buckets:
                    receiver.load(bucket)
                receiver.verify(sent)
                assert receiver.commit() == sent.version
                theirs = {n: digest(t) for n, t in rollout.state_dict().items()}
                names = [spec.name for spec in sent.manifest.specs]
                found.append([sent.version.digest, theirs == mine, names == sorted(theirs)])
            own.update([share(samples(0))], LOSS)
        OUT[f"published-{stage}"] = found


def loaded() -> None:
    """Each rank reads its own experts alone from a folder of whole ones."""
    folder = FOLDER / f"policy-{RANKS}-{RANK}"
    save_policy(folder, policy())
    for stage in SOME:
        own = load_policy(folder, part=(RANK % DIVIDED, DIVIDED))
        OUT[f"read-{stage}"] = [len(part.w1) for part in own.modules() if isinstance(part, Experts)]
        name = f"loaded-{stage}"
        trained(name, stage, [share(samples(step)) for step in range(2)], module=own)


def refused() -> None:
    config = LearnerConfig(ranks=RANKS, expert_parallel=DIVIDED)
    three = Policy(PolicyConfig.tiny(vocab_size=VOCAB, num_experts=3))
    for name, module in (("three", three), ("none", torch.nn.Linear(2, 2))):
        try:
            Learner(module, config, 1.0)
        except UserError as error:
            OUT[f"refused-{name}"] = str(error)


SCENARIOS: list[Callable[[], None]] = [
    steps,
    other_settings,
    one_sequence,
    lopsided,
    skipped,
    resumed,
    published,
    loaded,
    refused,
]


def main() -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{FOLDER}/rendezvous-{RANKS}-{DIVIDED}" if RANKS > 1 else ""
    join(RANK, RANKS, rendezvous, "cpu")
    for scenario in SCENARIOS:
        if not sys.argv[5:] or scenario.__name__ in sys.argv[5:]:
            scenario()
    (FOLDER / f"{RANKS}-{DIVIDED}-{RANK}.json").write_text(json.dumps(OUT))
    leave()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive the group, and end the interpreter with an abort


if __name__ == "__main__":
    main()
