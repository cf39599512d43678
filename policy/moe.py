"""Feed-forward layers: dense SiTU-GLU, and latent mixture of experts with Quantile Balancing
(Kimi K3 report 2.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.moe import QuantileHistogram, grouped_experts, mxfp4_rounded, route, situ_glu
from ..kernels.precision import as_given, widen
from .attention import RMSNorm
from .config import PolicyConfig


class DenseMLP(nn.Module):
    """Gated MLP of one width; also the shared expert."""

    def __init__(self, hidden: int, inner: int, activation: tuple[float, float] | None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation is None:
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(situ_glu(gate, up, *self.activation))


class Router(nn.Module):
    """Sigmoid router with a balancing threshold per expert.

    ``e_score_correction_bias`` [E] is a persistent buffer that stays fp32 whatever the module is
    cast to, and is only ever written in place.
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
        self.load = torch.zeros(0, dtype=torch.long)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if moved.dtype != torch.float32:
            self.e_score_correction_bias = before.to(moved.device, torch.float32)
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes ``[T, k]`` and mixing weights ``[T, k]`` of ``x [T, D]``."""
        with as_given(x):
            wide = widen(x)
            scores = torch.sigmoid(F.linear(wide, self.weight.to(wide.dtype)))
            experts, weights, cutoff = route(scores, self.e_score_correction_bias, self.k)
        if self.collecting:
            self._count(scores, experts, cutoff)
        return experts, weights

    def _count(self, scores: torch.Tensor, experts: torch.Tensor, cutoff: torch.Tensor) -> None:
        if self.histogram is None:
            self.histogram = QuantileHistogram(self.e_score_correction_bias, self.k)
            self.load = torch.zeros_like(self.e_score_correction_bias, dtype=torch.long)
        self.histogram.add(scores, self.valid, cutoff)
        counted = experts if self.valid is None else experts[self.valid]
        self.load += torch.bincount(counted.flatten(), minlength=len(self.load))

    def counts(self) -> list[torch.Tensor]:
        """Integer tensors that are summed over data-parallel ranks before `update`."""
        if self.histogram is None:
            self.histogram = QuantileHistogram(self.e_score_correction_bias, self.k)
            self.load = torch.zeros_like(self.e_score_correction_bias, dtype=torch.long)
        return [self.histogram.counts, self.histogram.tokens, self.load]

    def update(self) -> float:
        """Set the next threshold from the counts, clear them, return max / mean expert load."""
        if self.histogram is None or int(self.histogram.tokens) == 0:
            raise ValueError("no token was counted since the last update")
        self.e_score_correction_bias.copy_(self.histogram.solve())
        load = self.load.float()
        self.clear()
        return float(load.max() / load.mean())

    def clear(self) -> None:
        """Forget what was counted."""
        self.histogram = None


class Experts(nn.Module):
    """Weights of all routed experts: ``w1, w3 [E, I, D]`` (gate, up), ``w2 [E, D, I]`` (down)."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, inner))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner, width))


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
        z = self.routed_expert_down_proj(x) if self.latent else x
        kept = (self.experts.w1, self.experts.w2, self.experts.w3)
        # before any cast: an export encodes the weights as they are kept
        used = map(mxfp4_rounded, kept) if self.rounded else kept
        w1, w2, w3 = (w.to(z.dtype) for w in used)
        out = grouped_experts(z, w1, w2, w3, experts, weights * self.scaling, self.activation)
        if self.latent:
            if self.latent_norm:
                out = self.routed_expert_norm(out)
            out = self.routed_expert_up_proj(out)
        return out + self.shared_experts(x) if self.shared else out
