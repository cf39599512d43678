"""Folders in the published layout: exact, whole, and one clear line for whatever is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from farhorizon.configs.errors import UserError
from farhorizon.policy import Policy, PolicyConfig, checkpoint
from farhorizon.policy.checkpoint import load_checkpoint, save_checkpoint
from farhorizon.policy.records import StageRecord, check_context, read_config, read_stage
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer

TOKENIZER = train_tokenizer(["one two\n"], 300)
CONFIG = PolicyConfig.tiny(vocab_size=300, hidden_size=32, num_hidden_layers=4)
STAGE = StageRecord(512, (128, 512), 1000, tokenizer_sha256(TOKENIZER), "runs/parent")
EXPERT = "model.layers.2.block_sparse_moe.experts.5.w2.weight"
BIAS = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"


def policy(seed: int = 0, config: PolicyConfig = CONFIG) -> Policy:
    torch.manual_seed(seed)
    made = Policy(config)
    for router in made.routers():
        router.e_score_correction_bias.normal_()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "policy", policy(), CONFIG, TOKENIZER, STAGE)


def edit(folder: Path, change) -> None:
    """Rewrite the weights after ``change(tensors)``."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_comes_back_bit_for_bit(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    expected = policy().state_dict()
    found = loaded.policy.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert loaded.stage == STAGE
    ids = torch.arange(7)[None]
    assert torch.equal(loaded.policy(ids).logits, policy()(ids).logits)
    assert loaded.policy.lm_head.weight.requires_grad
    assert tokenizer_sha256(loaded.tokenizer) == STAGE.tokenizer_sha256


def test_files_have_the_published_names_and_config(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert torch.equal(
            file.get_tensor(EXPERT),
            policy().state_dict()["model.layers.2.block_sparse_moe.experts.w2"][5],
        )
        assert file.get_tensor(BIAS).dtype == torch.float32
        assert list(file.get_tensor("model.layers.0.self_attn.q_conv1d.weight").shape)[1:] == [1, 4]
    assert not any(name.endswith(("experts.w1", "experts.w2", "experts.w3")) for name in names)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["architectures"] == ["KimiLinearForCausalLM"]
    assert fields["model_type"] == "kimi_linear" and fields["max_position_embeddings"] == 512
    assert fields["kv_lora_rank"] == 32 and fields["dtype"] == "float32"
    assert fields["eos_token_id"] == TOKENIZER.convert_tokens_to_ids("<|end_of_msg|>")


def test_bf16_parameters_keep_what_is_published_in_fp32(tmp_path: Path) -> None:
    wide = (".A_log", ".dt_bias", "_conv1d.weight", ".o_norm.weight", "e_score_correction_bias")
    half = policy().bfloat16()
    save_checkpoint(tmp_path / "half", half, CONFIG, TOKENIZER, STAGE)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_checkpoint(tmp_path / "half", dtype).policy.state_dict()
        assert torch.equal(loaded[BIAS], policy().state_dict()[BIAS])
        for name, tensor in loaded.items():
            assert tensor.dtype == (torch.float32 if name.endswith(wide) else dtype), name


def test_an_update_after_saving_reaches_the_next_save(tmp_path: Path) -> None:
    trained = policy()
    sender = trained.state_dict()
    with trained.routing_statistics():
        trained(torch.randint(0, 300, (1, 64)))
    trained.update_thresholds()
    save_checkpoint(tmp_path / "p", sender, CONFIG, TOKENIZER, STAGE)
    saved = load_checkpoint(tmp_path / "p").policy.state_dict()[BIAS]
    assert torch.equal(saved, trained.state_dict()[BIAS]) and bool(saved.any())
    assert not torch.equal(saved, policy().state_dict()[BIAS])


def test_shards_and_streams_hold_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 60_000)
    stream = iter(policy().state_dict().items())
    save_checkpoint(tmp_path / "p", stream, CONFIG, TOKENIZER, STAGE)
    shards = sorted(file.name for file in (tmp_path / "p").glob("model-*"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((tmp_path / "p" / name).stat().st_size < 70_000 for name in shards)
    found = load_checkpoint(tmp_path / "p").policy.state_dict()
    assert all(torch.equal(found[name], t) for name, t in policy().state_dict().items())
    (tmp_path / "p" / shards[1]).unlink()
    with pytest.raises(UserError, match=f"files missing: {shards[1]}"):
        load_checkpoint(tmp_path / "p")


def test_published_variants_load(folder: Path) -> None:
    def publish(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if name.endswith("0.self_attn.A_log"):
                tensor = torch.cat([tensor, torch.zeros(30)])
            tensors["language_model." + name] = tensor
        tensors["vision_tower.patch_embed.weight"] = torch.zeros(1)

    edit(folder, publish)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "kimi_k3", "text_config": fields})
    )
    found = load_checkpoint(folder).policy.state_dict()
    assert all(torch.equal(found[name], t) for name, t in policy().state_dict().items())


