"""Parts of latent attention for Hopper, in Gluon; `triton_mla` has the algebra and the plain twin.

One warp copies tiles of coming tokens into shared memory, across the parts that its program walks
through; four warps multiply. Tokens, then channels, stand where the tensor cores take 64 rows, and
heads where they take few columns: both products read a tile where it lies, and every byte once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def part_range(places, lengths, sequence, part, PART: gl.constexpr, PARTS: gl.constexpr):
    """Row of the cache, first token and end of a part; no token where there is none."""
    place = gl.load(places + sequence).to(gl.int32)
    length = gl.load(lengths + sequence).to(gl.int32)
    least = gl.where(length <= 32 * PART, 2 * PART, PART)
    share = gl.maximum(least, (length + PART * PARTS - 1) // (PART * PARTS) * PART)
    start = part * share
    end = gl.minimum(start + share, length)
    return place, start, gl.where(place < 0, start, gl.maximum(end, start))


@gluon.jit
def copy_tiles(
    latent_desc,
    key_desc,
    latents,
    keys,
    ready,
    free,
    places,
    lengths,
    count,
    capacity,
    items,
    GROUPS: gl.constexpr,
    BT: gl.constexpr,
    R: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the stages in turn with the tiles of all parts of this program."""
    BYTES: gl.constexpr = latent_desc.block_type.nbytes + key_desc.block_type.nbytes
    i = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence = item // GROUPS % count
        part = item // (GROUPS * count)
        place, start, end = part_range(places, lengths, sequence, part, PART, PARTS)
        for first in range(start, end, BT):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, BYTES)
            row = place * capacity + first
            tma.async_copy_global_to_shared(latent_desc, [row, 0], bar, latents.index(stage))
            tma.async_copy_global_to_shared(key_desc, [row, R], bar, keys.index(stage))
            i += 1


