"""The policy in vLLM's CPU backend, for tests of the engine without a GPU; fp32.

vLLM's own classes of the architecture are kernels for GPUs. Here its scheduler, its hybrid cache
(pages of latents, a slot of state for each KDA layer) and its sampler run around the policy of
`farhorizon.policy`: before a step states are gathered from where vLLM put them, and put back after.
vLLM loads it by name, which the entry point of `farhorizon.launch.serve_chat` tells it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..policy import PolicyConfig
from ..policy.head import LanguageHead
from ..policy.model import PolicyModel
from ..policy.packing import Packing
from ..policy.state import DecodeState, KdaState, LatentCache, LayerState

_attention: Any = importlib.import_module("vllm.v1.attention.backend")
_layer: Any = importlib.import_module("vllm.model_executor.layers.attention_layer_base")
_mamba: Any = importlib.import_module("vllm.model_executor.layers.mamba.abstract")
_utils: Any = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
_backends: Any = importlib.import_module("vllm.v1.attention.backends.registry")
_caches: Any = importlib.import_module("vllm.v1.kv_cache_interface")
_context: Any = importlib.import_module("vllm.forward_context")
_interfaces: Any = importlib.import_module("vllm.model_executor.models.interfaces")

_EXPERT = re.compile(r"(.+\.block_sparse_moe\.experts)\.(\d+)\.(w[123])\.weight")


@dataclass(slots=True)
class Pages:
    """Where the latents of a step's sequences lie: ``blocks`` [N, pages], and for each of its
    tokens the ``slots`` [T] that take them."""

    blocks: Tensor
    slots: Tensor
    bounds: list[int]
    lengths: list[int]


class PagesBuilder(_attention.AttentionMetadataBuilder):
    """Keeps what a step says as it is."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **_: Any) -> Pages:
        given = common_attn_metadata
        return Pages(
            given.block_table_tensor,
            given.slot_mapping,
            given.query_start_loc_cpu.tolist(),
            given.seq_lens.tolist(),
        )


class LatentBackend(_attention.AttentionBackend):
    """No kernels: the policy reads its latents itself."""

    supported_dtypes = [torch.float32]  # noqa: RUF012 - vLLM's own declaration

    @staticmethod
    def get_name() -> str:
        return "FARHORIZON_LATENTS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[PagesBuilder]:
        return PagesBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True


class LatentLayer(_layer.AttentionLayerBase):
    """Pages of one layer's latents."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.kv_cache = torch.tensor([])

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """``kv_cache`` [pages, 1, tokens, width]."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> type[LatentBackend]:
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return _caches.MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=torch.float32,
        )


class KdaLayer(_mamba.MambaBase):
    """Slots of one layer's convolution tails and recurrent states."""

    def __init__(self, config: PolicyConfig) -> None:
        self._shapes = state_shapes(config)
        self.kv_cache = ()

    @property
    def mamba_type(self) -> Any:
        return _backends.MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> Sequence[tuple[int, ...]]:
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.float32


def state_shapes(config: PolicyConfig) -> tuple[tuple[int, ...], ...]:
    """Of a sequence's convolution tail and recurrent state in a KDA layer."""
    linear = config.linear_attn_config or {}
    heads, width = linear["num_heads"], linear["head_dim"]
    tail = linear["short_conv_kernel_size"] - 1
    return (tail, 3 * heads * width), (heads, width, width)