def test_missing_unknown_and_misshapen_tensors_are_listed(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[EXPERT], tensors[BIAS]
        tensors["model.stray"] = torch.zeros(1)

    edit(folder, spoil)
    with pytest.raises(UserError) as caught:
        load_checkpoint(folder)
    text = str(caught.value)
    assert f"missing: {BIAS}, {EXPERT}" in text and "unknown: model.stray" in text
    assert "\n" not in text

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT], tensors[BIAS] = torch.zeros(2, 3), torch.zeros(8)
        del tensors["model.stray"]

    edit(folder, reshape)
    with pytest.raises(UserError, match=r"5\.w2\.weight \[2, 3\] instead of \[16, 16\]"):
        load_checkpoint(folder)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_named(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or truncated"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        load_checkpoint(folder)


def write_config(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


# What does not change the result: one value is supported, names and ids, what only a new policy
# uses, and what published checkpoints leave out: an epsilon, and rounding while training.
OPTIONAL = {
    *("mla_use_nope", "moe_router_activation_func", "moe_renormalize", "use_grouped_topk"),
    *(
        "num_expert_group",
        "topk_group",
        "topk_method",
        "num_nextn_predict_layers",
        "tie_word_embeddings",
    ),
    *("num_key_value_heads", "initializer_range", "mla_norm_eps", "expert_fake_quant"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}


def test_every_missing_config_field_that_matters_is_named(tmp_path: Path) -> None:
    complete = CONFIG.to_dict()
    linear = complete["linear_attn_config"]
    assert read_config(write_config(tmp_path / "whole", complete)).to_dict() == complete
    for name in PolicyConfig.__annotations__.keys() - OPTIONAL:
        fields = {key: value for key, value in complete.items() if key != name}
        with pytest.raises(UserError, match=rf"config\.json: missing {name}\b"):
            read_config(write_config(tmp_path / name, fields))
    for name in linear:
        fields = complete | {"linear_attn_config": {k: linear[k] for k in linear if k != name}}
        with pytest.raises(UserError, match=rf"config\.json: .*linear_attn_config\.{name}\b"):
            read_config(write_config(tmp_path / f"linear-{name}", fields))


def test_a_kimi_linear_config_needs_no_gate_bound(tmp_path: Path) -> None:
    presets = Path(__file__).parents[2] / "configs" / "policy"
    for name in ("kimi-linear-48b", "k3"):
        fields = json.loads((presets / f"{name}.json").read_text())
        config = read_config(write_config(tmp_path / name, fields))
        assert config.gate_lower_bound == (-5.0 if name == "k3" else None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", 0),
        ("vocab_size", -1),
        ("vocab_size", 300.0),
        ("num_hidden_layers", "4"),
        ("moe_layer_freq", 0),
        ("tie_word_embeddings", True),
        ("mla_use_output_gate", 1),
        ("q_lora_rank", "32"),
        ("routed_scaling_factor", float("nan")),
        ("linear_attn_config", [1]),
        ("linear_attn_config.head_dim", 0),
        ("linear_attn_config.gate_lower_bound", -6.0),
        ("linear_attn_config.kda_layers", "123"),
    ],
)
def test_a_config_field_of_the_wrong_kind_is_named(folder: Path, field: str, value: Any) -> None:
    fields = json.loads((folder / "config.json").read_text())
    *path, name = field.split(".")
    place = fields[path[0]] if path else fields
    place[name] = value
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=rf"/config\.json: {field}=") as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_and_damaged_json_are_refused(folder: Path) -> None:
    train_tokenizer(["other\n"], 290).save_pretrained(folder)
    with pytest.raises(UserError, match="not the one the policy was trained with"):
        load_checkpoint(folder)
    (folder / "stage.json").write_text("")
    with pytest.raises(UserError, match=r"stage\.json: not JSON"):
        read_stage(folder)


def test_ids_beyond_the_vocabulary_are_refused_however_few_they_are(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["id"] += 100
    file.write_text(json.dumps(content))
    stage = json.loads((folder / "stage.json").read_text())
    (folder / "stage.json").write_text(json.dumps(stage | {"tokenizer_sha256": ""}))
    with pytest.raises(UserError, match=r"has tokens up to id \d+, config.json says voc"):
        load_checkpoint(folder)
    small = policy(config=PolicyConfig.tiny(vocab_size=299, hidden_size=32))
    with pytest.raises(UserError, match="has tokens up to id 299"):
        save_checkpoint(folder / "x", small, small.config, TOKENIZER, STAGE)
    assert not (folder / "x").exists()


def test_an_index_cannot_point_outside_its_folder(folder: Path) -> None:
    (folder / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../x"}}))
    with pytest.raises(UserError, match="does not name files of this folder"):
        load_checkpoint(folder)


def test_a_longer_run_than_trained_is_refused(folder: Path) -> None:
    check_context(folder, 512, allow_longer=False)
    check_context(folder, 513, allow_longer=True)
    with pytest.raises(UserError, match="context=513 is longer than the 512 tokens"):
        check_context(folder, 513, allow_longer=False)
    (folder / "stage.json").unlink()  # then the config says it
    check_context(folder, 512, allow_longer=False)
    with pytest.raises(UserError, match="513"):
        check_context(folder, 513, allow_longer=False)


def test_two_files_that_say_another_context_are_refused(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 4096}))
    with pytest.raises(UserError) as caught:
        check_context(folder, 64, allow_longer=False)
    assert str(caught.value) == (
        f"{folder}/stage.json: context=512, but config.json beside it says "
        "max_position_embeddings=4096; correct the one that is wrong"
    )


def test_an_incomplete_policy_is_not_saved(tmp_path: Path) -> None:
    weights = policy().state_dict()
    del weights[BIAS]
    with pytest.raises(ValueError, match=f"tensors missing: {BIAS}"):
        save_checkpoint(tmp_path / "p", weights, CONFIG, TOKENIZER, STAGE)
    assert not (tmp_path / "p").exists()


def test_saving_again_replaces_the_folder_and_leaves_nothing_behind(folder: Path) -> None:
    save_checkpoint(folder, policy(1), CONFIG, TOKENIZER, replace(STAGE, tokens_seen=2000))
    loaded = load_checkpoint(folder)
    assert loaded.stage.tokens_seen == 2000
    assert torch.equal(loaded.policy.lm_head.weight, policy(1).lm_head.weight)
    assert [entry.name for entry in folder.parent.iterdir()] == ["policy"]


def test_a_link_to_a_checkpoint_stays_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder.name)
    assert save_checkpoint(link, policy(1), CONFIG, TOKENIZER, STAGE) == link
    assert link.is_symlink()
    assert torch.equal(load_checkpoint(folder).policy.lm_head.weight, policy(1).lm_head.weight)
    assert {entry.name for entry in folder.parent.iterdir()} == {"policy", "link"}


