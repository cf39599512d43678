"""What a published folder says of images: ``vision_config`` and ``preprocessor_config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MEDIA_TOKEN_ID = 163605  # of ``<|media_pad|>``, where config.json does not say it

PATCH_LIMIT, SIDE_LIMIT = 65536, 512  # of an image, in K3's files

# What the published tower is made of; nothing else is built here.
_ONLY: dict[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
_LARGEST = 3.4e38  # of fp32, in which images are normalised
_INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of the vision tower and its projector; names as published, K3's where a file is silent.

    ``init_pos_emb_*`` are the sizes of the position table in patches and frames,
    ``qkv_hidden_size`` is the width of all heads together, ``merge_kernel_size`` patches become one
    token of ``text_hidden_size``, which is that of the text policy where it is not said.
    """

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_interpolation_mode: str = "bilinear"
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    vt_num_hidden_layers: int = 27
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int = 1536
    merge_kernel_size: tuple[int, int] = (2, 2)
    projector_ln_eps: float = 1e-5
    text_hidden_size: int | None = None

    @classmethod
    def of(cls, published: Any) -> VisionConfig:
        """From the object of ``config.json``; ValueError names the field."""
        if not isinstance(published, Mapping):
            raise ValueError(f"config.json: vision_config={published!r} must be an object")
        given = {f.name: published[f.name] for f in fields(cls) if f.name in published}
        kernel = given.get("merge_kernel_size", (2, 2))
        given["merge_kernel_size"] = tuple(kernel) if isinstance(kernel, list) else kernel
        made = cls(**given)
        made._check()
        for name, value in (_ONLY | {"mm_hidden_size": made.vt_hidden_size}).items():
            if published.get(name) not in (None, value):
                raise _wrong(name, published[name], f"{value!r}, nothing else is supported")
        return made

    def _check(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            counts = f.type == "int" or (f.type == "int | None" and value is not None)
            if counts and not (type(value) is int and value >= 1):
                raise _wrong(f.name, value, "a whole number of at least 1")
        rows = self.merge_kernel_size
        if not (isinstance(rows, tuple) and len(rows) == 2 and rows[0] == rows[1]):
            raise _wrong("merge_kernel_size", rows, "two equal numbers")
        if not (type(rows[0]) is int and rows[0] >= 1):
            raise _wrong("merge_kernel_size", rows, "whole numbers of at least 1")
        if self.pos_emb_interpolation_mode not in _INTERPOLATIONS:
            mode = self.pos_emb_interpolation_mode
            raise _wrong("pos_emb_interpolation_mode", mode, f"one of {', '.join(_INTERPOLATIONS)}")
        eps = self.projector_ln_eps
        if type(eps) not in (int, float) or not 0 < eps < math.inf:
            raise _wrong("projector_ln_eps", eps, "a positive number")
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise _wrong(
                "qkv_hidden_size",
                self.qkv_hidden_size,
                f"a multiple of 4 x vt_num_attention_heads={self.vt_num_attention_heads}",
            )
        if self.vt_hidden_size % 2:
            raise _wrong("vt_hidden_size", self.vt_hidden_size, "even")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merge(self) -> int:
        """Patches along one side of what becomes one token."""
        return self.merge_kernel_size[0]


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How an image becomes patches: ``media_proc_cfg`` of ``preprocessor_config.json``.

    An image is made smaller until it has at most ``patch_limit`` patches and no side of more than
    ``side_limit`` patches; numbers of 0 to 1 are normalised by ``mean`` and ``std`` of R, G, B.
    """

    patch_size: int
    merge: int
    patch_limit: int = PATCH_LIMIT
    side_limit: int = SIDE_LIMIT
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, preprocessor: Mapping[str, Any] | None, vision: VisionConfig) -> ImageRules:
        """From the file, if there is one, for a tower; ValueError names the field."""
        found = (preprocessor or {}).get("media_proc_cfg", {})
        if not isinstance(found, Mapping):
            raise ValueError("preprocessor_config.json: media_proc_cfg must be an object")
        kernel = found.get("merge_kernel_size", vision.merge)
        pair = [vision.merge] * 2
        same = {"patch_size": vision.patch_size, "merge_kernel_size": vision.merge}
        given = {
            "patch_size": found.get("patch_size", vision.patch_size),
            "merge_kernel_size": kernel[0] if kernel in ([vision.merge], pair) else kernel,
        }
        for name, value in same.items():
            if given[name] != value:
                raise _unfit(name, given[name], f"{value}, as config.json's vision_config says")
        if found.get("fixed_output_tokens") is not None:
            raise _unfit("fixed_output_tokens", found["fixed_output_tokens"], "null")
        limits = {
            "in_patch_limit": found.get("in_patch_limit", PATCH_LIMIT),
            "patch_limit_on_one_side": found.get("patch_limit_on_one_side", SIDE_LIMIT),
        }
        for name, value in limits.items():
            least = vision.merge**2 if name == "in_patch_limit" else vision.merge
            if type(value) is not int or value < least:
                raise _unfit(name, value, f"a whole number of at least {least}")
        colours = [found.get(name, (0.5, 0.5, 0.5)) for name in ("image_mean", "image_std")]
        for name, values in zip(("image_mean", "image_std"), colours, strict=True):
            numbers = isinstance(values, list | tuple) and len(values) == 3
            if not numbers or not all(
                type(v) in (int, float) and abs(v) <= _LARGEST for v in values
            ):
                raise _unfit(name, values, "three numbers")
        if min(colours[1]) <= 0:
            raise _unfit("image_std", colours[1], "positive")
        mean, std = (tuple(float(v) for v in values) for values in colours)
        patches, side = limits.values()
        return cls(vision.patch_size, vision.merge, patches, side, mean, std)

    def published(self) -> dict[str, Any]:
        """The file that says this, with the published rules for what is not read here."""
        return {
            "media_proc_cfg": {
                "patch_size": self.patch_size,
                "merge_kernel_size": self.merge,
                "in_patch_limit": self.patch_limit,
                "patch_limit_on_one_side": self.side_limit,
                "image_mean": list(self.mean),
                "image_std": list(self.std),
                "fixed_output_tokens": None,
                "in_patch_limit_each_frame": min(16384, self.patch_limit),
                "in_patch_limit_video": None,
                "temporal_merge_kernel_size": 4,
            }
        }


def _wrong(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"config.json: vision_config.{name}={value!r} must be {wanted}")


def _unfit(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"preprocessor_config.json: media_proc_cfg.{name}={value!r} must be {wanted}")
