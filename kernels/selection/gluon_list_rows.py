# SPDX-License-Identifier: Apache-2.0
"""The rows of dK over lists of keys whose values are a part of the keys' own rows, with wgmma (sm_90).

    part[row, j] = scale * ds[:, j] @ q (+ p[:, j] @ dO in the columns of the values), over the heads of a query

For more than 64 heads. A program has a query and 256 columns of its rows, and half of the columns beyond the values. q
and dO stay in shared memory. One warpgroup copies tiles of 64 keys of the scores' gradients and of the weights. The
other two each take every second tile and multiply in turn, so that one multiplies while the other scales or stores.
The bytes of the rows bound it, whose stores hold a warpgroup up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_language import async_load, thread_barrier
from .gluon_list_tiles import HB, NW, barriers, copy_rows, rows_layout, signal

BN = gl.constexpr(64)  # keys of a tile
DC = gl.constexpr(256)  # columns of a program
STAGES = gl.constexpr(2)  # tiles in shared memory
REGISTERS = gl.constexpr([224, 64])  # of a thread of the second warpgroup and of the third


@gluon.constexpr_function
def tail_width(DV, KT):
    """Returns how many of the KT columns beyond the values a program has; 16, the fewest of a product, where KT is 0."""
    return KT // (DV // 256) if KT else 16


@gluon.constexpr_function
def stored_layout(columns):
    """Returns the layout of rows [BN, columns] of a warpgroup with 8 neighbouring columns a thread.

    Each warp has the rows that it has of a product, so that values move between four threads only.
    """
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    wide = 32
    while wide < columns:
        registers.append([0, wide])
        wide *= 2
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def store_rows(to, x, tile, first, n, DK: gl.constexpr, W: gl.constexpr):
    """Stores x[BN, W] as columns ``first`` to ``first`` + W of the rows of a tile's keys."""
    L: gl.constexpr = stored_layout(W)
    x = gl.convert_layout(x.to(to.dtype.element_ty), L)
    j = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, L))
    d = first + gl.arange(0, W, layout=gl.SliceLayout(0, L))
    gl.store(to + ((j * DK)[:, None] + d[None, :]), x, mask=(j < n)[:, None] & (d < DK)[None, :])


@gluon.jit
def await_turn(turns, who: gl.constexpr, product):
    """Waits until the other warpgroup has begun its last product before the ``product``-th of warpgroup ``who``."""
    mbarrier.wait(turns.index(who), (product + 1 - who) & 1)


