"""Which parameters are optimized how: groups, weight decay, and where ZeRO keeps their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..configs.errors import UserError
from ..configs.schema import LearnerConfig
from ..policy.attention import GatedMLA
from ..policy.kda import KimiDeltaAttention
from .muon import Block, Muon

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum_buffer",)

# Matrices whose output goes through a sigmoid: write strength, decay and output of attention, and
# the router. Decay would pull them towards half open gates and equal scores.
_GATES = ("b_proj", "f_a_proj", "f_b_proj", "g_proj", "g_a_proj", "g_b_proj", "gate")
_EMBEDDINGS = ("embed_tokens", "pos_emb")
_ROUTER = ("gate",)
_ATTNRES = tuple(
    f"{place}_res_{part}"
    for place in ("self_attention", "mlp", "output_attn")
    for part in ("norm", "proj")
)


def is_vector(parameter: Tensor) -> bool:
    """Norms, biases, A_log, dt_bias, queries of the mixture over depth: one number per channel."""
    return max(parameter.shape, default=1) == parameter.numel()


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices that are no gates and no embeddings.

    Rows of tokens that do not occur have no gradient, and decay would wear them down; small
    embeddings also make large gradients behind the norm that follows. OLMo 2 (arXiv:2501.00656)
    leaves them out for the latter.
    """
    return not is_vector(parameter) and _module(name) not in (*_GATES, *_EMBEDDINGS)


def lr_factor(name: str, config: LearnerConfig) -> float:
    """What the learning rate is multiplied by for a parameter."""
    module = _module(name)
    if module in _ROUTER:
        return config.router_lr
    return config.attnres_lr if module in _ATTNRES else 1.0


def check_lr_factors(names: Iterable[str], config: LearnerConfig) -> None:
    """UserError for a learning rate of parameters that the policy does not have."""
    modules = {_module(name) for name in names}
    for field, what, own in (
        ("router_lr", "routers", _ROUTER),
        ("attnres_lr", "mixture over depth", _ATTNRES),
    ):
        value = getattr(config, field)
        if value != 1.0 and modules.isdisjoint(own):
            raise UserError(
                f"learner.{field}={value:g} would have no effect: the policy has no {what}; "
                "leave it out"
            )


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Whether a parameter consists of matrices between hidden states: projections, experts and
    routers of the layers; not their convolutions, nor embedding and output head (Moonlight,
    arXiv:2502.16982)."""
    inside = ".layers." in f".{name}"
    return inside and not is_vector(parameter) and not name.endswith("_conv1d.weight")


def _module(name: str) -> str:
    return name.split(".")[-2] if "." in name else ""


def moment_keys(muon: bool) -> tuple[str, ...]:
    """Names of what the optimizer keeps for each number of a parameter."""
    return MUON_MOMENTS if muon else ADAM_MOMENTS


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: LearnerConfig,
    divided: Collection[str] = (),
    group_name: str = "",
) -> torch.optim.AdamW:
    """The optimizer of the settings, before any engine replaces tensors by shards.

    Parameters named in ``divided`` are in groups of their own, marked as DeepSpeed wants it with
    its ``group_name`` of the ranks that hold the same ones.
    """
    muon = config.optimizer == "muon"
    check_lr_factors(parameters, config)
    sides: dict[tuple[bool, bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        # without any decay one group: half the collectives in ZeRO
        decayed = config.weight_decay > 0 and decays(name, parameter)
        by_muon, apart = muon and uses_muon(name, parameter), name in divided
        side = by_muon, decayed, lr_factor(name, config), apart
        sides.setdefault(side, []).append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": members,
            "weight_decay": config.weight_decay if decayed else 0.0,
            "lr_factor": factor,
            **({"muon": by_muon} if muon else {}),
            **({"moe": True, "name": group_name} if apart else {}),
        }
        for (by_muon, decayed, factor, apart), members in sorted(
            sides.items(), key=lambda side: side[0], reverse=True
        )
    ]
    kind = Muon if muon else torch.optim.AdamW
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def new_moments(group: Mapping[str, Any], tensor: Tensor, steps: int) -> dict[str, Tensor]:
    """The state that a group's first step would create for ``tensor``, after ``steps``."""
    muon = bool(group.get("muon", False))
    state = {key: torch.zeros_like(tensor.data) for key in moment_keys(muon)}
    return state if muon else {"step": torch.tensor(float(steps), device=tensor.device), **state}


