# SPDX-License-Identifier: Apache-2.0
"""dQ over lists of keys whose values are a part of the keys' own rows, and the factors of dK, with wgmma (sm_90).

``list_dq.py`` has the formulas. A program has 64 heads of a query and three warpgroups. The first computes the scores
of a tile of 32 keys, the weights and their gradients, and the left half of dQ's columns; the second dO V^T, a tile
ahead, and the right half; the third copies. Shared memory limits it: q, dO and two tiles fill a multiprocessor's, and
products of 32 keys read both factors from there. Each key's row is gathered once for K, V and dQ.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_language import thread_barrier
from .gluon_list_tiles import (
    HB,
    LOG2E,
    NW,
    RING,
    allocate,
    barriers,
    copy_rows,
    copy_tiles,
    half_layout,
    product,
    rows_layout,
    scores_layout,
    signal,
    write_lines,
)

BN = gl.constexpr(32)  # keys of a tile


@gluon.constexpr_function
def registers(KT):
    """Returns the registers of a thread of the second warpgroup and of the third."""
    return [208, 72] if KT else [176, 88]


@gluon.jit
def gradients(
    passing, free, biases, x, rows, ds_row, p_row, at, tile, n, N, qk, live, DOUT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Returns the gradients of a tile's scores, which go to the other warpgroup and, with the weights, to memory.

    The scores x are there, so that this warpgroup no longer reads the right half of their tile: ``free``.
    """
    dp_s, ds_s, dp_passed, dp_taken, ds_passed, ds_taken = passing
    M: gl.constexpr = x.type.layout
    column = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, M))
    lse, delta, inverse, of_lse = rows
    counts = column < n
    if BIAS:
        bias = biases.index(tile % RING).load(gl.SliceLayout(0, M))
        counts &= bias == bias
        x = x * qk + bias[None, :]
        own = gl.exp2((x - lse[:, None]) * LOG2E)
        p = own * inverse[:, None]
    else:
        p = gl.exp2(x * qk - lse[:, None])
    mbarrier.wait(dp_passed.index(0), tile & 1)
    dp = dp_s.load(M)
    signal(dp_taken.index(0))
    mbarrier.arrive(free.index(tile % RING), count=1)
    ds = p * (dp - delta[:, None])
    if BIAS:
        ds += own * of_lse[:, None]
    ds = gl.where(counts[None, :], ds, 0.0).to(ds_s.dtype)
    mbarrier.wait(ds_taken.index(0), (tile + 1) & 1)
    ds_s.store(ds)
    fence_async_shared()
    signal(ds_passed.index(0))
    inside = live[:, None] & (column < N)[None, :]
    gl.store(ds_row + (at[:, None] + column[None, :]), ds, mask=inside)
    if DOUT:
        gl.store(p_row + (at[:, None] + column[None, :]), p.to(ds_s.dtype), mask=inside)
    return ds


