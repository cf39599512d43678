"""Feed-forward layers: dense SiTU-GLU, and latent mixture of experts with Quantile Balancing
(Kimi K3 report 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.moe import (
    Counts,
    QuantileHistogram,
    grouped_experts,
    mxfp4_rounded,
    router,
    situ_glu,
)
from ..kernels.moe.histogram import balanced
from .attention import RMSNorm
from .config import PolicyConfig
from .joint import each, split_joint, trained
from .spread import spread_experts
from .thresholds import TRACK, ThresholdRule


class DenseMLP(nn.Module):
    """Gated MLP of one width; also the shared expert."""

    def __init__(self, hidden: int, inner: int, activation: tuple[float, float] | None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.projections()
        gate, up = trained(x, [(part,) for part in parts]) or each(x, parts)
        return self.finish(gate, up)

    def projections(self) -> tuple[nn.Module, ...]:
        """The maps of its input."""
        return self.gate_proj, self.up_proj

    def finish(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The result for both inner products ``[T, I]``."""
        if self.activation is None:
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(situ_glu(gate, up, *self.activation))


class Router(nn.Module):
    """Sigmoid router with a balancing threshold per expert.

    ``e_score_correction_bias`` [E] is a persistent buffer that stays fp32 whatever the module is
    cast to, and is only ever written in place. With ``given`` routes [T, k] the choice is theirs
    where their mask [T] is set, and the weights are those of the router's own scores; the
    histogram then stands still, and what is counted is the load of the routes that were taken.
    """

    e_score_correction_bias: torch.Tensor

    def __init__(self, hidden: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        bias = torch.zeros(num_experts, dtype=torch.float32)  # whatever the default dtype is
        self.register_buffer("e_score_correction_bias", bias)
        self.collecting = False
        self.valid: torch.Tensor | None = None
        self.histogram: QuantileHistogram | None = None
        self.load = self.replayed_load = torch.zeros(0, dtype=torch.long)
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        self.recorded: list[torch.Tensor] | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if moved.dtype != torch.float32:
            self.e_score_correction_bias = before.to(moved.device, torch.float32)
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes ``[T, k]`` and mixing weights ``[T, k]`` of ``x [T, D]``. ValueError if routes are
        given for another number of tokens."""
        counts = self._counts() if self.collecting else None
        bias = self.e_score_correction_bias
        experts, weights = router(x, self.weight, bias, self.k, self.given, counts)
        if self.recorded is not None:
            self.recorded.append(experts)
        return experts, weights

    def _counts(self) -> Counts:
        histogram = self.begin_counts()
        if self.given is not None:
            return Counts(self.replayed_load, None, self.valid)
        return Counts(self.load, histogram, self.valid)

    def begin_counts(self) -> QuantileHistogram:
        """The histogram of the step, which is made, with the loads at 0, where there is none."""
        if self.histogram is None:
            self.histogram = QuantileHistogram(self.e_score_correction_bias, self.k)
            self.load = torch.zeros_like(self.e_score_correction_bias, dtype=torch.long)
            self.replayed_load = torch.zeros_like(self.load)
        return self.histogram

    def counts(self) -> list[torch.Tensor]:
        """Integer tensors that are summed over data-parallel ranks before `update`."""
        histogram = self.begin_counts()
        return [histogram.counts, histogram.tokens, self.load, self.replayed_load]

    def update(self, rule: ThresholdRule = TRACK) -> float:
        """Set the next threshold from the counts, clear them, return max / mean expert load."""
        return update_routers([self], rule)[0]

    def clear(self) -> None:
        """Forget what was counted."""
        self.histogram = None


def update_routers(routers: Sequence[Router], rule: ThresholdRule) -> list[float]:
    """`Router.update` of all, for which the CPU waits once. ValueError, and nothing has changed,
    if one has counted no token."""
    if not routers:
        return []
    found = [one.histogram for one in routers if one.histogram is not None]
    if len(found) < len(routers):
        raise ValueError("no token was counted since the last update")
    tokens = torch.cat([histogram.tokens for histogram in found])
    loads = max_over_mean(torch.stack([one.load for one in routers]))
    counted, *ratios = torch.cat([tokens.min().double()[None], loads.double()]).tolist()
    if counted == 0:
        raise ValueError("no token was counted since the last update")
    biases = [one.e_score_correction_bias for one in routers]
    moved = rule(torch.stack(biases), lambda: balanced(found))
    for one, bias, values in zip(routers, biases, moved, strict=True):
        bias.copy_(values)
        one.clear()
    return ratios


def max_over_mean(load: torch.Tensor) -> torch.Tensor:
    """Largest load ``[..., E]`` of an expert over that of all, nan where nothing was counted."""
    load = load.float()
    return load.amax(-1) / load.mean(-1)


class Experts(nn.Module):
    """Weights of all routed experts: ``w1, w3 [E, I, D]`` (gate, up), ``w2 [E, D, I]`` (down); of
    some of the ``count``, where a ``group`` of ranks holds the others."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.count, self.part = num_experts, (0, 1)
        self.w1 = nn.Parameter(torch.empty(num_experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, inner))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner, width))
        self.group: Any = None

    def keep(self, part: tuple[int, int]) -> None:
        """Of all experts hold a ``part``, the one of this number among so many equal ones."""
        self.part = part
        for name, weight in [*self.named_parameters()]:
            own = weight.detach().chunk(part[1])[part[0]].clone()
            setattr(self, name, nn.Parameter(own, weight.requires_grad))


