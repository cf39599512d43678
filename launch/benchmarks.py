"""The benchmarks by name: what each compares, the function that runs it, its settings."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from ..configs import schema
from ..configs.errors import UserError
from ..configs.load import override_config


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``function`` of ``module`` takes the settings and returns an exit code; ``text`` says in few
    words what it compares."""

    module: str
    function: str
    settings: type
    text: str


BENCHMARKS = {
    "attnres": Benchmark(
        "bench_attnres", "bench_attnres", schema.AttnResBenchConfig, "mixture over depth on a GPU"
    ),
    "decode": Benchmark(
        "bench_decode", "bench_decode", schema.DecodeBenchConfig, "decode steps on a GPU"
    ),
    "grpo": Benchmark("bench", "bench_grpo", schema.BenchConfig, "an RL step beside TRL's"),
    "kda": Benchmark("bench_kda", "bench_kda", schema.KdaBenchConfig, "KDA kernels on a GPU"),
    "learning": Benchmark(
        "bench_learning", "bench_learning", schema.LearningBenchConfig, "all algorithms"
    ),
    "logprob": Benchmark(
        "bench_logprob", "bench_logprob", schema.LogprobBenchConfig, "log-probs on a GPU"
    ),
    "moe": Benchmark(
        "bench_moe", "bench_moe", schema.MoeBenchConfig, "router and experts on a GPU"
    ),
    "overlap": Benchmark(
        "bench_learning", "bench_overlap", schema.OverlapBenchConfig, "asynchronous RL"
    ),
    "parity": Benchmark(
        "bench_parity", "bench_parity", schema.ParityBenchConfig, "log-probs beside vLLM's"
    ),
    "routing": Benchmark(
        "bench_routing", "bench_routing", schema.RoutingBenchConfig, "tokens thresholds see"
    ),
    "step": Benchmark(
        "bench_step", "bench_step", schema.StepBenchConfig, "a training step on a GPU"
    ),
    "thresholds": Benchmark(
        "bench_thresholds", "bench_thresholds", schema.ThresholdBenchConfig, "thresholds in RL"
    ),
}


def run_benchmark(name: str, overrides: list[str]) -> int:
    """The exit code of a benchmark with ``key=value`` settings; UserError for an unknown name."""
    if name not in BENCHMARKS:
        raise UserError(f"bench {name}: no such benchmark; known: {', '.join(sorted(BENCHMARKS))}")
    found = BENCHMARKS[name]
    # Not from nothing: settings of a benchmark may have defaults of their own.
    config = override_config(found.settings(), overrides)
    return getattr(import_module(f".{found.module}", __package__), found.function)(config)
