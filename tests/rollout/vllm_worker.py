"""The real engine on a small dense policy, in vLLM's own environment: what `test_vllm.py` runs.

vllm_worker.py FOLDER      prints one JSON object
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.policy.weights import (
    PolicyVersion,
    Publication,
    WeightManifest,
    pack,
    policy_digest,
)
from farhorizon.rollout.engine_weights import EngineWeights
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.sync import WeightReceiver
from farhorizon.rollout.types import Completion, SamplingParams
from farhorizon.rollout.vllm import VllmEngine

LIMIT, VOCABULARY = 512, 512
LOST = "model.layers.0.self_attn.k_proj.weight"
PROMPT = np.arange(1, 301)
HOT = SamplingParams(temperature=0.7, max_tokens=12)


def build(folder: Path, seed: int) -> Qwen3ForCausalLM:
    """A random policy, saved in fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LIMIT,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    policy = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for norm in (one for one in policy.parameters() if one.ndim == 1):
            norm.add_(torch.randn_like(norm), alpha=0.1)  # or all of them would be alike
    policy.save_pretrained(folder)
    return policy


@torch.no_grad()
def error(policy: Any, before: np.ndarray, completion: Completion, temperature: float) -> float:
    """The largest difference of its log-probs to those of a forward over all of it."""
    ids = torch.from_numpy(np.concatenate((before, completion.token_ids)).astype(np.int64))
    logits = policy(ids[None]).logits[0, len(before) - 1 : -1].double() / temperature
    wanted = logits.log_softmax(-1)[torch.arange(len(logits)), ids[len(before) :]]
    return float((wanted - torch.from_numpy(completion.logprobs)).abs().max())


def play(generator: RequestGenerator) -> dict[int, Completion]:
    """Step until nothing is asked any more."""
    found: dict[int, Completion] = {}
    while generator.busy:
        found |= dict(generator.step())
    return found


