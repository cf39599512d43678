"""A random policy on which mistakes show, what our forward says of tokens, and how far that is from
what another engine says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..policy import Policy, PolicyConfig
from ..policy.attention import GatedMLA, RMSNorm
from ..policy.kda import HeadNorm, KimiDeltaAttention, ShortConv
from ..policy.moe import Experts, LatentMoE, Router

QUERY_STD, THRESHOLD_STD, LOGIT_STD, ROUTER_STD = 0.5, 0.1, 2.1, 0.2
# Of attention scores: a few of many keys count then, so that long contexts do not average out.
SCORE_STD = 3.0
# Of scores between depth sources, set by their norm weights: with norm weights near one, queries of
# std 0.5 pick one source each, and a chain of such picks makes noise out of bf16's last bit.
MIX_STD = 0.35
# Size of what a sub-layer adds beside the embedding. A routed expert more or less changes little,
# so that routes differ where scores nearly tie and not because routes differed before.
KDA_GAIN, MLA_GAIN, MLP_GAIN, ROUTED_GAIN = 0.075, 0.17, 0.05, 0.018
_GAINS = {
    ".mlp.down_proj.weight": MLP_GAIN,
    ".shared_experts.down_proj.weight": MLP_GAIN,
    ".routed_expert_up_proj.weight": ROUTED_GAIN,
    ".block_sparse_moe.gate.weight": ROUTER_STD,
}
FIRST_EDGE = 1024  # of the position buckets; each is as long as all before it
MISTAKES = (
    "flipped threshold sign",
    "zeroed depth queries",
    "two KDA heads swapped",
    "two MLA heads swapped",
)
# The gains above damp these below what the comparison can tell; they are reported, not judged.
FAINT = (
    "SwiGLU in routed experts",
    "no weight of the routed norm",
    "a gate bound of -4",
    "no weight of the head norm",
    "latent norms with epsilon 1e-6",
)


@dataclass(frozen=True, slots=True)
class Scored:
    """What our forward says of a sequence of T tokens, on its device.

    ``logprobs`` fp32 [T - 1] of every token but the first; of every token but the last the
    ``routes`` [T - 1, layers, k] and the scores they were chosen by, thresholds added: ``biased``
    fp32 [T - 1, layers, E]. Layers without experts are left out.
    """

    logprobs: Tensor
    routes: Tensor
    biased: Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Routes of two engines: ``shared`` of ``slots`` are the same.

    Per token and layer where the sets differ: ``token`` and ``layer`` [n], and ``margin`` [n], by
    how much the best of ours that they left out beats the worst of theirs that we left out.
    """

    slots: int
    shared: int
    token: Tensor
    layer: Tensor
    margin: Tensor


def random_policy(config: PolicyConfig, seed: int, device: str) -> Policy:
    """Weights that keep the size of what they are applied to, in bf16 but for those that published
    files hold in fp32; depth queries, thresholds, decays and logits far from where they start."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        policy = Policy(config)
    policy = policy.to_empty(device=device)
    wide: set[int] = set()
    with torch.no_grad():
        for module in reversed(list(policy.modules())):  # a layer after the modules in it
            wide |= {id(parameter) for parameter in _fill(module)}
        mix = MIX_STD / (QUERY_STD * config.hidden_size**0.5)
        for name, parameter in policy.named_parameters():
            if name.endswith("_res_proj.weight"):
                parameter.normal_(0, QUERY_STD)
            elif name.endswith("_res_norm.weight"):
                parameter.mul_(mix)
            for end, gain in _GAINS.items():
                if name.endswith(end):
                    parameter.mul_(gain)
        policy.model.embed_tokens.weight.normal_()
        policy.lm_head.weight.mul_(LOGIT_STD)
    for parameter in policy.parameters():
        if id(parameter) not in wide:
            parameter.data = parameter.data.to(torch.bfloat16)
    return policy.eval()


def _fill(module: nn.Module) -> list[nn.Parameter]:
    """Draw the parameters and buffers of one module, and return those that stay fp32."""
    if isinstance(module, nn.Linear | ShortConv | Router):
        module.weight.normal_(0, module.weight.shape[-1] ** -0.5)
    elif isinstance(module, Experts):
        for weight in (module.w1, module.w2, module.w3):
            weight.normal_(0, weight.shape[-1] ** -0.5)
    elif isinstance(module, RMSNorm | HeadNorm):
        module.weight.normal_(1, 0.1)
    elif isinstance(module, GatedMLA):
        query = module.q_b_proj if module.low_rank_query else module.q_proj
        query.weight.mul_(SCORE_STD)
        module.o_proj.weight.mul_(MLA_GAIN)
    elif isinstance(module, KimiDeltaAttention):
        module.o_proj.weight.mul_(KDA_GAIN)
        module.init_gate()
        module.A_log.uniform_(-1, 1)
        return [module.A_log, module.dt_bias]
    if isinstance(module, Router):
        module.e_score_correction_bias.normal_(0, THRESHOLD_STD)
    return [module.weight] if isinstance(module, ShortConv | HeadNorm) else []


@contextmanager
def mistaken(policy: Policy, mistake: str) -> Iterator[None]:
    """The policy with one of `MISTAKES` or `FAINT` made in every layer."""
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), ExitStack() as stack:
        for tensor, wrong in _changes(policy, mistake):
            kept.append((tensor, tensor.clone()))
            tensor.copy_(wrong)
        for module, name, value in _settings(policy, mistake):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        try:
            yield
        finally:
            for tensor, right in kept:
                tensor.copy_(right)


def _changes(policy: Policy, mistake: str) -> Iterator[tuple[Tensor, Tensor]]:
    for module in policy.modules():
        if mistake == MISTAKES[0] and isinstance(module, Router):
            yield module.e_score_correction_bias, -module.e_score_correction_bias
        elif mistake == MISTAKES[2] and isinstance(module, KimiDeltaAttention):
            yield module.v_proj.weight, swapped(module.v_proj.weight, module.num_heads)
        elif mistake == MISTAKES[3] and isinstance(module, GatedMLA):
            yield module.kv_b_proj.weight, swapped(module.kv_b_proj.weight, module.num_heads)
        elif mistake == FAINT[1] and isinstance(module, LatentMoE) and module.latent_norm:
            weight = module.routed_expert_norm.weight
            yield weight, torch.ones_like(weight)
        elif mistake == FAINT[3] and isinstance(module, HeadNorm):
            yield module.weight, torch.ones_like(module.weight)
    if mistake == MISTAKES[1]:
        for name, parameter in policy.named_parameters():
            if name.endswith("_res_proj.weight"):
                yield parameter, torch.zeros_like(parameter)


def _settings(policy: Policy, mistake: str) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in policy.modules():
        if mistake == FAINT[0] and isinstance(module, LatentMoE):
            yield module, "activation", None
        elif mistake == FAINT[2] and isinstance(module, KimiDeltaAttention):
            yield module, "lower_bound", -4.0
        elif mistake == FAINT[4] and isinstance(module, GatedMLA):
            yield module.kv_a_layernorm, "eps", 1e-6
            if module.low_rank_query:
                yield module.q_a_layernorm, "eps", 1e-6


def swapped(weight: Tensor, heads: int) -> Tensor:
    """``weight [heads * n, D]`` with the first two heads exchanged."""
    parts = weight.unflatten(0, (heads, -1))
    return torch.cat([parts[[1, 0]], parts[2:]]).flatten(0, 1)


@torch.no_grad()
def score(policy: Policy, ids: Tensor) -> Scored:
    """One pass over ``ids [T]``."""
    found: list[tuple[Tensor, Tensor]] = []

    def listen(router: nn.Module, given: tuple[Tensor, ...], out: tuple[Tensor, Tensor]) -> None:
        assert isinstance(router, Router)
        scores = torch.sigmoid(F.linear(given[0].float(), router.weight.float()))
        found.append((out[0][:-1], (scores + router.e_score_correction_bias)[:-1]))

    with ExitStack() as stack:
        for router in policy.routers():
            stack.callback(router.register_forward_hook(listen).remove)
        rows = torch.arange(len(ids) - 1, device=ids.device)
        logprobs = policy(ids[None], rows=rows, targets=ids[1:]).logprobs
    routes, biased = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    return Scored(logprobs, routes, biased)


@torch.no_grad()
def logit_std(policy: Policy, ids: Tensor) -> float:
    """Of one token's logits, the mean over ``ids [T]``."""
    return float(policy(ids[None]).logits.float().std(-1).mean())


