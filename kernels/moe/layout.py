"""Rows in the order of their experts, on the GPU that the routes are on and without waiting for it.

Few routes take one launch, which no count has to wait for; more are ranked by blocks. Both find the
same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device import launch, on_device_of
from .triton_layout import (
    few_kernel,
    place_kernel,
    rank_kernel,
    start_kernel,
    sum_kernel,
    tile_kernel,
)

TILE = 128  # rows of a tile, all of one expert
COUNT_BLOCK, COUNT_PIECE = 256, 16  # routes that are ranked together, and compared at once
FEW_ROUTES, FEW_EXPERTS = 4096, 128  # at most, for a layout in one launch

Tensor = torch.Tensor


class Layout(NamedTuple):
    """Rows in the order of their experts; those of an expert fill whole tiles.

    ``place [T k]`` is the row of a route; ``source`` and ``token``, ``[rows]``, are the route of a
    row and its token, -1 where it holds nothing; ``starts [E + 1]`` and ``sizes [E]`` are an
    expert's first row and number of routes, ``tile_expert`` is the expert of a tile, E behind the
    last.
    """

    place: Tensor
    source: Tensor
    token: Tensor
    starts: Tensor
    sizes: Tensor
    tile_expert: Tensor


def layout_of(experts: Tensor, num_experts: int) -> Layout:
    """The rows of ``experts [T, k]``, contiguous int64, at least one."""
    routes, k = experts.numel(), experts.shape[1]
    tiles = (routes + min(num_experts, routes) * (TILE - 1)) // TILE

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    place, sizes, starts = (whole(n) for n in (routes, num_experts, num_experts + 1))
    source, token = whole(2, tiles * TILE)
    layout = Layout(place, source, token, starts, sizes, whole(tiles))
    few = routes <= FEW_ROUTES and num_experts <= FEW_EXPERTS
    with on_device_of(experts):
        (lay_out_few if few else lay_out_many)(experts, num_experts, k, layout)
    return layout


def lay_out_few(experts: Tensor, num_experts: int, k: int, out: Layout) -> None:
    """Fill ``out`` in one launch."""
    routes = experts.numel()
    # few kernels for all numbers of routes
    most = next(n for n in (256, 1024, FEW_ROUTES) if routes <= n)
    launch(few_kernel)[(num_experts,)](
        *(experts, out.sizes, out.starts, out.place, out.source, out.token, out.tile_expert),
        *(routes, len(out.tile_expert)),
        E=num_experts,
        EP=max(32, power_above(num_experts)),  # of a warp's lanes each has a bin
        K=k,
        MOST=most,
        TILE=TILE,
        num_warps=8 if most > 1024 else 4,
    )


def lay_out_many(experts: Tensor, num_experts: int, k: int, out: Layout) -> None:
    """Fill ``out`` by blocks of routes."""
    routes, tiles = experts.numel(), len(out.tile_expert)
    blocks = -(-routes // COUNT_BLOCK)
    rank, table = torch.empty_like(out.place), out.place.new_zeros(num_experts, blocks)
    out.source.fill_(-1)
    out.token.fill_(-1)
    launch(rank_kernel)[(blocks,)](
        *(experts, rank, table, routes, blocks), BLOCK=COUNT_BLOCK, PIECE=COUNT_PIECE
    )
    launch(sum_kernel)[(num_experts,)](table, out.sizes, blocks, BLOCK=1024)
    launch(start_kernel)[(1,)](
        *(out.sizes, out.starts), E=num_experts, EP=power_above(num_experts), TILE=TILE
    )
    launch(place_kernel)[(blocks,)](
        *(experts, rank, table, out.starts, out.place, out.source, out.token, routes, blocks),
        K=k,
        BLOCK=COUNT_BLOCK,
    )
    launch(tile_kernel)[(-(-tiles // 128),)](
        *(out.starts, out.tile_expert, tiles),
        E=num_experts,
        STEPS=num_experts.bit_length(),
        TILE=TILE,
        BLOCK=128,
    )


def power_above(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()
