# SPDX-License-Identifier: Apache-2.0
"""Tiles of listed keys in shared memory: their places, their barriers, and the warpgroup that copies them (sm_90).

A program has 64 heads of a query and three warpgroups. One copies tiles [BN, columns] of gathered rows, RING of them
in flight, and each row once; the other two take the left and the right half of the columns. Each half of a place is
free as soon as nothing reads it any more; the tail, columns that are no part of the values, is free with the right
half.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma

from ..gluon_language import async_load, thread_barrier

HB = gl.constexpr(64)  # heads of a program
NW = gl.constexpr(4)  # warps of a warpgroup
RING = gl.constexpr(2)  # tiles of keys in shared memory
LOG2E = gl.constexpr(1.4426950408889634)
REGISTERS = gl.constexpr(88)  # of a thread that copies


@gluon.constexpr_function
def rows_layout(D, warps):
    """Returns the layout of a copy of rows of D columns: 16 bytes a thread, neighbouring threads in a row."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def scores_layout(BN):
    """Returns the layout of scores [HB, BN] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])


@gluon.constexpr_function
def half_layout(DV):
    """Returns the layout of half of DV columns [HB, DV / 2] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(256, DV // 2), 16])


@gluon.jit
def copy_rows(to, base, at, mask, first: gl.constexpr, W: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """Starts to copy columns ``first`` to ``first`` + W of the rows at base + at; 0 outside mask and beyond D."""
    d = first + gl.arange(0, W, layout=gl.SliceLayout(0, L))[None, :]
    if first + W <= D:
        async_load(to, base + (at[:, None] + d), mask=mask[:, None])
    else:
        async_load(to, base + (at[:, None] + d), mask=mask[:, None] & (d < D))


@gluon.jit
def load_keys(keys_row, start, end, BN: gl.constexpr, L: gl.constexpr):
    """Returns the keys [BN] from ``start`` on, and whether each is before ``end``."""
    i = start + gl.arange(0, BN, layout=gl.SliceLayout(1, L))
    return gl.load(keys_row + i, mask=i < end, other=0), i < end


@gluon.jit
def barriers(N: gl.constexpr, count: gl.constexpr):
    """Allocates N barriers at which ``count`` threads or warpgroups arrive."""
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def signal(bar):
    """Arrives at a barrier once all threads of the warpgroup are here."""
    thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def allocate(
    dtype: gl.constexpr, BN: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, BIAS: gl.constexpr, users: gl.constexpr,
):  # fmt: skip
    """Allocates q and the ring of tiles, each in halves and a tail of KT columns, their biases, and their barriers.

    ``users``: how many warpgroups say that a place is free.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_l = gl.allocate_shared_memory(dtype, [HB, DV // 2], TILE)
    q_r = gl.allocate_shared_memory(dtype, [HB, DV // 2], TILE)
    left = gl.allocate_shared_memory(dtype, [RING, BN, DV // 2], TILE)
    right = gl.allocate_shared_memory(dtype, [RING, BN, DV // 2], TILE)
    if KT:
        q_t = gl.allocate_shared_memory(dtype, [HB, KT], TILE)
        tails = gl.allocate_shared_memory(dtype, [RING, BN, KT], TILE)
    else:
        q_t = q_l
        tails = left
    if BIAS:
        biases = gl.allocate_shared_memory(gl.float32, [RING, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        biases = left
    q_ready = barriers(1, 32 * NW)
    left_ready = barriers(RING, 32 * NW)
    right_ready = barriers(RING, 32 * NW)
    left_free = barriers(RING, users)
    right_free = barriers(RING, users)
    return (q_l, q_r, q_t, left, right, tails, biases), (q_ready, left_ready, right_ready, left_free, right_free)


@gluon.jit
def copy_tiles(
    tiles, bars, q_base, k_base, keys_row, bias_row, hb, sqh, skn, begin, end,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, BIAS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Copies q, and each tile of BN keys with its biases as soon as its place is free."""
    q_l, q_r, q_t, left, right, tails, biases = tiles
    q_ready, left_ready, right_ready, left_free, right_free = bars
    HALF: gl.constexpr = DV // 2
    L: gl.constexpr = rows_layout(HALF, NW)
    LT: gl.constexpr = rows_layout(KT if KT else 64, NW)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
    copy_rows(q_l, q_base, head * sqh, head < H, 0, HALF, DK, L)
    copy_rows(q_r, q_base, head * sqh, head < H, HALF, HALF, DK, L)
    if KT:
        thead = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, LT))
        copy_rows(q_t, q_base, thead * sqh, thead < H, DV, KT, DK, LT)
        tkey, tthere = load_keys(keys_row, begin, end, BN, LT)
    async_copy.mbarrier_arrive(q_ready.index(0), increment_count=False)
    key, there = load_keys(keys_row, begin, end, BN, L)
    for tile in range(gl.cdiv(end - begin, BN)):
        slot = tile % RING
        following = begin + (tile + 1) * BN
        phase = (tile // RING + 1) & 1
        mbarrier.wait(left_free.index(slot), phase)
        copy_rows(left.index(slot), k_base, key * skn, there, 0, HALF, DK, L)
        async_copy.mbarrier_arrive(left_ready.index(slot), increment_count=False)
        mbarrier.wait(right_free.index(slot), phase)
        copy_rows(right.index(slot), k_base, key * skn, there, HALF, HALF, DK, L)
        if KT:
            copy_rows(tails.index(slot), k_base, tkey * skn, tthere, DV, KT, DK, LT)
            tkey, tthere = load_keys(keys_row, following, end, BN, LT)
        if BIAS:
            i = begin + tile * BN + gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [NW], [0]))
            async_load(biases.index(slot), bias_row + i, mask=i < end)
        async_copy.mbarrier_arrive(right_ready.index(slot), increment_count=False)
        key, there = load_keys(keys_row, following, end, BN, L)


@gluon.jit
def product(a_l, a_r, a_t, tiles, bars, tile, KT: gl.constexpr, BN: gl.constexpr):
    """Starts the product [HB, BN] of rows, in halves and a tail, with a tile, once it is copied."""
    _, _, _, left, right, tails, _ = tiles
    _, left_ready, right_ready, _, _ = bars
    slot = tile % RING
    phase = (tile // RING) & 1
    mbarrier.wait(left_ready.index(slot), phase)
    fence_async_shared()
    x = gl.zeros([HB, BN], gl.float32, layout=scores_layout(BN))
    x = warpgroup_mma(a_l, left.index(slot).permute((1, 0)), x, use_acc=False, is_async=True)
    mbarrier.wait(right_ready.index(slot), phase)
    fence_async_shared()
    x = warpgroup_mma(a_r, right.index(slot).permute((1, 0)), x, is_async=True)
    if KT:
        x = warpgroup_mma(a_t, tails.index(slot).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def write_lines(to, x, through, row, H, hb, first: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Stores x[HB, W] as columns ``first`` to ``first`` + W of the rows [H, D] at ``row``, through shared memory.

    So whole lines are written.
    """
    L: gl.constexpr = rows_layout(W, NW)
    through.store(x.to(through.dtype))
    thread_barrier()
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
    column = first + gl.arange(0, W, layout=gl.SliceLayout(0, L))
    gl.store(to + ((row * H + head) * D)[:, None] + column[None, :], through.load(L), mask=(head < H)[:, None])