def compare_routes(ours: Scored, theirs: Tensor) -> Agreement:
    """``theirs`` [T - 1, layers, k] against ours; ValueError unless they name k experts each."""
    experts, k = ours.biased.shape[-1], ours.routes.shape[-1]
    if theirs.shape != ours.routes.shape:
        raise ValueError(f"routes of shape {list(theirs.shape)}, not {list(ours.routes.shape)}")
    mine, other = (membership(routes, experts) for routes in (ours.routes, theirs))
    if bool((other.sum(-1) != k).any()):
        raise ValueError(f"some routes do not name {k} different experts")
    token, layer = (mine != other).any(-1).nonzero().unbind(1)
    picked, left, scores = (x[token, layer] for x in (mine, other, ours.biased))
    best = scores.masked_fill(~(picked & ~left), -torch.inf).amax(-1)
    worst = scores.masked_fill(~(left & ~picked), torch.inf).amin(-1)
    return Agreement(int(mine.sum()), int((mine & other).sum()), token, layer, best - worst)


def membership(routes: Tensor, experts: int) -> Tensor:
    """``routes [..., k]`` as bool [..., experts]."""
    empty = torch.zeros(*routes.shape[:-1], experts, dtype=torch.bool, device=routes.device)
    return empty.scatter_(-1, routes.long(), True)


def summary(difference: Tensor) -> dict[str, float]:
    """Of log-prob differences ``[n]``: their number, and if any their mean and largest size and
    their mean."""
    if len(difference) == 0:
        return {"tokens": 0}
    size = difference.abs()
    return {
        "tokens": len(difference),
        "mean": float(size.mean()),
        "max": float(size.max()),
        "bias": float(difference.mean()),
    }


def by_position(difference: Tensor, position: Tensor) -> list[dict[str, float]]:
    """`summary` of the tokens up to each edge 1024, 2048, ... that lie beyond the one before."""
    rows: list[dict[str, float]] = []
    low, high = 0, FIRST_EDGE
    while len(position) and low <= int(position.max()):
        inside = (position >= low) & (position < high)
        if bool(inside.any()):
            rows.append({"up_to": high, **summary(difference[inside])})
        low, high = high, 2 * high
    return rows


def route_summary(found: Sequence[Agreement], limit: float) -> dict[str, Any]:
    """Shared slots over all sequences, and the margins where sets of routes differ."""
    slots, shared = (sum(getattr(part, name) for part in found) for name in ("slots", "shared"))
    margin = torch.cat([part.margin for part in found])
    return {
        "slots": slots,
        "shared": shared / slots,
        "disagreements": len(margin),
        "margin_mean": float(margin.mean()) if len(margin) else 0.0,
        "margin_max": float(margin.max()) if len(margin) else 0.0,
        "margins_too_large": int((margin >= limit).sum()),
    }
