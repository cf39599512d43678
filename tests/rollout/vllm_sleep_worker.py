"""vLLM on a GPU that gives its memory away and takes it back, run by `test_vllm_sleep_gpu` in the
environment that has it: ``vllm_sleep_worker.py FOLDER EAGER``; prints what it found as JSON.

What is sampled after a sleep is compared with what the same engine sampled before its first one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.launch.parity import random_policy
from farhorizon.launch.plan import read_policy
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import save_checkpoint
from farhorizon.policy.records import StageRecord, read_config
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer
from farhorizon.policy.weights import (
    PolicyVersion,
    Publication,
    ThresholdVersion,
    WeightManifest,
    pack,
    policy_digest,
)
from farhorizon.rollout.engine_weights import policy_weights
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.sync import PolicyWeights, WeightReceiver
from farhorizon.rollout.types import Completion, SamplingParams
from farhorizon.rollout.vllm import VllmEngine

LIMIT, MEMORY, TOLERANCE = 1024, 0.2, 0.5
VOCABULARY = 288
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 64)
PROMPTS = [np.random.default_rng(n).integers(3, VOCABULARY, n) for n in (1, 70, 700)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=40)


def build(folder: Path, seed: int) -> Policy:
    """A random policy on the GPU, in the fp32 that a learner has."""
    sizes = read_policy("small")[0].to_dict() | {"vocab_size": VOCABULARY}
    config = PolicyConfig.from_dict(sizes)
    policy = random_policy(config, seed, "cuda").float()
    tokenizer = train_tokenizer([], VOCABULARY, [" red", " green"])
    stage = StageRecord(LIMIT, (LIMIT,), 1000, tokenizer_sha256(tokenizer))
    save_checkpoint(folder, policy, config, tokenizer, stage)
    return policy


def publish(policy: Policy, number: int) -> Publication:
    """What a learner on this GPU would publish."""
    weights = policy.state_dict()
    manifest = WeightManifest.of(weights)
    tensors = ((name, weights[name]) for name in manifest.names)
    buckets, digests = pack(manifest, tensors, 64 << 20, lambda bucket: bucket)
    return Publication(
        PolicyVersion(number, policy_digest(manifest, digests)),
        manifest,
        tuple(buckets),
        digests,
        IDS,
        PolicyWeights(policy).score(IDS, 1.0),
        1.0,
        TOLERANCE,
        ThresholdVersion.of(number, dict(policy.named_buffers())),
    )


class Engine:
    """An engine with its generator, and what takes weights over."""

    def __init__(self, folder: Path, eager: bool) -> None:
        self.engine = VllmEngine(
            *(folder, LIMIT), concurrency=16, memory=MEMORY, eager=eager, sleeps=True
        )
        self.generator = RequestGenerator(self.engine, seed=0)
        self.receiver = WeightReceiver(policy_weights(self.engine, folder, read_config(folder)))

    def update(self, publication: Publication) -> None:
        with self.generator.updating(publication.version.number):
            self.receiver.begin(publication.announced)
            for bucket in publication.buckets:
                self.receiver.load(bucket)
            self.receiver.verify(publication)
            self.receiver.commit()

    def play(self) -> dict[str, Any]:
        """Groups of four behind each prompt; tokens, log-probs, versions, prompt tokens reused."""
        reused = self.generator.counters.reused_tokens
        asked = [self.generator.open(prompt, [1, 2, 3, 4], PARAMS) for prompt in PROMPTS]
        found: dict[int, Completion] = {}
        while self.generator.busy:
            found |= dict(self.generator.step())
        played = [found[session] for group in asked for session in group]
        for group in asked:
            for session in group:
                self.generator.close(session)
        return {
            "tokens": [one.token_ids.tolist() for one in played],
            "logprobs": np.concatenate([one.logprobs for one in played]),
            "versions": sorted({int(v) for one in played for v in one.versions}),
            "reused": self.generator.counters.reused_tokens - reused,
            "score": self.engine.score(IDS, 1.0),
        }


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def learn(size: int) -> None:
    """What a learner does with the memory: it is NaN in every dtype afterwards."""
    torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    free()


def gap(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What sets two rounds of play apart."""
    return {
        "tokens": sum(a != b for a, b in zip(one["tokens"], other["tokens"], strict=True)),
        "logprob": float(np.abs(one["logprobs"] - other["logprobs"]).max()),
        "score": float(np.abs(one["score"] - other["score"]).max()),
        "reused": one["reused"] - other["reused"],
    }


def main() -> None:
    folder, eager = Path(sys.argv[1]), sys.argv[2] == "eager"
    old, new = build(folder / "old", 0), build(folder / "new", 1)
    engine = Engine(folder / "old", eager)
    out: dict[str, Any] = {"total": torch.cuda.mem_get_info()[1], "memory": MEMORY}
    first = engine.play()
    engine.update(publish(new, 1))
    changed = engine.play()
    engine.update(publish(old, 2))
    again = engine.play()
    out["awake"] = gap(first, again)  # how well anything repeats
    out["apart"] = gap(first, changed)

    before = free()
    out["sleep_seconds"] = seconds(engine.generator.sleep)
    out["freed"] = free() - before
    learn(out["freed"] * 9 // 10)
    out["update_seconds"] = seconds(partial(engine.update, publish(new, 3)))
    found = engine.play()
    out["updated"], out["versions"] = gap(changed, found), found["versions"]
    out["back"] = before - free()

    engine.generator.sleep()
    learn(out["freed"] * 9 // 10)
    out["skipped"] = gap(changed, engine.play())

    engine.generator.sleep()
    wrong = publish(old, 4)
    try:
        engine.update(replace(wrong, canary_logprobs=wrong.canary_logprobs + 1))
    except RunFailed as caught:
        out["refused"] = str(caught)
    out["kept"] = gap(changed, engine.play())
    print(json.dumps(out))


if __name__ == "__main__":
    main()
