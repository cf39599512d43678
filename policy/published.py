"""How a published ``config.json`` is laid out: flat, or nested with a vision tower beside the text.

A policy is read from either layout and written back in the one it came in. What nobody here has a
meaning for is kept as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]

TEXT, VISION, QUANTISATION = "text_config", "vision_config", "quantization_config"
TEXT_TYPE, NESTED_TYPE = "kimi_linear", "kimi_k3"
TEXT_ARCHITECTURE, NESTED_ARCHITECTURE = "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"
MXFP4 = "mxfp4-pack-quantized"

# What an export says of its experts, where the policy does not come from a file that says it.
EXPORTED: Fields = {
    "quant_method": "compressed-tensors",
    "format": MXFP4,
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": MXFP4,
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": [
        *("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"),
        *("re:.*routed_expert_(down|up)_proj.*", "re:.*block_sparse_moe\\.gate.*"),
        *("re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"),
    ],
}

# What a description of MXFP4 weights may say, where it says it; the first is what is written.
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "strategy": ("group",),
    "group_size": (32,),
    "symmetric": (True,),
    "dynamic": (False,),
    "scale_dtype": ("torch.uint8", "uint8"),
}

# Of a nested file as a whole; what else stands at its top (token ids) holds for the text as well.
_OF_THE_FILE = (
    *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *(TEXT, VISION, QUANTISATION),
)
# Two names of one field: Kimi-Linear publishes the second.
_POSITIONS, _ROPE = "rope_scaling", "rope_parameters"
_CONTEXT, _CONTEXT_ALIAS = "max_position_embeddings", "model_max_length"


def text_fields(published: Fields) -> Fields:
    """The fields of the text policy in either layout.

    ValueError naming the field for another model, and for weights quantised in a way that cannot
    be decoded.
    """
    nested = published.get(TEXT)
    if TEXT in published and not isinstance(nested, dict):
        raise ValueError(f"config.json: {TEXT}={nested!r} must be an object")
    if nested is None:
        fields = dict(published)
        _check_type(fields, "", TEXT_TYPE)
    else:
        _check_type(published, "", NESTED_TYPE)
        _check_type(nested, f"{TEXT}.", TEXT_TYPE)
        shared = {k: v for k, v in published.items() if k not in _OF_THE_FILE}
        fields = shared | {k: v for k, v in nested.items() if v is not None or k not in shared}
    stores_mxfp4(published)
    if fields.pop(_POSITIONS, None) is not None:
        raise ValueError(
            f"config.json: {_POSITIONS} must be null: the policy has no positions to scale"
        )
    if _scales(fields.get(_ROPE)):
        raise ValueError(
            f"config.json: {_ROPE}={fields[_ROPE]!r} must be null or of rope_type default: the "
            "policy has no positions to scale"
        )
    labels = fields.get("id2label")
    if not isinstance(labels, dict | None):
        raise ValueError(f"config.json: id2label={labels!r} must be null or an object")
    fields.pop(QUANTISATION, None)  # weights are decoded
    if fields.get(_CONTEXT) is None and _CONTEXT_ALIAS in fields:
        fields[_CONTEXT] = fields[_CONTEXT_ALIAS]
    return fields


def _scales(rope: Any) -> bool:
    """Whether parameters of positions, perhaps by kind of layer, ask for more than the default."""
    if rope is None:
        return False
    if not isinstance(rope, dict):
        return True
    inner = [value for value in rope.values() if isinstance(value, dict)]
    kinds = [part.get("rope_type", part.get("type")) for part in (rope, *inner)]
    return any(kind not in (None, "default") for kind in kinds)


def stores_mxfp4(published: Fields) -> bool:
    """Whether the file says that routed experts are packed; ValueError on any other packing."""
    found = published.get(QUANTISATION) or (published.get(TEXT) or {}).get(QUANTISATION)
    if found is None:
        return False
    if not isinstance(found, dict):
        raise ValueError(f"config.json: {QUANTISATION}={found!r} must be an object")
    groups = found.get("config_groups") or {}
    parts = list(groups.values()) if isinstance(groups, dict) else [groups]
    kinds = [part.get("weights") or {} for part in parts if isinstance(part, dict)]
    if len(kinds) < len(parts) or not all(isinstance(weights, dict) for weights in kinds):
        raise ValueError(f"config.json: {QUANTISATION}.config_groups must hold objects")
    formats = {str(part["format"]) for part in [found, *parts] if part.get("format") is not None}
    if formats != {MXFP4}:
        raise ValueError(
            f"config.json: {QUANTISATION}.format={sorted(formats)} is not supported, "
            f"only {MXFP4}; convert the weights to bfloat16"
        )
    for weights in kinds:
        for name, values in _WEIGHTS.items():
            if weights.get(name) not in (None, *values):
                raise ValueError(
                    f"config.json: {QUANTISATION} {name}={weights[name]!r} must be {values[0]!r}"
                )
    for name in ("input_activations", "output_activations"):
        if any(part.get(name) is not None for part in parts):
            raise ValueError(f"config.json: {QUANTISATION} {name} must be null: weights alone")
    return True


@dataclass(frozen=True, slots=True)
class Published:
    """A config file as it was read, with what each field of the policy was then."""

    source: Fields
    values: Fields
    a_log_shape: tuple[int, ...] | None = None  # in the weight files beside it, once they were read
    preprocessor: Fields | None = None  # the file about images beside it
    tower: Any = None  # `carried.CarriedTower`, if the weight files have one that was not built

    @property
    def nested(self) -> bool:
        """Whether the text policy stands beside a vision tower."""
        return TEXT in self.source

    def rewritten(self, values: Fields) -> Fields:
        """The file with those fields replaced that have another value than when it was read."""
        changed = {k: v for k, v in values.items() if k not in self.values or self.values[k] != v}
        return with_fields(self.source, changed)


def with_fields(published: Fields, changes: Fields) -> Fields:
    """A copy of a config file with changed fields of the text policy, each where it belongs."""
    out = copy.deepcopy(published)
    if _CONTEXT in changes and _CONTEXT_ALIAS in out.get(TEXT, out):
        changes = changes | {_CONTEXT_ALIAS: changes[_CONTEXT]}
    for name, value in changes.items():
        if TEXT in out and (name in out[TEXT] or name not in out or name in _OF_THE_FILE):
            out[TEXT][name] = value
        if TEXT not in out or (name in out and name not in _OF_THE_FILE):
            out[name] = value
    return out


def saved_fields(published: Fields, changes: Fields, dtype: str, packed: bool) -> Fields:
    """A config file for weights that are saved with other fields: most of them in ``dtype``, routed
    experts ``packed`` or not."""
    out = with_fields(published, changes)
    nested = TEXT in out
    text = out[TEXT] if nested else out
    text["dtype"] = dtype
    found = [part.pop(QUANTISATION) for part in (text, out) if part.get(QUANTISATION) is not None]
    if packed:
        text[QUANTISATION] = found[0] if found else copy.deepcopy(EXPORTED)
    for part in (text, out):
        part.update({name: dtype for name in ("dtype", "torch_dtype") if name in part})
    out["model_type"] = NESTED_TYPE if nested else TEXT_TYPE
    out["architectures"] = [NESTED_ARCHITECTURE if nested else TEXT_ARCHITECTURE]
    return out


def _check_type(fields: Fields, prefix: str, wanted: str) -> None:
    found = fields.get("model_type", wanted)
    if found != wanted:
        raise ValueError(f"config.json: {prefix}model_type={found!r} must be {wanted!r}")
