"""Gated multi-head latent attention without positions (Kimi K3 report 2.1.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.attention import causal_attention
from ..kernels.device import takes_kernels
from ..kernels.mla import append_latent, latent_attention
from ..kernels.norm import rms_norm
from ..kernels.precision import widen
from .config import PolicyConfig
from .joint import each, trained
from .packing import Packing
from .state import LatentCache, LayerStep

MAX_SCORES = 1 << 26  # attention scores of a decoding layer that exist at once; 256 MiB in fp32


class RMSNorm(nn.Module):
    """RMSNorm with weight ``[D]``, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedMLA(nn.Module):
    """Latent attention: full keys in training, absorbed into the latent when decoding.

    The ``rope`` slice of queries and keys is shared by all heads and neither rotated nor normed.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        hidden, self.num_heads = config.hidden_size, config.num_attention_heads
        self.nope, self.rope, self.value = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.rank, self.scale = config.kv_lora_rank, (self.nope + self.rope) ** -0.5

        def project(n_in: int, n_out: int) -> nn.Linear:
            return nn.Linear(n_in, n_out, bias=False)

        queries = self.num_heads * (self.nope + self.rope)
        self.low_rank_query = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = project(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
            self.q_b_proj = project(config.q_lora_rank, queries)
        else:
            self.q_proj = project(hidden, queries)
        self.kv_a_proj_with_mqa = project(hidden, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, config.latent_norm_eps)
        self.kv_b_proj = project(self.rank, self.num_heads * (self.nope + self.value))
        self.gated = config.mla_use_output_gate
        if self.gated:
            self.g_proj = project(hidden, self.num_heads * self.value)
        self.o_proj = project(self.num_heads * self.value, hidden)
        self.watching = False
        self.logit_max = torch.zeros(self.num_heads, dtype=torch.float32, device="cpu")

    def forward(
        self,
        x: torch.Tensor,
        packing: Packing,
        state: LatentCache | LayerStep | None,
        past: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, D]`` -> ``[T, D]``; with ``state`` the new latents are appended after the
        ``past`` [N] tokens of each sequence."""
        if isinstance(state, LayerStep) and past is not None:
            return self._step(x, state, past)
        parts = self.projections()
        found = trained(x, [(part,) for part in parts])
        q, entry, *gate = found or (*(part(x) for part in parts[:2]),)
        if self.low_rank_query:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.view(len(x), self.num_heads, self.nope + self.rope)
        latent, shared = entry.split([self.rank, self.rope], -1)
        latent = self.kv_a_layernorm(latent)
        if isinstance(state, LatentCache) and past is not None:
            out = self._absorbed(q, torch.cat([latent, shared], -1), packing, state, past)
        else:
            out = self._expanded(q, latent, shared, packing)
        if self.gated:
            out = out * torch.sigmoid(gate[0] if gate else self.g_proj(x))
        return self.o_proj(out)

    def _step(self, x: torch.Tensor, state: LayerStep, past: torch.Tensor) -> torch.Tensor:
        """One token of some sequences of a cache, which is added to where it lies."""
        cache = state.kept
        assert isinstance(cache, LatentCache)
        count, heads = len(x), self.num_heads
        q, entry, *gate = each(x, self.projections())
        append_latent(
            *(entry, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps),
            *(cache.latent, state.places, past),
        )
        if self.low_rank_query:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_nope, q_rope = q.unflatten(1, (heads, -1)).split([self.nope, self.rope], -1)
        weight = self.kv_b_proj.weight.view(heads, self.nope + self.value, self.rank).to(q.dtype)
        absorbed = torch.bmm(q_nope.transpose(0, 1), weight[:, : self.nope]).transpose(0, 1)
        context = latent_attention(
            absorbed, q_rope, cache.latent, state.places, state.lengths, self.scale
        )
        values = weight[:, self.nope :].transpose(1, 2)
        out = x.new_empty(count, heads, self.value)
        torch.bmm(context.transpose(0, 1), values, out=out.transpose(0, 1))
        out = out.flatten(1)
        if self.gated:
            out = out * torch.sigmoid(gate[0])
        return self.o_proj(out)

    def projections(self) -> tuple[nn.Module, ...]:
        """The maps of a layer's input, in the order in which a decode step wants their results."""
        query = self.q_a_proj if self.low_rank_query else self.q_proj
        return query, self.kv_a_proj_with_mqa, *((self.g_proj,) if self.gated else ())

    def _expanded(
        self, q: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        kv = self.kv_b_proj(latent).view(len(q), self.num_heads, self.nope + self.value)
        k_nope, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k_nope, shared[:, None].expand(-1, self.num_heads, -1)], -1)
        if takes_kernels(q):
            for tokens, group in packing.by_length() if self.watching else ():
                some = (group.pad(t.index_select(0, tokens)).transpose(1, 2) for t in (q, k))
                self._watch(*some)
            return causal_attention(q, k, v, packing.bounds, self.scale).flatten(1)
        groups = packing.by_length()
        if len(groups) == 1:
            return self._causal(q, k, v, packing)
        out = q.new_empty(len(q), self.num_heads * self.value)
        for tokens, group in groups:
            some = [t.index_select(0, tokens) for t in (q, k, v)]
            out = out.index_copy(0, tokens, self._causal(some[0], some[1], some[2], group))
        return out

    def _causal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        q, k, v = (packing.pad(t).transpose(1, 2) for t in (q, k, v))
        if self.watching:
            self._watch(q, k)
        # zeros behind a shorter sequence are never seen: attention is causal
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return packing.unpad(out.transpose(1, 2)).flatten(1)

    @torch.no_grad()
    def _watch(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raise ``logit_max`` to the largest causal logits of ``q, k [N, H, L, D]``."""
        count, _, length, _ = q.shape
        self.logit_max = self.logit_max.to(q.device)
        block = max(1, MAX_SCORES // (count * self.num_heads * length))
        for start in range(0, length, block):
            end = min(start + block, length)
            scores = widen(q[:, :, start:end] @ k[:, :, :end].mT)
            seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(start)
            # of padding, and where there is none above it, 0
            largest = torch.where(seen, scores, 0.0).amax((0, 2, 3)) * self.scale
            self.logit_max = torch.maximum(self.logit_max, largest.float())

    def _absorbed(
        self,
        q: torch.Tensor,
        entry: torch.Tensor,
        packing: Packing,
        state: LatentCache,
        past: torch.Tensor,
    ) -> torch.Tensor:
        position = past[packing.row] + packing.offset
        length = int(position.max()) + 1
        state.reserve(length)
        state.store(packing.row, position, entry)
        keys = [part.to(q.dtype) for part in state.keys(length)]  # each [n, S, rank + rope]
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.value, self.rank)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        absorbed = torch.einsum("thn,hnr->thr", q_nope, weight[:, : self.nope].to(q.dtype))
        query = packing.pad(torch.cat([absorbed, q_rope], -1))  # [N, L, H, rank + rope]
        # Keys are shared by all heads: one query each costs less than the cache. More go in blocks.
        block = max(1, MAX_SCORES // (len(query) * self.num_heads * length))
        seen = past[:, None] + torch.arange(query.shape[1], device=q.device)
        parts = [
            self._attend(some, keys, last)
            for some, last in zip(query.split(block, 1), seen.split(block, 1), strict=True)
        ]
        context = packing.unpad(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        return torch.einsum("thr,hvr->thv", context, weight[:, self.nope :].to(q.dtype)).flatten(1)

    def _attend(
        self, query: torch.Tensor, keys: list[torch.Tensor], last: torch.Tensor
    ) -> torch.Tensor:
        """Latents [N, L, H, rank] that ``query`` [N, L, H, rank + rope] finds among ``keys``
        [n, S, rank + rope] of N sequences in all, each up to its position ``last`` [N, L]."""
        count, longest, _, _ = query.shape
        length = keys[0].shape[1]
        scores = _stretches(query.flatten(1, 2), [part.transpose(1, 2) for part in keys]).view(
            count, longest, self.num_heads, length
        )
        hidden = torch.arange(length, device=query.device) > last[..., None]  # [N, L, S]
        scores = (widen(scores) * self.scale).masked_fill_(hidden[:, :, None], -torch.inf)
        weights = scores.softmax(-1).to(query.dtype).view(count, longest * self.num_heads, length)
        context = _stretches(weights, [part[..., : self.rank] for part in keys])
        return context.view(count, longest, self.num_heads, self.rank)


def _stretches(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """``torch.bmm(x, torch.cat(others))`` without that copy."""
    if len(others) == 1:
        return torch.bmm(x, others[0])
    parts = x.split([len(other) for other in others])
    return torch.cat([torch.bmm(a, b) for a, b in zip(parts, others, strict=True)])
