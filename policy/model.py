"""The policy: a causal language model of the Kimi-K3 family, read top down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from ..kernels.attnres import mix
from ..kernels.logprob import token_logprobs
from .attention import GatedMLA, RMSNorm
from .config import PolicyConfig
from .kda import KimiDeltaAttention, ShortConv
from .moe import DenseMLP, Experts, LatentMoE, Router
from .packing import Packing
from .state import DecodeState


@dataclass
class PolicyOutput(ModelOutput):
    """What a forward returns; fields that were not asked for are None.

    ``logits [1, T, V]`` (``[B, T, V]`` for rows, ``[N, V]`` with ``last_only``), ``logprobs`` and
    ``entropy`` fp32 [R], ``last_hidden_state [1, T, D]`` or ``[B, T, D]``, ``loss`` scalar.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    state: DecodeState | None = None


class DecoderLayer(nn.Module):
    """One attention and one feed-forward sub-layer, each reading a mixture over depth."""

    def __init__(self, config: PolicyConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.eps, self.block_size, self.index = eps, config.attn_res_block_size, index
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = GatedMLA(config) if config.is_mla(index) else KimiDeltaAttention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if config.is_dense(index):
            self.mlp = DenseMLP(hidden, config.intermediate_size, config.situ_bounds)
        else:
            self.block_sparse_moe = LatentMoE(config)
        self.dense = config.is_dense(index)
        if self.block_size is not None:
            self.self_attention_res_norm = RMSNorm(hidden, eps)
            self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
            self.mlp_res_norm = RMSNorm(hidden, eps)
            self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)

    def forward(
        self,
        blocks: tuple[torch.Tensor, ...],
        partial: torch.Tensor,
        packing: Packing,
        state: DecodeState | None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Finished blocks and the new partial sum (K3 report 2.2).

        Blocks are returned, never appended in place: sharding engines hand a module copies of
        the containers it is called with.
        """
        if self.block_size is None:
            partial = partial + self._attend(partial, packing, state)
            return blocks, partial + self._feed(partial)
        if blocks:
            mixed = mix(
                [*blocks, partial],
                self.self_attention_res_proj.weight,
                self.self_attention_res_norm.weight,
                self.eps,
            )
        else:
            mixed = partial
        boundary = self.index % self.block_size == 0
        if boundary:
            blocks = (*blocks, partial)
        attended = self._attend(mixed, packing, state)
        partial = attended if boundary else partial + attended
        mixed = mix(
            [*blocks, partial], self.mlp_res_proj.weight, self.mlp_res_norm.weight, self.eps
        )
        return blocks, partial + self._feed(mixed)

    def _attend(self, x: torch.Tensor, packing: Packing, state: DecodeState | None) -> torch.Tensor:
        x = self.input_layernorm(x)
        layer: Any = None if state is None else state.layers[self.index]
        if isinstance(self.self_attn, GatedMLA):
            return self.self_attn(x, packing, layer, None if state is None else state.lengths)
        return self.self_attn(x, packing, layer)

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mlp if self.dense else self.block_sparse_moe)(self.post_attention_layernorm(x))


class PolicyModel(nn.Module):
    """Embedding, decoder layers, output mixture and final norm."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_residuals = config.attn_res_block_size is not None
        if self.attention_residuals:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        packing: Packing | None = None,
        state: DecodeState | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Final hidden states ``[T, D]`` of flattened ``input_ids [T]``.

        Without ``packing`` it is what a trainer with an output head of its own calls: ``input_ids
        [B, T]`` and the names that `Policy.forward` takes give an output with
        ``last_hidden_state [B, T, D]``.
        """
        if packing is None:
            edges = sequence_edges(
                input_ids, cu_seqlens, cu_seq_lens_q, position_ids, attention_mask
            )
            hidden = self(input_ids.flatten(), Packing.of(edges, input_ids.device))
            return PolicyOutput(last_hidden_state=hidden.view(*input_ids.shape, -1))
        blocks: tuple[torch.Tensor, ...] = ()
        partial = self.embed_tokens(input_ids)
        for layer in self.layers:
            blocks, partial = layer(blocks, partial, packing, state)
        if self.attention_residuals:
            partial = mix(
                [*blocks, partial],
                self.output_attn_res_proj.weight,
                self.output_attn_res_norm.weight,
                self.eps,
            )
        return self.norm(partial)


class LanguageHead(nn.Linear):
    """Output projection that can also score targets without making all logits."""

    def forward(
        self, input: torch.Tensor, targets: torch.Tensor | None = None, temperature: float = 1.0
    ) -> Any:
        """Logits of ``input [..., D]``, or (log-probs, entropy) of ``targets``."""
        if targets is None:
            return super().forward(input)
        return token_logprobs(input, self.weight.to(input.dtype), targets, temperature)


class Policy(PreTrainedModel, GenerationMixin):
    """Causal language model whose tensors carry the published names.

    Experts are fused in memory (``experts.w1|w2|w3``) and separate in files. Routing thresholds
    are fp32 buffers; they move only through `update_thresholds`.
    """

    config_class = PolicyConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - transformers' own declaration
    config: PolicyConfig

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.model = PolicyModel(config)
        self.lm_head = LanguageHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding | Router):
            module.weight.normal_(0, std)
        elif isinstance(module, Experts):
            for weight in (module.w1, module.w2, module.w3):
                weight.normal_(0, std)
        elif isinstance(module, ShortConv):
            bound = module.weight.shape[-1] ** -0.5
            module.weight.uniform_(-bound, bound)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1)
        elif isinstance(module, KimiDeltaAttention):
            module.init_gate()
        # queries of the mixture over depth start at zero, a plain average (arXiv:2603.15031)
        if isinstance(module, DecoderLayer) and module.block_size is not None:
            module.self_attention_res_proj.weight.zero_()
            module.mlp_res_proj.weight.zero_()
        if isinstance(module, PolicyModel) and module.attention_residuals:
            module.output_attn_res_proj.weight.zero_()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        state: DecodeState | None = None,
        *,
        rows: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        temperature: float = 1.0,
        last_only: bool = False,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **_: Any,
    ) -> PolicyOutput:
        """Logits, or log-probs of chosen tokens, of packed or batched sequences.

        ``input_ids [1, T]`` with ``cu_seqlens [N + 1]``, or ``[B, T]`` rows of equal length. A
        ``state`` of N sequences is continued and updated in place. With ``targets [R]`` and
        ``rows [R]`` (indices into the flattened tokens) only their log-probs and entropy at
        ``temperature`` are computed; ``last_only`` gives the logits after each sequence.
        ``labels`` (shape of input_ids, -100 ignored) add the shifted token-mean loss.
        ``position_ids`` that restart and ``cu_seq_lens_q`` mark packed sequences as well;
        ``attention_mask`` may hide tokens at the right end of a row, never at the left.
        """
        batch, length = input_ids.shape
        bounds = sequence_edges(input_ids, cu_seqlens, cu_seq_lens_q, position_ids, attention_mask)
        packing = Packing.of(bounds, input_ids.device)
        if state is not None and state.num_sequences != packing.num_sequences:
            raise ValueError(
                f"state holds {state.num_sequences} sequences, input {packing.num_sequences}"
            )
        hidden = self.model(input_ids.flatten(), packing, state)
        if state is not None:
            lengths = torch.tensor(bounds, device=state.lengths.device)
            state.lengths = state.lengths + lengths[1:] - lengths[:-1]
        out = PolicyOutput(last_hidden_state=hidden.view(batch, length, -1), state=state)
        if targets is not None:
            picked = hidden if rows is None else hidden.index_select(0, rows)
            out.logprobs, out.entropy = self.lm_head(picked, targets, temperature)
        elif last_only:
            out.logits = self.lm_head(hidden.index_select(0, packing.last()))
        else:
            out.logits = self.lm_head(hidden).view(batch, length, -1)
            if labels is not None:
                out.loss = shifted_loss(out.logits, labels, packing, num_items_in_batch)
        return out

    @classmethod
    def from_pretrained(  # type: ignore[override] - no hub, no pickle, no other options
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Policy:
        """The policy of a checkpoint folder; parameters get ``dtype``, thresholds stay fp32."""
        from .checkpoint import load_policy

        return load_policy(pretrained_model_name_or_path, dtype)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **_: Any
    ) -> None:
        """Write ``config.json`` and weights in the published layout; no tokenizer, no stages
        (`checkpoint.save_checkpoint` writes a whole checkpoint)."""
        from .checkpoint import save_policy

        save_policy(save_directory, self)

    def routers(self) -> list[Router]:
        """The routers in layer order."""
        return [m for m in self.modules() if isinstance(m, Router)]

    @contextmanager
    def routing_statistics(self, valid: torch.Tensor | None = None) -> Iterator[None]:
        """Count the routing of forwards inside; ``valid`` bool [T] leaves tokens out.

        Nothing else is ever counted: evaluation, scoring and recomputation in backward run
        outside of this context.
        """
        routers = self.routers()
        for router in routers:
            router.collecting, router.valid = True, valid
        try:
            yield
        finally:
            for router in routers:
                router.collecting, router.valid = False, None

    def routing_counts(self) -> list[torch.Tensor]:
        """Integer tensors to be summed in place over data-parallel ranks."""
        return [count for router in self.routers() for count in router.counts()]

    def update_thresholds(self) -> list[float]:
        """Set the next thresholds in place; max / mean load per layer of what was counted."""
        return [router.update() for router in self.routers()]

    def clear_routing_counts(self) -> None:
        """Forget counts of a step that was skipped."""
        for router in self.routers():
            router.clear()

    @staticmethod
    def leaf_modules() -> list[type[nn.Module]]:
        """Modules whose parameters a sharding engine must gather together."""
        return [KimiDeltaAttention, GatedMLA, LatentMoE]


def sequence_edges(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> tuple[int, ...]:
    """Where sequences start and end in the flattened tokens; ValueError on left padding."""
    batch, length = input_ids.shape
    if (
        attention_mask is not None
        and attention_mask.dim() == 2
        and bool((attention_mask[:, 0] == 0).any())
    ):
        raise ValueError("attention_mask hides the first token: left padding is not supported")
    edges = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    if edges is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens needs input_ids [1, T], got batch size {batch}")
        bounds = tuple(edges.tolist())
        if bounds[-1] != length:
            raise ValueError(f"cu_seqlens ends at {bounds[-1]}, input_ids has {length} tokens")
        return bounds
    if batch == 1 and position_ids is not None:
        starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
        if starts[:1] == [0]:
            return (*starts, length)
    return tuple(range(0, batch * length + 1, length))


def shifted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    packing: Packing,
    num_items: torch.Tensor | int | None,
) -> torch.Tensor:
    """Mean negative log-prob of each token from the one before it in the same sequence."""
    flat = labels.flatten()
    predicted = packing.offset > 0
    predicted &= flat != -100
    rows = predicted.nonzero().flatten()
    if len(rows) == 0:
        return logits.sum() * 0.0
    picked = logits.flatten(0, 1)[rows - 1].float().log_softmax(-1)
    total = -picked.gather(-1, flat[rows][:, None]).sum()
    return total / (len(rows) if num_items is None else num_items)
