"""Which kernels of chunked KDA run, and the tensors that they copy in blocks.

The configurations are fixed, nothing is tuned at run time: the same inputs take the same kernels in
the same order on every machine of a kind. On Hopper the passes run in Gluon.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

from .tables import Prepared


def shared(x: torch.Tensor, rows: int, columns: int) -> SharedDescriptor:
    """A matrix read or written in blocks through shared memory."""
    return SharedDescriptor(
        x, list(x.shape), list(x.stride()), [rows, columns], layout(rows, columns, x.dtype)
    )


@lru_cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    kind = float32 if dtype == torch.float32 else bfloat16
    return NVMMASharedLayout.get_default_for([rows, columns], kind)


def shared_blocks(prepared: Prepared) -> list[SharedDescriptor]:
    """What the first pass wrote for the state passes, one chunk a block: five matrices, then the
    decay of the chunk and beta as single rows."""
    matrices = (prepared.kt, prepared.qt, prepared.kh, prepared.inv, prepared.att)
    rows = (prepared.decay, prepared.beta)
    return [shared(x.view(-1, x.shape[3]), x.shape[2], x.shape[3]) for x in matrices] + [
        shared(x.view(-1, x.shape[2]), 1, x.shape[2]) for x in rows
    ]


def rows_of(x: torch.Tensor, rows: int, columns: int) -> SharedDescriptor:
    """``x [T, H, V]`` as a matrix with a row per token, whatever the distance between heads."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    return SharedDescriptor(
        x, [x.shape[0], width], [x.stride(0), 1], [rows, columns], layout(rows, columns, x.dtype)
    )
