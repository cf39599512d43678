"""What a save leaves behind: all of a policy in its published form, or what was there before."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from farhorizon.configs.errors import UserError
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint, load_policy, save_checkpoint, save_policy
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import train_tokenizer
from farhorizon.policy.value import ValueHead

BIAS = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
A_LOG = "model.layers.0.self_attn.A_log"
WIDE = (".A_log", ".dt_bias", "_conv1d.weight", ".o_norm.weight")


def made(seed: int = 0, **changes: Any) -> Policy:
    torch.manual_seed(seed)
    policy = Policy(PolicyConfig.tiny(**({"vocab_size": 64} | changes)))
    for router in policy.routers():
        router.e_score_correction_bias.normal_()
    return policy


def linear(**changes: Any) -> dict[str, Any]:
    return (PolicyConfig.tiny().linear_attn_config or {}) | changes


def nested(**changes: Any) -> PolicyConfig:
    text = PolicyConfig.tiny(vocab_size=64, **changes).to_dict()
    return PolicyConfig.from_dict({"model_type": "kimi_k3", "text_config": text})


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def spoiled(policy: Policy, name: str) -> Policy:
    """With one number of a tensor gone."""
    with torch.no_grad():
        policy.state_dict()[name].view(-1)[-1] = float("nan")
    return policy


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of ``config.json`` by hand, of the text where it is nested."""
    fields = json.loads((folder / "config.json").read_text())
    fields.get("text_config", fields).update(changes)
    (folder / "config.json").write_text(json.dumps(fields))


def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    save_policy(folder, made())
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    failing = made(1)
    failing.config.odd = {1, 2}  # no JSON: weights are written before the configuration
    with pytest.raises(TypeError):
        save_policy(folder, failing)
    with pytest.raises(UserError, match=r"experts\.7\.w3\.weight is not finite"):
        expert = "model.layers.3.block_sparse_moe.experts.w3"
        save_policy(folder, spoiled(made(1), expert), export=True)
    assert contents(folder) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]
    with pytest.raises(UserError, match="is not finite"):
        save_policy(tmp_path / "new", spoiled(made(), "lm_head.weight"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: is no folder"):
        save_policy(tmp_path / "file", made())


def test_a_save_takes_the_place_of_another_and_of_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    first = made()
    first.v_head = ValueHead(64)
    save_policy(folder, first)
    (folder / "checkpoint-1").mkdir()
    for name in ("notes.txt", "checkpoint-1/x"):
        (folder / name).write_text("mine")
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    for name in stale:
        (folder / name).write_text("{}")
    save_policy(folder, made(1))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"model.safetensors", "config.json", "notes.txt", "checkpoint-1/x"}
    assert torch.equal(load_policy(folder).lm_head.weight, made(1).lm_head.weight)


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", BIAS, A_LOG, "model.layers.1.block_sparse_moe.experts.w2", "v_head"],
)
def test_numbers_that_are_none_replace_no_checkpoint(tmp_path: Path, name: str) -> None:
    tokenizer = train_tokenizer(["one two"], 300)
    stage = StageRecord(64, (64,), 0, "")
    good = made(vocab_size=300)
    save_checkpoint(tmp_path / "p", good, good.config, tokenizer, stage)
    bad = made(1, vocab_size=300)
    if name == "v_head":
        bad.v_head = ValueHead(64)
        torch.nn.init.constant_(bad.v_head.summary.bias, float("inf"))
    else:
        spoiled(bad, name)
    with pytest.raises(UserError, match=r"^checkpoint: \S+ is not finite, it cannot be saved"):
        save_checkpoint(tmp_path / "p", bad, bad.config, tokenizer, stage)
    found = load_checkpoint(tmp_path / "p").policy
    assert torch.equal(found.lm_head.weight, good.lm_head.weight)
    assert [entry.name for entry in tmp_path.iterdir()] == ["p"]


