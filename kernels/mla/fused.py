"""Latent attention on the GPU: launches of its kernels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

from ..device import is_hopper, launch, on_device_of, processors
from .gluon_mla import part_hopper_kernel
from .triton_mla import append_kernel, merge_kernel, part_kernel

PART, PARTS = 1024, 256  # tokens of a part, where that leaves at most PARTS of them
MERGED, COLUMNS = 8, 512  # parts that are merged at once, and columns of them
# Two tiles of 64 tokens are all that shared memory holds: one on its way, while one is used.
HOPPER_TOKENS, HOPPER_STAGES = 64, 2
MOST_HEADS = 32  # for which a program of the kernel for Hopper has registers
TOKENS, STAGES, WARPS = 32, 2, 4

Tensor = torch.Tensor


def attend(
    query: Tensor, shared: Tensor, cache: Tensor, places: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """`farhorizon.kernels.mla.latent_attention` on the GPU.

    Sums over parts follow the cache's capacity: beside a layer's 16-bit latents of 576 numbers they
    take 2 % for 12 heads, 17 % for 96, and stop growing at 256K tokens. They go back to torch's
    allocator with the call, so that a CUDA graph of many layers has room for them once, and makes
    none when it is replayed.
    """
    count, heads, rank = query.shape
    parts = min(PARTS, max(1, -(-cache.shape[1] // PART)))
    partial = query.new_empty(count, parts, heads, rank, dtype=torch.float32)
    stats = query.new_empty(2, count, parts, heads, dtype=torch.float32)
    out = query.new_empty(heads, count, rank)
    query, shared = (x if x.stride(2) == 1 else x.contiguous() for x in (query, shared))
    places, lengths = places.contiguous(), lengths.contiguous()
    if count:
        with on_device_of(query):
            given = (query, shared, cache, places, lengths, partial, stats)
            sum_parts(given, scale / math.log(2), parts, takes_hopper(query, cache))
            columns = min(COLUMNS, power_of_two(rank))
            launch(merge_kernel)[(count * heads, -(-rank // columns))](
                *(partial, stats, places, lengths, out, count, parts),
                H=heads,
                R=rank,
                BR=columns,
                BS=MERGED,
                PART=PART,
                PARTS=PARTS,
            )
    return out.transpose(0, 1)


def takes_hopper(query: Tensor, cache: Tensor) -> bool:
    """Whether the kernel for Hopper runs: sizes that fill its tiles, and 16-bit numbers."""
    rank, width = query.shape[2], cache.shape[2]
    fits = rank == 512 and width - rank == 64 and cache.is_contiguous()
    narrow = query.dtype in (torch.bfloat16, torch.float16) and cache.dtype == query.dtype
    return fits and narrow and is_hopper(query.device)


def sum_parts(given: tuple[Tensor, ...], scale: float, parts: int, hopper: bool) -> None:
    """Run the kernel that makes all parts; ``scale`` is that of exponents to base 2."""
    query, shared, cache, places, lengths, partial, stats = given
    count, heads, rank = query.shape
    strides = (*query.stride()[:2], *shared.stride()[:2])
    extra = shared.shape[2]
    if hopper:
        block = min(MOST_HEADS, max(16, power_of_two(heads)))
        items = -(-heads // block) * count * parts
        launch(part_hopper_kernel)[(min(items, processors(query.device)),)](
            *(tile_of(cache, rank), tile_of(cache, extra)),
            *(query, shared, places, lengths, partial, stats, scale),
            *(count, parts, items, cache.shape[1], *strides),
            H=heads,
            BH=block,
            BT=HOPPER_TOKENS,
            R=rank,
            P=extra,
            PART=PART,
            PARTS=PARTS,
            STAGES=HOPPER_STAGES,
            num_warps=4,
        )
        return
    launch(part_kernel)[(-(-heads // 16) * count * parts,)](
        *(query, shared, cache, places, lengths, partial, stats, scale, count, parts),
        *(*strides, *cache.stride()[:2]),
        H=heads,
        R=rank,
        P=extra,
        BR=power_of_two(rank),
        BP=power_of_two(extra),
        BH=16,
        BT=TOKENS,
        PART=PART,
        PARTS=PARTS,
        STAGES=STAGES,
        num_warps=WARPS,
    )


def tile_of(cache: Tensor, columns: int) -> SharedDescriptor:
    """Tiles of so many columns of all tokens of a cache, whatever their sequence."""
    rows = cache.view(-1, cache.shape[2])
    layout = shared_layout(HOPPER_TOKENS, columns, cache.dtype)
    return SharedDescriptor(
        rows, list(rows.shape), list(rows.stride()), [HOPPER_TOKENS, columns], layout
    )


@lru_cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    kind = bfloat16 if dtype == torch.bfloat16 else float16
    return NVMMASharedLayout.get_default_for([rows, columns], kind)


def power_of_two(least: int) -> int:
    """The least power of two from ``least``, which is at least 16 as products want it."""
    return 1 << (max(16, least) - 1).bit_length()


def append(
    entry: Tensor, weight: Tensor, eps: float, cache: Tensor, places: Tensor, position: Tensor
) -> None:
    """`farhorizon.kernels.mla.append_latent` on the GPU."""
    if entry.stride(1) != 1:
        entry = entry.contiguous()
    rank, extra = len(weight), entry.shape[1] - len(weight)
    if len(entry):
        with on_device_of(entry):
            launch(append_kernel)[(len(entry),)](
                *(entry, weight.contiguous(), cache, places.contiguous(), position.contiguous()),
                eps,
                *(entry.stride(0), *cache.stride()[:2]),
                R=rank,
                P=extra,
                BR=power_of_two(rank),
                BP=power_of_two(extra),
            )
