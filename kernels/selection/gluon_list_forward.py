# SPDX-License-Identifier: Apache-2.0
"""The forward over lists of keys whose values are a part of the keys' own rows, with wgmma (sm_90).

A program has 64 heads of a query and three warpgroups, which meet at barriers in shared memory (``bars``). The
first computes the scores of a tile of 64 keys, their softmax, and the left half of the result's columns. It passes the
weights through shared memory to the second, which computes the right half while the softmax of the next tile runs. The
third copies each key's row to shared memory once, into places for two tiles that are free again half by half.
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

BN = gl.constexpr(64)  # keys of a tile
HB = gl.constexpr(64)  # heads of a program
NW = gl.constexpr(4)  # warps of a warpgroup
RING = gl.constexpr(2)  # tiles of keys in shared memory


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
def share(n, split, NS):
    """Returns [from, to), the positions of one split of n."""
    each = n // NS
    rest = n - each * NS
    begin = split * each + gl.minimum(split, rest)
    return begin, begin + each + (split < rest).to(gl.int32)


@gluon.jit
def signal(bar):
    """Arrives at a barrier once all threads of the warpgroup are here."""
    thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def copy_tiles(
    buffers, bars, q_base, k_base, keys_row, hb, sqh, skn, begin, end,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr,
):  # fmt: skip
    """Copies q and each tile of keys to shared memory, as soon as its place is free."""
    q_l, q_r, q_t, left, right, tails, _, _ = buffers
    q_ready, left_ready, right_ready, left_free, right_free, _, _, _ = bars
    HALF: gl.constexpr = DV // 2
    L: gl.constexpr = rows_layout(HALF, NW)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
    copy_rows(q_l, q_base, head * sqh, head < H, 0, HALF, DK, L)
    copy_rows(q_r, q_base, head * sqh, head < H, HALF, HALF, DK, L)
    if KT:
        LT: gl.constexpr = rows_layout(KT, NW)
        thead = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, LT))
        copy_rows(q_t, q_base, thead * sqh, thead < H, DV, KT, DK, LT)
    async_copy.mbarrier_arrive(q_ready.index(0), increment_count=False)
    key, there = load_keys(keys_row, begin, end, BN, L)
    if KT:
        tkey, tthere = load_keys(keys_row, begin, end, BN, LT)
    for tile in range(gl.cdiv(end - begin, BN)):
        slot = tile % RING
        following = begin + (tile + 1) * BN
        phase = (tile // RING + 1) & 1
        mbarrier.wait(left_free.index(slot), phase)
        copy_rows(left.index(slot), k_base, key * skn, there, 0, HALF, DK, L)
        if KT:
            copy_rows(tails.index(slot), k_base, tkey * skn, tthere, DV, KT, DK, LT)
            tkey, tthere = load_keys(keys_row, following, end, BN, LT)
        async_copy.mbarrier_arrive(left_ready.index(slot), increment_count=False)
        mbarrier.wait(right_free.index(slot), phase)
        copy_rows(right.index(slot), k_base, key * skn, there, HALF, HALF, DK, L)
        async_copy.mbarrier_arrive(right_ready.index(slot), increment_count=False)
        key, there = load_keys(keys_row, following, end, BN, L)


@gluon.jit
def scores(buffers, bars, tile, KT: gl.constexpr, MS: gl.constexpr):
    """Starts the scores of a tile, once it is copied: [HB, BN]."""
    q_l, q_r, q_t, left, right, tails, _, _ = buffers
    _, left_ready, right_ready, _, _, _, _, _ = bars
    slot = tile % RING
    mbarrier.wait(left_ready.index(slot), (tile // RING) & 1)
    fence_async_shared()
    x = gl.zeros([HB, BN], gl.float32, layout=MS)
    x = warpgroup_mma(q_l, left.index(slot).permute((1, 0)), x, use_acc=False, is_async=True)
    if KT:
        x = warpgroup_mma(q_t, tails.index(slot).permute((1, 0)), x, is_async=True)
    mbarrier.wait(right_ready.index(slot), (tile // RING) & 1)
    fence_async_shared()
    return warpgroup_mma(q_r, right.index(slot).permute((1, 0)), x, is_async=True)


@gluon.jit
def weights(buffers, bars, x, m, norm, tile, rest, qk, LAST: gl.constexpr, MS: gl.constexpr):
    """Returns the weights of a tile and the factor of what came before, which both go to the other warpgroup, too.

    ``rest``: how many keys the LAST tile has; the others are full. qk is positive.
    """
    _, _, _, _, _, _, p_s, factor_s = buffers
    _, _, _, _, _, passed, taken, _ = bars
    dtype: gl.constexpr = p_s.dtype
    if LAST:
        x = gl.where((gl.arange(0, BN, layout=gl.SliceLayout(0, MS)) < rest)[None, :], x, float("-inf"))
    m_new = gl.maximum(m, gl.max(x, axis=1) * qk)
    # Nothing but -inf so far: exp2(-inf - 0) = 0.
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(x * qk - safe[:, None])
    factor = gl.exp2(m - safe)
    norm = norm * factor + gl.sum(p, axis=1)
    p = p.to(dtype)
    mbarrier.wait(taken.index(0), (tile + 1) & 1)
    p_s.store(p)
    factor_s.store(factor)
    fence_async_shared()
    signal(passed.index(0))
    return p, factor, m_new, norm


@gluon.jit
def write_half(
    o_ptr, part_ptr, acc, factor, out_s, row, split, NS, hb, first: gl.constexpr,
    H: gl.constexpr, DV: gl.constexpr, MO: gl.constexpr,
):  # fmt: skip
    """Writes one half of the result's columns, or of a split's normalised part."""
    HALF: gl.constexpr = DV // 2
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, MO))[:, None]
    if NS == 1:
        # Through shared memory, so that whole lines are written.
        L: gl.constexpr = rows_layout(HALF, NW)
        out_s.store(out.to(out_s.dtype))
        thread_barrier()
        line = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, L))
        column = first + gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
        gl.store(o_ptr + ((row * H + line) * DV)[:, None] + column[None, :], out_s.load(L), mask=(line < H)[:, None])
    else:
        at = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MO))
        d = first + gl.arange(0, HALF, layout=gl.SliceLayout(0, MO))
        gl.store(part_ptr + (((row * NS + split) * H + at) * DV)[:, None] + d[None, :], out, mask=(at < H)[:, None])


@gluon.jit
def left_half(
    buffers, bars, o_ptr, lse_ptr, part_ptr, plse_ptr, sink_ptr, qk, row, split, NS, hb, g, begin, end,
    H: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Computes the scores, the weights, lse and the left half of the result."""
    q_l, _, _, left, _, _, _, factor_s = buffers
    q_ready, _, _, left_free, _, passed, taken, scored = bars
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(256, DV // 2), 16])
    m = gl.full([HB], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MS))
    norm = gl.zeros([HB], gl.float32, layout=gl.SliceLayout(1, MS))
    acc = gl.zeros([HB, DV // 2], gl.float32, layout=MO)
    tiles = gl.cdiv(end - begin, BN)
    last = tiles - 1
    mbarrier.wait(q_ready.index(0), 0)
    if tiles > 0:
        x = warpgroup_mma_wait(0, deps=(scores(buffers, bars, 0, KT, MS),))
        for tile in range(last):
            p, factor, m, norm = weights(buffers, bars, x, m, norm, tile, BN, qk, False, MS)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, MO))[:, None]
            p = gl.convert_layout(p, gl.DotOperandLayout(0, MO, 2))
            acc = warpgroup_mma(p, left.index(tile % RING), acc, is_async=True)
            x = scores(buffers, bars, tile + 1, KT, MS)
            acc = warpgroup_mma_wait(3 if KT else 2, deps=(acc,))
            signal(left_free.index(tile % RING))
            x = warpgroup_mma_wait(0, deps=(x,))
            # Now the tensor cores are idle until the next weights: the other half may use them.
            mbarrier.arrive(scored.index(0), count=1)
        p, factor, m, norm = weights(buffers, bars, x, m, norm, last, end - begin - last * BN, qk, True, MS)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, MO))[:, None]
        p = gl.convert_layout(p, gl.DotOperandLayout(0, MO, 2))
        acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p, left.index(last % RING), acc, is_async=True),))

    lse = gl.where(norm == 0.0, float("-inf"), m + gl.log2(norm))
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MS))
    live = head < H
    factor = gl.full([HB], 1.0, gl.float32, layout=gl.SliceLayout(1, MS))
    if NS == 1:
        if SINK:
            sink = gl.load(sink_ptr + g * H + head, mask=live, other=0.0).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(m, sink)
            top = gl.where(top == float("-inf"), 0.0, top)
            factor = gl.exp2(m - top)
            norm = norm * factor + gl.exp2(sink - top)
        gl.store(lse_ptr + row * H + head, lse * 0.6931471805599453, mask=live)
    else:
        gl.store(plse_ptr + (row * NS + split) * H + head, lse, mask=live)
    factor = factor / gl.where(norm == 0.0, 1.0, norm)
    mbarrier.wait(taken.index(0), (tiles + 1) & 1)
    factor_s.store(factor)
    signal(passed.index(0))
    write_half(o_ptr, part_ptr, acc, factor, q_l, row, split, NS, hb, 0, H, DV, MO)


