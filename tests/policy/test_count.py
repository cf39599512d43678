"""Sizes by arithmetic against hand-computed numbers and against what policies really hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from farhorizon.policy import DecodeState, Policy, PolicyConfig
from farhorizon.policy.count import (
    LearnerSizes,
    activation_bytes,
    count_parameters,
    count_vision,
    learner_sizes,
    state_sizes,
)

PRESETS = Path(__file__).parents[2] / "configs" / "policy"


def preset(name: str, **changes: int) -> PolicyConfig:
    return PolicyConfig.from_dict(json.loads((PRESETS / f"{name}.json").read_text()) | changes)


def test_k3_holds_what_its_report_says() -> None:
    half, full = (state_sizes(preset("k3"), itemsize) for itemsize in (2, 4))
    assert half.per_token == 24 * (512 + 64) * 2 == 27648
    recurrent = 69 * 96 * 128 * 128 * 4
    assert recurrent == 414 * 2**20
    assert half.fixed == recurrent + 69 * 3 * 3 * 12288 * 2
    assert full.fixed == recurrent + 69 * 3 * 3 * 12288 * 4 and full.per_token == 55296
    assert half.of(1 << 20) == half.fixed + 27 * 2**30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_sizes_are_those_of_a_decode_state(dtype: torch.dtype) -> None:
    config = PolicyConfig.tiny(vocab_size=64, num_hidden_layers=6)
    policy = Policy(config).to(dtype).eval()  # type: ignore[arg-type] - Module.to
    state = DecodeState.empty(config, 3, dtype=dtype)
    sizes = state_sizes(config, dtype.itemsize)
    assert state.nbytes == 3 * sizes.fixed
    with torch.no_grad():
        policy(torch.arange(3 * 40).view(3, 40) % 64, state=state)
    assert state.nbytes == 3 * sizes.of(40)


def test_weight_bytes_keep_gates_and_convolutions_in_fp32() -> None:
    counts = count_parameters(preset("k3"))
    wide = 69 * (3 * 12288 * 4 + 96 + 12288 + 128)
    assert counts.wide == wide
    assert counts.weight_bytes(2) == 2 * counts.total + 2 * wide
    assert counts.weight_bytes(4) == 4 * counts.total


def seeing(text: PolicyConfig, **sizes: int) -> PolicyConfig:
    """The policy with a vision tower beside it, K3's but for ``sizes``."""
    nested = {"model_type": "kimi_k3", "text_config": text.to_dict(), "vision_config": sizes}
    return PolicyConfig.from_dict(nested | {"media_placeholder_token_id": 5})


def test_the_tower_of_k3_has_about_401_million_parameters() -> None:
    parts = count_vision(seeing(preset("k3")))
    block = 2 * 1024 + 1024 * 3 * 1536 + 1536 * 1024 + 2 * 1024 * 4096
    assert parts["vision tower"] == 1024 * (588 + 4096) + 27 * block + 1024 == 401_214_464
    assert parts["projector"] == 4096 * 4096 + 4096 * 7168 + 7168
    assert count_vision(preset("k3")) == {}


def test_a_tower_is_counted_as_it_is_built() -> None:
    text = PolicyConfig.tiny(vocab_size=64)
    sizes = {"patch_size": 3, "init_pos_emb_height": 4, "init_pos_emb_width": 5}
    sizes |= {"vt_hidden_size": 12, "vt_intermediate_size": 20, "vt_num_hidden_layers": 3}
    config = seeing(text, **sizes, vt_num_attention_heads=2, qkv_hidden_size=16)
    policy = Policy(config, vision=True)
    modules = {"vision tower": policy.vision_tower, "projector": policy.mm_projector}
    built = {n: sum(p.numel() for p in m.parameters()) for n, m in modules.items()}
    assert count_vision(config) == built
    assert count_parameters(config) == count_parameters(text)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, LearnerSizes(4000, 4000, 8000)),
        (1, LearnerSizes(4000, 4000, 3000)),
        (2, LearnerSizes(4000, 1000, 3000)),
        (3, LearnerSizes(1000, 1000, 3000)),
    ],
)
def test_zero_shards_what_its_stage_says(stage: int, expected: LearnerSizes) -> None:
    assert learner_sizes(1000, 4, stage) == expected
    assert learner_sizes(1000, 4, stage).total == sum(
        (expected.weights, expected.gradients, expected.optimizer)
    )
    assert learner_sizes(1001, 4, 3).weights == 251 * 4  # a rank cannot hold part of a number


@pytest.mark.parametrize(("name", "tokens"), [("tiny", 256), ("small", 64)])
def test_activations_are_about_what_a_forward_keeps(name: str, tokens: int) -> None:
    config = preset(name, vocab_size=64)
    policy = Policy(config)
    owned = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = policy.model(torch.arange(tokens)[None] % 64)
    measured = sum(storage.nbytes() for storage in kept.values()) / tokens
    assert out is not None
    assert 1 <= activation_bytes(config) / measured < 2.5  # a CPU keeps half


def test_of_layers_that_are_computed_again_the_inputs_are_kept() -> None:
    config, tokens = preset("tiny", vocab_size=64), 64
    # outputs of KDA 418, MLA 368, dense MLP 320 and experts 424: the largest layer has 842
    inputs, attention = 4 * 2 * 64, 2 * (32 + 1)
    assert activation_bytes(config, "layers") == 4 * (inputs + attention + 5 * 842)
    policy = Policy(config)
    policy.checkpointing = "layers"
    kept: dict[int, torch.UntypedStorage] = {}

    def look(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
        blocks, *sums = given[:3]
        for tensor in (*blocks, *(one for one in sums if one is not None)):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()

    for layer in policy.model.layers:
        layer.register_forward_pre_hook(look)
    out = policy.model(torch.arange(tokens)[None] % 64)
    assert out is not None
    measured = sum(storage.nbytes() for storage in kept.values()) / tokens
    assert 1 <= 4 * inputs / measured < 1.5
