"""Images as the vision tower reads them: smaller if they must be, padded, cut into patches, placed.

The rules are those of the published preprocessor: an image is never made larger; its size is scaled
by the square root of what its whole patches are too many, and cut to whole pixels; PIL resamples
bicubically; black pixels are added at the right and at the bottom until whole tokens fill it; each
number is divided by 255, then normalised. Between processes images travel as bytes, so that rollout
and learner normalise the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image as Pillow

from ..configs.errors import UserError
from ..envs.types import Image
from .vision_config import ImageRules

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Patches:
    """An image in patches: ``pixels`` uint8 [h * w, 3, p, p], row by row, ``grid`` (1, h, w), and
    the number of ``rows`` it takes in a sequence of tokens."""

    pixels: np.ndarray
    grid: tuple[int, int, int]
    rows: int


@dataclass(frozen=True, slots=True)
class Placed:
    """An image whose placeholders begin at token ``start``; below 0 where the first are cut off."""

    start: int
    patches: Patches

    @property
    def end(self) -> int:
        """The token after its last placeholder."""
        return self.start + self.patches.rows


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels of an image after it was made smaller, and tokens along both sides after padding."""

    height: int
    width: int
    token_rows: int
    token_columns: int


def fitted(height: int, width: int, rules: ImageRules) -> Size:
    """The size in which an image is shown; UserError where no size is within the limits."""
    if height < 1 or width < 1:
        raise UserError(f"image: {height} x {width} pixels; it must have some")
    most = rules.side_limit * rules.patch_size
    whole = max(1, height // rules.patch_size) * max(1, width // rules.patch_size)
    scale = min(1.0, math.sqrt(rules.patch_limit / whole), most / width, most / height)
    rows, columns = (min(max(1, int(side * scale)), most) for side in (height, width))
    token = rules.merge * rules.patch_size
    size = Size(rows, columns, -(-rows // token), -(-columns // token))
    longest = max(size.token_rows, size.token_columns) * rules.merge
    if longest > rules.side_limit:
        raise UserError(
            f"image: {height} x {width} pixels need {longest} patches on one side, more than "
            f"patch_limit_on_one_side={rules.side_limit}; make that a multiple of {rules.merge}"
        )
    return size


def count_tokens(height: int, width: int, rules: ImageRules) -> int:
    """How many tokens an image of this size takes."""
    size = fitted(height, width, rules)
    return size.token_rows * size.token_columns


def prepare(image: Image | np.ndarray, rules: ImageRules) -> Patches:
    """The patches of an image ``uint8 [height, width, 3]``; UserError for anything else."""
    try:
        pixels = (image if isinstance(image, Image) else Image(image)).pixels
    except ValueError as error:
        raise UserError(str(error)) from None
    size = fitted(pixels.shape[0], pixels.shape[1], rules)
    if pixels.shape[:2] != (size.height, size.width):
        picture = Pillow.fromarray(np.ascontiguousarray(pixels))
        small = picture.resize((size.width, size.height), Pillow.Resampling.BICUBIC)
        pixels = np.asarray(small)
    h, w = size.token_rows * rules.merge, size.token_columns * rules.merge
    p = rules.patch_size
    canvas = np.zeros((h * p, w * p, 3), np.uint8)
    canvas[: size.height, : size.width] = pixels
    patches = canvas.reshape(h, p, w, p, 3).transpose(0, 2, 4, 1, 3).reshape(h * w, 3, p, p)
    return Patches(patches, (1, h, w), size.token_rows * size.token_columns)


def expand(items: Sequence[Item], placeholder: Item, counts: Sequence[int]) -> list[Item]:
    """The k-th ``placeholder`` among ``items`` repeated ``counts[k]`` times; UserError unless there
    are as many as images."""
    found = sum(item == placeholder for item in items)
    if found != len(counts):
        raise UserError(f"images: {found} placeholders stand for {len(counts)} images")
    left = iter(counts)
    return [i for item in items for i in [item] * (next(left) if item == placeholder else 1)]


def place(token_ids: Sequence[int], images: Sequence[Patches], placeholder: int) -> list[Placed]:
    """Where ``images`` stand among ids that are expanded; UserError unless they fill all
    placeholders."""
    rows = np.flatnonzero(np.asarray(token_ids) == placeholder)
    wanted = sum(image.rows for image in images)
    if len(rows) != wanted:
        raise UserError(f"images: {len(rows)} placeholders stand for {wanted} rows of images")
    placed, used = [], 0
    for image in images:
        placed.append(Placed(int(rows[used]), image))
        used += image.rows
    return placed


def normalised(images: Sequence[Patches], rules: ImageRules) -> torch.Tensor:
    """``pixel_values`` fp32 [P, 3, p, p] of all images, one after another."""
    p = rules.patch_size
    pixels = [image.pixels for image in images] or [np.zeros((0, 3, p, p), np.uint8)]
    numbers = torch.from_numpy(np.concatenate(pixels)).float() / 255
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (rules.mean, rules.std))
    return (numbers - mean) / std


def policy_inputs(images: Sequence[Placed], rules: ImageRules) -> dict[str, Any]:
    """What `Policy.forward` takes for images in a row of packed tokens, on the CPU."""
    rows = [torch.arange(image.start, image.end) for image in images]
    return {
        "pixel_values": normalised([image.patches for image in images], rules),
        "grid_thws": [image.patches.grid for image in images],
        "image_rows": torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long),
    }