class CpuPolicy(nn.Module, _interfaces.HasInnerState, _interfaces.IsHybrid):
    """What vLLM runs in the place of its ``KimiLinearForCausalLM``."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = policy_config(vllm_config)
        self.config = config
        self.model = PolicyModel(config)
        self.lm_head = LanguageHead(config.hidden_size, config.vocab_size, bias=False)
        self.eval().requires_grad_(False)
        for tensor in self._tensors().values():
            tensor.weight_loader = _copy  # vLLM wraps it when weights are loaded again
        known = vllm_config.compilation_config.static_forward_context
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self._names: list[str] = []
        self._caches: list[Any] = []  # lists are no modules: none of these has weights
        for index in range(config.num_hidden_layers):
            layer = LatentLayer(width) if config.is_mla(index) else KdaLayer(config)
            name = f"model.layers.{index}.self_attn"
            known[name] = layer
            self._names.append(name)
            self._caches.append(layer)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        return state_shapes(policy_config(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.float32

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return _utils.MambaStateCopyFuncCalculator.kda_state_copy_func()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        """Final hidden states [T, D] of the tokens of a step."""
        found = _context.get_forward_context().attn_metadata
        if not found:  # how much memory a step takes is being found out
            return self.model(input_ids, Packing.of((0, len(input_ids)), input_ids.device))
        pages = next(one for one in found.values() if isinstance(one, Pages))
        bounds = [
            edge for n, edge in enumerate(pages.bounds) if n == 0 or edge > pages.bounds[n - 1]
        ]
        count = len(bounds) - 1
        past = [pages.lengths[n] - (bounds[n + 1] - bounds[n]) for n in range(count)]
        state = DecodeState([], torch.tensor(past))
        for name, cache in zip(self._names, self._caches, strict=True):
            state.layers.append(_gather(cache, found[name], past))
        packing = Packing.of(tuple(bounds), input_ids.device)
        hidden = self.model(input_ids[: bounds[-1]], packing, state)
        for name, cache, layer in zip(self._names, self._caches, state.layers, strict=True):
            _scatter(cache, found[name], layer, past)
        rest = len(input_ids) - len(hidden)
        return torch.nn.functional.pad(hidden, (0, 0, 0, rest)) if rest else hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy published tensors to where they are served; the names of those."""
        own, loaded = self._tensors(), set[str]()
        for stored, tensor in weights:
            fused = _EXPERT.fullmatch(stored)
            name = f"{fused[1]}.{fused[3]}" if fused else stored
            part = (int(fused[2]),) if fused else ()
            own[name].weight_loader(own[name], tensor, *part)
            loaded.add(name)
        return loaded

    def _tensors(self) -> dict[str, Any]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def _copy(param: Tensor, loaded_weight: Tensor, part: int | None = None) -> None:
    """Of ``A_log`` files may have padding behind it, or more dimensions."""
    place = param.data if part is None else param.data[part]
    place.copy_(loaded_weight.flatten()[: place.numel()].view(place.shape))


def policy_config(vllm_config: Any) -> PolicyConfig:
    """Of the file that vLLM read."""
    return PolicyConfig.from_dict(vllm_config.model_config.hf_config.to_dict())


def _gather(cache: Any, step: Any, past: Sequence[int]) -> LayerState:
    """The state of a step's sequences in one layer, after ``past`` tokens of each."""
    if isinstance(cache, LatentLayer):
        longest, width = max(past), cache.width
        size = cache.kv_cache.shape[1]
        blocks = step.blocks[: len(past), : -(-longest // size)].long()
        latent = cache.kv_cache[blocks].view(len(past), -1, width)[:, :longest]
        return LatentCache(latent.clone())
    rows = step.state_indices_tensor[: len(past)].long()
    conv, recurrent = (kept[rows] for kept in cache.kv_cache)
    fresh = torch.tensor(past) == 0  # a slot still has what another sequence left
    conv[fresh], recurrent[fresh] = 0, 0
    return KdaState(recurrent, conv)


def _scatter(cache: Any, step: Any, layer: LayerState, past: Sequence[int]) -> None:
    """Put back what `_gather` gave, with the tokens of the step."""
    if isinstance(layer, LatentCache):
        new = torch.cat([layer.latent[n, old : step.lengths[n]] for n, old in enumerate(past)])
        slots, size = step.slots[: len(new)].long(), cache.kv_cache.shape[1]
        cache.kv_cache[slots // size, slots % size] = new
        return
    assert isinstance(layer, KdaState)
    rows = step.state_indices_tensor[: len(past)].long()
    cache.kv_cache[0][rows], cache.kv_cache[1][rows] = layer.conv, layer.recurrent
