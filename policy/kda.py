"""Kimi Delta Attention layer (Kimi K3 report 2.1.1)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.conv import short_conv
from ..kernels.kda import chunk_kda, decode_kda, decode_kda_, replay_kda
from ..kernels.norm import gated_norm
from ..kernels.precision import as_given
from .config import PolicyConfig
from .joint import is_plain, joint, stacked, trained
from .packing import Packing
from .precision import Change, kept_wide
from .state import KdaState, LayerStep, ReplayedKda


class ShortConv(nn.Module):
    """Weights ``[C, 1, W]`` of one causal depthwise convolution, fp32 whatever it is cast to."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def _apply(self, fn: Change, recurse: bool = True) -> Any:
        return super()._apply(kept_wide(fn, self.weight), recurse)


class HeadNorm(nn.Module):
    """RMSNorm over a head, one weight ``[V]`` for all heads, times a sigmoid gate; the weight is
    fp32 whatever the module is cast to."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def _apply(self, fn: Change, recurse: bool = True) -> Any:
        return super()._apply(kept_wide(fn, self.weight), recurse)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(x, gate, self.weight, self.eps)


class KimiDeltaAttention(nn.Module):
    """Delta rule with bounded channel-wise decay, short convolutions and an output gate.

    ``A_log`` and ``dt_bias`` stay fp32 whatever it is cast to, as published files have them.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        linear = config.linear_attn_config or {}
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.lower_bound = config.gate_lower_bound
        self.width = linear["short_conv_kernel_size"]
        hidden, inner = config.hidden_size, self.num_heads * self.head_dim

        def project(n_in: int, n_out: int) -> nn.Linear:
            return nn.Linear(n_in, n_out, bias=False)

        self.q_proj, self.k_proj, self.v_proj = (project(hidden, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(inner, self.width) for _ in range(3)
        )
        self.f_a_proj, self.f_b_proj = project(hidden, self.head_dim), project(self.head_dim, inner)
        self.b_proj = project(hidden, self.num_heads)
        self.full_rank_gate = bool(linear.get("use_full_rank_gate", False))
        if self.full_rank_gate:
            self.g_proj = project(hidden, inner)
        else:
            self.g_a_proj, self.g_b_proj = (
                project(hidden, self.head_dim),
                project(self.head_dim, inner),
            )
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.o_norm = HeadNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = project(inner, hidden)

    def _apply(self, fn: Change, recurse: bool = True) -> Any:
        return super()._apply(kept_wide(fn, self.A_log, self.dt_bias), recurse)

    def init_gate(self) -> None:
        """Bias softplus^-1(dt), dt log-uniform in [1e-3, 0.1]; A = 0, or log U(1, 16) where the
        gate has no bound (Kimi Linear)."""
        with torch.no_grad():
            span = math.log(0.1) - math.log(1e-3)
            dt = torch.exp(torch.rand_like(self.dt_bias) * span + math.log(1e-3)).clamp(min=1e-4)
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            if self.lower_bound is None:
                self.A_log.uniform_(1, 16).log_()
            else:
                self.A_log.zero_()

    def forward(
        self, x: torch.Tensor, packing: Packing, state: KdaState | ReplayedKda | LayerStep | None
    ) -> torch.Tensor:
        """``x [T, D]`` normed input -> ``[T, D]``; continues and updates ``state`` in place."""
        if isinstance(state, LayerStep):
            return self._step(x, state)
        *attended, output, decay, beta = self.projections()
        found = trained(x, (attended, (output,), (decay, beta)))
        if found is None:
            qkv, low, beta, gate = self._qkv(x), self.f_a_proj(x), self.b_proj(x), None
        else:
            qkv, gate, both = found
            inner = self.num_heads * self.head_dim
            qkv = qkv if qkv.shape[1] == 3 * inner else qkv[:, : 3 * inner]
            sizes = self.head_dim, self.num_heads
            low, beta, _ = both.split((*sizes, both.shape[1] - sum(sizes)), -1)
        kernel = self._kernel()
        z = self.f_b_proj(low)
        single = packing.longest == 1
        if isinstance(state, KdaState) and single:
            out, state.recurrent, state.conv = decode_kda(
                *(qkv, kernel, state.conv, z, beta, self._gate(x, gate)),
                *(self.o_norm.weight, self.o_norm.eps),
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                initial_state=state.recurrent,
                lower_bound=self.lower_bound,
            )
            return self.o_proj(out)
        before = None if state is None else state.conv
        mixed, tail = short_conv(qkv, kernel, packing.bounds, before)
        shape = (len(x), 1) if single else (1, len(x))
        q, k, v = mixed.view(*shape, 3, self.num_heads, self.head_dim).unbind(2)
        inputs = (q, k, v, z.view(q.shape), beta.view(q.shape[:3]))
        options: dict[str, Any] = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": self.lower_bound,
            "cu_seqlens": None if single else torch.tensor(packing.bounds),
        }
        # the recurrence adds up over the whole sequence: autocast must not round it
        with as_given(x):
            if isinstance(state, ReplayedKda):
                out = replay_kda(*inputs, state.replay, **options)
            else:
                initial = None if state is None else state.recurrent
                wanted = state is not None
                out, final = chunk_kda(
                    *inputs, initial_state=initial, output_final_state=wanted, **options
                )
                if state is not None and final is not None:
                    state.recurrent = final
        if state is not None:
            state.conv = tail
        heads = out.view(len(x), self.num_heads, -1)
        return self.o_proj(self.o_norm(heads, self._gate(x, gate).view(heads.shape)).flatten(1))

    def _step(self, x: torch.Tensor, state: LayerStep) -> torch.Tensor:
        """One token of some sequences of a state, which is changed where it lies."""
        kept = state.kept
        assert isinstance(kept, KdaState)
        parts = self.projections()
        found = joint(x, parts)
        if found is None:
            found = torch.cat([part(x) for part in parts], -1)
        inner = self.num_heads * self.head_dim
        gate_size = inner if self.full_rank_gate else self.head_dim
        sizes = (3 * inner, gate_size, self.head_dim, self.num_heads)
        qkv, gate, low, beta, _ = found.split((*sizes, found.shape[1] - sum(sizes)), -1)
        out = decode_kda_(
            *(qkv, self._kernel(), kept.conv, self.f_b_proj(low), beta),
            gate if self.full_rank_gate else self.g_b_proj(gate),
            *(self.o_norm.weight, self.o_norm.eps),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            state=kept.recurrent,
            places=state.places,
            lower_bound=self.lower_bound,
        )
        return self.o_proj(out)

    def projections(self) -> tuple[nn.Module, ...]:
        """The maps of a layer's input, in the order in which a decode step wants their results."""
        gate = self.g_proj if self.full_rank_gate else self.g_a_proj
        return self.q_proj, self.k_proj, self.v_proj, gate, self.f_a_proj, self.b_proj

    def convolutions(self) -> tuple[nn.Parameter, ...]:
        """Weights ``[C, 1, W]`` of the convolutions of q, k and v."""
        return self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight

    def _kernel(self) -> torch.Tensor:
        return stacked(self.convolutions())[:, 0]

    def _qkv(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, 3 H K]``. One product saves a copy of the result, but copies the weights, which a
        decode step on a GPU would feel; modules that are more than their weight run as they are."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if all(map(is_plain, parts)) and (not x.is_cuda or len(x) >= x.shape[1]):
            return F.linear(x, torch.cat([part.weight for part in parts]))
        return torch.cat([part(x) for part in parts], -1)

    def _gate(self, x: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        """The gate before its sigmoid; ``found`` is the result of its first map, if it is known."""
        first, *rest = (self.g_proj,) if self.full_rank_gate else (self.g_a_proj, self.g_b_proj)
        out = first(x) if found is None else found
        return rest[0](out) if rest else out
