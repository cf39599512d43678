"""Published layouts of tensors: read, written back bit for bit, and refused when torn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farhorizon.configs.errors import UserError
from farhorizon.kernels.moe import mxfp4_decode, mxfp4_encode
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_policy, save_policy
from farhorizon.policy.moe import Experts
from farhorizon.policy.shards import stored_manifest
from farhorizon.policy.weights import WeightManifest

WIDE = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight")
EXPERTS = "model.layers.1.block_sparse_moe.experts"

# K3 in little: nested, every fourth layer and the last MLA
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    **{"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5},
    **{"num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-5},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "mla_use_nope": True, "mla_use_output_gate": True},
    **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 4},
    **{"num_experts_per_token": 2, "num_shared_experts": 2, "moe_intermediate_size": 32},
    **{"routed_expert_hidden_size": 64, "latent_moe_use_norm": True, "moe_renormalize": True},
    **{"moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0},
    **{"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
    **{"attn_res_block_size": 2, "max_position_embeddings": 256},
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
    },
}
PACKED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "bos_token_id": 1,
    "text_config": TEXT | {"quantization_config": PACKED},
    "vision_config": {
        **{"patch_size": 2, "vt_hidden_size": 16, "vt_intermediate_size": 24},
        **{"qkv_hidden_size": 8, "vt_num_hidden_layers": 1, "vt_num_attention_heads": 2},
        **{"init_pos_emb_height": 4, "init_pos_emb_width": 5},
    },
}
# and Kimi-Linear: no query rank, no output gate of MLA, low-rank gate of KDA, no bound, SwiGLU
LINEAR: dict[str, Any] = {
    **{k: v for k, v in TEXT.items() if not k.startswith(("activation", "attn_res", "latent"))},
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_act": "silu",
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "num_shared_experts": 1,
    "linear_attn_config": {
        k: v
        for k, v in TEXT["linear_attn_config"].items()
        if k not in ("use_full_rank_gate", "gate_lower_bound")
    },
}
del LINEAR["routed_expert_hidden_size"]


def published(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a folder of that config, written down from the published list of names."""
    nested = "text_config" in config
    text = config.get("text_config", config)
    hidden, width = text["hidden_size"], text.get("routed_expert_hidden_size", 64)
    made = torch.Generator().manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).bfloat16()

    def full(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    out = {"model.embed_tokens.weight": half(40, hidden), "model.norm.weight": half(hidden)}
    out["lm_head.weight"] = half(40, hidden)
    if nested:
        out["model.output_attn_res_norm.weight"] = half(hidden)
        out["model.output_attn_res_proj.weight"] = half(1, hidden)
    for i in range(5):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{norm}.weight"] = half(hidden)
        for site in ("self_attention_res", "mlp_res") if nested else ():
            out[f"{layer}.{site}_norm.weight"] = half(hidden)
            out[f"{layer}.{site}_proj.weight"] = half(1, hidden)
        out[f"{attention}.o_proj.weight"] = half(hidden, 48)
        if i < 3:
            for name in "qkv":
                out[f"{attention}.{name}_proj.weight"] = half(48, hidden)
                out[f"{attention}.{name}_conv1d.weight"] = full(48, 1, 4)
            out[f"{attention}.f_a_proj.weight"] = half(16, hidden)
            out[f"{attention}.f_b_proj.weight"] = half(48, 16)
            out[f"{attention}.b_proj.weight"] = half(3, hidden)
            out[f"{attention}.dt_bias"] = full(48)
            out[f"{attention}.o_norm.weight"] = full(16)
            if nested:
                out[f"{attention}.A_log"] = torch.cat([full(3), torch.zeros(125)])
                out[f"{attention}.g_proj.weight"] = half(48, hidden)
            else:
                out[f"{attention}.A_log"] = full(1, 1, 3, 1)
                out[f"{attention}.g_a_proj.weight"] = half(16, hidden)
                out[f"{attention}.g_b_proj.weight"] = half(48, 16)
        else:
            if nested:
                out[f"{attention}.q_a_proj.weight"] = half(16, hidden)
                out[f"{attention}.q_a_layernorm.weight"] = half(16)
                out[f"{attention}.q_b_proj.weight"] = half(72, 16)
                out[f"{attention}.g_proj.weight"] = half(48, hidden)
            else:
                out[f"{attention}.q_proj.weight"] = half(72, hidden)
            out[f"{attention}.kv_a_proj_with_mqa.weight"] = half(24, hidden)
            out[f"{attention}.kv_a_layernorm.weight"] = half(16)
            out[f"{attention}.kv_b_proj.weight"] = half(96, 16)
        if i == 0:
            for name in ("gate", "up", "down"):
                shape = (hidden, 96) if name == "down" else (96, hidden)
                out[f"{layer}.mlp.{name}_proj.weight"] = half(*shape)
            continue
        moe = f"{layer}.block_sparse_moe"
        out[f"{moe}.gate.weight"] = half(4, hidden)
        out[f"{moe}.gate.e_score_correction_bias"] = full(4)
        if nested:
            out[f"{moe}.routed_expert_down_proj.weight"] = half(width, hidden)
            out[f"{moe}.routed_expert_norm.weight"] = half(width)
            out[f"{moe}.routed_expert_up_proj.weight"] = half(hidden, width)
        inner = 32 * text["num_shared_experts"]
        for name in ("gate", "up", "down"):
            shape = (hidden, inner) if name == "down" else (inner, hidden)
            out[f"{moe}.shared_experts.{name}_proj.weight"] = half(*shape)
        for expert in range(4):
            for name in ("w1", "w2", "w3"):
                weight = half(width, 32) if name == "w2" else half(32, width)
                stored = f"{moe}.experts.{expert}.{name}.weight"
                if not nested:
                    out[stored] = weight
                    continue
                packed, scale = mxfp4_encode(weight)
                out |= {f"{stored}_packed": packed, f"{stored}_scale": scale}
    if not nested:
        return out
    out = {f"language_model.{name}": tensor for name, tensor in out.items()}
    tower = {
        **{"patch_embed.proj": half(16, 3, 2, 2), "patch_embed.pos_emb": half(4, 5, 16)},
        **{f"encoder.blocks.0.norm{n}": half(16) for n in (0, 1)},
        **{"encoder.blocks.0.wqkv": half(24, 16), "encoder.blocks.0.wo": half(16, 8)},
        **{"encoder.blocks.0.mlp.fc0": half(24, 16), "encoder.blocks.0.mlp.fc1": half(16, 24)},
        "encoder.final_layernorm": half(16),
    }
    projector = {"proj.0": half(64, 64), "proj.2": half(hidden, 64), "post_norm": half(hidden)}
    out |= {f"vision_tower.{name}.weight": tensor for name, tensor in tower.items()}
    return out | {f"mm_projector.{name}.weight": tensor for name, tensor in projector.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(bits), b.view(bits))


def test_k3_files_are_read_to_the_last_bit(tmp_path: Path) -> None:
    files = published(K3)
    policy = load_policy(write(tmp_path / "k3", K3, files))
    found = policy.state_dict()
    for name, tensor in found.items():
        stored = files.get(f"language_model.{name}")
        if ".experts." in name:
            base, kind = name.rsplit(".", 1)
            for expert, part in enumerate(tensor):
                where = f"language_model.{base}.{expert}.{kind}.weight"
                decoded = mxfp4_decode(files[f"{where}_packed"], files[f"{where}_scale"])
                assert same(part, decoded.bfloat16()) and same(part.float(), decoded)
        elif name.endswith("A_log"):
            assert stored is not None and same(tensor, stored[:3])
        else:
            assert stored is not None and same(tensor, stored), name
    assert policy(torch.arange(9)[None]).logits.isfinite().all()


@pytest.mark.parametrize(("config", "number"), [(K3, 0), (K3, 1), (LINEAR, 1)])
def test_a_part_of_the_experts_is_read_alone(
    tmp_path: Path, config: dict[str, Any], number: int
) -> None:
    """The bytes of the others are none that could be read: they are not finite."""
    files = published(config)
    whole = load_policy(write(tmp_path / "whole", config, files)).state_dict()
    others = [f".experts.{expert}." for expert in range(4) if expert // 2 != number]
    for name, tensor in files.items():
        if any(part in name for part in others):
            files[name] = torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else torch.nan)
    folder = write(tmp_path / "torn", config, files)
    with pytest.raises(UserError, match="not finite"):
        load_policy(folder)
    policy = load_policy(folder, part=(number, 2))
    found = policy.state_dict()
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        fused = ".experts.w" in name
        wanted = whole[name][2 * number : 2 * number + 2] if fused else whole[name]
        assert same(tensor, wanted), name
    kept = [module for module in policy.modules() if isinstance(module, Experts)]
    assert [(one.count, one.part) for one in kept] == [(4, (number, 2))] * 4


def test_experts_that_have_no_such_part_are_all_read(tmp_path: Path) -> None:
    """Whoever wants to divide them says that it cannot."""
    folder = write(tmp_path / "k3", K3, published(K3))
    whole, found = (load_policy(folder, part=part).state_dict() for part in ((0, 1), (1, 3)))
    assert all(same(found[name], tensor) for name, tensor in whole.items())


def test_what_was_read_is_written_with_the_same_names_and_bits(tmp_path: Path) -> None:
    for name, config in (("k3", K3), ("linear", LINEAR)):
        files = published(config)
        folder = write(tmp_path / name, config, files)
        policy = load_policy(folder)
        policy.save_pretrained(tmp_path / f"{name}-again", export=name == "k3")
        again = load_file(tmp_path / f"{name}-again" / "model.safetensors")
        assert again.keys() == files.keys()
        for stored, tensor in files.items():
            if not stored.endswith(("_packed", "_scale")):
                assert same(again[stored], tensor), stored
        written = json.loads((tmp_path / f"{name}-again" / "config.json").read_text())
        assert written == config
        found = Policy.from_pretrained(tmp_path / f"{name}-again").state_dict()
        for stored, tensor in policy.state_dict().items():
            assert same(found[stored], tensor), stored


def test_without_export_experts_are_plain_and_the_config_says_so(tmp_path: Path) -> None:
    policy = load_policy(write(tmp_path / "k3", K3, published(K3)))
    save_policy(tmp_path / "plain", policy)
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert written == K3 | {"text_config": TEXT}
    found = load_policy(tmp_path / "plain").state_dict()
    assert all(same(found[name], tensor) for name, tensor in policy.state_dict().items())
    save_policy(tmp_path / "plain", policy, export=True)  # into the same folder
    text = json.loads((tmp_path / "plain" / "config.json").read_text())["text_config"]
    assert text["quantization_config"] == PACKED
    found = load_policy(tmp_path / "plain").state_dict()
    assert all(same(found[name], tensor) for name, tensor in policy.state_dict().items())


def test_a_new_policy_is_exported_as_it_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.from_dict(TEXT))
    policy.save_pretrained(tmp_path / "p", export=True)
    stored = load_file(tmp_path / "p" / "model.safetensors")
    weight = policy.get_parameter(f"{EXPERTS}.w1")[2]
    packed, scale = mxfp4_encode(weight)
    assert torch.equal(stored[f"{EXPERTS}.2.w1.weight_packed"], packed)
    assert torch.equal(stored[f"{EXPERTS}.2.w1.weight_scale"], scale)
    assert packed.shape == (32, 32) and scale.shape == (32, 2)
    assert stored["model.layers.0.self_attn.A_log"].shape == (3,)
    fields = json.loads((tmp_path / "p" / "config.json").read_text())
    assert fields["quantization_config"]["format"] == "mxfp4-pack-quantized"
    loaded = load_policy(tmp_path / "p", torch.float32).get_parameter(f"{EXPERTS}.w1")[2]
    assert torch.equal(loaded, mxfp4_decode(packed, scale))


