"""What a checkpoint folder says of itself: every field of the right kind, or one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farhorizon.configs.errors import UserError
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.records import read_config, read_stage

STAGE = {"context": 512, "stages": [512], "tokens_seen": 0, "tokenizer_sha256": "", "parent": None}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context", -5, r"context=-5 must be a whole number of at least 0"),
        ("context", 3.7, r"context=3\.7 must be a whole number"),
        ("context", float("inf"), r"context=inf must be a whole number"),
        ("context", True, r"context=True must be a whole number"),
        ("stages", "123", r"stages='123' must be a list of whole numbers"),
        ("stages", [1, "2"], r"stages=\[1, '2'\] must be a list of whole numbers"),
        ("tokens_seen", None, r"tokens_seen=None must be a whole number"),
        ("tokenizer_sha256", 5, r"tokenizer_sha256=5 must be a text"),
        ("parent", [], r"parent=\[\] must be a text or null"),
    ],
)
def test_a_stage_field_of_the_wrong_kind_is_named(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    file = tmp_path / "stage.json"
    file.write_text(json.dumps(STAGE))
    assert read_stage(tmp_path).stages == (512,)
    file.write_text(json.dumps(STAGE | {field: value}))
    with pytest.raises(UserError, match=rf"stage\.json: {message}"):
        read_stage(tmp_path)


def test_json_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json: not JSON \(maximum recursion") as found:
        read_config(tmp_path)
    assert "\n" not in str(found.value)
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_config(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has files of no content")
def test_a_file_that_fails_to_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"config\.json: cannot be read \(Input/output error\)"):
        read_config(tmp_path)


def test_a_nested_config_must_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": "x"}')
    with pytest.raises(UserError, match=r"config\.json: text_config='x' must be an object"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"tensors that are not finite: lm_head\.weight"),
        (-float("inf"), r"tensors that are not finite: lm_head\.weight"),
        (1, r"lm_head\.weight has dtype I8, not floats"),
    ],
)
def test_values_that_are_no_weights_are_named(
    tiny_checkpoint: Path, tmp_path: Path, value: float, message: str
) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    dtype = torch.int8 if value == 1 else torch.float32
    tensors["lm_head.weight"] = torch.full(tensors["lm_head.weight"].shape, value, dtype=dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path)
