"""vLLM for CPUs on a policy of ours, run by `test_vllm` in the environment that has it; prints what
it found as JSON. Compared with forwards of the same policy over whole sequences."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import numpy as np
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import save_checkpoint
from farhorizon.policy.records import StageRecord, read_config
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer
from farhorizon.rollout.engine_weights import policy_weights
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.types import Completion, SamplingParams
from farhorizon.rollout.vllm import VllmEngine

LIMIT = 256
BIAS = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
PROMPT = np.arange(3, 150)
HOT = SamplingParams(temperature=0.7, max_tokens=12)


def build(folder: Path, seed: int) -> Policy:
    """A random policy whose routers have thresholds, with its checkpoint."""
    tokenizer = train_tokenizer([], 288, [" red", " green"])
    torch.manual_seed(seed)
    config = PolicyConfig.tiny(vocab_size=288, hidden_size=64, num_hidden_layers=4)
    policy = Policy(config).eval()
    with torch.no_grad():
        for name, tensor in policy.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) / 8)
            elif tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
            else:
                tensor.mul_(1.5)
    stage = StageRecord(LIMIT, (LIMIT,), 0, tokenizer_sha256(tokenizer))
    save_checkpoint(folder, policy, config, tokenizer, stage)
    return policy


@torch.no_grad()
def error(policy: Policy, before: np.ndarray, completion: Completion, temperature: float) -> float:
    """The largest difference of its log-probs to those of a forward over all of it."""
    ids = torch.from_numpy(np.concatenate((before, completion.token_ids)).astype(np.int64))
    logits = policy(ids[None]).logits[0, len(before) - 1 : -1].double() / temperature
    wanted = logits.log_softmax(-1)[torch.arange(len(logits)), ids[len(before) :]]
    return float((wanted - torch.from_numpy(completion.logprobs)).abs().max())


def play(generator: RequestGenerator) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while generator.busy:
        found |= dict(generator.step())
    return found


def faults(engine: VllmEngine, weights: dict[str, torch.Tensor], out: dict[str, Any]) -> None:
    """What is served goes wrong in a way that only a comparison sees."""
    model = engine._worker.get_model()
    gate = model.model.layers[1].block_sparse_moe.gate
    kept = gate.e_score_correction_bias.clone()
    gate.e_score_correction_bias.zero_()
    out["stale"] = engine.difference(weights)
    gate.e_score_correction_bias = kept.bfloat16()
    out["narrow"] = engine.difference(weights)
    gate.e_score_correction_bias = kept
    left, right = model.model.layers[0].self_attn.q_proj, model.model.layers[1].self_attn.q_proj
    left.weight, right.weight = right.weight, left.weight
    out["swapped"] = engine.difference(weights)
    left.weight, right.weight = right.weight, left.weight
    out["whole"] = engine.difference(weights)
    try:
        engine.load({name: one for name, one in weights.items() if name != BIAS})
    except RunFailed as caught:
        out["dropped"] = str(caught)


def main() -> None:
    folder = Path(sys.argv[1])
    old, new = build(folder / "old", 0), build(folder / "new", 1)
    engine = VllmEngine(
        *(folder / "old", LIMIT), dtype="float32", eager=True, concurrency=8, memory=0.3
    )
    generator = RequestGenerator(engine)
    holder = policy_weights(engine, folder / "old", read_config(folder / "old"))
    out: dict[str, Any] = {}

    group = generator.open(PROMPT, [5, 6, 7], HOT)
    short = generator.open(PROMPT[:20], [8], HOT)[0]
    first = play(generator)
    out["error"] = max(error(old, PROMPT, first[s], 0.7) for s in group)
    out["short_error"] = error(old, PROMPT[:20], first[short], 0.7)
    out["group"] = [first[s].token_ids.tolist() for s in group]
    lone = generator.open(PROMPT, [6], HOT)[0]
    out["alone"] = play(generator)[lone].token_ids.tolist()
    before = np.concatenate((PROMPT, first[group[0]].token_ids, [9, 8]))
    generator.extend(group[0], np.array([9, 8]), HOT)
    out["turn_error"] = error(old, before, play(generator)[group[0]], 0.7)
    ids = torch.from_numpy(PROMPT[:30].astype(np.int64))
    with torch.no_grad():
        meant = old(ids[None]).logits[0, :-1].double().log_softmax(-1)
    wanted = meant[torch.arange(29), ids[1:]]
    found = torch.from_numpy(engine.score(PROMPT[:30], 1.0))
    out["score_error"] = float((wanted - found).abs().max())

    running = generator.open(PROMPT[:50], [3], SamplingParams(1.0, 12))[0]
    for _ in range(5):
        assert not generator.step()
    weights = dict(new.state_dict())
    with generator.updating(1), holder.serving(dict(weights)):
        stored = dict(holder._loaded)
        out["difference"] = engine.difference(stored)
    spanning = play(generator)[running]
    out["versions"] = spanning.versions.tolist()
    fresh = generator.open(PROMPT, [5], HOT)[0]
    out["new_error"] = error(new, PROMPT, play(generator)[fresh], 0.7)
    before = np.concatenate((PROMPT[:50], spanning.token_ids, [4]))
    generator.extend(running, np.array([4]), HOT)
    out["renewed_error"] = error(new, before, play(generator)[running], 0.7)

    faults(engine, stored, out)
    last = generator.open(PROMPT, [5], HOT)[0]
    out["kept_error"] = error(new, PROMPT, play(generator)[last], 0.7)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
