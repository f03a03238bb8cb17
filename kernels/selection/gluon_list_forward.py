# SPDX-License-Identifier: Apache-2.0
"""The forward over lists of keys whose values are a part of the keys' own rows, with wgmma (sm_90).

``list_forward.py`` has the formula. A program has 64 heads of a query, a split of its keys, and three warpgroups. The
first computes the scores of a tile of 64 keys, their softmax, and the left half of the result's columns. It passes the
weights through shared memory to the second, which computes the right half while the softmax of the next tile runs. The
third copies each key's row to shared memory once. Half of a tile's time are the scores' reads of both factors from
shared memory; the right half starts when the next tile's scores are there, so that the tensor cores do not idle during
the softmax.
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
    REGISTERS,
    RING,
    allocate,
    barriers,
    copy_tiles,
    half_layout,
    product,
    scores_layout,
    signal,
    write_lines,
)

BN = gl.constexpr(64)  # keys of a tile


@gluon.jit
def share(n, split, NS):
    """Returns [from, to), the positions of one split of n."""
    each = n // NS
    rest = n - each * NS
    begin = split * each + gl.minimum(split, rest)
    return begin, begin + each + (split < rest).to(gl.int32)


@gluon.jit
def weights(passing, biases, x, m, norm, tile, rest, qk, LAST: gl.constexpr, BIAS: gl.constexpr):
    """Returns the weights of a tile and the factor of what came before, which both go to the other warpgroup, too.

    ``rest``: how many keys the LAST tile has; the others are full. Logits are qk * x, of a positive qk, in log2 units, or
    with BIAS qk * x + bias in natural ones.
    """
    p_s, factor_s, passed, taken, _ = passing
    if BIAS:
        x = x * qk + biases.index(tile % RING).load(gl.SliceLayout(0, x.type.layout))[None, :]
    if LAST:
        x = gl.where((gl.arange(0, BN, layout=gl.SliceLayout(0, x.type.layout)) < rest)[None, :], x, float("-inf"))
    m_new = gl.maximum(m, gl.max(x, axis=1) * (1.0 if BIAS else qk))
    # Nothing but -inf so far: exp2(-inf - 0) = 0.
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    if BIAS:
        p = gl.exp2((x - safe[:, None]) * LOG2E)
        factor = gl.exp2((m - safe) * LOG2E)
    else:
        p = gl.exp2(x * qk - safe[:, None])
        factor = gl.exp2(m - safe)
    norm = norm * factor + gl.sum(p, axis=1)
    p = p.to(p_s.dtype)
    mbarrier.wait(taken.index(0), (tile + 1) & 1)
    p_s.store(p)
    factor_s.store(factor)
    fence_async_shared()
    signal(passed.index(0))
    return p, factor, m_new, norm


@gluon.jit
def add_left(acc, p, factor, left, tile):
    """Starts to add a tile's part to the left half: acc * factor + p @ left."""
    MO: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, MO))[:, None]
    return warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, MO, 2)), left.index(tile % RING), acc, is_async=True
    )


@gluon.jit
def write_half(
    o_ptr, part_ptr, acc, factor, through, row, split, NS, hb, first: gl.constexpr, H: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Writes one half of the result's columns, or of a split's normalised part."""
    MO: gl.constexpr = acc.type.layout
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, MO))[:, None]
    if NS == 1:
        write_lines(o_ptr, out, through, row, H, hb, first, DV // 2, DV)
    else:
        head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MO))
        d = first + gl.arange(0, DV // 2, layout=gl.SliceLayout(0, MO))
        gl.store(part_ptr + (((row * NS + split) * H + head) * DV)[:, None] + d[None, :], out, mask=(head < H)[:, None])


@gluon.jit
def left_half(
    tiles, bars, passing, o_ptr, lse_ptr, part_ptr, plse_ptr, pnorm_ptr, sink_ptr, qk, row, split, NS, hb, g, begin, end,
    H: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, SINK: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Computes the scores, the weights, lse and the left half of the result."""
    q_l, q_r, q_t, left, _, _, biases = tiles
    q_ready, _, _, left_free, _ = bars
    _, factor_s, passed, taken, scored = passing
    MS: gl.constexpr = scores_layout(BN)
    m = gl.full([HB], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MS))
    norm = gl.zeros([HB], gl.float32, layout=gl.SliceLayout(1, MS))
    acc = gl.zeros([HB, DV // 2], gl.float32, layout=half_layout(DV))
    count = gl.cdiv(end - begin, BN)
    last = count - 1
    mbarrier.wait(q_ready.index(0), 0)
    if count > 0:
        x = warpgroup_mma_wait(0, deps=(product(q_l, q_r, q_t, tiles, bars, 0, KT, BN),))
        for tile in range(last):
            p, factor, m, norm = weights(passing, biases, x, m, norm, tile, BN, qk, False, BIAS)
            acc = add_left(acc, p, factor, left, tile)
            x = product(q_l, q_r, q_t, tiles, bars, tile + 1, KT, BN)
            acc = warpgroup_mma_wait(3 if KT else 2, deps=(acc,))
            signal(left_free.index(tile % RING))
            x = warpgroup_mma_wait(0, deps=(x,))
            # Now the tensor cores are idle until the next weights: the other half may use them.
            mbarrier.arrive(scored.index(0), count=1)
        p, factor, m, norm = weights(passing, biases, x, m, norm, last, end - begin - last * BN, qk, True, BIAS)
        acc = warpgroup_mma_wait(0, deps=(add_left(acc, p, factor, left, last),))

    # From the units of the logits to log2 and to natural ones.
    to_log2: gl.constexpr = LOG2E if BIAS else 1.0
    to_natural: gl.constexpr = 1.0 if BIAS else 0.6931471805599453
    lse = gl.where(norm == 0.0, float("-inf"), m + gl.log2(norm) / to_log2)
    head = hb * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, MS))
    live = head < H
    factor = gl.full([HB], 1.0, gl.float32, layout=gl.SliceLayout(1, MS))
    if NS == 1:
        if SINK:
            sink = gl.load(sink_ptr + g * H + head, mask=live, other=0.0).to(gl.float32) / to_natural
            top = gl.maximum(m, sink)
            top = gl.where(top == float("-inf"), 0.0, top)
            factor = gl.exp2((m - top) * to_log2)
            norm = norm * factor + gl.exp2((sink - top) * to_log2)
        gl.store(lse_ptr + row * H + head, lse * to_natural, mask=live)
    else:
        at = (row * NS + split) * H + head
        gl.store(plse_ptr + at, m if BIAS else lse, mask=live)
        if BIAS:
            gl.store(pnorm_ptr + at, norm, mask=live)
    factor = factor / gl.where(norm == 0.0, 1.0, norm)
    mbarrier.wait(taken.index(0), (count + 1) & 1)
    factor_s.store(factor)
    signal(passed.index(0))
    write_half(o_ptr, part_ptr, acc, factor, q_l, row, split, NS, hb, 0, H, DV)


