"""MXFP4: 4-bit floats with one power of two for 32 of them, as published experts are stored.

Along the last dimension, groups of 32 numbers share a scale byte s that means 2^(s - 127). Each
number is a code of E2M1, sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes share a byte, the
even column in the low nibble.

The scale of a group is that of the OCP microscaling specification, 2^(floor(log2(largest)) - 2):
the largest magnitude comes to lie in [4, 8), above 6 it saturates. Numbers are rounded to the
nearest code, ties to the even one. A group of zeros has scale 1; one that holds a number that is
not finite gets the byte 255, which decodes to NaN. What was decoded is encoded to the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

GROUP = 32
BIAS, NOT_A_NUMBER = 127, 255
LARGEST = 6.0
CHUNK = 1 << 22  # numbers worked on at once: everything here needs some copies of them in fp32

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [..., D]`` of any float type -> ``packed [..., D / 2]`` and ``scale [..., D / 32]``,
    both uint8. ValueError unless D is a multiple of 32."""
    *rest, width = _checked(weight)
    packed = torch.empty(*rest, width // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*rest, width // GROUP, dtype=torch.uint8, device=weight.device)
    rows = weight.detach().reshape(-1, width)
    bytes_out, scale_out = packed.view(-1, width // 2), scale.view(-1, width // GROUP)
    for some in _chunks(len(rows), width):
        groups = rows[some].float().unflatten(1, (-1, GROUP))
        scale_byte = _scale_bytes(groups)
        level = _rounded(groups / _scales(scale_byte)[..., None])
        code = torch.where(level < 2, 2 * level, torch.where(level < 4, level + 2, level / 2 + 4))
        code = (code.nan_to_num(0) + 8 * torch.signbit(groups)).to(torch.uint8).flatten(1)
        bytes_out[some] = code[:, 0::2] | code[:, 1::2] << 4
        scale_out[some] = scale_byte
    return packed, scale


def mxfp4_decode(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The numbers ``[..., D]`` that `mxfp4_encode` rounded to. ValueError if the shapes do not
    belong together."""
    *rest, half = packed.shape
    if scale.shape != (*rest, 2 * half // GROUP) or 2 * half % GROUP:
        raise ValueError(f"scale {list(scale.shape)} does not belong to packed {[*rest, half]}")
    out = torch.empty(*rest, 2 * half, dtype=dtype, device=packed.device)
    values = torch.tensor(
        [*_VALUES, *(-v for v in _VALUES)], dtype=torch.float32, device=packed.device
    )
    bytes_in, scale_in = packed.reshape(-1, half), scale.reshape(-1, 2 * half // GROUP)
    rows = out.view(-1, 2 * half)
    for some in _chunks(len(rows), 2 * half):
        code = bytes_in[some].int()
        numbers = values[torch.stack([code & 15, code >> 4], -1).flatten(1)]
        groups = numbers.unflatten(1, (-1, GROUP)) * _scales(scale_in[some])[..., None]
        rows[some] = groups.flatten(1).to(dtype)
    return out


def mxfp4_rounded(weight: torch.Tensor) -> torch.Tensor:
    """What decoding the encoded ``weight [..., D]`` gives, in its own dtype; its gradient is that
    of the result, as if nothing had been rounded."""
    _checked(weight)
    return _StraightThrough.apply(weight)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        width = weight.shape[-1]
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        given, rows = weight.reshape(-1, width), out.view(-1, width)
        for some in _chunks(len(rows), width):
            groups = given[some].float().unflatten(1, (-1, GROUP))
            scale = _scales(_scale_bytes(groups))[..., None]
            level = torch.copysign(_rounded(groups / scale), groups)
            rows[some] = (level * scale).flatten(1).to(out.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _checked(weight: torch.Tensor) -> torch.Size:
    if weight.shape[-1] % GROUP or not weight.is_floating_point():
        raise ValueError(f"MXFP4 needs floats in groups of {GROUP}, got {list(weight.shape)}")
    return weight.shape


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, width))
    return (slice(first, first + step) for first in range(0, rows, step))


def _scale_bytes(groups: torch.Tensor) -> torch.Tensor:
    """Scale bytes of fp32 ``groups [..., 32]``."""
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent  # largest lies in [2^(exponent - 1), 2^exponent)
    scale = (exponent - 3 + BIAS).clamp(0, NOT_A_NUMBER - 1)
    scale = scale.masked_fill(largest == 0, BIAS)
    return scale.masked_fill(~torch.isfinite(largest), NOT_A_NUMBER).to(torch.uint8)


def _scales(byte: torch.Tensor) -> torch.Tensor:
    """The powers of two as fp32, from the bits: no function rounds them on any device."""
    exponent = byte.int()
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal
    scale = bits.to(torch.int32).view(torch.float32)
    return scale.masked_fill(byte == NOT_A_NUMBER, torch.nan)


def _rounded(scaled: torch.Tensor) -> torch.Tensor:
    """Magnitudes of the nearest codes; codes lie 0.5 apart below 2, 1 below 4, and 2 above."""
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(size / step) * step).clamp(max=LARGEST)