def update(
    folder: Path, engine: VllmEngine, generator: RequestGenerator, new: Any, out: dict[str, Any]
) -> None:
    """Version 1 with faults, each of which is refused, then without; a request is running."""
    weights = dict(new.state_dict())
    lost = {name: tensor for name, tensor in weights.items() if name != LOST}
    rounded = weights | {LOST: weights[LOST].bfloat16()}
    model = engine._worker.get_model()
    first, second = (layer.input_layernorm.weight for layer in model.model.layers)
    holder = Faulty(engine, folder, WeightManifest.of(weights), dict)
    receiver = WeightReceiver(holder)
    before = engine.score(PROMPT[:24], 0.7)
    out["kept"] = True

    def swap() -> None:
        kept = first.data.clone()
        first.data.copy_(second)
        second.data.copy_(kept)

    def unload() -> None:
        model.model.norm.weight.data.zero_()

    def mix(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        other = LOST.replace("k_proj", "v_proj")
        return dict(given) | {LOST: given[other], other: given[LOST]}

    def tear(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        class Torn(dict[str, torch.Tensor]):
            def items(self) -> Any:
                yield from list(super().items())[:9]
                raise OSError("torn")

        return Torn(given)

    faults: dict[str, tuple[Any, Any]] = {
        "swapped": (None, swap),
        "unloaded": (None, unload),
        "mixed": (mix, None),
        "failed": (tear, None),
    }
    for name, given in (("lost", lost), ("rounded", rounded), *((n, weights) for n in faults)):
        change, holder.after = faults.get(name, (None, None))
        holder._stored = change or dict
        try:
            with generator.exclusive():
                receive(receiver, publish(new, given, 1))
        except RunFailed as caught:
            out[name] = str(caught)
        same = np.array_equal(engine.score(PROMPT[:24], 0.7), before)
        out["kept"] = out["kept"] and same and receiver.version is None
    holder._stored, holder.after = dict, None
    with generator.updating(1):
        receive(receiver, publish(new, weights, 1))
    assert receiver.version is not None
    out["version"] = receiver.version.number


class Faulty(EngineWeights):
    """Changes what the engine serves before that is proven."""

    after: Any = None

    @contextmanager
    def serving(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        with super().serving(weights):
            if self.after is not None:
                self.after()
            yield


def receive(receiver: WeightReceiver, publication: Publication) -> None:
    receiver.begin(publication.announced)
    for bucket in publication.buckets:
        receiver.load(bucket)
    receiver.verify(publication)
    receiver.commit()


@torch.no_grad()
def publish(policy: Any, weights: dict[str, torch.Tensor], number: int) -> Publication:
    """What a learner of this policy would publish."""
    manifest = WeightManifest.of(weights)
    tensors = ((name, weights[name]) for name in manifest.names)
    buckets, digests = pack(manifest, tensors, 1 << 16, lambda bucket: bucket)
    ids = torch.arange(24) * 7
    scores = (policy(ids[None]).logits[0, :-1].double() / 0.7).log_softmax(-1)
    return Publication(
        PolicyVersion(number, policy_digest(manifest, digests)),
        manifest,
        tuple(buckets),
        digests,
        ids.numpy(),
        scores[torch.arange(23), ids[1:]].float().numpy(),
        0.7,
        1e-4,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    old = build(folder / "old", 0)
    new = build(folder / "new", 1)
    options: Any = {"dtype": "float32", "eager": True, "concurrency": 8, "memory": 0.3}
    engine = VllmEngine(folder / "old", LIMIT, **options)
    generator = RequestGenerator(engine)
    out: dict[str, Any] = {}

    group = generator.open(PROMPT, [5, 6, 7], HOT)
    first = play(generator)
    out["group"] = [first[s].token_ids.tolist() for s in group]
    out["error"] = max(error(old, PROMPT, first[s], 0.7) for s in group)
    out["reused"] = generator.counters.reused_tokens
    lone = generator.open(PROMPT, [6], HOT)[0]
    out["alone"] = play(generator)[lone].token_ids.tolist()
    before = np.concatenate((PROMPT, first[group[0]].token_ids, [9, 8]))
    generator.extend(group[0], np.array([9, 8]), HOT)
    turn = play(generator)[group[0]]
    out["turn"], out["turn_error"] = turn.token_ids.tolist(), error(old, before, turn, 0.7)

    stop = int(first[group[0]].token_ids[3])
    session = generator.open(PROMPT, [5], SamplingParams(0.7, 12, (stop,)))[0]
    stopped = play(generator)[session]
    out["stopped"], out["finish"] = stopped.token_ids.tolist(), stopped.finish
    greedy = generator.open(PROMPT[:20], [1], SamplingParams(0.0, 4))[0]
    out["greedy_error"] = error(old, PROMPT[:20], play(generator)[greedy], 1.0)

    renewed = generator.counters.renewed_tokens
    running = generator.open(PROMPT[:50], [3], SamplingParams(1.0, 12))[0]
    for _ in range(5):
        assert not generator.step()
    queued = generator.open(PROMPT, [5, 9], HOT)
    reused = generator.counters.reused_tokens
    update(folder / "old", engine, generator, new, out)
    found = play(generator)
    spanning = found[running]
    out["found_of_new"] = generator.counters.reused_tokens - reused
    out["queued"] = [found[session].versions.tolist() for session in queued]
    out["queued_error"] = max(error(new, PROMPT, found[s], 0.7) for s in queued)
    out["versions"] = spanning.versions.tolist()
    out["stale"] = generator.counters.stale_tokens
    fresh = generator.open(PROMPT, [5], HOT)[0]
    out["new_error"] = error(new, PROMPT, play(generator)[fresh], 0.7)
    before = np.concatenate((PROMPT[:50], spanning.token_ids, [4]))
    generator.extend(running, np.array([4]), HOT)
    out["renewed_error"] = error(new, before, play(generator)[running], 0.7)
    out["renewed"] = generator.counters.renewed_tokens - renewed

    generator.open(PROMPT, [1, 2], HOT)
    generator.step()
    generator.clear()
    last = generator.open(PROMPT, [5], HOT)[0]
    out["after_clear"] = list(play(generator)) == [last]
    try:
        generator.open(PROMPT, [1], SamplingParams(1.0, 300))
    except UserError as caught:
        out["too_long"] = str(caught)
    del os.environ["VLLM_CPU_KVCACHE_SPACE"]  # or the share of memory would not count
    try:
        VllmEngine(folder / "old", LIMIT, **options | {"memory": 0.001})
    except RunFailed as caught:
        out["no_memory"] = str(caught)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
