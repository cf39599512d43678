"""An engine that is divided over two workers, in vLLM's own environment: what
`test_vllm_parallel.py` runs. On the CPU a small dense policy in fp32, else one of ours in bf16.

vllm_parallel_worker.py FOLDER cpu|gpu      prints one JSON object; then a worker is killed, and
                                            this process ends with it
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# No NVLink multicast: not every machine that lends GPUs bears it.
os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

import numpy as np
import psutil
import torch
from vllm_worker import HOT, LIMIT, PROMPT, Faulty, build, play, publish, receive

from farhorizon.configs.errors import RunFailed
from farhorizon.launch.fresh import policy_presets
from farhorizon.launch.parity import random_policy
from farhorizon.policy import PolicyConfig
from farhorizon.policy.checkpoint import save_policy
from farhorizon.policy.weights import WeightManifest
from farhorizon.rollout.engine_weights import policy_weights
from farhorizon.rollout.proof import tensors
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.sync import WeightReceiver
from farhorizon.rollout.types import Completion, SamplingParams
from farhorizon.rollout.vllm import VllmEngine

SIZE = 2
# Of tensors that are divided, whole on each, and derived, as far as the policy has them.
SUFFIXES = {
    "cpu": ("layers.1.input_layernorm.weight", "embed_tokens.weight"),
    "gpu": (
        "e_score_correction_bias",
        "in_proj_qkvgfab.weight",
        "w13_weight",
        "conv1d.weight",
        "W_UK_T",
        "lm_head.weight",
        "res_proj.weight",
    ),
}


def spoil(worker: Any, rank: int, suffix: str) -> str | None:
    """Change a number of what that worker serves; the name of the tensor, if there is one."""
    for name, tensor in tensors(worker.get_model()).items():
        if name.endswith(suffix):
            if worker.rank == rank:
                tensor.data[(0,) * tensor.ndim] += 1
            return name
    return None


def process_id(worker: Any) -> int:
    return os.getpid()


def ask(engine: VllmEngine, function: Any, *given: Any) -> list[Any]:
    return engine._engine.collective_rpc(function, args=given)


@torch.no_grad()
def gaps(
    policy: Any, before: np.ndarray, completion: Completion, temperature: float
) -> list[float]:
    """The mean and largest difference of its log-probs to those of a forward over all of it."""
    ids = torch.from_numpy(np.concatenate((before, completion.token_ids)).astype(np.int64))
    logits = policy(ids[None]).logits[0, len(before) - 1 : -1].double() / temperature
    wanted = logits.log_softmax(-1)[torch.arange(len(logits)), ids[len(before) :]]
    apart = (wanted - torch.from_numpy(completion.logprobs)).abs()
    return [float(apart.mean()), float(apart.max())]


def make(folder: Path, on_gpu: bool) -> tuple[Any, Any, VllmEngine, Faulty]:
    """Two policies, an engine that serves the first, and the holder of its weights."""
    if not on_gpu:
        old, new = build(folder / "old", 0), build(folder / "new", 1)
        options: Any = {"dtype": "float32", "eager": True, "memory": 0.3}
        engine = VllmEngine(folder / "old", LIMIT, tensor_parallel=SIZE, concurrency=8, **options)
        manifest = WeightManifest.of(new.state_dict())
        return old, new, engine, Faulty(engine, folder / "old", manifest, dict)
    config = PolicyConfig.from_dict(json.loads(policy_presets()["small"].read_text()))
    config.max_position_embeddings = LIMIT
    old, new = (random_policy(config, seed, "cpu") for seed in (0, 1))
    save_policy(folder / "old", old)
    routed = [n for n in range(config.num_hidden_layers) if not config.is_dense(n)]
    options = {"memory": 0.3, "routed_layers": routed}
    engine = VllmEngine(folder / "old", LIMIT, tensor_parallel=SIZE, concurrency=8, **options)
    plain = policy_weights(engine, folder / "old", config)
    return old, new, engine, Faulty(engine, folder / "old", plain.manifest, plain._stored)


def faults(
    engine: VllmEngine, receiver: Any, holder: Faulty, wanted: Any, kind: str
) -> list[dict[str, Any]]:
    """One tensor of one worker is not what was published, for each kind of tensor and worker."""
    found: list[dict[str, Any]] = []
    before = engine.score(PROMPT[:24], 0.7)
    for suffix in SUFFIXES[kind]:
        for rank in range(SIZE):
            name = ask(engine, spoil, -1, suffix)[0]
            holder.after = lambda rank=rank, suffix=suffix: ask(engine, spoil, rank, suffix)
            told = None
            try:
                if name is not None:
                    receive(receiver, wanted)
            except RunFailed as caught:
                told = str(caught)
            apart = float(np.abs(engine.score(PROMPT[:24], 0.7) - before).max())
            found.append({"rank": rank, "name": name, "told": told, "moved": apart})
    holder.after = None
    return found


def listeners() -> list[str]:
    """Where this process and the workers can be reached from other machines."""
    own = psutil.Process()
    ours = {own.pid, *(child.pid for child in own.children(recursive=True))}
    there = [c for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in ours]
    addresses = [str(c.laddr[0]).removeprefix("::ffff:") for c in there if c.laddr]
    return [address for address in addresses if address not in ("127.0.0.1", "::1")]


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    out: dict[str, Any] = {}
    began = time.perf_counter()
    old, new, engine, holder = make(folder, kind == "gpu")
    out["start_seconds"] = time.perf_counter() - began
    out["processes"] = ask(engine, process_id)
    out["listeners"] = listeners()
    generator = RequestGenerator(engine)

    group = generator.open(PROMPT, [5, 6, 7], HOT)
    first = play(generator)
    out["gaps"] = [gaps(old, PROMPT, first[s], 0.7) for s in group]
    out["group"] = [first[s].token_ids.tolist() for s in group]
    routes = [first[s].routes for s in group]
    out["routes"] = [None if one is None else list(one.shape) for one in routes]
    lone = generator.open(PROMPT, [6], HOT)[0]
    out["alone"] = play(generator)[lone].token_ids.tolist()

    running = generator.open(PROMPT[:50], [3], SamplingParams(1.0, 12))[0]
    for _ in range(5):
        assert not generator.step()
    published = publish(new, dict(new.state_dict()), 1)
    if kind == "gpu":
        published = replace(published, tolerance=0.5)
    receiver = WeightReceiver(holder)
    with generator.exclusive():
        out["faults"] = faults(engine, receiver, holder, published, kind)
    with generator.updating(1):
        receive(receiver, published)
    out["seconds"] = receiver.seconds
    spanning = play(generator)[running]
    out["versions"] = spanning.versions.tolist()
    fresh = generator.open(PROMPT, [5], HOT)[0]
    out["new_gaps"] = gaps(new, PROMPT, play(generator)[fresh], 0.7)
    print(json.dumps(out), flush=True)

    os.kill(out["processes"][1], signal.SIGKILL)
    generator.open(PROMPT, [9], HOT)
    while generator.busy:
        generator.step()
        time.sleep(0.1)
    sys.exit("a step was made without a worker")


if __name__ == "__main__":
    main()
