# SPDX-License-Identifier: Apache-2.0
"""The forward over lists of keys whose values are a part of the keys' own rows, with wgmma (sm_90).

A program has 64 heads of a query and 8 warps. Each key's row is copied to shared memory once, one tile of 64 keys ahead
of its products: the scores of both warpgroups' halves of the tile, and 256 columns of the result for each warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_language import async_load, thread_barrier

BN = gl.constexpr(64)  # keys of a tile
HB = gl.constexpr(64)  # heads of a program
NW = gl.constexpr(8)  # warps


@gluon.constexpr_function
def rows_layout(D, warps):
    """Returns the layout of a copy of rows of D columns: 16 bytes a thread, neighbouring threads in a row."""
    across = min(32, D // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


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
def row_parts(p):
    """Sums p[HB, BN] over the columns that a thread holds of a row in the layout of its product: [HB, 8]."""
    # A column is a warpgroup's half, a block of 8, a thread and one of its two neighbours.
    x = gl.sum(p.reshape([HB, 2, BN // 16, 4, 2]), axis=4)
    return gl.sum(x, axis=2).reshape([HB, 8])


@gluon.jit
def share(n, split, NS):
    """Returns [from, to), the positions of one split of n."""
    each = n // NS
    rest = n - each * NS
    begin = split * each + gl.minimum(split, rest)
    return begin, begin + each + (split < rest).to(gl.int32)


@gluon.jit(do_not_specialize=["S", "G", "NS", "sqb", "sqs", "sqg", "skb", "skg"])
def selection_list_forward_wgmma(
    q_ptr, k_ptr, keys_ptr, counts_ptr, sink_ptr, o_ptr, lse_ptr, part_ptr, plse_ptr, scale, S, G, N, NS,
    sqb, sqs, sqg, sqh, skb, skg, skn,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Computes o[B, S, G, H, DV] and lse[B, S, G, H] from q[B, S, G, H, DK], k[B, G, S_kv, DK] and keys[B, S, G, N].

    DV is a power of two; KT columns of a key, of which DK - DV count, are no part of the value. As
    ``list_forward.selection_list_forward`` otherwise.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    L: gl.constexpr = rows_layout(DV, NW)
    LT: gl.constexpr = rows_layout(KT if KT else 64, NW)
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, min(256, DV // 2), 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HN: gl.constexpr = (H + HB - 1) // HB
    pid = gl.program_id(0)
    split = pid % NS
    hb = pid // NS % HN
    rest = pid // NS // HN
    s = (rest % S).to(gl.int64)
    bg = (rest // S).to(gl.int64)
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g

    q_s = gl.allocate_shared_memory(dtype, [HB, DV], TILE)
    ring = gl.allocate_shared_memory(dtype, [2, BN, DV], TILE)
    # Rows start at multiples of 16 bytes.
    q_base = q_ptr + gl.multiple_of(b * sqb + s * sqs + g * sqg, 8)
    k_base = k_ptr + gl.multiple_of(b * skb + g * skg, 8)
    sqh = gl.multiple_of(gl.to_tensor(sqh).to(gl.int64), 8)
    skn = gl.multiple_of(gl.to_tensor(skn).to(gl.int64), 8)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
    copy_rows(q_s, q_base, head * sqh, head < H, 0, DV, DK, L)
    n = gl.load(counts_ptr + row)
    begin, end = share(n, split, NS)
    keys_row = keys_ptr + row * N
    key, there = load_keys(keys_row, begin, end, BN, L)
    copy_rows(ring.index(0), k_base, key * skn, there, 0, DV, DK, L)
    key, there = load_keys(keys_row, begin + BN, end, BN, L)
    if KT:
        qt_s = gl.allocate_shared_memory(dtype, [HB, KT], TILE)
        tails = gl.allocate_shared_memory(dtype, [2, BN, KT], TILE)
        head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, LT))
        copy_rows(qt_s, q_base, head * sqh, head < H, DV, KT, DK, LT)
        tkey, tthere = load_keys(keys_row, begin, end, BN, LT)
        copy_rows(tails.index(0), k_base, tkey * skn, tthere, DV, KT, DK, LT)
        tkey, tthere = load_keys(keys_row, begin + BN, end, BN, LT)
    async_copy.commit_group()

    qk = scale * 1.4426950408889634
    m = gl.full([HB], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MS))
    parts = row_parts(gl.zeros([HB, BN], gl.float32, layout=MS))
    acc = gl.zeros([HB, DV], gl.float32, layout=MO)
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, MS))
    slot = 0
    for start in range(begin, end, BN):
        async_copy.wait_group(0)
        fence_async_shared()
        # The tile is complete, and no warp still reads the one before it.
        thread_barrier()
        x = gl.zeros([HB, BN], gl.float32, layout=MS)
        x = warpgroup_mma(q_s, ring.index(slot).permute((1, 0)), x, use_acc=False, is_async=True)
        if KT:
            x = warpgroup_mma(qt_s, tails.index(slot).permute((1, 0)), x, is_async=True)
        if start + BN < end:
            copy_rows(ring.index(1 - slot), k_base, key * skn, there, 0, DV, DK, L)
            if KT:
                copy_rows(tails.index(1 - slot), k_base, tkey * skn, tthere, DV, KT, DK, LT)
        async_copy.commit_group()
        key, there = load_keys(keys_row, start + 2 * BN, end, BN, L)
        if KT:
            tkey, tthere = load_keys(keys_row, start + 2 * BN, end, BN, LT)
        x = warpgroup_mma_wait(0, deps=(x,))
        x = gl.where((start + column < end)[None, :], x * qk, float("-inf"))
        m_new = gl.maximum(m, gl.max(x, axis=1))
        # Nothing but -inf so far: exp2(-inf - 0) = 0.
        safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(x - safe[:, None])
        alpha = gl.exp2(m - safe)
        parts = parts * gl.convert_layout(alpha, gl.SliceLayout(1, parts.type.layout))[:, None] + row_parts(p)
        m = m_new
        # In registers: a fence for weights in shared memory would wait for the copies in flight.
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, MO, 2))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, MO))[:, None]
        acc = warpgroup_mma(p, ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        slot = 1 - slot
    async_copy.wait_group(0)

    norm = gl.convert_layout(gl.sum(parts, axis=1), gl.SliceLayout(1, MS))
    lse = gl.where(norm == 0.0, float("-inf"), m + gl.log2(norm))
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MS))
    live = head < H
    if NS == 1:
        factor = gl.full([HB], 1.0, gl.float32, layout=gl.SliceLayout(1, MS))
        if SINK:
            sink = gl.load(sink_ptr + g * H + head, mask=live, other=0.0).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(m, sink)
            top = gl.where(top == float("-inf"), 0.0, top)
            factor = gl.exp2(m - top)
            norm = norm * factor + gl.exp2(sink - top)
        factor = factor / gl.where(norm == 0.0, 1.0, norm)
        gl.store(lse_ptr + row * H + head, lse * 0.6931471805599453, mask=live)
        out = acc * gl.convert_layout(factor, gl.SliceLayout(1, MO))[:, None]
        # Through shared memory, so that whole lines are written.
        thread_barrier()
        q_s.store(out.to(dtype))
        thread_barrier()
        line = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
        to = o_ptr + ((row * H + line) * DV)[:, None] + gl.arange(0, DV, layout=gl.SliceLayout(0, L))[None, :]
        gl.store(to, q_s.load(L), mask=(line < H)[:, None])
    else:
        first = (row * NS + split) * H
        gl.store(plse_ptr + first + head, lse, mask=live)
        part = acc * gl.convert_layout(1.0 / gl.where(norm == 0.0, 1.0, norm), gl.SliceLayout(1, MO))[:, None]
        at = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MO))
        d = gl.arange(0, DV, layout=gl.SliceLayout(0, MO))
        gl.store(part_ptr + ((first + at) * DV)[:, None] + d[None, :], part, mask=(at < H)[:, None])
