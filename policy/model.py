"""The policy: a causal language model of the Kimi-K3 family, read top down."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..configs.errors import UserError
from ..kernels.attnres import mix_norm
from ..kernels.device import upload
from ..kernels.precision import product_dtype
from .attention import GatedMLA, RMSNorm
from .checkpointing import CHOICES, recomputed
from .config import PolicyConfig
from .head import LanguageHead, PolicyOutput
from .images import Placed, policy_inputs
from .initial import init_weights
from .kda import KimiDeltaAttention
from .layout import read_layout
from .moe import DenseMLP, LatentMoE
from .packing import Packing
from .routing import Routed
from .state import DecodeState
from .trainers import check_inputs, check_ranges, refuse, refuse_saving, shifted_loss
from .value import ValueHead
from .vision import NO_TOWER, Projector, VisionTower, blank, placed, read_grids

Sums = tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]


def _site(
    sums: Sums, query: nn.Linear, norm: RMSNorm, following: RMSNorm
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """`mix_norm` of blocks, partial sum and its update, with the weights of three modules."""
    return mix_norm(*sums, query.weight, norm.weight, following.weight, norm.eps)


class DecoderLayer(nn.Module):
    """One attention and one feed-forward sub-layer, each reading a mixture over depth."""

    def __init__(self, config: PolicyConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.block_size, self.index = config.attn_res_block_size, index
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
        update: torch.Tensor | None,
        packing: Packing,
        state: DecodeState | None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
        """Finished blocks, partial sum, and what the next layer is to add to it (K3 report 2.2).

        Blocks are returned, never appended in place: sharding engines hand a module copies of
        the containers it is called with.
        """
        if self.block_size is None:
            x = partial if update is None else partial + update
            x = x + self._attend(self.input_layernorm(x), packing, state)
            return blocks, x, self._feed(self.post_attention_layernorm(x))
        if blocks:
            blocks, partial, x = _site(
                (blocks, partial, update),
                self.self_attention_res_proj,
                self.self_attention_res_norm,
                self.input_layernorm,
            )
        else:
            x = self.input_layernorm(partial)
        update = self._attend(x, packing, state)
        if self.index % self.block_size == 0:
            blocks, partial, update = (*blocks, partial), update, None
        blocks, partial, x = _site(
            (blocks, partial, update),
            self.mlp_res_proj,
            self.mlp_res_norm,
            self.post_attention_layernorm,
        )
        return blocks, partial, self._feed(x)

    def _attend(self, x: torch.Tensor, packing: Packing, state: DecodeState | None) -> torch.Tensor:
        layer: Any = None if state is None else state.layers[self.index]
        if isinstance(self.self_attn, GatedMLA):
            return self.self_attn(x, packing, layer, None if state is None else state.lengths)
        return self.self_attn(x, packing, layer)

    def _feed(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mlp if self.dense else self.block_sparse_moe)(x)


class PolicyModel(nn.Module):
    """Embedding, decoder layers, output mixture and final norm."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpointing = "none"
        self.attention_residuals = config.attn_res_block_size is not None
        if self.attention_residuals:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        packing: Packing | None = None,
        state: DecodeState | None = None,
        images: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> Any:
        """Final hidden states ``[T, D]`` of flattened ``input_ids [T]``; of ``images`` (rows [M],
        features [M, D]) the features stand in the place of the embeddings at the rows.

        Without ``packing`` it is what a trainer with an output head of its own calls: ``input_ids
        [B, T]`` and the names that `Policy.forward` takes give an output with
        ``last_hidden_state [B, T, D]``.
        """
        if packing is None:
            refuse(unused)
            edges = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
            layout = read_layout(input_ids, edges, position_ids, attention_mask)
            hidden = layout.restore(self(layout.pack(input_ids), layout.packing))
            return PolicyOutput(last_hidden_state=hidden.view(*input_ids.shape, -1))
        blocks: tuple[torch.Tensor, ...] = ()
        partial = self.embed_tokens(input_ids)
        if images is not None:
            rows, features = images
            partial = partial.index_copy(0, rows, features.to(partial.dtype))
        if partial.is_cuda:  # as wide as the products: memory bounds what reads the residual stream
            partial = partial.to(product_dtype(partial))
        update = None
        again = self.checkpointing == "layers" and torch.is_grad_enabled() and state is None
        for layer in self.layers:
            given = (blocks, partial, update, packing, state)
            blocks, partial, update = recomputed(layer, *given) if again else layer(*given)
        if self.attention_residuals:
            return _site(
                (blocks, partial, update),
                self.output_attn_res_proj,
                self.output_attn_res_norm,
                self.norm,
            )[2]
        return self.norm(partial if update is None else partial + update)


