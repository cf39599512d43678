"""The vision tower against that of Kimi K2.5 in transformers, made equal in what differs.

K3's tower has RMSNorm where K2.5's has LayerNorm, no biases, and resamples positions bilinearly
where K2.5 does bicubically. With the norms exchanged, biases of 0 and bicubic positions here, the
two are one function: patches, positions, frames, rotations, attention, MLP and merging agree.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farhorizon.policy.vision import VisionTower
from farhorizon.policy.vision_config import VisionConfig

k25 = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")

WIDTH, HEADS, INNER, LAYERS = 24, 3, 40, 3
GRIDS = [(1, 4, 6), (1, 2, 2), (3, 4, 2), (1, 8, 8), (1, 4, 6)]


def test_the_tower_of_k25_with_our_norms_gives_the_same() -> None:
    torch.manual_seed(0)
    mine = VisionTower(
        VisionConfig(
            patch_size=5,
            init_pos_emb_height=8,
            init_pos_emb_width=8,
            vt_hidden_size=WIDTH,
            vt_intermediate_size=INNER,
            vt_num_hidden_layers=LAYERS,
            vt_num_attention_heads=HEADS,
            qkv_hidden_size=WIDTH,
            pos_emb_interpolation_mode="bicubic",
        )
    )
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig

    theirs = k25.Kimi_K25VisionModel(
        Kimi_K25VisionConfig(
            patch_size=5,
            pos_emb_height=8,
            pos_emb_width=8,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
        )
    )
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            parameter.normal_(1 if "norm" in name else 0, 0.3)
        share(mine, theirs)
        pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), 3, 5, 5)
        found = mine(pixels, GRIDS)
        wanted = theirs(pixels, torch.tensor(GRIDS)).pooler_output
    wanted = torch.cat(list(wanted)) if isinstance(wanted, list | tuple) else wanted
    assert found.shape == (6 + 1 + 2 + 16 + 6, 4 * WIDTH)
    assert float((found - wanted.reshape(found.shape)).abs().max()) < 1e-5


def share(mine: VisionTower, theirs: nn.Module) -> None:
    """Our weights in their model; there the two halves of a head turn, here neighbours do."""
    for parameter in theirs.parameters():
        parameter.zero_()
    embed = mine.patch_embed
    theirs.patch_embed.proj.weight.copy_(embed.proj.weight)  # type: ignore[union-attr]
    theirs.patch_embed.pos_emb.position_embeddings.copy_(embed.pos_emb.weight)  # type: ignore[union-attr]
    head = WIDTH // HEADS
    halves = [*range(0, head, 2), *range(1, head, 2)]
    for own, other in zip(mine.encoder.blocks, theirs.layers, strict=True):  # type: ignore[arg-type]
        q, k, v = own.wqkv.weight.view(3, HEADS, head, WIDTH)
        for weight, target in ((q, other.attn.q_proj), (k, other.attn.k_proj)):
            target.weight.copy_(weight[:, halves].reshape(WIDTH, WIDTH))
        other.attn.v_proj.weight.copy_(v.reshape(WIDTH, WIDTH))
        other.attn.proj.weight.copy_(own.wo.weight)
        other.mlp.fc1.weight.copy_(own.mlp.fc0.weight)
        other.mlp.fc2.weight.copy_(own.mlp.fc1.weight)
        other.norm1, other.norm2 = plain(own.norm0), plain(own.norm1)
    theirs.final_layernorm = plain(mine.encoder.final_layernorm)


def plain(norm: nn.Module) -> nn.RMSNorm:
    """torch's own norm, with the epsilon that it takes for none."""
    made = nn.RMSNorm(WIDTH)
    made.weight.copy_(norm.weight)  # type: ignore[arg-type]
    return made
