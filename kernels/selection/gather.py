# SPDX-License-Identifier: Apache-2.0
"""Selection attention, the gather path: a program takes some of the keys that one query selects, for up to HB heads.

The forward, its combination of splits, and dQ. Position p of a selection of n keys is its p-th key in increasing
order; a program has one of NS even splits of these positions, in tiles of BN keys. Bytes bound it, of which only those
of selected keys and values are read; in decoding also launches and what comes before the first key. Ranges become keys
in the program itself (up to 64 ranges, which saves a launch), one tile ahead of the loads; splits of a long cache fill
the device, and are even whatever the ranges are.
"""

import triton
import triton.language as tl

from .pieces import load_ranges, query_bounds, trim
from .row_tiles import column_tile, tiles_at, zero_tiles
from .segments import same_segment
from .softmax import online_softmax, with_sink
from .splits import share, split_place, store_dq, store_output


@triton.jit
def _few_pieces(
    ranges_ptr, cu_q_ptr, cu_k_ptr, s, row, S_kv, N, R: tl.constexpr, RP: tl.constexpr, VARLEN: tl.constexpr
):
    """Returns the pieces of the ranges at ``row``, in their order, as [1, RP] each.

    They are the first position, the length, and the key minus the position.
    """
    one = tl.zeros((1,), tl.int32)
    lo, hi = query_bounds(one + s, cu_q_ptr, cu_k_ptr, N, S_kv, VARLEN)
    lo = lo[:, None]
    start, end = load_ranges(ranges_ptr + row * (2 * R), lo, hi[:, None], one[:, None] == 0, R, RP)
    start, end, _, before = trim(start, end, lo, RP)
    length = end - start
    first = tl.sum(tl.where(before, tl.expand_dims(length, 1), 0), axis=2)
    return first, length, start - first


