"""Policy configuration: the fields of the published ``config.json``."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from ..configs.errors import UserError
from .fields import check_field, check_names
from .published import VISION, Published, stores_mxfp4, text_fields
from .vision_config import MEDIA_TOKEN_ID, ImageRules, VisionConfig

if TYPE_CHECKING:
    from .carried import CarriedTower

_LATENT = "routed_expert_hidden_size"
_BIASES = ("attention_bias", "mlp_bias")  # other ports have them; no projection here has one
MXFP4_GROUP = 32
_LINEAR_KINDS = {
    "num_heads": "int",
    "head_dim": "int",
    "short_conv_kernel_size": "int",
    "use_full_rank_gate": "bool",
    "gate_lower_bound": "bound | None",
    "kda_layers": "list[int]",
    "full_attn_layers": "list[int]",
}


class PolicyConfig(PretrainedConfig):
    """Text policy of the Kimi-K3 family; field names and meaning as published.

    ``linear_attn_config`` holds ``num_heads, head_dim, short_conv_kernel_size, use_full_rank_gate,
    gate_lower_bound`` and the 1-indexed lists ``kda_layers`` and ``full_attn_layers``.
    ``gate_lower_bound`` None selects the unbounded gate of Kimi-Linear. ``attn_res_block_size``
    counts transformer layers.

    `from_dict` also reads the file of a policy with a vision tower, where these fields are nested;
    `to_dict` gives back the file as it was read, unknown fields included, but for what was changed.
    """

    model_type = "kimi_linear"

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5
    mla_norm_eps: float | None = None  # None: 1e-6, what published checkpoints without it mean
    max_position_embeddings: int = 1048576
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 1024
    routed_expert_hidden_size: int | None = None  # latent width; None: experts work at full width
    latent_moe_use_norm: bool = False
    expert_fake_quant: bool = False  # routed experts compute as they would be exported, in MXFP4
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    hidden_act: str = "silu"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int | None = None  # None: plain residual connections
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    linear_attn_config: dict[str, Any] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    _published = None  # the file it was read from, a `Published`; no field: no annotation

    def __post_init__(self, **kwargs: Any) -> None:
        check_names(kwargs, type(self))
        super().__post_init__(**kwargs)
        for name, kind in PolicyConfig.__annotations__.items():
            if not name.endswith("_token_id"):
                check_field(name, getattr(self, name), kind)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.linear_attn_config is None:  # as Kimi-Linear-48B, like every other default
            full = full_attention_layers(self.num_hidden_layers)
            self.linear_attn_config = {
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "full_attn_layers": full,
                "kda_layers": [i for i in range(1, self.num_hidden_layers + 1) if i not in full],
            }
        self._check()

    def _check(self) -> None:
        linear = self.linear_attn_config or {}
        for name in (
            "num_heads",
            "head_dim",
            "short_conv_kernel_size",
            "kda_layers",
            "full_attn_layers",
        ):
            if name not in linear:
                raise ValueError(f"config.json: linear_attn_config.{name} is missing")
        for name, kind in _LINEAR_KINDS.items():
            if name in linear:
                check_field(f"linear_attn_config.{name}", linear[name], kind)
        listed = sorted([*linear["kda_layers"], *linear["full_attn_layers"]])
        layers = self.num_hidden_layers
        if len(listed) != layers or listed != list(range(1, layers + 1)):
            raise ValueError(
                "config.json: linear_attn_config.kda_layers and full_attn_layers must name each "
                f"layer 1..{layers} once, got {listed}"
            )
        if self.expert_fake_quant:
            self.check_packing("with expert_fake_quant=true")
        no_latent = self.routed_expert_hidden_size is None
        unsupported = {
            "moe_router_activation_func": self.moe_router_activation_func != "sigmoid",
            "moe_renormalize": not self.moe_renormalize,
            "mla_use_nope": not self.mla_use_nope,
            "hidden_act": self.hidden_act not in ("situ", "silu"),
            "num_expert_group": self.num_expert_group != 1,
            "topk_method": self.topk_method != "noaux_tc",
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_experts_per_token": not 1 <= self.num_experts_per_token <= self.num_experts,
            "num_key_value_heads": self.num_key_value_heads != self.num_attention_heads,
            "num_nextn_predict_layers": self.num_nextn_predict_layers != 0,
            "topk_group": self.topk_group != 1,
            "latent_moe_use_norm": self.latent_moe_use_norm and no_latent,
            **{name: bool(getattr(self, name, False)) for name in _BIASES},
        }
        for name, wrong in unsupported.items():
            if wrong:
                raise ValueError(f"config.json: {name}={getattr(self, name)!r} is not supported")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            given = getattr(self, name)
            ids = given if isinstance(given, list) else [] if given is None else [given]
            if not all(type(index) is int and 0 <= index < self.vocab_size for index in ids):
                raise ValueError(
                    f"config.json: {name}={given!r} must be null or a token of the vocabulary, "
                    f"0 to {self.vocab_size - 1}"
                )

    def check_packing(self, why: str) -> None:
        """UserError unless experts can be stored as MXFP4, which takes numbers in groups."""
        latent = self.routed_expert_hidden_size
        inputs = (
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("hidden_size", self.hidden_size) if latent is None else (_LATENT, latent),
        )
        for name, value in inputs:
            if value % MXFP4_GROUP and not all(map(self.is_dense, range(self.num_hidden_layers))):
                raise UserError(
                    f"config.json: {name}={value} must be a multiple of {MXFP4_GROUP} {why}"
                )

    @classmethod
    def from_pretrained(  # type: ignore[override] - a folder, no hub
        cls, pretrained_model_name_or_path: str | os.PathLike[str]
    ) -> PolicyConfig:
        """The configuration of a folder; UserError for what cannot be read, and where a field is
        missing that decides what the policy computes."""
        from .records import read_config

        return read_config(Path(pretrained_model_name_or_path))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of a published file, flat or nested; ValueError names a wrong field.

        Fields that are missing get the default values of this class, as in its constructor;
        `from_pretrained` refuses a file in which they would decide anything.
        """
        made = super().from_dict(text_fields(config_dict), **kwargs)
        config: PolicyConfig = made[0] if isinstance(made, tuple) else made
        config._published = Published(copy.deepcopy(config_dict), config._values())
        _ = config.image_rules  # to be refused here, if it cannot be read
        if config.stores_mxfp4:
            config.check_packing("with a quantization_config")
        return made

    def to_dict(self) -> dict[str, Any]:
        """All that ``config.json`` says, in the layout that it was read in."""
        values = self._values()
        return values if self._published is None else self._published.rewritten(values)

    def to_diff_dict(self) -> dict[str, Any]:
        """`to_dict`: a file that leaves out what is default here would depend on the reader."""
        return self.to_dict()

    def _values(self) -> dict[str, Any]:
        values = super().to_dict()
        values.pop("_published", None)
        if values.get("id2label"):  # of transformers' own; JSON knows no other keys than text
            values["id2label"] = {str(key): label for key, label in values["id2label"].items()}
        return values

    @property
    def nested(self) -> bool:
        """Whether files hold the text policy beside a vision tower: names have a prefix then."""
        return self._published is not None and self._published.nested

    @property
    def vision(self) -> VisionConfig | None:
        """Configuration of the vision tower; None in a text-only policy."""
        found = None if self._published is None else self._published.source.get(VISION)
        return None if found is None else VisionConfig.of(found)

    def tower_config(self) -> VisionConfig:
        """`vision` of a policy whose tower is to be built; ValueError if there is none, or it does
        not fit the text policy."""
        sizes = self.vision
        if sizes is None:
            raise ValueError("config.json: has no vision_config: the policy sees no images")
        if sizes.text_hidden_size not in (None, self.hidden_size):
            raise ValueError(
                f"config.json: vision_config.text_hidden_size={sizes.text_hidden_size} must be "
                f"hidden_size={self.hidden_size}"
            )
        index = self.media_token_id
        if type(index) is not int or not 0 <= index < self.vocab_size:
            raise ValueError(
                f"config.json: media_placeholder_token_id={index!r} must be a token of the "
                f"vocabulary, 0 to {self.vocab_size - 1}"
            )
        return sizes

    @property
    def media_token_id(self) -> int:
        """The id that stands for each row of an image."""
        return getattr(self, "media_placeholder_token_id", MEDIA_TOKEN_ID)

    @property
    def image_rules(self) -> ImageRules | None:
        """How images become patches; None in a text-only policy."""
        vision = self.vision
        return None if vision is None else ImageRules.of(self.preprocessor, vision)

    @property
    def preprocessor(self) -> Mapping[str, Any] | None:
        """``preprocessor_config.json`` of the folder that the policy was read from."""
        return None if self._published is None else self._published.preprocessor

    def remember_preprocessor(self, preprocessor: dict[str, Any] | None) -> None:
        """Take over the file about images that lies beside this one; ValueError for rules that do
        not fit the tower."""
        if self._published is not None:
            self._published = replace(self._published, preprocessor=preprocessor)
            _ = self.image_rules

    @property
    def carried_tower(self) -> CarriedTower | None:
        """The vision tower in the files of a policy that was read without it."""
        return None if self._published is None else self._published.tower

    def carry_tower(self, tower: CarriedTower | None) -> None:
        """Save this vision tower with the policy."""
        if self._published is not None:
            self._published = replace(self._published, tower=tower)

    @property
    def stores_mxfp4(self) -> bool:
        """Whether the file that this was read from says that routed experts are packed."""
        return self._published is not None and stores_mxfp4(self._published.source)

    @property
    def a_log_shape(self) -> tuple[int, ...] | None:
        """The shape of ``A_log`` in the files that the policy was read from, if it was and has the
        heads and the gate that it had then."""
        if self._published is None:
            return None
        before, now = self._published.values["linear_attn_config"], self.linear_attn_config or {}
        same = all(before.get(n) == now.get(n) for n in ("num_heads", "gate_lower_bound"))
        return self._published.a_log_shape if same else None

    def remember_a_log(self, shape: tuple[int, ...]) -> None:
        """Save ``A_log`` in this shape: padding is no part of the policy, but of its files."""
        if self._published is not None:
            self._published = replace(self._published, a_log_shape=shape)

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of the two MLA latent norms."""
        return 1e-6 if self.mla_norm_eps is None else self.mla_norm_eps

    @property
    def gate_lower_bound(self) -> float | None:
        """Bound of the KDA log decay, None for the unbounded gate."""
        return (self.linear_attn_config or {}).get("gate_lower_bound")

    @property
    def situ_bounds(self) -> tuple[float, float] | None:
        """SiTU's two bounds, or None for SwiGLU."""
        if self.hidden_act != "situ":
            return None
        return self.activation_situ_beta, self.activation_situ_linear_beta

    def is_mla(self, layer: int) -> bool:
        """Whether the 0-based ``layer`` is full attention (published lists are 1-indexed)."""
        return layer + 1 in (self.linear_attn_config or {})["full_attn_layers"]

    def is_dense(self, layer: int) -> bool:
        """Whether the 0-based ``layer`` has a dense MLP instead of experts."""
        return layer < self.first_k_dense_replace or layer % self.moe_layer_freq != 0

    @classmethod
    def tiny(cls, **overrides: Any) -> PolicyConfig:
        """A K3-shaped policy of laptop size; any field can be overridden.

        Layers follow the published rule: every fourth and the last are MLA.
        """
        layers = overrides.get("num_hidden_layers", 4)
        hidden = overrides.get("hidden_size", 64)
        full = full_attention_layers(layers)
        fields: dict[str, Any] = {
            "vocab_size": 512,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "mla_use_output_gate": True,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": hidden // 2,
            "routed_expert_hidden_size": hidden // 2,
            "latent_moe_use_norm": True,
            "hidden_act": "situ",
            "attn_res_block_size": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.1,
            "mla_norm_eps": 1e-5,
            "linear_attn_config": {
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
                "full_attn_layers": full,
                "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            },
        }
        return cls(**(fields | overrides))


def full_attention_layers(layers: int) -> list[int]:
    """1-indexed MLA layers by the published rule: every fourth, and the last."""
    return [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
