"""A Ray actor whose vLLM engine has two processes, one of which is killed: what
`test_vllm_parallel.py` runs in vLLM's own environment. Ray is told of two GPUs that are not there;
the policy's class for CPUs is not divided, so that each process has all of it.

vllm_actor_worker.py FOLDER      FOLDER is a checkpoint; prints one JSON object
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import psutil
import ray

from farhorizon.configs.schema import EnvConfig, RolloutConfig, VllmConfig
from farhorizon.envs.types import Task
from farhorizon.launch.cluster import cluster
from farhorizon.rollout.pool import RolloutPool
from farhorizon.rollout.types import Group

REPLIES = [" red", " green blue", " black", " red red"] * 3
ENV = EnvConfig(
    id="scripted-v0",
    kwargs={"prompt": " go", "replies": REPLIES},
    plugins=(str(Path(__file__).parents[1] / "fakes.py"),),
)
TASKS = [Task(f"t{number}", number) for number in range(4)]


def sampled(groups: list[Group]) -> list[list[int]]:
    return [one.token_ids.tolist() for group in groups for one in group.trajectories]


def start(folder: str, size: int, told: list[str]) -> RolloutPool:
    vllm = VllmConfig(tensor_parallel=size, dtype="float32", eager=True, memory=0.1)
    rollout = RolloutConfig(
        engine="vllm",
        vllm=vllm,
        gpus=float(size) if size > 1 else 0.0,
        concurrency=5,
        max_turn_tokens=6,
    )
    return RolloutPool(folder, ENV, rollout, 128, 3, tell=told.append)


def workers(pool: RolloutPool) -> list[psutil.Process]:
    children = psutil.Process(pool.process_ids[0]).children(recursive=True)
    return [one for one in children if "Worker_TP" in one.name()]


def main() -> None:
    plain: Any = ray.init
    ray.init = lambda **given: plain(**given, num_gpus=2)  # type: ignore[assignment]
    told: list[str] = []
    out: dict[str, Any] = {}
    with cluster(None):
        pool = start(sys.argv[1], 2, told)
        first = workers(pool)
        out["workers"] = len(first)
        out["two"] = sampled(pool.collect(pool.submit(TASKS, 2))[0])
        playing = pool.submit(TASKS, 2)
        time.sleep(0.3)
        os.kill(first[1].pid, signal.SIGKILL)
        out["again"] = sampled(pool.collect(playing)[0])
        out["restarted"], out["told"] = pool.restarted, told
        every = [*first, *workers(pool)]
        pool.close()
        psutil.wait_procs(every, timeout=30)
        out["left"] = [one.pid for one in every if one.is_running()]
        pool = start(sys.argv[1], 1, told)
        out["one"] = sampled(pool.collect(pool.submit(TASKS, 2))[0])
        pool.close()
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