def test_a_wanted_dtype_leaves_gates_and_convolutions_in_fp32(tmp_path: Path) -> None:
    files = published(LINEAR)
    folder = write(tmp_path / "linear", LINEAR, files)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for name, tensor in load_policy(folder, dtype).state_dict().items():
            wide = name.endswith(WIDE)
            bias = name.endswith("e_score_correction_bias")
            wanted = torch.float32 if bias or (wide and dtype == torch.bfloat16) else dtype
            assert tensor.dtype == wanted, name
            if not name.startswith(EXPERTS[:13]) or wide:
                continue
            stored = files.get(name)
            assert stored is None or torch.equal(tensor.double(), stored.double())


def test_a_softplus_gate_is_not_read_as_a_bounded_one(tmp_path: Path) -> None:
    files = published(LINEAR)
    linear = LINEAR["linear_attn_config"]
    bounded = LINEAR | {"linear_attn_config": linear | {"gate_lower_bound": -5.0}}
    with pytest.raises(UserError, match=r"linear_attn_config\.gate_lower_bound=-5.*A_log") as found:
        load_policy(write(tmp_path / "a", bounded, files))
    assert "\n" not in str(found.value)
    mixed = files | {A_LOG.removeprefix(P): files[A_LOG.removeprefix(P)].view(-1)}
    for config in (bounded, LINEAR):
        with pytest.raises(UserError, match=r"linear_attn_config\.gate_lower_bound=.*A_log"):
            load_policy(write(tmp_path / "mixed", config, mixed))
    text = {k: v for k, v in TEXT.items() if k != "linear_attn_config"}
    text["linear_attn_config"] = {
        k: v for k, v in TEXT["linear_attn_config"].items() if k != "gate_lower_bound"
    }
    with pytest.raises(UserError, match=r"missing linear_attn_config\.gate_lower_bound"):
        load_policy(write(tmp_path / "b", K3 | {"text_config": text}, files))


