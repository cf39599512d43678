"""The digest on the GPU: one launch for any number of tensors, and for their copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..device import launch, on_device_of, upload
from .naive import LENGTH, MIXERS, STEPS
from .triton_digest import digest_kernel

CHUNK, BLOCK = 8192, 1024  # words of a program, an even number, and of a step of it
WARPS = 4


def lanes_fused(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `farhorizon.kernels.digest.lanes`; the host does not wait."""
    return _lanes(tensors, None)


def copied_lanes_fused(
    tensors: Sequence[torch.Tensor], starts: Sequence[int], payload: torch.Tensor
) -> torch.Tensor:
    """As `farhorizon.kernels.digest.copied_lanes`: all bytes are read once and written once."""
    return _lanes(tensors, payload.data_ptr() + np.array(starts, np.int64))


def _lanes(tensors: Sequence[torch.Tensor], copies: np.ndarray | None) -> torch.Tensor:
    """Digests, and copies at these addresses if there are any."""
    device = tensors[0].device
    held = [tensor.detach().contiguous() for tensor in tensors]
    sizes = np.array([tensor.numel() * tensor.element_size() for tensor in held], np.int64)
    chunks = np.maximum(-(-sizes // (8 * CHUNK)), 1)
    firsts = np.cumsum(chunks) - chunks
    addresses = np.array([tensor.data_ptr() for tensor in held], np.int64)
    places = np.zeros_like(addresses) if copies is None else copies
    table = np.stack([addresses, sizes, firsts, places], 1)
    owners = np.repeat(np.arange(len(held), dtype=np.int64), chunks)
    plan = torch.from_numpy(np.concatenate((table.reshape(-1), owners)))
    out = torch.zeros(len(held), 2, dtype=torch.int64, device=device)
    with on_device_of(out):
        launch(digest_kernel)[(len(owners),)](
            *(upload(plan, device), len(held), out),
            COPY=copies is not None,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            STEPS=STEPS,
            FIRST=MIXERS[0],
            SECOND=MIXERS[1],
            LENGTH=LENGTH,
            num_warps=WARPS,
        )
    return out
