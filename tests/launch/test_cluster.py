"""A local Ray is reachable from this machine only (C28), and its GPUs are counted beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import (
    EnvConfig,
    LearnerConfig,
    RolloutConfig,
    Stage,
    StageConfig,
    TrainConfig,
    VllmConfig,
)
from farhorizon.launch.cluster import check_gpus, gpus_needed
from farhorizon.launch.evaluate import evaluate
from farhorizon.launch.stage import run_stages
from farhorizon.launch.train import train

PROBE = """
import os, psutil, ray
from farhorizon.launch.cluster import cluster

with cluster(None):
    assert ray.get(ray.remote(num_cpus=0.1)(lambda: os.getpid()).remote()) != os.getpid()
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    sockets = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in ours]
    print("sockets", len(sockets))
    for c in sockets:
        if c.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1"):
            print("open", c.laddr.ip, c.laddr.port, psutil.Process(c.pid).name())
"""


def test_every_socket_of_a_local_ray_is_on_loopback() -> None:
    # A process of its own: the address is chosen when Ray starts, and other tests share one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert int(lines[0].split()[1]) >= 3
    assert [line for line in lines if line.startswith("open")] == []


BROKEN = """
import sys, ray
from farhorizon.launch import cli

def broken(*arguments, **keywords):
    raise {error}

ray.init = broken
sys.exit(cli.main(["{command}", *{arguments}]))
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("AssertionError('no port\\nis free')", "AssertionError: no port"),
        ("SystemExit(1)", "SystemExit: 1"),
        ("TimeoutError", "TimeoutError: no text"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line(checkpoint: Path, error: str, reason: str) -> None:
    arguments = [str(checkpoint), "env.id=echo-v0", "episodes=1"]
    code = BROKEN.format(error=error, command="eval", arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"farhorizon: Ray does not start ({reason}); farhorizon doctor looks for the cause\n"
    )


@pytest.mark.parametrize(
    ("shares", "needed"),
    [
        ([], 0),
        ([1.0, 1.0, 1.0, 1.0], 4),
        ([0.5, 0.5], 1),
        ([0.5, 1.0, 0.5], 2),
        ([0.6, 0.6, 0.6], 3),  # 1.8 in all, but none shares a GPU with another
        ([0.3, 0.7, 0.7, 0.3], 2),
        ([1 / 3] * 3, 1),
    ],
)
def test_a_share_lies_on_one_gpu(shares: list[float], needed: int) -> None:
    assert gpus_needed(shares) == needed


def test_gpus_that_are_not_there_are_told(ray_local: None) -> None:
    """Ray would wait for them without a word."""
    check_gpus(None, RolloutConfig(actors=9), LearnerConfig(ranks=9))
    with pytest.raises(
        UserError,
        match=r"^rollout\.actors=99 with rollout\.gpus=1 and learner\.ranks=98 with "
        r"learner\.gpus=1 need 197 GPUs, there are \d+; lower them, or set gpus to 0",
    ):
        check_gpus(None, RolloutConfig(actors=99, gpus=1), LearnerConfig(ranks=98, gpus=1))


def test_gpus_of_one_engine_are_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of machines with 3, 3, 8 and no GPUs, and one that has left."""
    gpus = [3, 3, 8, 0]
    nodes = [{"Alive": True, "Resources": {"GPU": float(n)} if n else {}} for n in gpus]
    gone = {"Alive": False, "Resources": {"GPU": 8.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, gone])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 14.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 14.0})

    def check(size: int, actors: int, ranks: int = 0) -> None:
        vllm = VllmConfig(tensor_parallel=size)
        rollout = RolloutConfig(actors=actors, gpus=size, vllm=vllm)
        learner = LearnerConfig(ranks=ranks, gpus=1) if ranks else None
        check_gpus("auto", rollout, learner)

    for size, actors in ((6, 1), (4, 2), (2, 6)):
        check(size, actors)
        with pytest.raises(
            UserError,
            match=rf"^rollout\.vllm\.tensor_parallel={size} needs {size} GPUs of one machine for "
            rf"each of rollout\.actors={actors + 1}, and there is room for {actors}; lower one of",
        ):
            check(size, actors + 1)
    check(2, 6, ranks=2)
    with pytest.raises(
        UserError, match=r"gpus=2 and learner\.ranks=3 .* need 15 GPUs, there are 14"
    ):
        check(2, 6, ranks=3)


def test_every_command_looks_for_its_gpus_first(
    ray_local: None, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    run = TrainConfig(
        policy=str(checkpoint),
        env=EnvConfig(id="echo-v0"),
        output=str(output),
        context=64,
        learner=LearnerConfig(ranks=99, gpus=1),
    )
    with pytest.raises(UserError, match=r"^learner\.ranks=99 with learner\.gpus=1 needs 99 GPUs"):
        train(run)
    stages = StageConfig(
        policy="tiny",
        text="stdlib",
        output=str(output),
        stages=(Stage(context=8, steps=1, batch_tokens=8, lr=1e-3),),
        learner=replace(run.learner, ranks=98),
    )
    with pytest.raises(UserError, match=r"needs 98 GPUs"):
        run_stages(stages)
    with pytest.raises(UserError, match=r"^rollout\.actors=97 with .* needs 97 GPUs"):
        evaluate(str(checkpoint), ["env.id=echo-v0", "rollout.actors=97", "rollout.gpus=1"])
    assert not output.exists()