P = "language_model."
W1 = f"{P}{EXPERTS}.3.w1.weight"
BIAS = f"{P}model.layers.2.block_sparse_moe.gate.e_score_correction_bias"
A_LOG = f"{P}model.layers.0.self_attn.A_log"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({BIAS: None}, f"tensors missing: {BIAS.removeprefix(P)}"),
        ({"stray": torch.zeros(1)}, "tensors unknown: stray"),
        ({f"{W1}_scale": None}, r"tensors missing: .*experts\.3\.w1\.weight_scale"),
        (
            {f"{W1}_packed": torch.zeros(32, 16, dtype=torch.uint8)},
            r"weight_packed \[32, 16\] instead of \[32, 32\]",
        ),
        ({f"{W1}_packed": torch.zeros(32, 32)}, "weight_packed has dtype F32, not U8"),
        (
            {f"{W1}_scale": torch.full((32, 2), 255, dtype=torch.uint8)},
            r"tensors that are not finite: .*experts\.3\.w1\.weight",
        ),
        ({BIAS: torch.tensor([0, torch.inf, 0, 0])}, "not finite: .*e_score_correction_bias"),
        ({BIAS: torch.zeros(4, dtype=torch.int32)}, "bias has dtype I32, not floats"),
        ({f"stray.{i:02}": torch.zeros(1) for i in range(12)}, r"unknown: stray\.00.*stray\.11"),
        ({A_LOG: torch.ones(128)}, r"A_log \[128\] has more than the 3 heads"),
        ({A_LOG: torch.ones(2)}, r"A_log \[2\] instead of \[3\]"),
        ({A_LOG: torch.ones(1, 3)}, r"A_log \[1, 3\] instead of \[3\]"),
        ({BIAS.removeprefix(P): torch.zeros(4)}, "e_score_correction_bias is stored twice"),
    ],
)
def test_torn_files_are_one_line(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    files = {k: v for k, v in (published(K3) | change).items() if v is not None}
    with pytest.raises(UserError, match=message) as found:
        load_policy(write(tmp_path / "k3", K3, files))
    assert "\n" not in str(found.value) and str(tmp_path) in str(found.value)


def test_a_config_that_contradicts_its_experts_is_named(tmp_path: Path) -> None:
    plain = K3 | {"text_config": TEXT}
    with pytest.raises(UserError, match="has no quantization_config, but experts are stored as pa"):
        load_policy(write(tmp_path / "a", plain, published(K3)))
    quantised = LINEAR | {"quantization_config": PACKED}
    with pytest.raises(UserError, match="has a quantization_config, but experts are stored as pl"):
        load_policy(write(tmp_path / "b", quantised, published(LINEAR)))
    # a tower beside a policy whose config knows none is a stray tensor
    tower = {"vision_tower.x": torch.zeros(1)}
    with pytest.raises(UserError, match=r"unknown: vision_tower\.x"):
        load_policy(write(tmp_path / "c", LINEAR, published(LINEAR) | tower))


def test_a_header_may_have_no_notes(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", LINEAR, published(LINEAR))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]) | {"__metadata__": None}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    assert same(load_policy(folder).lm_head.weight.detach(), published(LINEAR)["lm_head.weight"])


def test_an_index_must_be_right(tmp_path: Path) -> None:
    files = published(LINEAR)
    names = sorted(files)
    folder = write(tmp_path / "p", LINEAR, {n: files[n] for n in names[:20]})
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({n: files[n] for n in names[20:]}, folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    placed = {n: "a.safetensors" if n in names[:20] else "b.safetensors" for n in names}
    index.write_text(json.dumps({"weight_map": placed}))
    found = load_policy(folder).state_dict()
    assert same(found["lm_head.weight"], files["lm_head.weight"])
    for wrong, message in (
        ({names[0]: "b.safetensors"}, f"missing in the shards: {names[0]}"),
        ({names[0]: "c.safetensors"}, "files missing: c.safetensors"),
        ({names[0]: 3}, "does not name files of this folder"),
        ({names[0]: "c" * 300}, "does not name files of this folder"),
    ):
        index.write_text(json.dumps({"weight_map": placed | wrong}))
        with pytest.raises(UserError, match=message):
            load_policy(folder)
    index.write_text(json.dumps({"weight_map": {n: placed[n] for n in names[2:]}}))
    message = f"does not name tensors of the shards: {names[0]}, {names[1]}$"
    with pytest.raises(UserError, match=message):
        load_policy(folder)
    index.write_text(json.dumps({"weight_map": placed}))
    shard = folder / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"b\.safetensors: damaged or truncated"):
        load_policy(folder)


MEASURE = """
import sys
import torch
from farhorizon.policy.checkpoint import load_policy
def kib(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
load_policy(sys.argv[1])  # what only the first load needs
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
policy = load_policy(sys.argv[2], eval(sys.argv[3]))
size = sum(t.nbytes for t in policy.state_dict().values())
print((kib("VmHWM") - before) * 1024 / size)
policy.save_pretrained(sys.argv[1])
print((kib("VmHWM") - before) * 1024 / size)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts peaks")
@pytest.mark.parametrize(
    ("export", "dtype"), [(False, "None"), (True, "None"), (False, "torch.float32")]
)
def test_loading_and_saving_need_little_more_than_the_policy(
    tmp_path: Path, export: bool, dtype: str
) -> None:
    """A policy of 112 million parameters, a quarter of them in one tensor, from one file."""
    fields = TEXT | {
        **{"vocab_size": 64000, "hidden_size": 448, "moe_intermediate_size": 256},
        **{"num_experts": 64, "routed_expert_hidden_size": 256},
    }
    write(tmp_path / "small", LINEAR, published(LINEAR))
    with torch.device("meta"):
        policy = Policy(PolicyConfig.from_dict(fields))
    policy = policy.to_empty(device="cpu").bfloat16()
    for tensor in policy.state_dict().values():
        tensor.fill_(0.5)
    policy.save_pretrained(tmp_path / "p", export=export)
    del policy
    command = [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "p", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loading, saving = map(float, done.stdout.split())
    assert 0.9 < loading < 1.15 and loading <= saving < 1.15


def test_the_manifest_of_a_folder_is_read_from_its_headers(tmp_path: Path) -> None:
    state = {
        "b": torch.zeros(2, 3, dtype=torch.bfloat16),
        "a": torch.zeros(4),
        "c": torch.zeros(()),
    }
    save_file(state, tmp_path / "model.safetensors")
    assert stored_manifest(tmp_path) == WeightManifest.of(state)
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="a has dtype I64"):
        stored_manifest(tmp_path)