def test_options_of_a_save_are_honoured_or_refused(tmp_path: Path) -> None:
    policy = made()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in policy.state_dict().items()}
    policy.save_pretrained(tmp_path / "p", state_dict=zeros, safe_serialization=True)
    assert not any(bool(t.any()) for t in load_policy(tmp_path / "p").state_dict().values())
    refused: tuple[tuple[dict[str, Any], type[Exception]], ...] = (
        ({"max_shard_size": "1KB"}, TypeError),
        ({"nonsense": 3}, TypeError),
        ({"safe_serialization": False}, ValueError),
        ({"push_to_hub": True}, ValueError),
    )
    for options, error in refused:
        with pytest.raises(error, match=next(iter(options))):
            policy.save_pretrained(tmp_path / "q", **options)
    del zeros["lm_head.weight"]
    with pytest.raises(ValueError, match=r"tensors missing: lm_head\.weight"):
        policy.save_pretrained(tmp_path / "q", state_dict=zeros)
    assert not (tmp_path / "q").exists()


HEAD, EXPERT = "lm_head.weight", "model.layers.1.block_sparse_moe.experts.w1"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (HEAD, lambda t: t.to(torch.uint8), r"lm_head\.weight has dtype torch\.uint8"),
        (HEAD, lambda t: t.long(), r"lm_head\.weight has dtype torch\.int64"),
        (HEAD, lambda t: t.to(torch.complex64), r"lm_head\.weight has dtype torch\.complex64"),
        (HEAD, lambda t: t.to(torch.float8_e4m3fn), r"lm_head\.weight has dtype torch\.float8"),
        (HEAD, lambda t: t.to("meta"), r"lm_head\.weight has the meta device"),
        (HEAD, lambda t: t.numpy(), r"'lm_head\.weight' is a ndarray"),
        (BIAS, lambda t: t.double() + 1e300, "correction_bias is not finite as torch.float32"),
        (EXPERT, lambda t: t.double() + 1e300, r"w1\.weight is not finite as torch\.float32"),
    ],
)
def test_what_no_file_can_hold_replaces_nothing(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], Any], message: str
) -> None:
    policy = made()
    policy.save_pretrained(tmp_path / "p")
    before = contents(tmp_path / "p")
    wrong = policy.state_dict() | {name: change(policy.state_dict()[name])}
    with pytest.raises(UserError, match=message) as found:
        policy.save_pretrained(tmp_path / "p", state_dict=wrong, export=name == EXPERT)
    assert "\n" not in str(found.value) and contents(tmp_path / "p") == before


