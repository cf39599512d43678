"""The vision tower against its formulas, image by image; its place in the policy and in files."""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farhorizon.configs.errors import UserError
from farhorizon.policy import DecodeState, Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_policy, save_checkpoint, save_policy
from farhorizon.policy.records import StageRecord, parse_config, read_config
from farhorizon.policy.tokenizer import load_tokenizer, tokenizer_sha256, train_tokenizer
from farhorizon.policy.vision_config import ImageRules, VisionConfig

PAD = 61
VISION: dict[str, Any] = {
    **{"patch_size": 3, "init_pos_emb_height": 4, "init_pos_emb_width": 5, "init_pos_emb_time": 3},
    **{"pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear"},
    **{"vt_num_attention_heads": 2, "vt_num_hidden_layers": 3, "vt_hidden_size": 12},
    **{"vt_intermediate_size": 20, "qkv_hidden_size": 16, "merge_kernel_size": [2, 2]},
    **{"merge_type": "sd2_tpool", "norm_type": "rmsnorm", "mlp_type": "mlp2"},
    **{"attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False},
    **{"activation_func": "gelu_pytorch_tanh", "mm_projector_type": "patchmergerv2"},
    **{"mm_hidden_size": 12, "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5},
    "text_hidden_size": 32,
}
GRIDS = [(1, 2, 4), (1, 4, 5 + 1), (2, 2, 2), (1, 2, 4)]


def fields(**changes: Any) -> dict[str, Any]:
    text = PolicyConfig.tiny(vocab_size=300, hidden_size=32, num_hidden_layers=2).to_dict()
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "media_placeholder_token_id": PAD,
        "text_config": text,
        "vision_config": VISION | changes,
    }


def made(dtype: torch.dtype = torch.float64, **changes: Any) -> Policy:
    """A policy whose every weight matters: norms far from 1, positions far from 0."""
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.from_dict(fields(**changes)), vision=True)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.startswith(("vision_tower", "mm_projector")):
                parameter.normal_(1 if "norm" in name else 0, 0.4)
    return policy.to(dtype).eval()  # type: ignore[arg-type] - Module.to


def patches(grids: list[tuple[int, int, int]], dtype: torch.dtype = torch.float64) -> Tensor:
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, 3, 3, 3, generator=torch.Generator().manual_seed(1)).to(dtype)


# The tower once more, written down from the formulas: one image, one patch at a time.


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def position(
    table: Tensor, frame: int, row: int, column: int, grid: tuple[int, int, int]
) -> Tensor:
    """Bilinear between the four nearest entries, cell centres on cell centres."""
    t, h, w = grid
    rows, columns, width = table.shape
    y = min(max((row + 0.5) * rows / h - 0.5, 0), rows - 1)
    x = min(max((column + 0.5) * columns / w - 0.5, 0), columns - 1)
    top, left = int(y), int(x)
    low, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
    a, b = y - top, x - left
    out = (1 - a) * ((1 - b) * table[top, left] + b * table[top, right])
    out = out + a * ((1 - b) * table[low, left] + b * table[low, right])
    if t > 1:
        half = width // 2
        angles = [frame * 10000 ** (-i / half) for i in range(half)]
        out = out + torch.tensor(
            [math.sin(x) for x in angles] + [math.cos(x) for x in angles], dtype=out.dtype
        )
    return out