def test_the_current_folder_is_not_replaced(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with contextlib.chdir(folder), pytest.raises(UserError, match="is the current folder"):
        save_checkpoint(".", policy(1), CONFIG, TOKENIZER, STAGE)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in folder.parent.iterdir()] == ["policy"]


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is no checkpoint"):
        save_checkpoint(tmp_path, policy(), CONFIG, TOKENIZER, STAGE)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["stages/", "checkpoints/", "state/", "run.json"])
def test_a_run_is_never_replaced(folder: Path, name: str) -> None:
    path = folder / name
    path.mkdir() if name.endswith("/") else path.touch()
    with pytest.raises(UserError, match=f"holds {path.name} of a run; choose another output"):
        save_checkpoint(folder, policy(1), CONFIG, TOKENIZER, STAGE)
    assert path.exists()


def test_notes_are_part_of_the_folder(folder: Path) -> None:
    save_checkpoint(folder, policy(), CONFIG, TOKENIZER, STAGE, notes={"metrics.jsonl": "{}\n"})
    assert (folder / "metrics.jsonl").read_text() == "{}\n"
    save_checkpoint(folder, policy(), CONFIG, TOKENIZER, STAGE)
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_any_moment_only_whole_folders_are_seen(tmp_path: Path) -> None:
    moments = random.Random(0)
    for attempt in range(8):
        child = os.fork()
        if child == 0:
            try:
                for number in range(1000):
                    save_checkpoint(
                        tmp_path / f"{attempt}-{number}", policy(), CONFIG, TOKENIZER, STAGE
                    )
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while not (tmp_path / f"{attempt}-0").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    whole = [entry for entry in tmp_path.iterdir() if not entry.name.startswith(".")]
    assert len(whole) >= 8
    for entry in whole:
        load_checkpoint(entry)
    # What was being written is removed by the next save of that name.
    for name in [entry.name.split(".")[1] for entry in tmp_path.iterdir() if entry.name[0] == "."]:
        save_checkpoint(tmp_path / name, policy(), CONFIG, TOKENIZER, STAGE)
    assert not any(entry.name.startswith(".") for entry in tmp_path.iterdir())
