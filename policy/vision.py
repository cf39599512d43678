"""The vision tower MoonViT-V2 and its projector: patches of images as rows of the text policy.

Formulas as in the Kimi K3 report (arXiv:2607.24653, 2.4 and table 1) and, where it leaves them
open, as the released modelling code has them in its public ports (NVIDIA-NeMo/Automodel
``kimi_k3/vision.py``, vLLM 0.33 ``kimi_k25_vit.py``): RMSNorm without an epsilon of its own, which
torch takes for that of fp32; the tanh form of GELU in the tower and the exact one in the
projector; one attention over all patches of an image, where the report speaks of passes over space
and time.

Images of any sizes are packed: ``pixel_values [P, 3, p, p]`` are all patches of all images, row by
row, and ``grid_thws`` says of each image how many frames, rows and columns of patches it has.
Shapes: P patches, M rows of the text policy, W width of the tower, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..configs.errors import UserError
from ..kernels.precision import widen
from .attention import RMSNorm
from .layout import Layout
from .vision_config import VisionConfig

EPS = 2.0**-23  # of fp32, in every precision
THETA = 10000.0
NO_TOWER = "images: the policy was loaded without its vision tower (vision=True builds it)"

Grid = tuple[int, int, int]


class PositionTable(nn.Module):
    """Learned positions ``weight [rows, columns, W]``, resampled to the grid of each image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size
        self.weight = nn.Parameter(torch.zeros(size))
        self.mode = config.pos_emb_interpolation_mode

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """``[P, W]`` in fp32; frames of a clip differ by sines and cosines of their number."""
        table = widen(self.weight)
        made: dict[Grid, Tensor] = {}
        for t, h, w in dict.fromkeys(grids):
            flat = table
            if (h, w) != table.shape[:2]:
                flat = F.interpolate(table.permute(2, 0, 1)[None], size=(h, w), mode=self.mode)
                flat = flat[0].permute(1, 2, 0)
            frames = flat.reshape(1, h * w, -1)
            if t > 1:
                frames = frames + _frame_waves(t, table)[:, None]
            made[t, h, w] = frames.flatten(0, 1)
        return torch.cat([made[grid] for grid in grids])


class PatchEmbed(nn.Module):
    """Patches as vectors, with their positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(3, config.vt_hidden_size, size, stride=size, bias=False)
        self.pos_emb = PositionTable(config)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[P, 3, p, p]`` -> ``[P, W]``."""
        x = self.proj(pixel_values).flatten(1)
        return (x + self.pos_emb(grids)).to(x.dtype)


class TowerMLP(nn.Module):
    """Two linear maps around the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class TowerBlock(nn.Module):
    """Attention within each image, then an MLP, both on a norm and added to their input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.heads, self.head_dim = config.vt_num_attention_heads, config.head_dim
        self.norm0 = RMSNorm(width, EPS)
        self.norm1 = RMSNorm(width, EPS)
        self.wqkv = nn.Linear(width, 3 * inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.mlp = TowerMLP(config)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], alike: list[Tensor]) -> Tensor:
        """``x [P, W]``; ``turns`` are `rotations`, ``alike`` the patches of images of one size."""
        x = x + self.wo(self._attend(self.wqkv(self.norm0(x)), turns, alike))
        return x + self.mlp(self.norm1(x))

    def _attend(self, qkv: Tensor, turns: tuple[Tensor, Tensor], alike: list[Tensor]) -> Tensor:
        q, k, v = qkv.view(len(qkv), 3, self.heads, self.head_dim).unbind(1)
        q, k = rotate(q, *turns), rotate(k, *turns)
        out = torch.zeros_like(v)
        for patches in alike:  # [images, patches of one]
            query, key, value = (x[patches].transpose(1, 2) for x in (q, k, v))
            some = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
            out = out.index_copy(0, patches.flatten(), some.flatten(0, 1).to(out.dtype))
        return out.flatten(1)


class TowerEncoder(nn.Module):
    """All blocks and the norm behind them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, EPS)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[P, W]`` -> ``[P, W]``."""
        turns = rotations(grids, self.head_dim, x)
        alike = _alike([t * h * w for t, h, w in grids], x.device)
        for block in self.blocks:
            x = block(x, turns, alike)
        return self.final_layernorm(x)


class VisionTower(nn.Module):
    """Patches to merged patches: ``merge x merge`` neighbours side by side, frames averaged."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = TowerEncoder(config)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """``[P, 3, p, p]`` -> ``[M, merge * merge * W]``, images one after another."""
        check_patches(pixel_values, grids, self.config)
        weight = self.patch_embed.proj.weight
        x = self.patch_embed(pixel_values.to(weight.device, weight.dtype), grids)
        x = self.encoder(x, grids)
        images = x.split([t * h * w for t, h, w in grids])
        merge = self.config.merge
        return torch.cat(
            [merged(image, grid, merge) for image, grid in zip(images, grids, strict=True)]
        )


class Projector(nn.Module):
    """Merged patches as rows of the text policy, normed at the end."""

    def __init__(self, config: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        width = config.merge**2 * config.vt_hidden_size
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.GELU(),
            nn.Linear(width, hidden_size, bias=False),
        )
        self.post_norm = RMSNorm(hidden_size, config.projector_ln_eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[M, merge * merge * W]`` -> ``[M, D]``."""
        return self.post_norm(self.proj(x))