class Policy(Routed, PreTrainedModel, GenerationMixin):
    """Causal language model whose tensors carry the published names.

    Experts are fused in memory (``experts.w1|w2|w3``) and separate in files. Routing thresholds
    are fp32 buffers; they move only through `update_thresholds`. The vision tower of a policy that
    has one is built only with ``vision``: text alone does without.
    """

    config_class = PolicyConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _is_stateful = True  # no assisted generation: nothing could take tokens back
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - transformers' own declaration
    config: PolicyConfig
    v_head: ValueHead | None

    def __init__(self, config: PolicyConfig, *, vision: bool = False) -> None:
        super().__init__(config)
        self.model = PolicyModel(config)
        self.lm_head = LanguageHead(config.hidden_size, config.vocab_size, bias=False)
        self.sees_images = vision
        if vision:
            sizes = config.tower_config()
            self.vision_tower = VisionTower(sizes)
            self.mm_projector = Projector(sizes, config.hidden_size)
        self.post_init()
        self.register_module("v_head", None)

    @property
    def checkpointing(self) -> str:
        """What a training forward keeps for backward: "none" is recomputed, or of "layers" all but
        their inputs and what attention made."""
        return self.model.checkpointing

    @checkpointing.setter
    def checkpointing(self, choice: str) -> None:
        if choice not in CHOICES:
            raise ValueError(f"checkpointing must be one of {', '.join(CHOICES)}, got {choice!r}")
        self.model.checkpointing = choice

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, self.config.initializer_range)

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
        logits_to_keep: int = 0,
        pixel_values: torch.Tensor | None = None,
        grid_thws: torch.Tensor | Sequence[Sequence[int]] = (),
        image_features: torch.Tensor | None = None,
        image_rows: torch.Tensor | None = None,
        **unused: Any,
    ) -> PolicyOutput:
        """Logits, or log-probs of chosen tokens, of packed or batched sequences.

        ``input_ids [1, T]`` with ``cu_seqlens [N + 1]``, or ``[B, T]`` rows of equal length. A
        ``state`` of N sequences is continued and updated in place. With ``targets [R]`` and
        ``rows [R]`` (indices into the flattened tokens) only their log-probs and entropy at
        ``temperature`` are computed; ``last_only`` gives the logits after each sequence.
        ``labels`` (shape of input_ids, -100 ignored) add the shifted token-mean loss.
        ``position_ids`` that restart and ``cu_seq_lens_q`` mark packed sequences as well;
        ``attention_mask [B, T]`` may hide tokens at the right end of a row: they are not run, and
        what is returned for them means nothing. ``logits_to_keep`` n > 0 without labels gives the
        logits of the last n columns. ``targets`` without ``rows`` are one for every token; they
        exclude ``labels``. Images are ``pixel_values [P, 3, p, p]`` with ``grid_thws [N, 3]``, or
        ``image_features [M, D]`` that `encode_images` gave; they stand at ``image_rows [M]`` of the
        flattened tokens in that order, by default wherever the placeholder is. With no patches at
        all (P = 0) the tower still runs, for ranks that others wait for. ``unused`` are
        names that trainers pass and that change nothing here; TypeError names any other,
        ValueError a cache that is not a ``state``, and inputs that contradict each other.
        """
        refuse(unused)
        check_inputs(input_ids, rows, targets, labels)
        check_ranges(input_ids, rows, targets, labels, self.config.vocab_size)
        batch, length = input_ids.shape
        edges = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
        layout = read_layout(input_ids, edges, position_ids, attention_mask, state is not None)
        packing = layout.packing
        if state is not None and state.num_sequences != packing.num_sequences:
            raise ValueError(
                f"state holds {state.num_sequences} sequences, input {packing.num_sequences}"
            )
        images = None
        if pixel_values is not None:
            image_features = self.encode_images(pixel_values, grid_thws)
        if image_features is not None:
            marked = input_ids == self.config.media_token_id
            images = placed(layout, marked, image_rows, image_features)
        hidden = self.model(layout.pack(input_ids), packing, state, images)
        if state is not None:
            lengths = torch.tensor(packing.bounds, device=state.lengths.device)
            state.lengths = state.lengths + lengths[1:] - lengths[:-1]
        given = layout.restore(hidden)
        out = PolicyOutput(last_hidden_state=given.view(batch, length, -1), state=state)
        picked = given if rows is None else given.index_select(0, rows)
        if self.v_head is not None:
            out.value = self.v_head(out.last_hidden_state if rows is None else picked)
        if targets is not None:
            out.logprobs, out.entropy = self.lm_head(picked, targets, temperature)
        elif last_only:
            out.logits = self.lm_head(hidden.index_select(0, packing.last()))
        elif labels is None:
            out.logits = self.lm_head(given.view(batch, length, -1)[:, -logits_to_keep:])
        else:
            logits = self.lm_head(hidden)
            out.loss = shifted_loss(logits, layout.pack(labels), packing, num_items_in_batch)
            out.logits = layout.restore(logits).view(batch, length, -1)
        return out

    def encode_images(
        self, pixel_values: torch.Tensor, grid_thws: torch.Tensor | Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Rows ``[M, D]`` of the text policy for the patches ``[P, 3, p, p]`` of images; without
        any image, none of them. UserError for a policy without a tower, and for patches that are
        not those of the grids."""
        if not self.sees_images:
            raise UserError(NO_TOWER)
        grids = read_grids(grid_thws)
        shown = (pixel_values, grids)
        if not grids:  # ranks that have images wait for this one in the tower, and in its backward
            shown = blank(self.vision_tower.config, pixel_values)
        features = self.mm_projector(self.vision_tower(*shown))
        return features if grids else features[:0]

    def image_inputs(self, images: Sequence[Placed]) -> dict[str, Any]:
        """What a training forward takes for the images of a packed batch, and what keeps step with
        other ranks where it has none; nothing for a policy without a tower."""
        rules = self.config.image_rules if self.sees_images else None
        if rules is not None:
            made = policy_inputs(images, rules)
            device = self.device
            return {n: upload(v, device) if torch.is_tensor(v) else v for n, v in made.items()}
        if images:
            raise UserError(NO_TOWER)
        return {}

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        *_: Any,
        attention_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """What `generate` feeds at each step: always the whole sequences, no cache.

        It is exact and slow; rollouts decode with a `DecodeState`. ValueError on prompts of
        different lengths; what is not named here (a cache, a state), `generate` itself refuses.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("generate needs prompts of one length, attention_mask hides tokens")
        given = ("pixel_values", "grid_thws", "image_features", "image_rows")
        images = {name: unused[name] for name in given if unused.get(name) is not None}
        return {"input_ids": input_ids, "logits_to_keep": 1, **images}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def from_pretrained(  # type: ignore[override] - no hub, no pickle, no other options
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        vision: bool = False,
    ) -> Policy:
        """The policy of a checkpoint folder, with the bits of its files; or parameters get
        ``dtype``, but for thresholds and for gates and convolutions that are stored in fp32. With
        ``vision`` also its vision tower, which is otherwise copied when the policy is saved."""
        from .checkpoint import load_policy

        return load_policy(os.fspath(pretrained_model_name_or_path), dtype, vision=vision)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        *,
        export: bool = False,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **unused: Any,
    ) -> None:
        """Write ``config.json`` and weights in the published layout, with ``export`` the experts as
        MXFP4; no tokenizer, no stages (`checkpoint.save_checkpoint` writes a whole checkpoint).

        ``state_dict`` are the tensors to write, by default the policy's own. ``unused`` are options
        of trainers that ask for what is done here anyway; TypeError names any other.
        """
        from .checkpoint import save_policy

        refuse_saving(unused)
        if not isinstance(state_dict, Mapping | None):
            kind = type(state_dict).__name__
            raise UserError(f"save_pretrained: state_dict is a {kind}, not tensors by name")
        save_policy(os.fspath(save_directory), self, export=export, weights=state_dict)

    @staticmethod
    def leaf_modules() -> list[type[nn.Module]]:
        """Modules whose parameters a sharding engine must gather together."""
        return [KimiDeltaAttention, GatedMLA, LatentMoE]