def turned(x: Tensor, row: int, column: int) -> Tensor:
    """One head of one patch; neighbours are a complex number, turned by column, row, column ..."""
    out = x.clone()
    for pair in range(len(x) // 2):
        angle = (row if pair % 2 else column) * 10000 ** (-4 * (pair // 2) / len(x))
        real, imaginary = x[2 * pair], x[2 * pair + 1]
        out[2 * pair] = real * math.cos(angle) - imaginary * math.sin(angle)
        out[2 * pair + 1] = real * math.sin(angle) + imaginary * math.cos(angle)
    return out


def naive(policy: Policy, image: Tensor, grid: tuple[int, int, int]) -> Tensor:
    w = {n: p.detach() for n, p in policy.named_parameters()}
    t, rows, columns = grid
    places = [(f, r, c) for f in range(t) for r in range(rows) for c in range(columns)]
    embed = "vision_tower.patch_embed"
    x = torch.stack(
        [
            (w[f"{embed}.proj.weight"] * patch).sum((1, 2, 3))
            + position(w[f"{embed}.pos_emb.weight"], *place, grid)
            for patch, place in zip(image, places, strict=True)
        ]
    )
    heads, head = 2, 8
    for layer in range(3):
        block = f"vision_tower.encoder.blocks.{layer}"
        qkv = norm(x, w[f"{block}.norm0.weight"], 2**-23) @ w[f"{block}.wqkv.weight"].T
        out = torch.zeros(len(x), heads * head, dtype=x.dtype)
        for h in range(heads):
            at = [slice(part * 16 + h * head, part * 16 + (h + 1) * head) for part in range(3)]
            q = torch.stack([turned(a[at[0]], *p[1:]) for a, p in zip(qkv, places, strict=True)])
            k = torch.stack([turned(a[at[1]], *p[1:]) for a, p in zip(qkv, places, strict=True)])
            weights = (q @ k.T / head**0.5).softmax(-1)
            out[:, h * head : (h + 1) * head] = weights @ qkv[:, at[2]]
        x = x + out @ w[f"{block}.wo.weight"].T
        inner = norm(x, w[f"{block}.norm1.weight"], 2**-23) @ w[f"{block}.mlp.fc0.weight"].T
        wave = torch.tanh((2 / math.pi) ** 0.5 * (inner + 0.044715 * inner**3))
        x = x + (0.5 * inner * (1 + wave)) @ w[f"{block}.mlp.fc1.weight"].T
    x = norm(x, w["vision_tower.encoder.final_layernorm.weight"], 2**-23)
    by_place = dict(zip(places, x, strict=True))
    merged = []
    for r in range(0, rows, 2):
        for c in range(0, columns, 2):
            four = [(r, c), (r, c + 1), (r + 1, c), (r + 1, c + 1)]
            means = [sum(by_place[f, *p] for f in range(t)) / t for p in four]
            merged.append(torch.cat(means))  # type: ignore[arg-type]
    y = torch.stack(merged) @ w["mm_projector.proj.0.weight"].T
    y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    y = y @ w["mm_projector.proj.2.weight"].T
    return norm(y, w["mm_projector.post_norm.weight"], 1e-5)


def test_packed_images_are_what_the_formulas_say() -> None:
    policy = made()
    pixels = patches(GRIDS)
    found = policy.encode_images(pixels, GRIDS)
    split = pixels.split([t * h * w for t, h, w in GRIDS])
    wanted = [naive(policy, image, grid) for image, grid in zip(split, GRIDS, strict=True)]
    assert [len(rows) for rows in wanted] == [2, 6, 1, 2]
    assert float((found - torch.cat(wanted)).detach().abs().max()) < 1e-12
    alone = policy.encode_images(split[1], torch.tensor([GRIDS[1]]))
    assert float((alone - found[2:8]).detach().abs().max()) < 1e-12
    single = made(torch.float32)
    again = single.encode_images(pixels.float(), GRIDS)
    assert float((again.double() - found).detach().abs().max()) < 1e-4
    half = made(torch.bfloat16).encode_images(pixels, GRIDS)
    assert half.dtype == torch.bfloat16
    assert float((half.double() - found).detach().abs().mean()) < 0.05


def test_a_grid_of_the_size_of_the_table_is_the_table() -> None:
    policy = made(init_pos_emb_height=4, init_pos_emb_width=6)
    table = policy.vision_tower.patch_embed.pos_emb
    assert torch.equal(table([(1, 4, 6)]), table.weight.flatten(0, 1))


def test_parameters_of_k3_are_those_of_its_files() -> None:
    published = {n: v for n, v in fields().items() if n != "vision_config"}
    text = published["text_config"] | {"hidden_size": 7168, "vocab_size": 163840}
    config = PolicyConfig.from_dict(
        published | {"text_config": text, "vision_config": {}, "media_placeholder_token_id": 163605}
    )
    with torch.device("meta"):
        policy = Policy(config, vision=True)
    assert sum(p.numel() for p in policy.vision_tower.parameters()) == 401_214_464
    assert sum(p.numel() for p in policy.mm_projector.parameters()) == 46_144_512
    names = {n: tuple(p.shape) for n, p in policy.named_parameters()}
    block = "vision_tower.encoder.blocks.26"
    for name, shape in {
        "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
        f"{block}.norm0.weight": (1024,),
        f"{block}.norm1.weight": (1024,),
        f"{block}.wqkv.weight": (4608, 1024),
        f"{block}.wo.weight": (1024, 1536),
        f"{block}.mlp.fc0.weight": (4096, 1024),
        f"{block}.mlp.fc1.weight": (1024, 4096),
        "vision_tower.encoder.final_layernorm.weight": (1024,),
        "mm_projector.proj.0.weight": (4096, 4096),
        "mm_projector.proj.2.weight": (7168, 4096),
        "mm_projector.post_norm.weight": (7168,),
    }.items():
        assert names.pop(name) == shape, name
    assert sum(n.startswith(("vision_tower", "mm_projector")) for n in names) == 26 * 6
    with torch.device("meta"):
        text_only = Policy(config)
    assert not any(n.startswith(("vision", "mm_")) for n in text_only.state_dict())


def ids_with(counts: list[int]) -> Tensor:
    """Words around as many placeholders as each image needs."""
    ids: list[int] = [3]
    for number, count in enumerate(counts):
        ids += [PAD] * count + [5 + number]
    return torch.tensor(ids)


def test_features_stand_where_the_placeholders_are() -> None:
    policy = made()
    pixels, ids = patches(GRIDS), ids_with([2, 6, 1, 2])
    features = policy.encode_images(pixels, GRIDS)
    embedded = policy.model.embed_tokens(ids)
    embedded = torch.where((ids == PAD)[:, None], 0, embedded)
    embedded[ids == PAD] = features
    wanted = {}

    def swap(_: Any, __: Any, output: Tensor) -> Tensor:
        return embedded.view_as(output)

    hook = policy.model.embed_tokens.register_forward_hook(swap)
    wanted = policy(ids[None]).logits
    hook.remove()
    found = policy(ids[None], pixel_values=pixels, grid_thws=GRIDS).logits
    assert torch.equal(found, wanted)
    # packed: each sequence has its own images; the rows may be given, or features made before
    edges = torch.tensor([0, len(ids), 2 * len(ids)])
    twice = torch.cat([ids, ids])[None]
    rows = (twice[0] == PAD).nonzero().flatten()
    for images in (
        {"pixel_values": torch.cat([pixels, pixels]), "grid_thws": GRIDS * 2},
        {"image_features": torch.cat([features, features]), "image_rows": rows},
    ):
        both = policy(twice, edges, **images).logits[0]
        assert float((both - torch.cat([wanted, wanted], 1)[0]).detach().abs().max()) < 1e-12
    # in pieces, an image cut in two
    state = DecodeState.empty(policy.config, 1, dtype=torch.float64)
    parts = []
    for some in (slice(0, 5), slice(5, 9), slice(9, len(ids))):
        at = (ids[some] == PAD).nonzero().flatten()
        first = int((ids[: some.start] == PAD).sum())
        mine = features[first : first + len(at)]
        out = policy(ids[None, some], state=state, image_features=mine, image_rows=at)
        parts.append(out.logits)
    assert float((torch.cat(parts, 1) - wanted).detach().abs().max()) < 1e-10
    # a placeholder that the policy itself sampled is a token like any other
    more = torch.cat([ids, torch.tensor([PAD, 4])])[None]
    where = (ids == PAD).nonzero().flatten()
    out = policy(more, image_features=features, image_rows=where).logits
    assert torch.allclose(out[:, : len(ids)], wanted, atol=1e-10)


def test_features_stand_at_the_rows_in_their_order() -> None:
    policy = made()
    ids, order = torch.randint(3, PAD, (1, 12)), torch.tensor([2, 3, 0, 1])
    features, rows = torch.randn(4, 32, dtype=torch.float64), torch.tensor([6, 7, 1, 2])
    out = policy(ids, image_features=features, image_rows=rows).logits
    again = policy(ids, image_features=features[order], image_rows=rows[order]).logits
    assert torch.equal(out, again)
    other = policy(ids, image_features=features, image_rows=rows.sort().values).logits
    assert not torch.allclose(out, other)
    # rows of the input as it was given, though what is hidden is not run
    both = torch.cat([ids, ids])
    mask = torch.ones_like(both)
    mask[0, 9:] = 0
    padded = policy(both, attention_mask=mask, image_features=features, image_rows=rows + 12).logits
    assert torch.allclose(padded[1], out[0], atol=1e-12)
    for wrong in ([6, 7, 1, 24], [6, 7, 1, -1], [6, 7, 1, 6], [6, 7, 1, 9]):
        with pytest.raises(UserError, match=r"image_rows: each row must be another one of the 24"):
            policy(
                both,
                attention_mask=mask,
                image_features=features,
                image_rows=torch.tensor(wrong),
            )
    with pytest.raises(UserError, match="image_rows has 3 rows, the images need 4"):
        policy(ids, image_features=features, image_rows=rows[:3])


def test_padding_and_rows_of_equal_length_carry_images() -> None:
    policy = made()
    pixels, ids = patches(GRIDS[:1]), ids_with([2])
    wanted = policy(ids[None], pixel_values=pixels, grid_thws=GRIDS[:1]).logits[0]
    padded = torch.stack([torch.cat([torch.tensor([7, 8]), ids[:2] * 0]), ids])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    out = policy(padded, attention_mask=mask, pixel_values=pixels, grid_thws=GRIDS[:1])
    assert torch.allclose(out.logits[1], wanted, atol=1e-12)


def test_gradients_reach_the_tower_with_and_without_images() -> None:
    policy = made(torch.float32).train()
    ids = ids_with([2])
    pixels = patches(GRIDS[:1], torch.float32)
    tower = [p for n, p in policy.named_parameters() if n.startswith(("vision", "mm_"))]
    policy(ids[None], pixel_values=pixels, grid_thws=GRIDS[:1], labels=ids[None]).loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in tower)
    text = torch.tensor([[3, 4, 5, 6]])
    plain = policy(text).logits
    policy.zero_grad()
    none = torch.zeros(0, 3, 3, 3)
    out = policy(text, pixel_values=none, grid_thws=[], labels=text)
    assert torch.equal(out.logits, plain)
    out.loss.backward()
    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in tower)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid_thws": [(1, 2, 3)]}, "image 0 has 1 x 2 x 3 patches; rows and columns must be"),
        ({"grid_thws": [(4, 2, 2)]}, "image 0 has 4 x 2 x 2 patches; .* frames 1 to 3"),
        ({"grid_thws": [(1, 0, 2)]}, "image 0 has 1 x 0 x 2 patches"),
        ({"grid_thws": [(1, 2)]}, "grid_thws: each image needs three numbers"),
        ({"grid_thws": [(1, 2, 2)]}, r"pixel_values has shape \[8, 3, 3, 3\], .* \[4, 3, 3, 3\]"),
        ({"pixel_values": torch.zeros(8, 3, 3, 3, dtype=torch.uint8)}, "dtype uint8, not floats"),
        ({"input_ids": torch.tensor([[3, PAD, 4]])}, "1 placeholders of images, the images need 2"),
        ({"input_ids": ids_with([3])[None]}, "3 placeholders of images, the images need 2"),
    ],
)
def test_images_that_do_not_fit_are_one_line(change: dict[str, Any], message: str) -> None:
    given = {"input_ids": ids_with([2])[None], "pixel_values": patches(GRIDS[:1])}
    with pytest.raises(UserError, match=message) as found:
        made()(**(given | {"grid_thws": GRIDS[:1]} | change))
    assert "\n" not in str(found.value)