@gluon.jit
def clear_behind(latent, valid, BT: gl.constexpr, R: gl.constexpr):
    """Zeros in the rows of a tile from ``valid`` on: what lies there may not even be finite."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BT, layout=gl.SliceLayout(1, rows))
    for c in gl.static_range(R // 64):
        piece = latent.slice(c * 64, 64, dim=1)
        x = piece.load(rows)
        piece.store(gl.where((row < valid)[:, None], x, 0.0).to(x.dtype))
    fence_async_shared()


@gluon.jit
def mix_tiles(
    query,
    shared,
    latents,
    keys,
    ready,
    free,
    places,
    lengths,
    partial,
    stats,
    scale,
    count,
    parts,
    items,
    query_n,
    query_h,
    shared_n,
    shared_h,
    H: gl.constexpr,
    BH: gl.constexpr,
    BT: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Sums over the tokens of each part of this program."""
    GROUPS: gl.constexpr = (H + BH - 1) // BH
    work: gl.constexpr = latents.dtype
    thin: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BH, 16])
    q_rows: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    r_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_tile = gl.allocate_shared_memory(
        work, [BH, R], gl.NVMMASharedLayout.get_default_for([BH, R], work)
    )
    r_tile = gl.allocate_shared_memory(
        work, [BH, P], gl.NVMMASharedLayout.get_default_for([BH, P], work)
    )
    p_tile = gl.allocate_shared_memory(
        work, [BH, BT], gl.NVMMASharedLayout.get_default_for([BH, BT], work)
    )
    token = gl.arange(0, BT, layout=gl.SliceLayout(1, thin))
    column = gl.arange(0, BH, layout=gl.SliceLayout(0, thin))
    channel = gl.arange(0, R, layout=gl.SliceLayout(1, thin))
    q_head = gl.arange(0, BH, layout=gl.SliceLayout(1, q_rows))
    q_channel = gl.arange(0, R, layout=gl.SliceLayout(0, q_rows))
    r_head = gl.arange(0, BH, layout=gl.SliceLayout(1, r_rows))
    r_channel = gl.arange(0, P, layout=gl.SliceLayout(0, r_rows))
    none = gl.zeros([BT, BH], gl.float32, thin)
    i = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group = item % GROUPS
        sequence = item // GROUPS % count
        part = item // (GROUPS * count)
        _, start, end = part_range(places, lengths, sequence, part, PART, PARTS)
        if start < end:
            lead = sequence.to(gl.int64)
            first_head = group * BH
            q_place = lead * query_n + (first_head + q_head)[:, None] * query_h + q_channel[None, :]
            r_place = lead * shared_n + (first_head + r_head)[:, None] * shared_h
            r_place += r_channel[None, :]
            q = gl.load(query + q_place, mask=(first_head + q_head < H)[:, None], other=0.0)
            r = gl.load(shared + r_place, mask=(first_head + r_head < H)[:, None], other=0.0)
            q_tile.store(q)
            r_tile.store(r)
            fence_async_shared()
            top = gl.full([BH], float("-inf"), gl.float32, gl.SliceLayout(0, thin))
            total = gl.zeros([BT, BH], gl.float32, thin)
            mixed = gl.zeros([R, BH], gl.float32, thin)
            for first in range(start, end, BT):
                stage = i % STAGES
                latent = latents.index(stage)
                mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
                scores = warpgroup_mma(
                    keys.index(stage), r_tile.permute((1, 0)), none, use_acc=False, is_async=True
                )
                scores = warpgroup_mma(latent, q_tile.permute((1, 0)), scores, is_async=True)
                valid = gl.minimum(end - first, BT)
                scores = warpgroup_mma_wait(0, deps=[scores])
                if valid < BT:
                    clear_behind(latent, valid, BT, R)
                scores = gl.where((token < valid)[:, None], scores * scale, float("-inf"))
                higher = gl.maximum(top, gl.max(scores, 0))
                shrink = gl.exp2(top - higher)
                power = gl.exp2(scores - higher[None, :])
                p_tile.permute((1, 0)).store(power.to(work))
                fence_async_shared()
                total = total * shrink[None, :] + power
                mixed = mixed * shrink[None, :]
                mixed = warpgroup_mma(
                    latent.permute((1, 0)), p_tile.permute((1, 0)), mixed, is_async=True
                )
                top = higher
                mixed = warpgroup_mma_wait(0, deps=[mixed])
                mbarrier.arrive(free.index(stage), count=1)
                i += 1
            head = first_head + column
            line = (lead * parts + part) * H + head
            gl.store(stats + line, top, mask=head < H)
            behind = count.to(gl.int64) * parts * H
            gl.store(stats + behind + line, gl.sum(total, 0), mask=head < H)
            gl.store(
                partial + line[None, :] * R + channel[:, None], mixed, mask=(head < H)[None, :]
            )


@gluon.jit(do_not_specialize=["count", "items"])
def part_hopper_kernel(
    latent_desc,
    key_desc,
    query,
    shared,
    places,
    lengths,
    partial,
    stats,
    scale,
    count,
    parts,
    items,
    capacity,
    query_n,
    query_h,
    shared_n,
    shared_h,
    H: gl.constexpr,
    BH: gl.constexpr,
    BT: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `part_kernel`, every program several of its ``items``; grid (processors)."""
    GROUPS: gl.constexpr = (H + BH - 1) // BH
    work: gl.constexpr = latent_desc.dtype
    latents = gl.allocate_shared_memory(work, [STAGES, BT, R], latent_desc.layout)
    keys = gl.allocate_shared_memory(work, [STAGES, BT, P], key_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (mix_tiles, (
                query, shared, latents, keys, ready, free, places, lengths, partial, stats, scale,
                count, parts, items, query_n, query_h, shared_n, shared_h,
                H, BH, BT, R, P, PART, PARTS, STAGES,
            )),
            (copy_tiles, (
                latent_desc, key_desc, latents, keys, ready, free, places, lengths, count, capacity,
                items, GROUPS, BT, R, PART, PARTS, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
