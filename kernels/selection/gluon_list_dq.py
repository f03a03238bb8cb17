# SPDX-License-Identifier: Apache-2.0
"""dQ over lists of keys whose values are a part of the keys' own rows, and the factors of dK, with wgmma (sm_90).

A program has 64 heads of a query and 8 warps. One product of 128 rows, the queries and dO of its heads, with a tile of
32 keys gives the scores (one warpgroup) and dO V^T (the other), which meet in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_language import thread_barrier
from .gluon_list_forward import HB, copy_rows, load_keys, rows_layout

NW = gl.constexpr(8)  # warps
BN = gl.constexpr(32)  # keys of a tile


@gluon.jit(do_not_specialize=["S", "G", "first", "rows", "sqb", "sqs", "sqg", "skb", "skg"])
def selection_list_dq_wgmma(
    dout_ptr, q_ptr, k_ptr, keys_ptr, counts_ptr, lse2_ptr, delta_ptr, dq_ptr, p_ptr, ds_ptr, scale, S, G, N, first, rows,
    sqb, sqs, sqg, sqh, skb, skg, skn,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, DOUT: gl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, G, H, DK] of ``rows`` queries from ``first`` on, p and ds[B, G, rows, H, N].

    DV is a power of two; KT columns of a key, of which DK - DV count, are no part of the value. As
    ``list_dq.selection_list_dq`` otherwise, without splits.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    L: gl.constexpr = rows_layout(DV, NW)
    LT: gl.constexpr = rows_layout(KT if KT else 64, NW)
    MX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, min(256, DV // 2), 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MO, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HN: gl.constexpr = (H + HB - 1) // HB
    pid = gl.program_id(0)
    hb = pid % HN
    line = (pid // HN).to(gl.int64)
    bg = line // rows
    s = first + line % rows
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g

    a_s = gl.allocate_shared_memory(dtype, [2 * HB, DV], TILE)
    ring = gl.allocate_shared_memory(dtype, [2, BN, DV], TILE)
    x_s = gl.allocate_shared_memory(gl.float32, [2 * HB, BN], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    # Rows start at multiples of 16 bytes.
    q_base = q_ptr + gl.multiple_of(b * sqb + s * sqs + g * sqg, 8)
    k_base = k_ptr + gl.multiple_of(b * skb + g * skg, 8)
    sqh = gl.multiple_of(gl.to_tensor(sqh).to(gl.int64), 8)
    skn = gl.multiple_of(gl.to_tensor(skn).to(gl.int64), 8)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
    copy_rows(a_s.slice(0, HB), q_base, head * sqh, head < H, 0, DV, DK, L)
    copy_rows(a_s.slice(HB, HB), dout_ptr, (row * H + head) * DV, (head < H) & DOUT, 0, DV, DV, L)
    n = gl.load(counts_ptr + row)
    keys_row = keys_ptr + row * N
    key, there = load_keys(keys_row, 0, n, BN, L)
    copy_rows(ring.index(0), k_base, key * skn, there, 0, DV, DK, L)
    key, there = load_keys(keys_row, BN, n, BN, L)
    if KT:
        qt_s = gl.allocate_shared_memory(dtype, [HB, KT], TILE)
        tails = gl.allocate_shared_memory(dtype, [2, BN, KT], TILE)
        thead = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, LT))
        copy_rows(qt_s, q_base, thead * sqh, thead < H, DV, KT, DK, LT)
        tkey, tthere = load_keys(keys_row, 0, n, BN, LT)
        copy_rows(tails.index(0), k_base, tkey * skn, tthere, DV, KT, DK, LT)
        tkey, tthere = load_keys(keys_row, BN, n, BN, LT)
    async_copy.commit_group()

    qk = scale * 1.4426950408889634
    mine = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, A))
    live = mine < H
    lse2 = gl.load(lse2_ptr + row * H + mine, mask=live, other=float("inf"))
    delta = gl.load(delta_ptr + row * H + mine, mask=live, other=0.0)
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, A))
    to = ((line * H + mine) * N)[:, None] + column[None, :]
    dq = gl.zeros([HB, DV], gl.float32, layout=MO)
    if KT:
        MQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KT // 2, 16])
        dqt = gl.zeros([HB, KT], gl.float32, layout=MQ)
    slot = 0
    for start in range(0, n, BN):
        async_copy.wait_group(0)
        fence_async_shared()
        # The tile is complete, and no warp still reads the one before it.
        thread_barrier()
        x = gl.zeros([2 * HB, BN], gl.float32, layout=MX)
        x = warpgroup_mma(a_s, ring.index(slot).permute((1, 0)), x, use_acc=False, is_async=True)
        if KT:
            # Both warpgroups compute all of it, which needs no exchange.
            t = gl.zeros([HB, BN], gl.float32, layout=MX)
            t = warpgroup_mma(qt_s, tails.index(slot).permute((1, 0)), t, use_acc=False, is_async=True)
        if start + BN < n:
            copy_rows(ring.index(1 - slot), k_base, key * skn, there, 0, DV, DK, L)
            if KT:
                copy_rows(tails.index(1 - slot), k_base, tkey * skn, tthere, DV, KT, DK, LT)
        async_copy.commit_group()
        key, there = load_keys(keys_row, start + 2 * BN, n, BN, L)
        if KT:
            tkey, tthere = load_keys(keys_row, start + 2 * BN, n, BN, LT)
            x, t = warpgroup_mma_wait(0, deps=(x, t))
        else:
            x = warpgroup_mma_wait(0, deps=(x,))
        x_s.store(x)
        thread_barrier()
        # Both warpgroups compute all weights, in the layout of the next product's left operand.
        y = x_s.slice(0, HB).load(A)
        if KT:
            y += gl.convert_layout(t, A, assert_trivial=True)
        dp = x_s.slice(HB, HB).load(A)
        p = gl.exp2(y * qk - lse2[:, None])
        ds = gl.where((start + column < n)[None, :], p * (dp - delta[:, None]), 0.0).to(dtype)
        inside = live[:, None] & (start + column < N)[None, :]
        gl.store(ds_ptr + to + start, ds, mask=inside)
        if DOUT:
            gl.store(p_ptr + to + start, p.to(dtype), mask=inside)
        dq = warpgroup_mma(ds, ring.index(slot), dq, is_async=True)
        if KT:
            dqt = warpgroup_mma(ds, tails.index(slot), dqt, is_async=True)
            dq, dqt = warpgroup_mma_wait(0, deps=(dq, dqt))
        else:
            dq = warpgroup_mma_wait(0, deps=(dq,))
        slot = 1 - slot
    async_copy.wait_group(0)
    # Through shared memory, so that whole lines are written.
    thread_barrier()
    a_s.slice(0, HB).store((dq * scale).to(dtype))
    thread_barrier()
    d = gl.arange(0, DV, layout=gl.SliceLayout(0, L))
    out = dq_ptr + ((row * H + head) * DK)[:, None] + d[None, :]
    gl.store(out, a_s.slice(0, HB).load(L), mask=(head < H)[:, None])
    if KT:
        theads = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MQ))
        d = DV + gl.arange(0, KT, layout=gl.SliceLayout(0, MQ))
        out = dq_ptr + ((row * H + theads) * DK)[:, None] + d[None, :]
        gl.store(out, (dqt * scale).to(dtype), mask=(theads < H)[:, None] & (d < DK)[None, :])
