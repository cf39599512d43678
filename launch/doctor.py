"""Is this machine ready? Versions, devices, memory, disk, and a Ray that starts."""

from __future__ import annotations

import os
import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray
import torch

from .cluster import GIB, cluster

PACKAGES = (
    "farhorizon",
    "torch",
    "triton",
    "ray",
    "deepspeed",
    "trl",
    "transformers",
    "tokenizers",
    "gymnasium",
    "omegaconf",
    "numpy",
)


def doctor() -> int:
    """Print the findings; 0 if runs can be expected to work, else 1."""
    problems: list[str] = []
    print(f"python       {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        found = _version(package)
        print(f"{package:<12} {found or 'not installed'}")
        if found is None and package != "triton":
            problems.append(
                f"{package} is not installed: install the version in launch/constraints.txt"
            )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    print(f"cpu          {os.cpu_count()} cores, {memory:.1f} GiB")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        print(f"gpu {index}        {gpu.name}, {gpu.total_memory / GIB:.0f} GiB")
    if not torch.cuda.is_available():
        print("gpu          none: runs use the CPU")
    free = shutil.disk_usage(Path.cwd()).free / GIB
    print(f"disk         {free:.1f} GiB free in {Path.cwd()}")
    if free < 1:
        problems.append("less than 1 GiB of disk is free here")
    problems += _check_ray()
    for problem in problems:
        print(f"problem      {problem}")
    print("not ready" if problems else "ready")
    return 1 if problems else 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check_ray() -> list[str]:
    start = time.perf_counter()
    try:
        with cluster(None):
            answer = ray.get(ray.remote(num_cpus=0.1)(_seven).remote(), timeout=60)
    except Exception as error:  # a report, not a run: whatever is wrong becomes a line of it
        cause = error.__cause__ or error  # not the advice to run what runs here
        text = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        return [f"Ray does not start: {text}"]
    print(f"ray          started and answered {answer} in {time.perf_counter() - start:.1f} s")
    return []


def _seven() -> int:
    return 7