def test_a_policy_without_a_tower_says_how_to_get_one() -> None:
    policy = Policy(PolicyConfig.from_dict(fields()))
    with pytest.raises(UserError, match=r"without its vision tower \(vision=True"):
        policy(ids_with([2])[None], pixel_values=patches(GRIDS[:1]), grid_thws=GRIDS[:1])
    with pytest.raises(ValueError, match="has no vision_config"):
        Policy(PolicyConfig.tiny(), vision=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vt_hidden_size": 0}, "vision_config.vt_hidden_size=0 must be a whole number"),
        ({"patch_size": "14"}, "vision_config.patch_size='14' must be a whole number"),
        (
            {"qkv_hidden_size": 20},
            "qkv_hidden_size=20 must be a multiple of 4 x vt_num_attention_h",
        ),
        ({"merge_kernel_size": [2, 3]}, "merge_kernel_size=.2, 3. must be two equal numbers"),
        ({"merge_type": "mean"}, "merge_type='mean' must be 'sd2_tpool', nothing else"),
        ({"norm_type": "layernorm"}, "norm_type='layernorm' must be 'rmsnorm'"),
        ({"attn_bias": True}, "attn_bias=True must be False"),
        ({"mm_hidden_size": 13}, "mm_hidden_size=13 must be 12"),
        ({"projector_ln_eps": 0}, "projector_ln_eps=0 must be a positive number"),
        ({"pos_emb_interpolation_mode": "area"}, "'area' must be one of bilinear, bicubic"),
    ],
)
def test_a_wrong_vision_config_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        parse_config(Path("config.json"), fields(**change))
    assert "\n" not in str(found.value)
    with pytest.raises(UserError, match="vision_config=3 must be an object"):
        parse_config(Path("config.json"), fields() | {"vision_config": 3})


