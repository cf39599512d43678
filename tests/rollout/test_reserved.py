"""Actors with several GPUs: each has its own, also when it starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# Ray believes in the GPUs that it is told of.
SCRIPT = """
import json, os, signal, time
import ray
from farhorizon.configs.schema import EnvConfig, RolloutConfig
from farhorizon.launch import cluster
from farhorizon.rollout import pool

class Actor:
    def __init__(self, *given):
        pass

    def load(self):
        return os.getpid()

    @ray.method(concurrency_group="sync")
    def ping(self):
        pass

    def gpus(self):
        return sorted(ray.get_gpu_ids())

init = ray.init
ray.init = lambda **given: init(**given, num_gpus=5)
pool.RolloutActor = Actor
rollout = RolloutConfig(actors=2, gpus=2)
with cluster.cluster(None):
    made = pool.RolloutPool("", EnvConfig(id="echo-v0"), rollout, 64, 0, tell=lambda line: None)
    first = ray.get([actor.gpus.remote() for actor in made.actors])
    free = ray.available_resources().get("GPU", 0)
    lost = made.process_ids[1]
    os.kill(lost, signal.SIGKILL)
    made._revive(pool.ActorLost("gone"), {1})
    again = ray.get([actor.gpus.remote() for actor in made.actors])
    made.close()
    until = time.monotonic() + 30
    while ray.available_resources().get("GPU", 0) < 5 and time.monotonic() < until:
        time.sleep(0.1)
    left = ray.available_resources().get("GPU", 0)
    print(json.dumps([first, free, made.process_ids[1] != lost, again, left]))
"""


def test_an_actor_keeps_its_gpus_when_it_starts_again() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, free, other, again, left = json.loads(done.stdout.splitlines()[-1])
    assert [len(gpus) for gpus in first] == [2, 2] and len({*first[0], *first[1]}) == 4
    assert (free, left) == (1, 5)
    assert other and again == first
