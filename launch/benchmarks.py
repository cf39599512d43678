"""The benchmarks by name: the module that has ``bench_NAME``, and its settings."""

from __future__ import annotations

from importlib import import_module

from ..configs import benchmarks as settings
from ..configs.errors import UserError
from ..configs.load import override_config

BENCHMARKS: dict[str, tuple[str, type]] = {
    "attnres": ("bench_attnres", settings.AttnResBenchConfig),
    "decode": ("bench_decode", settings.DecodeBenchConfig),
    "grpo": ("bench", settings.BenchConfig),
    "kda": ("bench_kda", settings.KdaBenchConfig),
    "learning": ("bench_learning", settings.LearningBenchConfig),
    "logprob": ("bench_logprob", settings.LogprobBenchConfig),
    "moe": ("bench_moe", settings.MoeBenchConfig),
    "overlap": ("bench_learning", settings.OverlapBenchConfig),
    "parity": ("bench_parity", settings.ParityBenchConfig),
    "routing": ("bench_routing", settings.RoutingBenchConfig),
    "step": ("bench_step", settings.StepBenchConfig),
    "sync": ("bench_sync", settings.SyncBenchConfig),
    "thresholds": ("bench_thresholds", settings.ThresholdBenchConfig),
}


def run_benchmark(name: str, overrides: list[str]) -> int:
    """The exit code of a benchmark with ``key=value`` settings; UserError for an unknown name."""
    if name not in BENCHMARKS:
        raise UserError(f"bench {name}: no such benchmark; known: {', '.join(BENCHMARKS)}")
    module, defaults = BENCHMARKS[name]
    # Not from nothing: settings of a benchmark may have defaults of their own.
    config = override_config(defaults(), overrides)
    return getattr(import_module(f".{module}", __package__), f"bench_{name}")(config)
