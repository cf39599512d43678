"""Every setting a user can change, one frozen dataclass per component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

InFlight = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """Which environment, and how it is built in every worker."""

    id: str  # registered id, or "module:Class"
    kwargs: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()  # python files or modules that register environments


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How the policy speaks (docs/chat-format.md); None is as its checkpoint says."""

    style: Literal["brief", "full"] | None = None  # None of a new policy is brief
    thinking: bool | None = None  # of full, where it is true unless said: answers have thoughts
    effort: Literal["none", "low", "medium", "high", "max"] | None = None  # of thinking, said first


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """The engine of ``rollout.engine=vllm``, and of ``farhorizon serve``."""

    memory: float = 0.9  # share of the GPU's memory for its weights, states and caches
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # its weights and what it computes in
    eager: bool = False  # without CUDA graphs: starts sooner, decodes more slowly
    sleep: bool = False  # of train: memory is the learner's while it learns on the same GPU
    tensor_parallel: int = 1  # of rollout: GPUs that hold one copy of the weights together


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Episode generation."""

    engine: Literal["native", "vllm"] = "native"  # vllm: in the environment of launch/vllm-env.sh
    vllm: VllmConfig = field(default_factory=VllmConfig)
    actors: int = 1
    threads: int = 1  # torch threads per actor; 0 keeps torch's default
    gpus: float = 0.0  # each actor reserves: a share of one, or vllm.tensor_parallel; 0 is the CPU
    dtype: Literal["float32", "bfloat16"] | None = None  # native; None: the learner's on a GPU
    concurrency: int = 64  # sequences decoded together by one actor
    temperature: float = 1.0
    max_turn_tokens: int = 16
    max_turns: int = 64
    keep_states: int = 0  # with max_staleness: new weights go on with states so many versions old
    env_retries: int = 1  # fresh tries of an episode whose environment failed
    env_timeout_s: float = 600.0  # a call into an environment that takes longer has failed
    restarts: int = 2  # of actors whose processes ended, in a run; one more stops it
    max_error_fraction: float = 0.2  # more failed episodes than this in one step stop the run


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Objective: advantages and loss; None is the algorithm's own value (docs/algorithms.md)."""

    name: Literal[
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "sapo",
        "rloo",
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "k15",
        "k25",
    ] = "grpo"
    scale: Literal["std", "none"] | None = None
    baseline: Literal["mean", "leave_one_out"] | None = None
    clip_low: float | None = None  # ratios from 1 - clip_low
    clip_high: float | None = None  # to 1 + clip_high
    dual_clip: float | None = None  # bound on the loss of negative advantages, > 1
    gamma: float | None = None  # of ppo: discount per token
    lam: float | None = None  # of ppo: 0 trusts the critic, 1 the rewards
    value_coefficient: float | None = None  # of ppo: weight of the critic's loss
    value_clip: float | None = None  # of ppo: how far a value may move in an update; 0 is no bound
    tau: float | None = None  # strength of the pull towards the policy that sampled
    tau_pos: float | None = None  # of sapo: how narrow its gate is, positive advantages
    tau_neg: float | None = None  # and all others
    aggregation: Literal["token", "sequence", "constant"] | None = None  # which mean the loss is
    length: int | None = None  # tokens that aggregation=constant divides by, 1024 by itself
    entropy: float = 0.0  # coefficient of the entropy bonus
    credit: Literal["trajectory", "turn", "step"] | None = None  # whose reward a token answers for
    overlong: int | None = None  # sampled tokens of a trajectory that cost 1 of its reward
    overlong_buffer: int | None = None  # tokens below over which that grows; a fifth of overlong
    budget: int | None = None  # sampled tokens above which a reward is -1, if its task says none
    efforts: dict[str, float] = field(default_factory=dict)  # kind of task: factor on its budget
    length_reward: float = 0.0  # coefficient of a reward for being shorter than one's siblings
    distill: float = 0.0  # coefficient of the teachers' advantages, per token; 0 loads none
    distill_bound: float | None = None  # nats that such an advantage has at most, 5 by itself
    reward_weight: float = 1.0  # of the advantages of rewards; 0 learns from teachers alone
    extra_rounds: int | None = None  # of rollout a step, while too few groups have an advantage
    kl: float = 0.0  # coefficient of the KL to the reference policy; 0 loads none
    kl_in: Literal["loss", "reward"] | None = None  # the loss by itself
    kl_estimator: Literal["k1", "k2", "k3"] | None = None  # k3 in the loss, k1 in rewards
    kl_gradient: Literal["right", "own"] | None = None  # own: that of the estimator, as in GRPO
    correction: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "icepop",
        "sequence_truncate",
        "sequence_mask",
        "sequence_reject",
    ] = "none"  # of samples that are not the learner's own: older, or of another engine
    correction_low: float | None = None  # range of the ratio learner / sampler
    correction_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """DeepSpeed learner."""

    ranks: int = 1
    threads: int = 1  # torch threads per rank; 0 keeps torch's default
    gpus: float = 0.0  # share of a GPU that each rank reserves, 1 if several; 0 stays on the CPU
    zero_stage: Literal[0, 1, 2, 3] = 0
    expert_parallel: int = 1  # ranks over which the experts of each layer are divided
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 = torch autocast, fp32 masters
    micro_batch_tokens: int = 8192
    checkpointing: Literal["none", "layers"] = "none"  # layers: backward computes them again
    deterministic: bool = False  # the same bits whenever a step runs again, at the cost of time
    minibatches: int = 1  # optimizer steps per rollout batch
    replay: Literal["off", "rollout", "learner"] = "off"  # whose choice of experts it learns with
    thresholds: Literal["freeze", "track", "ema"] = "track"  # of routers: what steps make of them
    threshold_decay: float | None = None  # of ema, 0.9 by itself
    router_lr: float = 1.0  # the rate of routers, times lr
    attnres_lr: float = 1.0  # that of the mixture over depth, norms and queries, times lr
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices; AdamW for the rest
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # of matrices that are no gates and no embeddings
    qk_clip: float | None = None  # largest attention logit of a head of MLA; K2 took 100
    grad_clip: float = 1.0
    warmup_steps: int = 0
    decay: float = 0.0  # last share of a train run's steps, over which lr falls to a tenth
    max_skipped_steps: int = 3  # consecutive non-finite gradients that stop the run


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Weight publication."""

    in_flight: InFlight = "keep"  # with max_staleness: what running completions do (docs/vllm.md)
    transport: Literal["auto", "objects", "collective", "ipc"] = "auto"  # docs/sync.md
    bucket_mb: int = 64
    canary_tokens: int = 64
    canary_tolerance: float | None = None  # difference of log-probs, nats (docs/sync.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """A policy that `AlgorithmConfig.distill` learns from."""

    policy: str  # checkpoint or run folder
    kinds: tuple[str, ...] = ()  # of tasks that it teaches, as their environment says; none is all
    weight: float = 1.0  # beside the other teachers of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """An RL run."""

    policy: str  # checkpoint folder to start from
    reference: str | None = None  # checkpoint that algorithm.kl pulls towards; None is policy
    teachers: tuple[TeacherConfig, ...] = ()  # that algorithm.distill learns from
    env: EnvConfig
    output: str = "runs/train"
    seed: int = 0
    steps: int = 20
    context: int  # tokens per trajectory at most
    allow_longer_context: bool = False  # run beyond the checkpoint's trained context
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 0  # versions a sampled token may lag behind the update it feeds
    eval_every: int = 0  # steps; 0 = only before and after
    eval_episodes: int = 200
    save_every: int = 10
    keep: int = 2  # complete checkpoints kept
    resume: Literal["auto", "never", "required"] = "auto"
    ray_address: str | None = None  # None starts a local Ray
    chat: ChatConfig = field(default_factory=ChatConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One context stage of `StageConfig`."""

    context: int  # tokens per packed sequence
    steps: int
    batch_tokens: int
    lr: float  # at the stage's start; goes linearly to the next stage's, or to a tenth at the end
    env_kwargs: dict[str, Any] = field(default_factory=dict)  # over env.kwargs: a longer horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Staged-context pre-training."""

    policy: str  # preset under configs/policy, or a checkpoint folder to go on from
    stages: tuple[Stage, ...]
    text: str  # folder of text files; "stdlib" is the running Python's own library
    output: str = "runs/stage"
    seed: int = 0
    vocab_size: int = 512
    chat: ChatConfig = field(default_factory=ChatConfig)
    env: EnvConfig | None = None  # episodes mixed in
    episode_fraction: float = 0.5  # share of tokens that come from episodes
    ray_address: str | None = None
    learner: LearnerConfig = field(default_factory=LearnerConfig)  # its lr is that of each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Warm-up on demonstrations."""

    policy: str
    env: EnvConfig  # its demonstrations are the data
    chat: ChatConfig = field(default_factory=ChatConfig)
    output: str = "runs/sft"
    seed: int = 0
    context: int
    steps: int = 200
    batch_tokens: int = 4096  # per optimizer step, over all ranks
    lr: float = 1e-3
    warmup_steps: int = 10
    grad_clip: float = 1.0
    ranks: int = 1  # data-parallel processes on this machine
    threads: int = 0  # torch threads per rank; 0 keeps torch's default
    gpus: float = 0.0  # share of a GPU for each rank, 1 if several; 0 stays on the CPU
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16 = torch autocast, fp32 masters


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation; what is None is read from the run or checkpoint."""

    env: EnvConfig | None = None
    output: str | None = None
    seed: int = 0
    episodes: int = 200
    context: int | None = None
    visible_context: int | None = None  # keep only this many last tokens: does the policy remember?
    allow_longer_context: bool = False
    greedy: bool = False
    ray_address: str | None = None
    chat: ChatConfig = field(default_factory=ChatConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayConfig:
    """One episode, printed, by this process alone: of ``rollout`` only the temperature, the turn
    limits and what concerns the environment have a meaning here, no actors, threads or GPUs."""

    env: EnvConfig
    policy: str | None = None  # checkpoint or run folder; None lets the environment's expert act
    seed: int = 0  # which held-out task
    context: int | None = None  # None is the checkpoint's trained context
    allow_longer_context: bool = False
    chat: ChatConfig = field(default_factory=ChatConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """An OpenAI server of a checkpoint, in the environment of launch/vllm-env.sh."""

    host: str = "127.0.0.1"  # where it listens; 0.0.0.0 is everywhere, for everybody
    port: int = 8000
    name: str | None = None  # of the model in requests; None is that of the folder
    context: int | None = None  # tokens per sequence; None is the checkpoint's trained context
    allow_longer_context: bool = False
    concurrency: int = 64  # sequences decoded together
    tensor_parallel: int = 1  # GPUs that hold one copy of the weights together
    vllm: VllmConfig = field(default_factory=VllmConfig)
    flags: tuple[str, ...] = ()  # more for vllm serve, as they are
    dry_run: bool = False  # print the command and start nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Sizes of a policy on given GPUs; nothing is loaded or run."""

    context: int | None = None  # tokens per sequence; None is what the policy is made for
    batch: int = 1  # sequences on one GPU whose largest context is asked for
    gpu_gib: float = 80.0  # memory of a GPU
    reserve: float = 0.1  # share of it that is left free, for buffers and fragments
    ranks: int = 8  # GPUs of the learner, over which ZeRO shards
    optimizer: Literal["adamw", "muon"] = "adamw"  # this and the next two as in learner
    expert_parallel: int = 1
    checkpointing: Literal["none", "layers"] = "none"
    serve_gpus: int = 1  # GPUs of rollout that hold one copy of the weights together
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of rollout's weights and caches