def optimized(engine: Any, stage: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each tensor that DeepSpeed's ``engine`` gives to torch's optimizer, with its group."""
    zero = engine.optimizer
    if stage == 0:
        for group in zero.param_groups:
            yield from ((group, tensor) for tensor in group["params"])
        return
    groups = zero.optimizer.param_groups
    if stage == 3:
        for number, tensor in enumerate(zero.fp32_partitioned_groups_flat):
            yield groups[zero.sub_group_to_group_id[number]], tensor
    else:
        yield from zip(groups, zero.single_partition_of_fp32_groups, strict=True)


@dataclass(frozen=True, slots=True)
class _Shard:
    """The numbers of a parameter from ``start`` on, ``held`` of them, at ``at`` in ``tensor``."""

    parameter: Tensor
    tensor: Tensor
    at: int
    start: int
    held: int


def lay_out(engine: Any, stage: int, policy: nn.Module) -> None:
    """Tell a `Muon` inside DeepSpeed's ``engine`` where the matrices of ``policy`` lie; under ZeRO
    a collective."""
    muon = getattr(engine.optimizer, "optimizer", engine.optimizer)
    names: dict[Tensor, str] = {parameter: name for name, parameter in policy.named_parameters()}
    heads = head_rows(policy)
    shards = list(_shards(engine, stage))
    spans = torch.tensor([[s.start, s.held] for s in shards], device=engine.device)
    everywhere = [spans]
    if stage > 0:
        everywhere = [torch.empty_like(spans) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, spans)
    table = torch.stack(everywhere, 1).tolist()
    found: dict[Tensor, list[Block]] = {}
    for shard, ranks in zip(shards, table, strict=True):
        name = names[shard.parameter]
        shape = tuple(getattr(shard.parameter, "ds_shape", shard.parameter.shape))
        blocks = found.setdefault(shard.tensor, [])
        for start, rows, columns in matrices(shape, heads.get(name)):
            end = start + rows * columns
            whole = any(first <= start and end <= first + held for first, held in ranks)
            begin = max(start, shard.start)
            held = max(0, min(end, shard.start + shard.held) - begin)
            at = shard.at + begin - shard.start
            blocks.append(Block(rows, columns, at, begin - start, held, not whole))
    for tensor, blocks in found.items():
        muon.lay_out(tensor, blocks)


def matrices(
    shape: tuple[int, ...], heads: tuple[int, ...] | None = None
) -> Iterator[tuple[int, int, int]]:
    """First number, rows and columns of each matrix in a parameter of ``shape``: one, or one per
    expert of ``[E, rows, columns]``, or, where ``heads`` are the rows that repeat with each head,
    one for each of those."""
    columns = shape[-1]
    pattern = heads or (shape[-2],)
    start = 0
    while start < torch.Size(shape).numel():
        for rows in pattern:
            yield start, rows, columns
            start += rows * columns


def head_rows(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Rows that repeat with each head, of the projections that make queries, keys and values: the
    per-head Muon of the Kimi K3 report cuts those and no others. Keys and values of a head of
    latent attention lie in one tensor, but are two projections."""
    rows: dict[str, tuple[int, ...]] = {}
    for name, module in policy.named_modules():
        if isinstance(module, KimiDeltaAttention):
            for projection in ("q_proj", "k_proj", "v_proj"):
                rows[f"{name}.{projection}.weight"] = (module.head_dim,)
        elif isinstance(module, GatedMLA):
            query = "q_b_proj" if module.low_rank_query else "q_proj"
            rows[f"{name}.{query}.weight"] = (module.nope + module.rope,)
            rows[f"{name}.kv_b_proj.weight"] = (module.nope, module.value)
    return rows


def _shards(engine: Any, stage: int) -> Iterator[_Shard]:
    """What this rank holds of each parameter of Muon's groups, in one order on all ranks."""
    zero = engine.optimizer
    for number, (group, tensor) in enumerate(optimized(engine, stage)):
        if not group["muon"]:
            continue
        if stage == 0:
            yield _Shard(tensor, tensor, 0, 0, tensor.numel())
        elif stage < 3:
            for parameter in zero.bit16_groups[number]:
                here = parameter._hp_mapping
                if here is None:  # it lies on other ranks
                    yield _Shard(parameter, tensor, 0, 0, 0)
                    continue
                at, start = here.hp_fragment_address, here.lp_fragment_address
                yield _Shard(parameter, tensor, at.start, start.start, at.numel)
        else:
            rank = dist.get_rank()
            for parameter in zero.fp16_groups[number]:
                _, at, size = zero.grad_position[zero.get_param_id(parameter)]
                start = min(rank * size, parameter.ds_numel)
                held = min(size, parameter.ds_numel - start)
                yield _Shard(parameter, tensor, int(at), start, held)
