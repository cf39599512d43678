"""Ray for one run: a local one that only this machine can reach, or the cluster at an address."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
import torch
from ray._private import ray_constants

from ..configs.errors import RunFailed, UserError
from ..configs.schema import LearnerConfig, RolloutConfig
from .interrupt import heed_sigterm

GIB = 2**30
GPU_UNITS = 10_000  # what Ray divides a GPU into


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Ray while the block runs; a connection that already exists is used and left alone.

    RunFailed if Ray does not start, UserError if there is none at the address.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would hide the GPUs from actors that reserve none and warn about it at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if address is None:
            _start_local()
        else:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (Exception, SystemExit) as error:  # Ray raises many kinds, and may end the process
        ray.shutdown()  # what of it had started
        heed_sigterm()
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # as Ray heeds it
            signal.raise_signal(signal.SIGTERM)
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else "no text"
        if address is not None and isinstance(error, ConnectionError | RuntimeError | ValueError):
            raise UserError(f"ray_address {address}: cannot connect to Ray ({reason})") from None
        raise RunFailed(
            f"Ray does not start ({type(error).__name__}: {reason}); "
            "farhorizon doctor looks for the cause"
        ) from error
    heed_sigterm()
    try:
        yield
    finally:
        ray.shutdown()


def check_gpus(
    address: str | None,
    rollout: RolloutConfig | None = None,
    learner: LearnerConfig | None = None,
) -> None:
    """UserError if Ray has fewer GPUs than all actors and ranks reserve; to be called in `cluster`.

    Ray itself would wait for more of them without end. On a cluster, nodes that have not joined
    yet do not count; GPUs that another job uses do, and are waited for.
    """
    parts: list[str] = []
    shares: list[float] = []
    if rollout is not None and rollout.gpus > 0:
        parts.append(f"rollout.actors={rollout.actors} with rollout.gpus={rollout.gpus:g}")
        whole = int(rollout.gpus) or 1  # above 1 the share is a number of whole ones
        shares += [rollout.gpus / whole] * whole * rollout.actors
    if learner is not None and learner.gpus > 0:
        parts.append(f"learner.ranks={learner.ranks} with learner.gpus={learner.gpus:g}")
        shares += [learner.gpus] * learner.ranks
    if not shares:
        return
    there = int(ray.cluster_resources().get("GPU", 0))
    if address is None:
        there = min(there, torch.cuda.device_count())  # none for a torch that is built for CPUs
    needed = gpus_needed(shares)
    if needed > there:
        raise UserError(
            f"{' and '.join(parts)} {'needs' if len(parts) == 1 else 'need'} {needed} GPUs, "
            f"there are {there}; lower them, or set gpus to 0 for the CPU"
        )
    if rollout is not None and rollout.gpus > 1:
        _check_machines(int(rollout.gpus), rollout.actors)
    free = int(ray.available_resources().get("GPU", 0))
    if needed > free:
        print(f"waiting for GPUs: {needed} needed, {free} of {there} free", flush=True)


def _check_machines(size: int, actors: int) -> None:
    """UserError if the machines of the cluster have no ``size`` GPUs for each actor, who is on one
    of them."""
    machines = [int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]]
    found = sum(gpus // size for gpus in machines)
    if found < actors:
        raise UserError(
            f"rollout.vllm.tensor_parallel={size} needs {size} GPUs of one machine for each of "
            f"rollout.actors={actors}, and there is room for {found}; lower one of them"
        )


def gpus_needed(shares: Sequence[float]) -> int:
    """How many GPUs hold all ``shares``, each of them on one GPU."""
    left: list[int] = []
    for share in sorted((max(int(share * GPU_UNITS), 1) for share in shares), reverse=True):
        fitting = next((i for i, units in enumerate(left) if units >= share), None)
        if fitting is None:
            left.append(GPU_UNITS - share)
        else:
            left[fitting] -= share
    return len(left)


def _start_local() -> None:
    """Loopback only: whoever reaches Ray's ports can run commands.

    Ray replaces a loopback node address by the machine's own and then listens everywhere, unless
    clusters are switched off, as it does itself on desktop systems.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when workers import Ray
    ray_constants.ENABLE_RAY_CLUSTER = False  # this process has read it
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, 2),
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        object_store_memory=object_store_bytes(),
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def object_store_bytes() -> int:
    """A tenth of the memory, at most 16 GiB and what the shared-memory disk has to spare."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = min(memory // 10, 16 * GIB)
    if os.path.isdir("/dev/shm"):
        wanted = min(wanted, shutil.disk_usage("/dev/shm").free * 8 // 10)
    return max(wanted, GIB // 8)
