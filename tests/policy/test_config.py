"""Published configurations: read in either layout, written back as they were, of the right size."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.policy import DecodeState, Policy, PolicyConfig
from farhorizon.policy.attention import GatedMLA
from farhorizon.policy.count import count_parameters
from farhorizon.policy.kda import KimiDeltaAttention
from farhorizon.policy.moe import LatentMoE
from farhorizon.policy.packing import Packing
from farhorizon.policy.records import parse_config
from farhorizon.policy.vision_config import VisionConfig

MXFP4 = "mxfp4-pack-quantized"
PRESETS = Path(__file__).parents[2] / "configs" / "policy"
FULL = [*range(4, 93, 4), 93]
KDA = [i for i in range(1, 94) if i not in FULL]

# Every field of the published text policy, and the layout around it.
K3_TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "vocab_size": 163840,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "pad_token_id": None,
    "use_cache": True,
    "head_dim": 72,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": FULL,
        "kda_layers": KDA,
    },
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "group_size": 32,
                    "symmetric": True,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
    },
}
K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
    "dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "text_config": K3_TEXT,
    "vision_config": {"patch_size": 14, "vt_hidden_size": 1024, "vt_num_hidden_layers": 27},
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def preset(name: str) -> PolicyConfig:
    return PolicyConfig.from_dict(json.loads((PRESETS / f"{name}.json").read_text()))


def meta(config: PolicyConfig) -> Policy:
    with torch.device("meta"):
        return Policy(config)


@pytest.mark.parametrize("published", [K3, KIMI_LINEAR], ids=["k3", "kimi-linear"])
def test_a_published_file_comes_back_unchanged(published: dict[str, Any], tmp_path: Path) -> None:
    given = published | {"from_the_future": {"a": [1, None]}}
    before = copy.deepcopy(given)
    config = PolicyConfig.from_dict(given)
    assert config.to_dict() == before == given
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = PolicyConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == before
    assert copy.deepcopy(config).to_dict() == before


def test_k3_is_read_to_the_last_field() -> None:
    config = parse_config(Path("config.json"), K3)
    for name, value in K3_TEXT.items():
        if name in PolicyConfig.__annotations__ and name != "pad_token_id":
            assert getattr(config, name) == value, name
    assert config.pad_token_id == 163839  # stands beside the text, where it says none
    assert (config.bos_token_id, config.eos_token_id) == (163584, 163586)
    assert config.gate_lower_bound == -5.0 and config.latent_norm_eps == 1e-6
    assert config.situ_bounds == (4.0, 25.0)
    assert config.nested and config.stores_mxfp4 and config.vision == VisionConfig()
    assert [i for i in range(93) if config.is_mla(i)] == [*range(3, 92, 4), 92]
    assert [i for i in range(93) if config.is_dense(i)] == [0]
    text = PolicyConfig.from_dict(K3_TEXT)
    assert not text.nested and text.vision is None and text.stores_mxfp4


def test_kimi_linear_is_read_to_the_last_field() -> None:
    config = parse_config(Path("config.json"), KIMI_LINEAR)
    for name, value in KIMI_LINEAR.items():
        if name in PolicyConfig.__annotations__:
            assert getattr(config, name) == value, name
    assert config.max_position_embeddings == 1048576
    assert config.gate_lower_bound is None and config.situ_bounds is None
    assert config.q_lora_rank is None and not config.mla_use_output_gate
    assert config.attn_res_block_size is None and config.routed_expert_hidden_size is None
    assert not config.nested and not config.stores_mxfp4


def test_a_changed_field_is_written_where_it_belongs() -> None:
    config = PolicyConfig.from_dict(K3)
    config.max_position_embeddings = 65536
    config.pad_token_id = 7
    config.mla_norm_eps = 1e-5
    written = config.to_dict()
    assert written["text_config"] == K3_TEXT | {
        "max_position_embeddings": 65536,
        "pad_token_id": 7,
        "mla_norm_eps": 1e-5,
    }
    assert written["pad_token_id"] == 7 and "mla_norm_eps" not in written
    linear = PolicyConfig.from_dict(KIMI_LINEAR)
    linear.max_position_embeddings = 8192
    assert linear.to_dict()["model_max_length"] == 8192


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, r"model_type='llama' must be 'kimi_k3'"),
        ({"text_config": 3}, "text_config=3 must be an object"),
        ({"text_config": K3_TEXT | {"model_type": "llama"}}, r"text_config\.model_type='llama'"),
        ({"text_config": K3_TEXT | {"topk_method": "greedy"}}, "topk_method='greedy'"),
        ({"quantization_config": {"format": "int8"}}, r"quantization_config\.format=\['int8'\]"),
        (
            {"quantization_config": {"format": MXFP4, "config_groups": {"g": {"weights": 7}}}},
            r"quantization_config\.config_groups must hold objects",
        ),
        ({"quantization_config": []}, r"quantization_config\.?"),
        ({"quantization_config": {"format": ["x"]}}, r"quantization_config\.format="),
        (
            {
                "quantization_config": {
                    "format": "mxfp4-pack-quantized",
                    "config_groups": {"group_0": {"weights": {"group_size": 16}}},
                }
            },
            "group_size=16 must be 32",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(change: dict[str, Any], named: str) -> None:
    given = K3 | change
    if change.get("quantization_config") == []:
        given = given | {"text_config": K3_TEXT | {"quantization_config": [1]}}
    with pytest.raises(UserError, match=named) as caught:
        parse_config(Path("folder/config.json"), given)
    assert str(caught.value).startswith("folder/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 8),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("num_nextn_predict_layers", 1),
        ("topk_group", 3),
        ("rope_scaling", {"type": "yarn", "factor": 4}),
        ("routed_expert_hidden_size", None),
        ("bos_token_id", "a"),
        ("pad_token_id", True),
        ("eos_token_id", 10**9),
        ("eos_token_id", [163586, 163840]),
        ("eos_token_id", -1),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**30),
        ("id2label", [1]),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4}),
        ("rope_parameters", {"full_attention": {"rope_type": "yarn"}}),
        ("gate_lower_bound", -5.0),
        ("nested", True),
        ("vision", {}),
        ("media_token_id", 1),
        ("a_log_shape", [2]),
        ("situ_bounds", [1, 2]),
        ("stores_mxfp4", True),
        ("use_return_dict", True),
        ("sub_configs", {}),
        ("_published", 1),
        ("is_mla", 1),
        ("to_dict", 1),
        ("check_packing", 1),
    ],
)
def test_what_would_be_another_policy_is_refused(field: str, value: Any) -> None:
    linear = "linear_attn_config"
    named = {"routed_expert_hidden_size": "latent_moe_use_norm", "num_hidden_layers": linear}.get(
        field, field
    )
    for given in (K3 | {"text_config": K3_TEXT | {field: value}}, K3_TEXT | {field: value}):
        with pytest.raises(UserError, match=rf"^folder/config\.json: {named}\b") as found:
            parse_config(Path("folder/config.json"), given)
        assert "\n" not in str(found.value)


def test_a_misplaced_bound_says_where_it_belongs() -> None:
    with pytest.raises(UserError, match="gate_lower_bound belongs into linear_attn_config"):
        parse_config(Path("config.json"), K3_TEXT | {"gate_lower_bound": -5.0})


def test_positions_by_default_are_kept() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert (
        PolicyConfig.from_dict(K3_TEXT | {"rope_parameters": rope}).to_dict()["rope_parameters"]
        == rope
    )


def test_several_ends_are_tokens() -> None:
    config = parse_config(Path("config.json"), KIMI_LINEAR | {"eos_token_id": [163585, 163586]})
    assert config.eos_token_id == [163585, 163586]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("type", "int"),
        ("symmetric", False),
        ("strategy", "channel"),
        ("scale_dtype", "torch.float16"),
        ("dynamic", True),
        ("num_bits", 8),
    ],
)
def test_weights_of_another_packing_are_refused(name: str, value: Any) -> None:
    found = copy.deepcopy(K3_TEXT["quantization_config"])
    group = found["config_groups"]["group_0"]
    for fine in (None, "torch.uint8", "uint8"):
        group["weights"]["scale_dtype"] = fine
        assert PolicyConfig.from_dict(K3_TEXT | {"quantization_config": found}).stores_mxfp4
    group["weights"][name] = value
    with pytest.raises(ValueError, match=rf"quantization_config {name}={value!r} must be"):
        PolicyConfig.from_dict(K3_TEXT | {"quantization_config": found})


def test_packed_activations_are_refused() -> None:
    found = copy.deepcopy(K3_TEXT["quantization_config"])
    found["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ValueError, match="quantization_config input_activations must be null"):
        PolicyConfig.from_dict(K3_TEXT | {"quantization_config": found})


def test_a_context_is_found_under_either_name_and_needed() -> None:
    given = {k: v for k, v in KIMI_LINEAR.items() if k != "model_max_length"}
    with pytest.raises(UserError, match=r"config\.json: missing max_position_embeddings"):
        parse_config(Path("config.json"), given)


SIZES = {  # total and active in billions; of the first three without the embedding table
    "small": (0.059 + 0.0168, 0.0421),
    "1b": (1.12 + 0.0503, 0.49),
    "3b": (3.16 + 0.0671, 1.13),
    "kimi-linear-48b": (49.1, 3.1),
    "k3": (2779.5, 104.2),
}


@pytest.mark.parametrize("name", ["tiny", *SIZES])
def test_counts_are_those_of_the_policy(name: str) -> None:
    config = preset(name)
    counts = count_parameters(config)
    parameters = dict(meta(config).named_parameters())
    assert counts.total == sum(p.numel() for p in parameters.values())
    experts = sum(p.numel() for n, p in parameters.items() if ".experts." in n)
    idle = experts // config.num_experts * (config.num_experts - config.num_experts_per_token)
    assert counts.active == counts.total - counts.parts["embedding"] - idle
    ends = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight")
    assert counts.wide == sum(p.numel() for n, p in parameters.items() if n.endswith(ends))
    if name in SIZES:
        total, active = SIZES[name]
        assert counts.total / 1e9 == pytest.approx(total, rel=0.005)
        assert counts.active / 1e9 == pytest.approx(active, rel=0.01)


def test_k3_has_the_published_size_and_layers() -> None:
    counts = count_parameters(preset("k3"))
    assert round(counts.total / 1e12, 4) == 2.7795
    assert round((counts.total - counts.parts["embedding"]) / 1e12, 4) == 2.7783
    assert round(counts.active / 1e9, 1) == 104.2
    policy = meta(PolicyConfig.from_dict(K3))
    assert sum(p.numel() for p in policy.parameters()) == counts.total
    kinds = [KimiDeltaAttention, GatedMLA, LatentMoE]
    assert [sum(isinstance(m, kind) for m in policy.modules()) for kind in kinds] == [69, 24, 92]
    experts = policy.get_parameter("model.layers.1.block_sparse_moe.experts.w1")
    assert experts.shape == (896, 3072, 3584)
    assert 3 * experts[0].numel() == 33_030_144
    layer = policy.get_submodule("model.layers.0.self_attn")
    projections = 5 * 12288 * 7168 + 96 * 7168 + 128 * (7168 + 12288)
    assert sum(p.numel() for p in layer.parameters()) == projections + 12288 * 13 + 96 + 128
    layer = policy.get_submodule("model.layers.3.self_attn")
    assert round(sum(p.numel() for p in layer.parameters()) / 1e6, 1) == 232.2


def test_k3_ends_with_eight_blocks_and_the_partial_one() -> None:
    """Counted in a small policy of K3's depth and block size: what is stored is the same."""
    fields = K3_TEXT | {
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "eos_token_id": None,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "num_experts": 2,
        "num_experts_per_token": 1,
        "moe_intermediate_size": 8,
        "routed_expert_hidden_size": 8,
        "linear_attn_config": K3_TEXT["linear_attn_config"] | {"num_heads": 1, "head_dim": 8},
    }
    del fields["quantization_config"]
    policy = Policy(PolicyConfig.from_dict(fields)).eval()
    blocks: tuple[torch.Tensor, ...] = ()
    partial = policy.model.embed_tokens(torch.tensor([1, 2]))
    packing = Packing.of((0, 2), torch.device("cpu"))
    update, stored = None, []
    for layer in policy.model.layers:
        blocks, partial, update = layer(blocks, partial, update, packing, None)
        stored.append(len(blocks))
    assert stored[0] == 1 and stored[11:13] == [1, 2] and stored[-1] == 8
    assert [i for i in range(1, 93) if stored[i] > stored[i - 1]] == list(range(12, 93, 12))
    assert DecodeState.empty(policy.config, 1).num_sequences == 1