@triton.jit
def _selection(
    ranges_ptr, cu_q_ptr, cu_k_ptr, totals_row, s, row, S_kv, N, R: tl.constexpr, RP: tl.constexpr, FEW: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Returns the pieces of :func:`_few_pieces` (zeros without FEW), and the number of keys that the query selects."""
    if FEW:
        first, length, shift = _few_pieces(ranges_ptr, cu_q_ptr, cu_k_ptr, s, row, S_kv, N, R, RP, VARLEN)
        n = tl.sum(tl.sum(length, axis=1), axis=0)
    else:
        first, length, shift = 0, 0, 0
        n = tl.load(totals_row + R - 1)
    return first, length, shift, n


@triton.jit
def _keys(
    p, n, first, length, shift, ends_row, totals_row, R: tl.constexpr, RP: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Returns the keys (int64) at positions p [BN]; a position beyond the last gives the last key."""
    # Summed over axis 0: otherwise each thread would repeat this for all the rows of K of which it loads a part.
    p = tl.minimum(p, n - 1)
    if FEW:
        i = p[None, :] - tl.trans(first)  # [RP, BN]
        key = tl.sum(tl.where((i >= 0) & (i < tl.trans(length)), p[None, :] + tl.trans(shift), 0), axis=0)
    else:
        # Count the totals that are <= p.
        p = p[None, :]
        i = p * 0
        half: tl.constexpr = RP
        for _ in tl.static_range(RP.bit_length() - 1):
            half = half // 2
            at = i + (half - 1)
            total = tl.load(totals_row + at, mask=at < R, other=0x7FFFFFFF)
            i = tl.where(total <= p, i + half, i)
        i = tl.minimum(i, R - 1)
        key = tl.max(tl.load(ends_row + i) - tl.load(totals_row + i) + p, axis=0)
    return key.to(tl.int64)


@triton.jit(do_not_specialize=[
    "S", "S_kv", "G", "N", "NS", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_gather(
    q_ptr, k_ptr, v_ptr, ranges_ptr, cu_q_ptr, cu_k_ptr, ends_ptr, totals_ptr, seg_q_ptr, seg_k_ptr, sink_ptr,
    o_ptr, lse_ptr, part_ptr, plse_ptr, scale, S, S_kv, G, N, NS, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, NK: tl.constexpr,
    NV: tl.constexpr, HELD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, FEW: tl.constexpr, VARLEN: tl.constexpr, SINK: tl.constexpr,
    ALIGN: tl.constexpr, PREC: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes o[B, S, G, H, DV] and lse[B, S, G, H] from q[B, S, G, H, DK], k[B, G, S_kv, DK] and v[B, G, S_kv, DV].

    FEW: reads ranges[B, S, G, R, 2], else ends and totals[B, G, S, R]. With several splits it writes normalised part[B,
    S, G, NS, H, DV] and plse[B, S, G, NS, H] in log2 units instead.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    bg, s, hb, split = split_place(NS, S, HN)
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g

    head = hb * HB + tl.arange(0, HB)
    live = head < H
    q_base = (
        q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s.to(tl.int64) * sqs, ALIGN)
        + tl.multiple_of(g * sqg, ALIGN)
    )  # fmt: skip
    q_at = head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    if HELD:
        q = tiles_at(q_base, q_at, live, DK, NK, KC, 0)  # NK times [HB, KC]

    ends_row = ends_ptr + (bg * S + s) * R
    totals_row = totals_ptr + (bg * S + s) * R
    first, length, shift, n = _selection(
        ranges_ptr, cu_q_ptr, cu_k_ptr, totals_row, s, row, S_kv, N, R, RP, FEW, VARLEN
    )
    begin, end = share(n, split, NS)

    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    qk = tl.cast(scale, tl.float32) * 1.4426950408889634
    i = tl.arange(0, BN)
    m = tl.full((HB,), float("-inf"), tl.float32)
    norm = tl.zeros((HB,), tl.float32)
    acc = zero_tiles(HB, NV, VC, 0)
    # Key indices are computed one tile ahead of their loads.
    key = _keys(begin + i, n, first, length, shift, ends_row, totals_row, R, RP, FEW)
    for start in range(begin, end, BN):
        mask = start + i < end
        if SEG:
            ids = tl.load(seg_k_ptr + b * S_kv + key, mask=mask, other=0)
            mask = mask & same_segment(tl.load(seg_q_ptr + b * S + s), ids)
        k_at = key * skn
        v_at = key * svn
        key = _keys(start + BN + i, n, first, length, shift, ends_row, totals_row, R, RP, FEW)
        # Always true: a separate mask keeps the compiler from holding the first read in registers or shared memory.
        again = live & (start < end)
        x = tl.zeros((HB, BN), tl.float32)
        for c in tl.static_range(NK):
            k = column_tile(k_base, k_at, mask, c * KC, KC, DK)
            qc = q[c] if HELD else column_tile(q_base, q_at, again, c * KC, KC, DK)
            x = tl.dot(qc, tl.trans(k), x, input_precision=PREC)
        x = tl.where(mask[None, :], x * qk, float("-inf"))
        p, alpha, m, norm = online_softmax(x, m, norm)
        old = acc
        acc = ()
        for c in tl.static_range(NV):
            v = column_tile(v_base, v_at, mask, c * VC, VC, DV)
            acc = acc + (tl.dot(p.to(v.dtype), v, old[c] * alpha[:, None], input_precision=PREC),)

    store_output(
        o_ptr, lse_ptr, part_ptr, plse_ptr, sink_ptr, acc, m, norm, row, g, head, live, split, NS, H, DV, NV, VC, 0, SINK
    )  # fmt: skip


@triton.jit(do_not_specialize=["G", "NS"])
def selection_combine(
    part_ptr, plse_ptr, pnorm_ptr, sink_ptr, o_ptr, lse_ptr, G, NS,
    H: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, CS: tl.constexpr, SINK: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Combines part[B, S, G, NS, H, DV] and plse[B, S, G, NS, H] to o[B, S, G, H, DV] and lse[B, S, G, H].

    NATURAL: plse and pnorm are the maximum and the sum of weights of :func:`splits.store_output`. Programs [B, S, G, H];
    they do nothing if NS = 1.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // H
    head = pid % H
    d = tl.arange(0, VP)
    m = tl.full((1,), float("-inf"), tl.float32)
    norm = tl.zeros((1,), tl.float32)
    acc = tl.zeros((VP,), tl.float32)
    if NS > 1:
        for c in range(0, NS, CS):
            i = c + tl.arange(0, CS)
            at = (row * NS + i) * H + head
            x = tl.load(plse_ptr + at, mask=i < NS, other=float("-inf"))
            y = tl.load(
                part_ptr + (at * DV)[:, None] + d[None, :], mask=(i < NS)[:, None] & (d < DV)[None, :], other=0.0
            )
            m_new = tl.maximum(m, tl.max(x, axis=0))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            if NATURAL:
                w = tl.exp(x - safe) * tl.load(pnorm_ptr + at, mask=i < NS, other=0.0)
                alpha = tl.exp(m - safe)
            else:
                w = tl.exp2(x - safe)
                alpha = tl.exp2(m - safe)
            norm = norm * alpha + tl.sum(w, axis=0)
            acc = acc * alpha + tl.sum(w[:, None] * y, axis=0)
            m = m_new
        if NATURAL:
            lse = tl.where(norm == 0.0, float("-inf"), m + tl.log(norm))
        else:
            lse = tl.where(norm == 0.0, float("-inf"), (m + tl.log2(norm)) * 0.6931471805599453)
        if SINK:
            factor, norm = with_sink(tl.load(sink_ptr + (row % G) * H + head), m, norm, NATURAL)
            acc *= factor
        acc /= tl.where(norm == 0.0, 1.0, norm)
        tl.store(o_ptr + pid * DV + d, acc.to(o_ptr.dtype.element_ty), mask=d < DV)
        tl.store(lse_ptr + pid + tl.arange(0, 1), lse)


@triton.jit(do_not_specialize=[
    "S", "S_kv", "G", "N", "NS", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_gather_dq(
    dout_ptr, q_ptr, k_ptr, v_ptr, ranges_ptr, cu_q_ptr, cu_k_ptr, ends_ptr, totals_ptr, seg_q_ptr, seg_k_ptr, lse2_ptr,
    delta_ptr, dq_ptr, part_ptr, scale, S, S_kv, G, N, NS, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, NK: tl.constexpr,
    NV: tl.constexpr, HELD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, FEW: tl.constexpr, VARLEN: tl.constexpr, DOUT: tl.constexpr,
    ALIGN: tl.constexpr, PREC: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, G, H, DK] from dout[B, S, G, H, DV], lse2 (log2 of the denominator; inf for no keys) and delta.

    As ``selection_gather``; with several splits it writes part[B, S, G, NS, H, DK] instead.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    bg, s, hb, split = split_place(NS, S, HN)
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g

    head = hb * HB + tl.arange(0, HB)
    live = head < H
    q_base = (
        q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s.to(tl.int64) * sqs, ALIGN)
        + tl.multiple_of(g * sqg, ALIGN)
    )  # fmt: skip
    q_at = head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    if HELD:
        q = tiles_at(q_base, q_at, live, DK, NK, KC, 0)  # NK times [HB, KC]
    at = row * H + head
    if DOUT and HELD:
        do = tiles_at(dout_ptr, at * DV, live, DV, NV, VC, 0)  # NV times [HB, VC]
    lse2 = tl.load(lse2_ptr + at, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)

    ends_row = ends_ptr + (bg * S + s) * R
    totals_row = totals_ptr + (bg * S + s) * R
    first, length, shift, n = _selection(
        ranges_ptr, cu_q_ptr, cu_k_ptr, totals_row, s, row, S_kv, N, R, RP, FEW, VARLEN
    )
    begin, end = share(n, split, NS)

    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    scale = tl.cast(scale, tl.float32)
    qk = scale * 1.4426950408889634
    i = tl.arange(0, BN)
    acc = zero_tiles(HB, NK, KC, 0)
    key = _keys(begin + i, n, first, length, shift, ends_row, totals_row, R, RP, FEW)
    for start in range(begin, end, BN):
        mask = start + i < end
        if SEG:
            ids = tl.load(seg_k_ptr + b * S_kv + key, mask=mask, other=0)
            mask = mask & same_segment(tl.load(seg_q_ptr + b * S + s), ids)
        k_at = key * skn
        v_at = key * svn
        key = _keys(start + BN + i, n, first, length, shift, ends_row, totals_row, R, RP, FEW)
        # Always true: a separate mask keeps the compiler from holding the first read in registers or shared memory.
        again = live & (start < end)
        x = tl.zeros((HB, BN), tl.float32)
        ks = ()
        for c in tl.static_range(NK):
            k = column_tile(k_base, k_at, mask, c * KC, KC, DK)
            if HELD:
                ks = ks + (k,)
            qc = q[c] if HELD else column_tile(q_base, q_at, again, c * KC, KC, DK)
            x = tl.dot(qc, tl.trans(k), x, input_precision=PREC)
        p = tl.exp2(x * qk - lse2[:, None])
        y = tl.zeros((HB, BN), tl.float32)
        if DOUT:
            for c in tl.static_range(NV):
                v = column_tile(v_base, v_at, mask, c * VC, VC, DV)
                dc = do[c] if HELD else column_tile(dout_ptr, at * DV, again, c * VC, VC, DV)
                y = tl.dot(dc, tl.trans(v), y, input_precision=PREC)
        ds = tl.where(mask[None, :], p * (y - delta[:, None]), 0.0)
        old = acc
        acc = ()
        for c in tl.static_range(NK):
            k = ks[c] if HELD else column_tile(k_base, k_at, mask & (start < end), c * KC, KC, DK)
            acc = acc + (tl.dot(ds.to(k.dtype), k, old[c], input_precision=PREC),)

    store_dq(dq_ptr, part_ptr, acc, scale, row, head, live, split, NS, H, HB, DK, NK, KC, 0)


@triton.jit(do_not_specialize=["NS"])
def selection_dq_sum(
    part_ptr, dq_ptr, NS, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    """Sums part[B, S, G, NS, H, D] to dq[B, S, G, H, D]. Programs [B, S, G, H]; they do nothing if NS = 1."""
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    acc = tl.zeros((DP,), tl.float32)
    if NS > 1:
        for c in range(0, NS, CS):
            i = c + tl.arange(0, CS)
            at = ((pid // H * NS + i) * H + pid % H) * D
            mask = (i < NS)[:, None] & (d < D)[None, :]
            acc += tl.sum(tl.load(part_ptr + at[:, None] + d[None, :], mask=mask, other=0.0), axis=0)
        tl.store(dq_ptr + pid * D + d, acc.to(dq_ptr.dtype.element_ty), mask=d < D)
