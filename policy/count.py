"""Sizes of a policy from its configuration alone: parameters, decode state, learner memory."""

from __future__ import annotations

from dataclasses import dataclass

from .config import PolicyConfig

WIDE_BYTES = 4  # fp32: masters, gradients, moments, recurrent states, and what `Counts.wide` counts

# 4.3 to 4.8 where autograd keeps what the plain forms make, counted tensor by tensor; forms that
# recompute, as those of a CPU do, keep half.
SAVED_COPIES = 5


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of parameters by part.

    ``wide`` of them are fp32 in every checkpoint. ``active`` are those that work on one token: the
    chosen experts only, the output head but not the embedding table.
    """

    parts: dict[str, int]
    active: int
    wide: int

    @property
    def total(self) -> int:
        """All parameters, embedding and output head included."""
        return sum(self.parts.values())

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all weights where all but the fp32 ones have ``itemsize``."""
        return (self.total - self.wide) * itemsize + self.wide * WIDE_BYTES


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes that a decoding sequence holds: ``fixed`` whatever its length, ``per_token`` each."""

    fixed: int
    per_token: int

    def of(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens."""
        return self.fixed + tokens * self.per_token


@dataclass(frozen=True, slots=True)
class LearnerSizes:
    """Bytes on each rank before any activation; ``optimizer`` are moments and master copies."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def count_parameters(config: PolicyConfig) -> Counts:
    """Parameters of a policy; routing thresholds are buffers and not among them."""
    hidden, layers = config.hidden_size, range(config.num_hidden_layers)
    num_mla = sum(config.is_mla(i) for i in layers)
    num_kda = len(layers) - num_mla
    num_dense = sum(config.is_dense(i) for i in layers)
    num_moe = len(layers) - num_dense
    width = config.routed_expert_hidden_size or hidden
    expert = 3 * width * config.moe_intermediate_size
    latent = 0
    if config.routed_expert_hidden_size is not None:
        latent = 2 * hidden * width + (width if config.latent_moe_use_norm else 0)
    mixtures = 0 if config.attn_res_block_size is None else 2 * hidden * (2 * len(layers) + 1)
    kda, wide = _kda(config)
    parts = {
        "embedding": config.vocab_size * hidden,
        "KDA attention": num_kda * kda,
        "MLA attention": num_mla * _mla(config),
        "routed experts": num_moe * config.num_experts * expert,
        "shared experts": num_moe
        * 3
        * hidden
        * config.num_shared_experts
        * config.moe_intermediate_size,
        "routers": num_moe * hidden * config.num_experts,
        "latent projections": num_moe * latent,
        "dense MLP": num_dense * 3 * hidden * config.intermediate_size,
        "depth mixtures": mixtures,
        "norms": hidden * (2 * len(layers) + 1),
        "output head": config.vocab_size * hidden,
    }
    idle = num_moe * (config.num_experts - config.num_experts_per_token) * expert
    active = sum(parts.values()) - parts["embedding"] - idle
    return Counts(parts, active, num_kda * wide)


def count_vision(config: PolicyConfig) -> dict[str, int]:
    """Parameters of the vision tower and its projector; none of a policy that sees no images."""
    sizes = config.vision
    if sizes is None:
        return {}
    width, inner = sizes.vt_hidden_size, sizes.qkv_hidden_size
    patches = 3 * sizes.patch_size**2 + sizes.init_pos_emb_height * sizes.init_pos_emb_width
    block = 2 * width + 4 * width * inner + 2 * width * sizes.vt_intermediate_size
    merged = sizes.merge**2 * width
    return {
        "vision tower": width * (patches + 1) + sizes.vt_num_hidden_layers * block,
        "projector": merged * (merged + config.hidden_size) + config.hidden_size,
    }


def _kda(config: PolicyConfig) -> tuple[int, int]:
    """Parameters of a KDA layer, and how many of them are fp32 in files."""
    linear = config.linear_attn_config or {}
    hidden, heads, head = config.hidden_size, linear["num_heads"], linear["head_dim"]
    inner = heads * head
    rank = head * (hidden + inner)
    gate = hidden * inner if linear.get("use_full_rank_gate", False) else rank
    wide = 3 * inner * linear["short_conv_kernel_size"] + heads + inner + head
    return 4 * hidden * inner + rank + gate + hidden * heads + wide, wide


def _mla(config: PolicyConfig) -> int:
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    value = heads * config.v_head_dim
    rank = config.q_lora_rank
    queries = hidden * query if rank is None else rank * (hidden + 1 + query)
    keys = hidden * (kv + config.qk_rope_head_dim) + kv
    keys += kv * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return queries + keys + (2 if config.mla_use_output_gate else 1) * hidden * value


def state_sizes(config: PolicyConfig, itemsize: int) -> StateSizes:
    """What `DecodeState`, not a matched one, holds of a sequence whose conv tails and latents have
    ``itemsize``; the room by which it grows ahead is not counted."""
    linear = config.linear_attn_config or {}
    num_mla = sum(config.is_mla(i) for i in range(config.num_hidden_layers))
    inner = linear["num_heads"] * linear["head_dim"]
    recurrent = inner * linear["head_dim"] * WIDE_BYTES
    tails = 3 * inner * (linear["short_conv_kernel_size"] - 1) * itemsize
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize
    return StateSizes((config.num_hidden_layers - num_mla) * (recurrent + tails), num_mla * latent)


def learner_sizes(
    parameters: int,
    ranks: int,
    zero_stage: int,
    *,
    experts: int = 0,
    expert_parallel: int = 1,
    muon: int = 0,
) -> LearnerSizes:
    """Memory of a learner whose parameters and gradients are fp32.

    ZeRO 1 shards the optimizer over ranks, 2 the gradients too, 3 also the weights. Its shards
    carry a master copy beside the moments, without ZeRO the weights are their own masters. Moments
    are two of each parameter, one of the ``muon`` ones. ``experts`` of the parameters are divided
    over ``expert_parallel`` ranks, and all ``muon`` ones among them.
    """
    divided = experts - experts // expert_parallel
    whole = parameters - divided
    shard = -(-parameters // ranks)
    alone = max(0, muon - divided)  # of what a rank holds
    moments = 2 * whole - alone
    if zero_stage:
        moments = 3 * shard - muon // ranks
    return LearnerSizes(
        weights=WIDE_BYTES * (shard if zero_stage == 3 else whole),
        gradients=WIDE_BYTES * (shard if zero_stage >= 2 else whole),
        optimizer=WIDE_BYTES * moments,
    )


def activation_bytes(config: PolicyConfig, checkpointing: str = "none") -> int:
    """About what a training forward keeps of each token until backward, ``checkpointing`` as
    `Policy` has it.

    An estimate from above: `SAVED_COPIES` times what all linear maps but the output head give.
    Their inputs, and what norms, convolutions, gates and the delta rule keep, have the same widths.
    With "layers" that is only one layer's at a time, the largest; of all others it keeps the sums
    they begin with and what attention made.
    """
    outputs = [_layer_outputs(config, i) for i in range(config.num_hidden_layers)]
    if checkpointing == "none":
        return SAVED_COPIES * WIDE_BYTES * sum(outputs)
    num_mla = sum(config.is_mla(i) for i in range(config.num_hidden_layers))
    kept = 2 * config.hidden_size * config.num_hidden_layers  # the sum so far, and what is added
    kept += num_mla * config.num_attention_heads * (config.v_head_dim + 1)  # and a sum per head
    return WIDE_BYTES * (kept + SAVED_COPIES * max(outputs))


def _layer_outputs(config: PolicyConfig, layer: int) -> int:
    """Numbers that the linear maps of a layer give for a token."""
    linear = config.linear_attn_config or {}
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.is_mla(layer):
        query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        value = heads * config.v_head_dim
        attention = (config.q_lora_rank or 0) + query + config.kv_lora_rank
        attention += config.qk_rope_head_dim + heads * config.qk_nope_head_dim + value + hidden
        attention += value if config.mla_use_output_gate else 0
    else:
        inner = linear["num_heads"] * linear["head_dim"]
        low_rank = 0 if linear.get("use_full_rank_gate", False) else linear["head_dim"]
        attention = 5 * inner + linear["head_dim"] + low_rank + linear["num_heads"] + hidden
    if config.is_dense(layer):
        return attention + 2 * config.intermediate_size + hidden
    width, expert = config.routed_expert_hidden_size or hidden, config.moe_intermediate_size
    moe = config.num_experts + config.num_experts_per_token * (2 * expert + width)
    moe += 0 if config.routed_expert_hidden_size is None else width + hidden
    moe += (2 * config.num_shared_experts * expert + hidden) if config.num_shared_experts else 0
    return attention + moe