class LatentMoE(nn.Module):
    """Routed experts in a latent space beside a shared expert at full width."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        latent = config.routed_expert_hidden_size
        self.activation, self.scaling = config.situ_bounds, config.routed_scaling_factor
        self.rounded = config.expert_fake_quant
        self.gate = Router(hidden, config.num_experts, config.num_experts_per_token)
        self.experts = Experts(config.num_experts, latent or hidden, config.moe_intermediate_size)
        self.latent, self.latent_norm = latent is not None, config.latent_moe_use_norm
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
            if self.latent_norm:
                self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
        self.shared = config.num_shared_experts > 0
        if self.shared:
            inner = config.moe_intermediate_size * config.num_shared_experts
            self.shared_experts = DenseMLP(hidden, inner, config.situ_bounds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, D]`` -> ``[T, D]``."""
        experts, weights = self.gate(x)
        parts = self.projections()
        inner = (
            (split_joint(x, parts) or trained(x, [(part,) for part in parts])) if parts else None
        )
        z = x if inner is None else inner[0]
        if inner is None and self.latent:
            z = self.routed_expert_down_proj(x)
        kept = (self.experts.w1, self.experts.w2, self.experts.w3)
        # before any cast: an export encodes the weights as they are kept
        used = map(mxfp4_rounded, kept) if self.rounded else kept
        w1, w2, w3 = (w.to(z.dtype) for w in used)
        # Statistics are those of training forwards, to the bit, also where no gradient is wanted.
        dense = False if self.gate.collecting else None
        if self.scaling != 1.0:
            weights = weights * self.scaling
        routed = (z, w1, w2, w3, experts, weights, self.activation)
        if self.experts.group is None:
            out = grouped_experts(*routed, dense)
        else:
            out = spread_experts(*routed, self.experts.group)
        if self.latent:
            if self.latent_norm:
                out = self.routed_expert_norm(out)
            out = self.routed_expert_up_proj(out)
        if not self.shared:
            return out
        if inner is not None:
            return out + self.shared_experts.finish(inner[1], inner[2])
        return out + self.shared_experts(x)

    def projections(self) -> tuple[nn.Module, ...]:
        """The maps of a layer's input that one product may compute; none without a shared expert or
        a latent space."""
        if not (self.shared and self.latent):
            return ()
        shared = self.shared_experts
        return self.routed_expert_down_proj, shared.gate_proj, shared.up_proj