def blank(config: VisionConfig, like: Tensor) -> tuple[Tensor, list[Grid]]:
    """Patches and grid of an image of one row, for what has to run where there is none."""
    size, merge = config.patch_size, config.merge
    return like.new_zeros(merge**2, 3, size, size), [(1, merge, merge)]


def rotations(grids: Iterable[Grid], head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[P, K / 2]`` of each patch, in fp32 or wider.

    Pair 2i of a head turns by column * THETA^(-4i / K), pair 2i + 1 by row times the same.
    """
    wide = widen(like).dtype
    steps = torch.arange(0, head_dim, 4, device=like.device, dtype=wide)
    speeds = THETA ** -(steps / head_dim)
    parts = []
    for t, h, w in grids:
        rows = torch.arange(h, device=like.device, dtype=wide)[:, None, None] * speeds
        columns = torch.arange(w, device=like.device, dtype=wide)[None, :, None] * speeds
        both = torch.stack([columns.expand(h, w, -1), rows.expand(h, w, -1)], -1)
        parts.append(both.reshape(h * w, -1).repeat(t, 1))
    angles = torch.cat(parts)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring numbers of ``x [P, H, K]`` by the angles of their pair ``[P, K / 2]``."""
    even, odd = widen(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.flatten(-2).to(x.dtype)


def merged(image: Tensor, grid: Grid, merge: int) -> Tensor:
    """``[t * h * w, W]`` -> ``[h * w / merge^2, merge^2 * W]``; neighbours row by row."""
    t, h, w = grid
    blocks = image.view(t, h // merge, merge, w // merge, merge, -1).mean(0)
    return blocks.transpose(1, 2).reshape((h // merge) * (w // merge), -1)


def placed(
    layout: Layout, marked: Tensor, rows: Tensor | None, features: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the rows ``features [M, D]`` of images stand among the tokens that are run, and they.

    They stand at ``rows [M]`` of the flattened input, the first at the first; without ``rows`` at
    the tokens that are ``marked`` [B, L]. UserError if they are not equally many, and for a row
    that is no token, is hidden as padding or comes twice.
    """
    if rows is None:
        found, where = "placeholders of images", layout.pack(marked).nonzero().flatten()
    else:
        found, where = "rows", rows.to(features.device)
    if len(where) != len(features):
        name = "input_ids" if rows is None else "image_rows"
        raise UserError(f"{name} has {len(where)} {found}, the images need {len(features)}")
    if rows is None:
        return where, features
    run = torch.arange(layout.given, device=where.device) if layout.real is None else layout.real
    places = torch.full((layout.given + 1,), -1, device=where.device)
    places[run] = torch.arange(len(run), device=where.device)
    # what is outside of the input gets the last place, which nothing is run at
    inside = (where >= 0) & (where < layout.given)
    kept = torch.where(inside, where, layout.given).long()
    twice = torch.bincount(kept, minlength=1) > 1
    where = places[kept]
    if bool((where < 0).any() | twice.any()):
        raise UserError(
            f"image_rows: each row must be another one of the {layout.given} tokens, and none that "
            "attention_mask hides"
        )
    return where, features


def read_grids(grid_thws: Tensor | Sequence[Sequence[int]]) -> list[Grid]:
    """``[N, 3]`` as numbers; UserError if it has another shape."""
    rows = grid_thws.tolist() if isinstance(grid_thws, Tensor) else grid_thws
    if not all(len(row) == 3 for row in rows):
        raise UserError("grid_thws: each image needs three numbers: frames, rows, columns")
    return [(int(t), int(h), int(w)) for t, h, w in rows]


def check_patches(pixel_values: Tensor, grids: Sequence[Grid], config: VisionConfig) -> None:
    """UserError unless the patches are those of the grids, which the tower can read."""
    size, merge = config.patch_size, config.merge
    if not pixel_values.is_floating_point():
        raise UserError(
            f"pixel_values has dtype {str(pixel_values.dtype).removeprefix('torch.')}, not floats "
            "(farhorizon.policy.images normalises them)"
        )
    for number, (t, h, w) in enumerate(grids):
        if min(t, h, w) < 1 or h % merge or w % merge or t > config.init_pos_emb_time:
            raise UserError(
                f"grid_thws: image {number} has {t} x {h} x {w} patches; rows and columns must be "
                f"multiples of {merge}, frames 1 to {config.init_pos_emb_time}"
            )
    wanted = [sum(t * h * w for t, h, w in grids), 3, size, size]
    if list(pixel_values.shape) != wanted:
        raise UserError(
            f"pixel_values has shape {list(pixel_values.shape)}, grid_thws says {wanted}"
        )


def _frame_waves(frames: int, like: Tensor) -> Tensor:
    """``[frames, W]``: sines in the first half, cosines in the second."""
    half = like.shape[-1] // 2
    speeds = THETA ** -(torch.arange(half, device=like.device, dtype=like.dtype) / half)
    angles = torch.arange(frames, device=like.device, dtype=like.dtype)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], -1)


def _alike(lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """Patches ``[images, length]`` of all images of one length, for each length there is."""
    starts: dict[int, list[int]] = {}
    first = 0
    for length in lengths:
        starts.setdefault(length, []).append(first)
        first += length
    return [
        torch.tensor(some, device=device)[:, None] + torch.arange(length, device=device)
        for length, some in starts.items()
    ]
