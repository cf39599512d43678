"""Settings of the benchmarks, one frozen dataclass for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .schema import LearnerConfig, RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A benchmark; the peer takes the completion limit, temperature and lr from here as well."""

    output: str | None = None  # file that gets one JSON line per benchmark
    seed: int = 0
    steps: int = 3  # timed steps per run, after one of warm-up
    runs: int = 3  # of each side, in turns
    trl_checkpointing: bool = True  # TRL's default: activations are computed again in backward
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(actors=2, max_turn_tokens=128)
    )
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(ranks=2, lr=1e-3))


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaBenchConfig:
    """KDA on this GPU beside other implementations that are installed."""

    lengths: tuple[int, ...] = (8192, 65536, 131072)  # tokens of one sequence
    heads: tuple[int, ...] = (32, 64, 96)  # of size 128; every length with every one
    forward_only_from: int = 131072  # from this length on there is no backward pass: memory
    decode: tuple[str, ...] = ("32x64", "64x64", "128x96")  # SEQUENCESxHEADS, of one token each
    peers: tuple[str, ...] = ("fla", "flashkda")  # flash-linear-attention, FlashKDA
    repeats: int = 30  # replays behind each median
    seed: int = 0
    output: str | None = None  # folder of kda.jsonl, which grows, kda.md and kda.png


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeBenchConfig:
    """Router and experts on this GPU beside torch's grouped products and others."""

    shapes: tuple[str, ...] = (  # TOKENSxWIDTHxINNERxEXPERTSxK
        "32768x2048x768x128x8",
        "65536x1024x512x896x16",
        "32768x768x512x32x4",
        "256x768x512x32x4",
    )
    router: tuple[str, ...] = (  # TOKENSxWIDTHxEXPERTSxK
        "65536x2048x896x16",
        "65536x7168x896x16",
        "32768x2048x128x8",
    )
    activation: Literal["situ", "swiglu"] = "situ"
    peers: tuple[str, ...] = ("torch",)  # and liger, for SwiGLU: it tunes itself for minutes
    repeats: int = 20  # replays behind each median
    seed: int = 0
    output: str | None = None  # file that gets a JSON line for each side and shape


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnResBenchConfig:
    """A site of the mixture over depth on this GPU beside that of flash-linear-attention."""

    shapes: tuple[str, ...] = (  # TOKENSxHIDDENxSOURCES
        "32768x2048x8",
        "32768x7168x8",
        "32768x1536x4",
    )
    peers: tuple[str, ...] = ("fla",)
    repeats: int = 20  # replays behind each median
    seed: int = 0
    output: str | None = None  # file that gets a JSON line for each side and shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobBenchConfig:
    """Log-probs of a vocabulary's head on this GPU beside those of TRL and Liger."""

    shapes: tuple[str, ...] = (  # TOKENSxVOCABULARYxHIDDEN
        "131072x163840x2048",
        "8192x163840x2304",
        "8192x32768x1536",
    )
    peers: tuple[str, ...] = ("trl", "liger")
    repeats: int = 20  # replays behind each median
    seed: int = 0
    output: str | None = None  # file that gets a JSON line for each side and shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBenchConfig:
    """A training step on this GPU beside that of transformers, on what both have."""

    policy: str = "1b"  # preset, folder or config.json: its sizes; weights are drawn
    lengths: tuple[int, ...] = (32768,)  # tokens of the documents that are packed
    checkpointing: Literal["none", "layers"] = "none"  # as of the learner
    peers: tuple[str, ...] = ("kimi_linear",)  # of transformers; they take one document
    steps: int = 20  # behind each median
    seed: int = 0
    output: str | None = None  # file that gets a JSON line for each side


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBenchConfig:
    """Decode steps on this GPU beside what its memory allows, and beside those of vLLM."""

    policy: str = "1b"  # preset, folder or config.json: its sizes; weights are drawn
    sequences: tuple[int, ...] = (256,)  # that a step reads one token of each
    context: int = 4096  # tokens that each sequence has
    peers: tuple[str, ...] = ()  # vllm, on the same weights: it takes some minutes
    eager: bool = False  # vllm without CUDA graphs, not with them
    repeats: int = 30  # steps behind each median
    seed: int = 0
    output: str | None = None  # file that gets a JSON line for each number of sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityBenchConfig:
    """Log-probs of a random policy in our forward and in stock vLLM, on this GPU."""

    policy: str = "1b"  # preset, folder or config.json: its sizes; weights are drawn
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32704)  # tokens of each prompt
    sampled: int = 64  # tokens that vLLM samples behind each
    seed: int = 0
    output: str | None = None  # folder that gets parity.json and parity.npz


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBenchConfig:
    """Weights from one process to another, beside plain transfers of as many bytes: two GPUs, one
    that both share, or the CPU."""

    policy: str = "1b"  # preset, folder or config.json: its sizes; weights are drawn
    bucket_mb: tuple[int, ...] = (64, 256)  # each measured
    repeats: int = 5  # behind each median
    seed: int = 0
    output: str | None = None  # file that gets a JSON line for each size of buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningBenchConfig:
    """Every algorithm on the quickstart's task, from the starts of several seeds."""

    start: str = "runs/quickstart-{seed}/sft"  # checkpoint of each seed
    seeds: tuple[int, ...] = (0, 1, 2)
    names: tuple[str, ...] = ()  # of algorithms; all by itself
    steps: int = 10  # updates of four optimizer steps each
    train: tuple[str, ...] = ()  # more settings of `farhorizon train`, for every run
    output: str = "runs/learning"  # folder of the runs, points.jsonl and learning.png


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapBenchConfig:
    """Synchronous and asynchronous RL from the same starts, with pages that take their time."""

    start: str = "runs/quickstart-{seed}/sft"
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 32
    staleness: int = 4  # max_staleness of the asynchronous runs
    delay: float = 0.05  # seconds that a page takes to come, as a slow tool would
    correction: tuple[str, ...] = ("algorithm.correction=token_truncate",)  # of asynchronous runs
    train: tuple[str, ...] = ()
    output: str = "runs/overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdBenchConfig:
    """Thresholds that stay, that follow free routing or replayed routes, over many steps of RL."""

    start: str = "runs/quickstart-0/sft"
    names: tuple[str, ...] = ("freeze", "track", "naive")
    steps: int = 200
    groups: int = 4  # of a step
    group_size: int = 8
    minibatches: int = 1
    lag: int = 4  # steps that are sampled with the same weights: the last is lag - 1 versions old
    lr: float = 5e-4
    entropy: float = 0.01  # without, a solved task would leave nothing to learn, and no drift
    seed: int = 0
    train: tuple[str, ...] = ()  # more settings of `farhorizon train` that count here
    output: str = "runs/thresholds"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingBenchConfig:
    """What routing thresholds do by how many tokens they see, simulated without a policy."""

    experts: tuple[int, ...] = (8, 32, 128)  # all with the middle batch
    k: int = 2  # experts of a token
    batches: tuple[int, ...] = (4096, 16384, 65536)  # tokens a step, all with the middle of experts
    windows: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144, 1048576)  # tokens
    sequence: int = 256  # tokens of one topic, end to end
    drift: float = 0.05  # radians by which router and topics turn in a step
    steps: int = 150
    seed: int = 0
    output: str = "runs/routing"  # folder of routing.json and routing.png