@gluon.jit
def left_half(
    tiles, bars, passing, lse_ptr, delta_ptr, total_ptr, of_lse_ptr, dq_ptr, p_ptr, ds_ptr, scale, row, line, hb, n, N,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, DOUT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Computes the scores, the weights, their gradients and the left half of dQ."""
    q_l, q_r, q_t, left, _, _, biases = tiles
    q_ready, _, _, left_free, right_free = bars
    M: gl.constexpr = scores_layout(BN)
    MO: gl.constexpr = half_layout(DV)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, M))
    live = head < H
    lse = gl.load(lse_ptr + row * H + head, mask=live, other=float("inf"))
    delta = gl.load(delta_ptr + row * H + head, mask=live, other=0.0)
    if BIAS:
        lse = gl.where(lse == float("-inf"), float("inf"), lse)
        inverse = 1.0 / gl.load(total_ptr + row * H + head, mask=live, other=1.0)
        rows = (lse, delta, inverse, gl.load(of_lse_ptr + row * H + head, mask=live, other=0.0))
    else:
        rows = (lse, delta, lse, lse)
    at = head * N
    ds_row, p_row = ds_ptr + line * H * N, p_ptr + line * H * N
    qk = scale * (1.0 if BIAS else LOG2E)
    dq = gl.zeros([HB, DV // 2], gl.float32, layout=MO)
    count = gl.cdiv(n, BN)
    mbarrier.wait(q_ready.index(0), 0)
    if count > 0:
        x = warpgroup_mma_wait(0, deps=(product(q_l, q_r, q_t, tiles, bars, 0, KT, BN),))
        for tile in range(count - 1):
            ds = gradients(passing, right_free, biases, x, rows, ds_row, p_row, at, tile, n, N, qk, live, DOUT, BIAS)
            ds = gl.convert_layout(ds, gl.DotOperandLayout(0, MO, 2))
            dq = warpgroup_mma(ds, left.index(tile % RING), dq, is_async=True)
            x = product(q_l, q_r, q_t, tiles, bars, tile + 1, KT, BN)
            dq = warpgroup_mma_wait(3 if KT else 2, deps=(dq,))
            signal(left_free.index(tile % RING))
            x = warpgroup_mma_wait(0, deps=(x,))
        last = count - 1
        ds = gradients(passing, right_free, biases, x, rows, ds_row, p_row, at, last, n, N, qk, live, DOUT, BIAS)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, MO, 2))
        dq = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, left.index(last % RING), dq, is_async=True),))
    write_lines(dq_ptr, dq * scale, q_l, row, H, hb, 0, DV // 2, DK)


@gluon.jit
def right_half(
    tiles, bars, passing, do_l, do_r, dq_ptr, scale, row, hb, n,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Computes dO V^T, and the right half of dQ and its tail from the gradients of the other warpgroup."""
    _, _, _, _, right, tails, _ = tiles
    q_ready, _, _, left_free, right_free = bars
    dp_s, ds_s, dp_passed, dp_taken, ds_passed, ds_taken = passing
    TAIL: gl.constexpr = KT if KT else 16
    MT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    dq = gl.zeros([HB, DV // 2], gl.float32, layout=half_layout(DV))
    dqt = gl.zeros([HB, TAIL], gl.float32, layout=MT)
    count = gl.cdiv(n, BN)
    mbarrier.wait(q_ready.index(0), 0)
    if count > 0:
        dp = warpgroup_mma_wait(0, deps=(product(do_l, do_r, do_r, tiles, bars, 0, 0, BN),))
        for tile in range(count):
            slot = tile % RING
            mbarrier.wait(dp_taken.index(0), (tile + 1) & 1)
            dp_s.store(dp)
            signal(dp_passed.index(0))
            mbarrier.arrive(left_free.index(slot), count=1)
            # The last tile's product is computed twice, and read once.
            following = product(do_l, do_r, do_r, tiles, bars, gl.minimum(tile + 1, count - 1), 0, BN)
            mbarrier.wait(ds_passed.index(0), tile & 1)
            fence_async_shared()
            dq = warpgroup_mma(ds_s, right.index(slot), dq, is_async=True)
            if KT:
                dqt = warpgroup_mma(ds_s, tails.index(slot), dqt, is_async=True)
                dp, dq, dqt = warpgroup_mma_wait(0, deps=(following, dq, dqt))
            else:
                dp, dq = warpgroup_mma_wait(0, deps=(following, dq))
            signal(ds_taken.index(0))
            mbarrier.arrive(right_free.index(slot), count=1)
    write_lines(dq_ptr, dq * scale, do_r, row, H, hb, DV // 2, DV // 2, DK)
    if KT:
        head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MT))
        d = DV + gl.arange(0, KT, layout=gl.SliceLayout(0, MT))
        to = dq_ptr + ((row * H + head) * DK)[:, None] + d[None, :]
        gl.store(to, (dqt * scale).to(dq_ptr.dtype.element_ty), mask=(head < H)[:, None] & (d < DK)[None, :])


@gluon.jit
def copy_all(
    tiles, bars, do_l, do_r, dout, q_base, k_base, keys_row, bias_row, hb, sqh, skn, n,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, DOUT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Copies dO, q and each tile of keys."""
    L: gl.constexpr = rows_layout(DV // 2, NW)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
    copy_rows(do_l, dout, head * DV, (head < H) & DOUT, 0, DV // 2, DV, L)
    copy_rows(do_r, dout, head * DV, (head < H) & DOUT, DV // 2, DV // 2, DV, L)
    copy_tiles(tiles, bars, q_base, k_base, keys_row, bias_row, hb, sqh, skn, 0, n, H, DK, DV, KT, BIAS, BN)


@gluon.jit(do_not_specialize=["S", "G", "first", "rows", "sqb", "sqs", "sqg", "skb", "skg"])
def selection_list_dq_wgmma(
    dout_ptr, q_ptr, k_ptr, keys_ptr, counts_ptr, bias_ptr, lse2_ptr, delta_ptr, total_ptr, of_lse_ptr, dq_ptr, p_ptr,
    ds_ptr, scale, S, G, N, first, rows, sqb, sqs, sqg, sqh, skb, skg, skn,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, DOUT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, G, H, DK] of ``rows`` queries from ``first`` on, p and ds[B, G, rows, H, N].

    DV is a power of two; KT columns of a key, of which DK - DV count, are no part of the value. As
    ``list_dq.selection_list_dq`` otherwise, without splits.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
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
    # Rows start at multiples of 16 bytes.
    q_base = q_ptr + gl.multiple_of(b * sqb + s * sqs + g * sqg, 8)
    k_base = k_ptr + gl.multiple_of(b * skb + g * skg, 8)
    dout = dout_ptr + gl.multiple_of(row * H * DV, 8)
    sqh = gl.multiple_of(gl.to_tensor(sqh).to(gl.int64), 8)
    skn = gl.multiple_of(gl.to_tensor(skn).to(gl.int64), 8)
    n = gl.load(counts_ptr + row)
    keys_row = keys_ptr + row * N
    bias_row = bias_ptr + row * N if BIAS else keys_row

    tiles, bars = allocate(dtype, BN, DV, KT, BIAS, 2)
    do_l = gl.allocate_shared_memory(dtype, [HB, DV // 2], TILE)
    do_r = gl.allocate_shared_memory(dtype, [HB, DV // 2], TILE)
    dp_s = gl.allocate_shared_memory(gl.float32, [HB, BN], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    ds_s = gl.allocate_shared_memory(dtype, [HB, BN], gl.NVMMASharedLayout(64, 16, 2))
    passing = (dp_s, ds_s, barriers(1, 1), barriers(1, 1), barriers(1, 1), barriers(1, 1))
    thread_barrier()
    gl.warp_specialize(
        [
            (left_half, (tiles, bars, passing, lse2_ptr, delta_ptr, total_ptr, of_lse_ptr, dq_ptr, p_ptr, ds_ptr, scale, row,
                         line, hb, n, N, H, DK, DV, KT, DOUT, BIAS)),
            (right_half, (tiles, bars, passing, do_l, do_r, dq_ptr, scale, row, hb, n, H, DK, DV, KT)),
            (copy_all, (tiles, bars, do_l, do_r, dout, q_base, k_base, keys_row, bias_row, hb, sqh, skn, n, H, DK, DV, KT,
                        DOUT, BIAS)),
        ],
        [NW, NW],
        registers(KT),
    )  # fmt: skip
