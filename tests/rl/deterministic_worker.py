"""Updates on a GPU from one start, run as a process by the tests: prints a digest of all weights
after each of three tries, ``deterministic_worker.py ALGORITHM CHECKPOINTING``."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, cast

import numpy as np
import torch

from farhorizon.configs.schema import AlgorithmConfig, LearnerConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.weights import digest
from farhorizon.rl.algorithms import make_algorithm
from farhorizon.rl.batch import shares
from farhorizon.rl.engine import join, leave
from farhorizon.rl.learner import Learner
from farhorizon.rl.types import Sample

LENGTHS = (5000, 4096, 700, 1300, 3)  # those from 4,096 on would go through cuDNN
TRIES, STEPS = 3, 2


def policy() -> Policy:
    linear = {
        "num_heads": 2,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
    }
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    torch.manual_seed(0)
    return Policy(PolicyConfig.tiny(hidden_size=256, linear_attn_config=linear, **sizes))


def samples(step: int) -> list[Sample]:
    random = np.random.default_rng(step)
    made = []
    for number, length in enumerate(LENGTHS):
        mask = np.arange(length) >= length // 2
        logprobs = np.where(mask, random.normal(-6, 0.3, length), 0).astype(np.float32)
        advantages = np.where(mask, random.normal(), 0).astype(np.float32)
        made.append(Sample(number, random.integers(0, 256, length), mask, logprobs, advantages))
    return made


def weights(algorithm: str, checkpointing: str) -> str:
    """The digest of all weights and thresholds behind the updates."""
    config = LearnerConfig(
        deterministic=True,
        gpus=1.0,
        dtype="bfloat16",
        lr=1e-3,
        checkpointing=cast(Any, checkpointing),
    )
    module = policy()
    module.to(torch.device("cuda"))  # type: ignore[arg-type] - Module.to
    own = Learner(module, config, temperature=1.0)
    loss = make_algorithm(AlgorithmConfig(name=cast(Any, algorithm))).loss
    for step in range(STEPS):
        result = own.update(shares(samples(step), 1, 20_000), loss)
        assert not result.skipped
    parts = [digest(tensor) for _, tensor in own.engine.gathered_state()]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def main() -> None:
    join(0, 1, "", "cuda")
    for _ in range(TRIES):
        print("digest", weights(sys.argv[1], sys.argv[2]), flush=True)
    leave()


if __name__ == "__main__":
    main()