def test_a_place_that_is_none_is_named(tmp_path: Path) -> None:
    policy, listed = made(), cast(Any, [1])
    with pytest.raises(UserError, match="state_dict is a list"):
        policy.save_pretrained(tmp_path / "p", state_dict=listed)
    with contextlib.chdir(tmp_path), pytest.raises(UserError, match="is empty"):
        policy.save_pretrained("")
    (tmp_path / "file").write_text("")
    for place in ("file", "file/p", "file/p/q"):
        with pytest.raises(UserError, match=r"/file:? is no folder"):
            policy.save_pretrained(tmp_path / place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("heads", [1, 3])
def test_decays_of_other_heads_have_a_shape_of_their_own(tmp_path: Path, heads: int) -> None:
    for config, padding in ((PolicyConfig.tiny(vocab_size=64), heads), (nested(), 128)):
        save_policy(tmp_path / "p", Policy(config))
        changed = copy.deepcopy(load_policy(tmp_path / "p").config)
        changed.linear_attn_config = linear(num_heads=heads)
        save_policy(tmp_path / "q", Policy(changed))
        (shape,) = {
            tuple(tensor.shape)
            for name, tensor in load_file(tmp_path / "q" / "model.safetensors").items()
            if name.endswith("A_log")
        }
        assert shape == (padding,)
        assert load_policy(tmp_path / "q").state_dict()[A_LOG].shape == (heads,)


@pytest.mark.parametrize("kind", ["flat", "nested"])
@pytest.mark.parametrize(("bound", "edited"), [(None, -5.0), (-5.0, None), (-5.0, -4.0)])
def test_a_gate_is_not_read_as_another_one(
    tmp_path: Path, kind: str, bound: float | None, edited: float | None
) -> None:
    gate = linear(gate_lower_bound=bound)
    text = PolicyConfig.tiny(vocab_size=64, linear_attn_config=gate)
    config = nested(linear_attn_config=gate) if kind == "nested" else text
    save_policy(tmp_path / "p", Policy(config))
    stored = load_file(tmp_path / "p" / "model.safetensors")
    dimensions = {t.dim() for name, t in stored.items() if name.endswith("A_log")}
    assert dimensions == {4 if bound is None else 1}
    assert load_policy(tmp_path / "p").config.gate_lower_bound == bound
    rewrite(tmp_path / "p", linear_attn_config=linear(gate_lower_bound=edited))
    with pytest.raises(UserError, match=r"linear_attn_config\.gate_lower_bound=") as found:
        load_policy(tmp_path / "p")
    assert "\n" not in str(found.value)


def test_gates_and_convolutions_stay_fp32_under_casts_and_in_files(tmp_path: Path) -> None:
    exact = made().state_dict()
    for narrow in (torch.bfloat16, torch.float16):
        made_here: Any = made()
        policy = made_here.to(narrow)
        policy(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        policy.to(narrow)  # gradients are cast with what they are of
        save_policy(tmp_path / "p", policy)
        stored = load_file(tmp_path / "p" / "model.safetensors")
        for name, tensor in policy.state_dict().items():
            wide = name.endswith((*WIDE, "e_score_correction_bias"))
            assert tensor.dtype == (torch.float32 if wide else narrow), name
            assert not wide or (
                torch.equal(tensor, exact[name]) and torch.equal(stored[name], tensor)
            )
        for name, parameter in policy.named_parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, name
    assert {p.dtype for p in made().double().parameters()} == {torch.float64}
    save_policy(tmp_path / "double", made().double())
    loaded = load_policy(tmp_path / "double", torch.bfloat16).state_dict()
    for name, tensor in loaded.items():
        wide = name.endswith((*WIDE, "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert not wide or torch.equal(tensor, exact[name])


def test_a_dtype_that_cannot_hold_the_weights_is_told(tmp_path: Path) -> None:
    large = made()
    with torch.no_grad():
        large.lm_head.weight[0, 0] = 1e6
    save_policy(tmp_path / "p", large)
    with pytest.raises(UserError, match=r"lm_head\.weight has numbers beyond the range of float16"):
        load_policy(tmp_path / "p", torch.float16)
    assert float(load_policy(tmp_path / "p", torch.bfloat16).lm_head.weight.detach().max()) > 9e5
    save_policy(tmp_path / "q", made(routed_expert_hidden_size=32), export=True)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    name = next(name for name in stored if name.endswith("weight_scale"))
    stored[name] = torch.full_like(stored[name], 150)
    save_file(stored, tmp_path / "q" / "model.safetensors")
    load_policy(tmp_path / "q")
    with pytest.raises(UserError, match="weight_packed has numbers beyond the range of float16"):
        load_policy(tmp_path / "q", torch.float16)
    for wrong in ("bfloat16", torch.int8):
        with pytest.raises(
            UserError, match=r"^dtype=.* must be None or one of torch\.float64"
        ) as told:
            load_policy(tmp_path / "p", wrong)  # type: ignore[arg-type]
        assert "\n" not in str(told.value)


def test_experts_that_cannot_be_packed_are_named_before_anything_is_written(tmp_path: Path) -> None:
    for change, named in (
        ({"routed_expert_hidden_size": 48}, "routed_expert_hidden_size=48"),
        ({"moe_intermediate_size": 24}, "moe_intermediate_size=24"),
        (
            {"routed_expert_hidden_size": None, "latent_moe_use_norm": False, "hidden_size": 80},
            "hidden_size=80",
        ),
    ):
        policy = made(**({"moe_intermediate_size": 32} | change))
        with pytest.raises(UserError, match=f"{named} must be a multiple of 32 to be exported"):
            save_policy(tmp_path / "p", policy, export=True)
        assert not (tmp_path / "p").exists()
    save_policy(tmp_path / "p", made(), export=True)
    rewrite(tmp_path / "p", routed_expert_hidden_size=48)
    with pytest.raises(UserError, match=r"config\.json: routed_expert_hidden_size=48 must be"):
        load_policy(tmp_path / "p")


def test_names_have_the_prefix_that_goes_with_the_configuration(tmp_path: Path) -> None:
    for config, add in ((PolicyConfig.tiny(vocab_size=64), True), (nested(), False)):
        save_policy(tmp_path / "p", Policy(config))
        file = tmp_path / "p" / "model.safetensors"
        stored = load_file(file)
        for number, name in enumerate(sorted(stored)):
            if number % 2:
                other = f"language_model.{name}" if add else name.removeprefix("language_model.")
                stored[other] = stored.pop(name)
        save_file(stored, file)
        with pytest.raises(UserError, match=r"names of the text policy go with.*language_model\."):
            load_policy(tmp_path / "p")


VISION = {
    **{"patch_size": 2, "vt_hidden_size": 16, "vt_intermediate_size": 16, "qkv_hidden_size": 16},
    **{"vt_num_hidden_layers": 1, "vt_num_attention_heads": 2, "text_hidden_size": 64},
    **{"init_pos_emb_height": 4, "init_pos_emb_width": 4},
}
PATCHES = "vision_tower.patch_embed.proj.weight"


def seeing(folder: Path) -> Path:
    """A folder with a vision tower."""
    config = nested().to_dict() | {"vision_config": VISION, "media_placeholder_token_id": 5}
    torch.manual_seed(0)
    save_policy(folder, Policy(PolicyConfig.from_dict(config), vision=True))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({PATCHES: torch.zeros(3)}, r"proj\.weight \[3\] instead of \[16, 3, 2, 2\]"),
        ({PATCHES: None}, f"tensors missing: {PATCHES}"),
        ({"vision_tower.junk": torch.zeros(1)}, r"tensors unknown: vision_tower\.junk"),
        ({PATCHES: torch.zeros(16, 3, 2, 2, dtype=torch.uint8)}, r"not floats: .*proj\.weight U8"),
        (
            {PATCHES: None, f"language_model.{PATCHES}": torch.zeros(16, 3, 2, 2)},
            "of the vision tower always without",
        ),
    ],
)
def test_a_tower_that_is_not_built_is_checked_as_well(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    file = seeing(tmp_path / "p") / "model.safetensors"
    load_policy(tmp_path / "p")
    save_file({n: t for n, t in (load_file(file) | change).items() if t is not None}, file)
    with pytest.raises(UserError, match=message):
        load_policy(tmp_path / "p")


def test_numbers_of_a_tower_that_are_none_are_not_handed_on(tmp_path: Path) -> None:
    file = seeing(tmp_path / "p") / "model.safetensors"
    stored = load_file(file)
    stored[PATCHES][0] = float("nan")
    save_file(stored, file)
    policy = load_policy(tmp_path / "p")  # nothing of it is read
    with pytest.raises(UserError, match=rf"^checkpoint: {PATCHES} is not finite"):
        save_policy(tmp_path / "q", policy)
    assert not (tmp_path / "q").exists()


def test_a_tower_that_is_gone_names_its_folder(tmp_path: Path) -> None:
    folder = seeing(tmp_path / "p")
    sent = pickle.dumps(load_policy(folder).config)
    assert pickle.loads(sent).carried_tower is not None
    shutil.rmtree(folder)
    message = rf"^{folder}: the vision tower .* is gone; keep the folder"
    with pytest.raises(UserError, match=message):
        pickle.loads(sent)
    save_policy(folder, made())  # another policy in its place
    with pytest.raises(UserError, match=message):
        pickle.loads(sent)


def test_a_configuration_alone_is_read_as_strictly_as_with_its_weights(tmp_path: Path) -> None:
    complete = PolicyConfig.tiny().to_dict()
    folder = tmp_path / "p"
    folder.mkdir()
    for missing in ("attn_res_block_size", "num_experts"):
        fields = {name: value for name, value in complete.items() if name != missing}
        (folder / "config.json").write_text(json.dumps(fields))
        with pytest.raises(UserError, match=f"missing {missing}"):
            PolicyConfig.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        PolicyConfig.from_pretrained(folder)
    with pytest.raises(UserError, match="no such checkpoint folder"):
        PolicyConfig.from_pretrained("moonshotai/Kimi-K3")