def test_what_only_the_tower_needs_is_asked_of_it_alone() -> None:
    for change, message in (
        (
            {"vision_config": VISION | {"text_hidden_size": 64}},
            "text_hidden_size=64 must be hidden",
        ),
        ({"media_placeholder_token_id": 300}, "media_placeholder_token_id=300 must be a token of"),
    ):
        config = PolicyConfig.from_dict(fields() | change)
        Policy(config)
        with pytest.raises(ValueError, match=message):
            Policy(config, vision=True)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A nested folder whose tower is bfloat16 beside a text policy of fp32."""
    policy = made(torch.float32)
    policy.save_pretrained(tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    tensors = {
        n: t.bfloat16() if n.startswith(("vision", "mm_")) else t for n, t in tensors.items()
    }
    rules = {"media_proc_cfg": {"patch_size": 3, "in_patch_limit": 64}, "auto_map": {"x": "y"}}
    written = write(tmp_path / "k3", fields(), tensors)
    (written / "preprocessor_config.json").write_text(json.dumps(rules))
    return written


def same_files(a: Path, b: Path) -> None:
    first, second = (load_file(x / "model.safetensors") for x in (a, b))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def test_the_tower_is_written_back_bit_for_bit_whether_it_was_built_or_not(
    folder: Path, tmp_path: Path
) -> None:
    names = set(load_file(folder / "model.safetensors"))
    assert "vision_tower.encoder.blocks.2.mlp.fc1.weight" in names
    assert "language_model.lm_head.weight" in names
    for vision in (True, False):
        policy = Policy.from_pretrained(folder, vision=vision)
        assert any(n.startswith("vision_tower") for n in policy.state_dict()) is vision
        policy.save_pretrained(tmp_path / f"again-{vision}")
        same_files(folder, tmp_path / f"again-{vision}")
        for file in ("config.json", "preprocessor_config.json"):
            texts = [
                json.loads((x / file).read_text()) for x in (folder, tmp_path / f"again-{vision}")
            ]
            assert texts[0].get("vision_config") == texts[1].get("vision_config")
            assert file == "config.json" or texts[0] == texts[1]
    asked = load_policy(folder, torch.float32, vision=True)
    assert {p.dtype for p in asked.parameters()} == {torch.float32}


def test_checkpoints_of_a_run_hand_the_tower_on(folder: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c"], 300, style="full")
    policy = load_policy(folder)
    config = policy.config
    stage = StageRecord(64, (64,), 0, tokenizer_sha256(tokenizer))
    kept, new = load_file(folder / "model.safetensors"), folder
    for step in range(3):  # each one replaces the one before, as a run keeps few of them
        old = new
        new = save_checkpoint(
            tmp_path / f"saving-{step}", policy.state_dict(), config, tokenizer, stage
        )
        new = new.rename(tmp_path / f"step-{step}")
        shutil.rmtree(old)
    found = load_file(new / "model.safetensors")
    assert found.keys() == kept.keys() and all(torch.equal(found[n], kept[n]) for n in kept)
    assert read_config(new).image_rules == ImageRules(3, 2, patch_limit=64)
    assert len(load_tokenizer(new)) == 300
    other = pickle.loads(pickle.dumps(load_policy(new).config))  # as another process has it
    shutil.rmtree(new)
    del policy
    save_policy(tmp_path / "last", Policy(copy.deepcopy(config)))
    save_policy(tmp_path / "other", Policy(other))
    for name in ("last", "other"):
        found = load_file(tmp_path / name / "model.safetensors")
        tower = [n for n in kept if n.startswith(("vision_tower", "mm_projector"))]
        assert all(torch.equal(found[n], kept[n]) for n in tower)


def test_towers_that_are_not_whole_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    text = {n: t for n, t in tensors.items() if not n.startswith(("vision", "mm_"))}
    none = write(tmp_path / "none", fields(), text)
    for vision in (True, False):
        with pytest.raises(UserError, match=r"vision|tensors missing") as found:
            load_policy(none, vision=vision)
        assert "\n" not in str(found.value)
    without = write(
        tmp_path / "text", {k: v for k, v in fields().items() if k != "vision_config"}, text
    )
    load_policy(without)
    with pytest.raises(UserError, match="has no vision_config: the policy sees no images"):
        load_policy(without, vision=True)
    torn = {n: t for n, t in tensors.items() if n != "mm_projector.post_norm.weight"}
    torn["vision_tower.stray"] = torch.zeros(1)
    with pytest.raises(UserError, match=r"missing: mm_projector.*unknown: vision_tower\.stray"):
        load_policy(write(tmp_path / "torn", fields(), torn), vision=True)
    wrong = tensors | {"vision_tower.patch_embed.pos_emb.weight": torch.zeros(4, 4, 12)}
    with pytest.raises(UserError, match=r"pos_emb\.weight \[4, 4, 12\] instead of \[4, 5, 12\]"):
        load_policy(write(tmp_path / "wrong", fields(), wrong), vision=True)
    fresh = Policy(PolicyConfig.from_dict(fields()))
    with pytest.raises(UserError, match="made without a vision tower; make it with vision=True"):
        fresh.save_pretrained(tmp_path / "fresh")
    half = made(torch.float32).state_dict()
    del half["mm_projector.post_norm.weight"]
    tokenizer = train_tokenizer(["a b c"], 300, style="full")
    with pytest.raises(ValueError, match=r"tensors missing: mm_projector\.post_norm\.weight"):
        save_checkpoint(tmp_path / "half", half, fresh.config, tokenizer, StageRecord(1, (), 0, ""))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"patch_size": 14}, "media_proc_cfg.patch_size=14 must be 3, as config.json's vision"),
        ({"merge_kernel_size": 1}, "media_proc_cfg.merge_kernel_size=1 must be 2"),
        ({"in_patch_limit": 0}, "media_proc_cfg.in_patch_limit=0 must be a whole number"),
        ({"fixed_output_tokens": 4}, "media_proc_cfg.fixed_output_tokens=4 must be null"),
        ({"image_std": [1, 1]}, r"media_proc_cfg.image_std=\[1, 1\] must be three numbers"),
        ({"image_std": [1, float("nan"), 1]}, "media_proc_cfg.image_std=.* must be three numbers"),
        ({"image_mean": [float("inf"), 0, 0]}, "media_proc_cfg.image_mean=.* three numbers"),
        ({"image_mean": [10**400, 0, 0]}, "media_proc_cfg.image_mean=.* three numbers"),
        ({"merge_kernel_size": [2, 3]}, r"media_proc_cfg.merge_kernel_size=\[2, 3\] must be 2"),
        ({"image_std": [1, 0, 1]}, r"media_proc_cfg.image_std=\[1, 0, 1\] must be positive"),
    ],
)
def test_rules_for_images_that_contradict_the_tower_are_named(
    folder: Path, rules: dict[str, Any], message: str
) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({"media_proc_cfg": rules}))
    with pytest.raises(UserError, match=message) as found:
        load_policy(folder)
    assert "\n" not in str(found.value) and str(file) in str(found.value)
    file.write_text("{")
    with pytest.raises(UserError, match=r"preprocessor_config\.json: not JSON"):
        load_policy(folder)


def test_what_a_file_does_not_say_is_as_in_k3() -> None:
    vision = VisionConfig.of({})
    assert (vision.head_dim, vision.merge, vision.vt_num_hidden_layers) == (128, 2, 27)
    assert ImageRules.of(None, vision) == ImageRules(14, 2, 65536, 512)
    rules = ImageRules(14, 2, 4096, 128, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    assert ImageRules.of(rules.published(), vision) == rules