@gluon.jit
def right_half(
    tiles, bars, passing, o_ptr, part_ptr, row, split, NS, hb, begin, end, H: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Computes the right half of the result from the weights of the other warpgroup."""
    _, q_r, _, _, right, _, _ = tiles
    _, _, right_ready, _, right_free = bars
    p_s, factor_s, passed, taken, scored = passing
    MO: gl.constexpr = half_layout(DV)
    acc = gl.zeros([HB, DV // 2], gl.float32, layout=MO)
    count = gl.cdiv(end - begin, BN)
    for tile in range(count):
        slot = tile % RING
        mbarrier.wait(right_ready.index(slot), (tile // RING) & 1)
        mbarrier.wait(passed.index(0), tile & 1)
        if tile + 1 < count:
            mbarrier.wait(scored.index(0), tile & 1)
        fence_async_shared()
        acc = acc * factor_s.load(gl.SliceLayout(1, MO))[:, None]
        acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(p_s, right.index(slot), acc, is_async=True),))
        signal(taken.index(0))
        mbarrier.arrive(right_free.index(slot), count=1)
    mbarrier.wait(passed.index(0), count & 1)
    factor = factor_s.load(gl.SliceLayout(1, MO))
    write_half(o_ptr, part_ptr, acc, factor, q_r, row, split, NS, hb, DV // 2, H, DV)


@gluon.jit(do_not_specialize=["S", "G", "NS", "sqb", "sqs", "sqg", "skb", "skg"])
def selection_list_forward_wgmma(
    q_ptr, k_ptr, keys_ptr, counts_ptr, bias_ptr, sink_ptr, o_ptr, lse_ptr, part_ptr, plse_ptr, pnorm_ptr, scale, S, G, N, NS,
    sqb, sqs, sqg, sqh, skb, skg, skn,
    H: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, KT: gl.constexpr, SINK: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Computes o[B, S, G, H, DV] and lse[B, S, G, H] from q[B, S, G, H, DK], k[B, G, S_kv, DK] and keys[B, S, G, N].

    DV is a power of two; KT columns of a key, of which DK - DV count, are no part of the value. As
    ``list_forward.selection_list_forward`` otherwise.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
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
    bias_row = bias_ptr + row * N if BIAS else keys_row

    tiles, bars = allocate(dtype, BN, DV, KT, BIAS, 1)
    p_s = gl.allocate_shared_memory(dtype, [HB, BN], gl.NVMMASharedLayout(128, 16, 2))
    factor_s = gl.allocate_shared_memory(gl.float32, [HB], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    passing = (p_s, factor_s, barriers(1, 1), barriers(1, 1), barriers(1, 1))
    thread_barrier()
    qk = scale * (1.0 if BIAS else LOG2E)
    gl.warp_specialize(
        [
            (left_half, (tiles, bars, passing, o_ptr, lse_ptr, part_ptr, plse_ptr, pnorm_ptr, sink_ptr, qk, row, split, NS,
                         hb, g, begin, end, H, DV, KT, SINK, BIAS)),
            (right_half, (tiles, bars, passing, o_ptr, part_ptr, row, split, NS, hb, begin, end, H, DV)),
            (copy_tiles, (tiles, bars, q_base, k_base, keys_row, bias_row, hb, sqh, skn, begin, end, H, DK, DV, KT, BIAS, BN)),
        ],
        [NW, NW],
        [160, REGISTERS],
    )  # fmt: skip