@gluon.jit
def right_half(
    buffers, bars, o_ptr, part_ptr, row, split, NS, hb, begin, end, H: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Computes the right half of the result from the weights of the other warpgroup."""
    _, q_r, _, _, right, _, p_s, factor_s = buffers
    _, _, right_ready, _, right_free, passed, taken, scored = bars
    MO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(256, DV // 2), 16])
    acc = gl.zeros([HB, DV // 2], gl.float32, layout=MO)
    tiles = gl.cdiv(end - begin, BN)
    for tile in range(tiles):
        slot = tile % RING
        mbarrier.wait(right_ready.index(slot), (tile // RING) & 1)
        mbarrier.wait(passed.index(0), tile & 1)
        if tile + 1 < tiles:
            mbarrier.wait(scored.index(0), tile & 1)
        fence_async_shared()
        acc = acc * factor_s.load(gl.SliceLayout(1, MO))[:, None]
        acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p_s, right.index(slot), acc, is_async=True),))
        thread_barrier()
        mbarrier.arrive(taken.index(0), count=1)
        mbarrier.arrive(right_free.index(slot), count=1)
    mbarrier.wait(passed.index(0), tiles & 1)
    factor = factor_s.load(gl.SliceLayout(1, MO))
    write_half(o_ptr, part_ptr, acc, factor, q_r, row, split, NS, hb, DV // 2, H, DV, MO)


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
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = DV // 2
    TAIL: gl.constexpr = KT if KT else 64
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
    # Rows start at multiples of 16 bytes.
    q_base = q_ptr + gl.multiple_of(b * sqb + s * sqs + g * sqg, 8)
    k_base = k_ptr + gl.multiple_of(b * skb + g * skg, 8)
    sqh = gl.multiple_of(gl.to_tensor(sqh).to(gl.int64), 8)
    skn = gl.multiple_of(gl.to_tensor(skn).to(gl.int64), 8)
    begin, end = share(gl.load(counts_ptr + row), split, NS)
    keys_row = keys_ptr + row * N

    q_l = gl.allocate_shared_memory(dtype, [HB, HALF], TILE)
    q_r = gl.allocate_shared_memory(dtype, [HB, HALF], TILE)
    left = gl.allocate_shared_memory(dtype, [RING, BN, HALF], TILE)
    right = gl.allocate_shared_memory(dtype, [RING, BN, HALF], TILE)
    if KT:
        q_t = gl.allocate_shared_memory(dtype, [HB, TAIL], TILE)
        tails = gl.allocate_shared_memory(dtype, [RING, BN, TAIL], TILE)
    else:
        q_t = q_l
        tails = left
    p_s = gl.allocate_shared_memory(dtype, [HB, BN], TILE)
    factor_s = gl.allocate_shared_memory(gl.float32, [HB], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    left_ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=32 * NW)
    for i in gl.static_range(RING):
        mbarrier.init(left_ready.index(i), count=32 * NW)
        mbarrier.init(right_ready.index(i), count=32 * NW)
        mbarrier.init(left_free.index(i), count=1)
        mbarrier.init(right_free.index(i), count=1)
    mbarrier.init(passed.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    mbarrier.init(scored.index(0), count=1)
    thread_barrier()

    buffers = (q_l, q_r, q_t, left, right, tails, p_s, factor_s)
    bars = (q_ready, left_ready, right_ready, left_free, right_free, passed, taken, scored)
    gl.warp_specialize(
        [
            (left_half, (buffers, bars, o_ptr, lse_ptr, part_ptr, plse_ptr, sink_ptr, scale * 1.4426950408889634,
                         row, split, NS, hb, g, begin, end, H, DV, KT, SINK)),
            (right_half, (buffers, bars, o_ptr, part_ptr, row, split, NS, hb, begin, end, H, DV)),
            (copy_tiles, (buffers, bars, q_base, k_base, keys_row, hb, sqh, skn, begin, end, H, DK, DV, KT)),
        ],
        [NW, NW],
        [160, 88],
    )  # fmt: skip