@gluon.jit
def multiply(
    who: gl.constexpr, tiles, bars, to, scale, column, n,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Computes the rows of every second tile, from the tile ``who`` on: scale * ds.T @ q + p.T @ dout over the heads."""
    factors, q, dout, q_t = tiles
    held, ready, free, turns = bars
    HN: gl.constexpr = (H + HB - 1) // HB
    TW: gl.constexpr = tail_width(DV, KT)
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DC, 16])
    MT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TW, 16])
    count = gl.cdiv(n, BN)
    mbarrier.wait(held.index(0), 0)
    fence_async_shared()
    for tile in range(who, count, 2):
        slot = tile % STAGES
        phase = (tile // STAGES) & 1
        x = gl.zeros([BN, DC], gl.float32, layout=M)
        t = gl.zeros([BN, TW], gl.float32, layout=MT)
        mbarrier.wait(ready.index(2 * slot), phase)
        fence_async_shared()
        await_turn(turns, who, 0)
        for c in gl.static_range(HN):
            ds = factors.index(slot * 2 * HN + c).permute((1, 0))
            x = warpgroup_mma(ds, q.index(c), x, is_async=True)
            if KT:
                t = warpgroup_mma(ds, q_t.index(c), t, is_async=True)
        signal(turns.index(1 - who))
        if KT:
            x, t = warpgroup_mma_wait(0, deps=(x, t))
        else:
            x = warpgroup_mma_wait(0, deps=(x,))
        signal(free.index(2 * slot))
        x = x * scale
        mbarrier.wait(ready.index(2 * slot + 1), phase)
        fence_async_shared()
        await_turn(turns, who, 1)
        for c in gl.static_range(HN):
            p = factors.index(slot * 2 * HN + HN + c).permute((1, 0))
            x = warpgroup_mma(p, dout.index(c), x, is_async=True)
        signal(turns.index(1 - who))
        x = warpgroup_mma_wait(0, deps=(x,))
        signal(free.index(2 * slot + 1))
        store_rows(to, x, tile, column * DC, n, DK, DC)
        if KT:
            store_rows(to, t * scale, tile, DV + column * TW, n, DK, TW)
    if who == 1:  # noqa: SIM102
        if count % 2 == 1:  # the other warpgroup's last tile has no partner: pass its turn on once
            await_turn(turns, who, 0)
            signal(turns.index(0))


@gluon.jit
def first_tiles(
    tiles, bars, to, scale, column, n, H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Computes the rows of the tiles 0, 2, 4 and so on."""
    multiply(0, tiles, bars, to, scale, column, n, H, DK, DV, KT)


@gluon.jit
def second_tiles(
    tiles, bars, to, scale, column, n, H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Computes the rows of the tiles 1, 3, 5 and so on."""
    multiply(1, tiles, bars, to, scale, column, n, H, DK, DV, KT)


@gluon.jit
def copy_rows_of_heads(
    tiles, q_base, dout_base, column, sqh, H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Starts to copy the program's columns of q and dO."""
    _, q, dout, q_t = tiles
    TW: gl.constexpr = tail_width(DV, KT)
    L: gl.constexpr = rows_layout(DC, NW)
    LT: gl.constexpr = rows_layout(TW, NW)
    for c in gl.static_range((H + HB - 1) // HB):
        head = c * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
        copy_rows(q.index(c), q_base + column * DC, head * sqh, head < H, 0, DC, DC, L)
        copy_rows(dout.index(c), dout_base + column * DC, head * DV, head < H, 0, DC, DC, L)
        if KT:
            of_tail = c * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, LT))
            d = DV + column * TW + gl.arange(0, TW, layout=gl.SliceLayout(0, LT))
            inside = (of_tail < H)[:, None] & (d < DK)[None, :]
            async_load(q_t.index(c), q_base + ((of_tail * sqh)[:, None] + d[None, :]), mask=inside)


@gluon.jit
def copy_all(
    tiles, bars, q_base, dout_base, ds_base, p_base, column, sqh, n, N,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Copies q and dO, then each tile of the factors as soon as its place is free."""
    factors, _, _, _ = tiles
    held, ready, free, _ = bars
    HN: gl.constexpr = (H + HB - 1) // HB
    L: gl.constexpr = rows_layout(BN, NW)
    copy_rows_of_heads(tiles, q_base, dout_base, column, sqh, H, DK, DV, KT)
    async_copy.mbarrier_arrive(held.index(0), increment_count=False)
    for tile in range(gl.cdiv(n, BN)):
        slot = tile % STAGES
        j = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
        for half in gl.static_range(2):
            mbarrier.wait(free.index(2 * slot + half), (tile // STAGES + 1) & 1)
            for c in gl.static_range(HN):
                head = c * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
                at = (head * N)[:, None] + j[None, :]
                inside = (head < H)[:, None] & (j < N)[None, :]
                base = p_base if half else ds_base
                async_load(factors.index((2 * slot + half) * HN + c), base + at, mask=inside)
            async_copy.mbarrier_arrive(ready.index(2 * slot + half), increment_count=False)


@gluon.jit(do_not_specialize=["S", "G", "first", "rows", "sqb", "sqs", "sqg"])
def selection_list_rows_wgmma(
    dout_ptr, q_ptr, p_ptr, ds_ptr, counts_ptr, part_k_ptr, scale, S, G, N, first, rows, sqb, sqs, sqg, sqh,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Computes part_k[B, G, rows, N, DK] = scale * ds.T @ q, with p.T @ dout added to the first DV columns.

    KT columns of a key, of which DK - DV count, are no part of the value. N is a multiple of 16. As
    ``list_dkv.selection_list_rows`` with SHARED and DOUT. Programs [B, G, rows] x [blocks of 256 columns].
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = DV // DC
    HN: gl.constexpr = (H + HB - 1) // HB
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    column = gl.program_id(0) % COLUMNS
    line = (gl.program_id(0) // COLUMNS).to(gl.int64)
    bg = line // rows
    s = first + line % rows
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g
    # Rows start at multiples of 16 bytes.
    q_base = q_ptr + gl.multiple_of(b * sqb + s * sqs + g * sqg, 8)
    dout_base = dout_ptr + gl.multiple_of(row * H * DV, 8)
    sqh = gl.multiple_of(gl.to_tensor(sqh).to(gl.int64), 8)
    N = gl.multiple_of(gl.to_tensor(N).to(gl.int64), 16)
    factors_at = gl.multiple_of(line * H * N, 16)
    to = part_k_ptr + gl.multiple_of(line * N * DK, 16)
    n = gl.load(counts_ptr + row)

    factors = gl.allocate_shared_memory(dtype, [STAGES * 2 * HN, HB, BN], TILE)
    q = gl.allocate_shared_memory(dtype, [HN, HB, DC], TILE)
    dout = gl.allocate_shared_memory(dtype, [HN, HB, DC], TILE)
    if KT:
        q_t = gl.allocate_shared_memory(dtype, [HN, HB, tail_width(DV, KT)], gl.NVMMASharedLayout(64, 16, 2))
    else:
        q_t = q
    tiles = (factors, q, dout, q_t)
    bars = (barriers(1, 32 * NW), barriers(2 * STAGES, 32 * NW), barriers(2 * STAGES, 1), barriers(2, 1))
    thread_barrier()
    gl.warp_specialize(
        [
            (first_tiles, (tiles, bars, to, scale, column, n, H, DK, DV, KT)),
            (second_tiles, (tiles, bars, to, scale, column, n, H, DK, DV, KT)),
            (copy_all, (tiles, bars, q_base, dout_base, ds_ptr + factors_at, p_ptr + factors_at, column, sqh, n, N, H, DK,
                        DV, KT)),
        ],
        [NW, NW],
        REGISTERS,
    )  # fmt: skip
