"""A 128-bit digest of the bytes of tensors, the same number on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .naive import ALIGNED, naive_copied_lanes, naive_lanes

__all__ = [
    "ALIGNED",
    "copied_lanes",
    "digests",
    "lanes",
    "naive_copied_lanes",
    "naive_lanes",
    "texts",
]


def lanes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Both halves of the digest of each tensor's bytes, int64 [N, 2] on the device of the tensors,
    which is one; the host does not wait for a GPU.

    Each half is a sum modulo 2^64 of bijections of the words, each by its place: the order in which
    they are added does not matter, a change of one word always shows, and others with all but 2^-64
    of a chance in each half. It tells accidents, not a forger. Any dtype, size and start; what is
    not contiguous is copied first. ValueError for tensors of several devices.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors must be on one device, got {sorted(map(str, devices))}")
    if any(device.type == "cuda" for device in devices):
        from .fused import lanes_fused

        return lanes_fused(tensors)
    return naive_lanes(tensors)


def copied_lanes(
    tensors: Sequence[torch.Tensor], starts: Sequence[int], payload: torch.Tensor
) -> torch.Tensor:
    """`lanes` of tensors, whose bytes are copied in the same pass to ``payload``, uint8 [N] on
    their device: each to its start, in memory a multiple of 16, with zeros behind it up to the next
    one. ValueError for several devices, and for starts that are no such multiples."""
    devices = {payload.device, *(tensor.device for tensor in tensors)}
    if len(devices) > 1:
        raise ValueError(f"tensors must be on one device, got {sorted(map(str, devices))}")
    if any((payload.data_ptr() + start) % ALIGNED for start in starts):
        raise ValueError(f"starts must be multiples of {ALIGNED} in memory, got {[*starts]}")
    if payload.is_cuda:
        from .fused import copied_lanes_fused

        return copied_lanes_fused(tensors, starts, payload)
    return naive_copied_lanes(tensors, starts, payload)


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The digest of each tensor as 32 hex digits, wherever each lies."""
    found: dict[int, str] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        found |= zip(here, texts(lanes([tensors[number] for number in here])), strict=True)
    return [found[number] for number in range(len(tensors))]


def texts(found: torch.Tensor) -> list[str]:
    """The hex digits of what `lanes` gave; waits for it."""
    return [f"{a % 2**64:016x}{b % 2**64:016x}" for a, b in found.tolist()]
