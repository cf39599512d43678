"""The digest on the GPU: one launch for any number of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..device import launch, on_device_of, upload
from .naive import LENGTH, MIXERS, STEPS
from .triton_digest import digest_kernel

CHUNK, BLOCK = 8192, 1024  # words of a program, and of a step of it
WARPS = 4


def lanes_fused(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `farhorizon.kernels.digest.lanes`; the host does not wait."""
    device = tensors[0].device
    held = [tensor.detach().contiguous() for tensor in tensors]
    sizes = np.array([tensor.numel() * tensor.element_size() for tensor in held], np.int64)
    chunks = np.maximum(-(-sizes // (8 * CHUNK)), 1)
    firsts = np.cumsum(chunks) - chunks
    addresses = np.array([tensor.data_ptr() for tensor in held], np.int64)
    table = torch.from_numpy(np.stack([addresses, sizes, firsts], 1))
    owners = torch.from_numpy(np.repeat(np.arange(len(held), dtype=np.int32), chunks))
    out = torch.zeros(len(held), 2, dtype=torch.int64, device=device)
    with on_device_of(out):
        launch(digest_kernel)[(len(owners),)](
            *(upload(table, device), upload(owners, device), out),
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            STEPS=STEPS,
            FIRST=MIXERS[0],
            SECOND=MIXERS[1],
            LENGTH=LENGTH,
            num_warps=WARPS,
        )
    return out
