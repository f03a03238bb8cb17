# SPDX-License-Identifier: Apache-2.0
"""dQ of selection attention, the tile path: dq = scale * ds @ k, ds = p * (dout @ v.T - delta), p = exp(score - lse).

As in the forward, a program takes QT queries x HB heads of a group over the union of their key tiles, of BN keys, in
the order of the same lists. Products bound it, three a tile. Two programs a multiprocessor hide each other's waits,
better than longer pipelines did: so 64 rows and two stages, whose tiles leave room for the second program.
"""

import triton
import triton.language as tl

from .common import (
    entry_bits,
    entry_tile,
    finite,
    key_words,
    load_pieces,
    load_queries,
    load_tile,
    place,
    row_keys,
    to_rows,
)
from .segments import segment_words


@triton.jit
def _dscores(q, dout, k, v, keep, qk, lse2, delta, DOUT: tl.constexpr, PREC: tl.constexpr):
    """Returns the gradient of the scores [M, BN] where ``keep`` is set, and 0, whatever k and v hold, elsewhere."""
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PREC) * qk - lse2[:, None])
    if DOUT:
        ds = p * (tl.dot(dout, tl.trans(v), input_precision=PREC) - delta[:, None])
    else:
        ds = p * (0.0 - delta[:, None])
    return tl.where(keep, ds, 0.0).to(k.dtype)


@triton.jit(do_not_specialize=[
    "S", "S_kv", "NT", "NQ", "G", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, starts_ptr, ends_ptr, tiles_ptr, counts_ptr, dirty_ptr, seg_q_ptr,
    seg_k_ptr, dq_ptr, scale, S, S_kv, NT, NQ, G, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, R: tl.constexpr,
    RC: tl.constexpr, QT: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, DOUT: tl.constexpr, ALIGN: tl.constexpr,
    PREC: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, G, H, DK] from dout[B, S, G, H, DV], lse2 and delta[B, S, G, H], pieces and lists.

    One program: QT queries x HB heads = M rows.
    """
    M: tl.constexpr = QT * HB
    b, g, bg, qt, hb = place(NQ, G, H, HB)
    list_row = bg * NQ + qt

    row = tl.arange(0, M)  # [M]
    query = row // HB
    s_row = qt * QT + query
    head = hb * HB + row % HB
    live = (s_row < S) & (head < H)
    dk = tl.arange(0, KP)
    dv = tl.arange(0, VP)
    q = load_queries(q_ptr, b, s_row, g, head, live, sqb, sqs, sqg, sqh, dk, DK, ALIGN)  # [M, KP]
    line = ((b * S + s_row) * G + g) * H + head  # [M]
    dout = q
    if DOUT:
        dout_row = dout_ptr + line * DV
        dout = tl.load(dout_row[:, None] + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)  # [M, VP]
    lse2 = tl.load(lse2_ptr + line, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + line, mask=live, other=0.0)
    scale = tl.cast(scale, tl.float32)  # generated code passes Python floats as fp64
    qk = scale * 1.4426950408889634

    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    n = tl.arange(0, BN)
    k_in = n.to(tl.int64)[:, None] * skn + dk[None, :]  # [BN, KP]
    v_in = n.to(tl.int64)[:, None] * svn + dv[None, :]  # [BN, VP]
    MASK_K: tl.constexpr = DK != KP
    MASK_V: tl.constexpr = DV != VP
    acc = tl.zeros((M, KP), tl.float32)

    # Tiles of which each query selects all keys or none. The next entry is loaded one step ahead of its tile.
    entries = tiles_ptr + list_row * NT
    nf = tl.load(counts_ptr + list_row * 2)
    np = tl.load(counts_ptr + list_row * 2 + 1)
    entry = tl.load(entries, mask=nf > 0, other=0)
    for i in range(nf):
        first = entry_tile(entry, QT).to(tl.int64) * BN
        k = load_tile(k_base + tl.multiple_of(first * skn, ALIGN) + k_in, n, dk < DK, False, MASK_K)
        v = k
        if DOUT:
            v = load_tile(v_base + tl.multiple_of(first * svn, ALIGN) + v_in, n, dv < DV, False, MASK_V)
        keep = (((entry_bits(entry, QT) >> query) & 1) != 0)[:, None]
        ds = _dscores(q, dout, k, v, keep, qk, lse2, delta, DOUT, PREC)
        acc = tl.dot(ds, k, acc, input_precision=PREC)
        entry = tl.load(entries + i + 1, mask=i + 1 < nf, other=0)

    # Tiles of which a query selects a part; the last nd hold a NaN or an infinity.
    if np > 0:
        nd = tl.load(dirty_ptr + list_row)
        ql = tl.arange(0, QT)
        rows = bg * S + qt * QT + ql
        QS = (bg + 1) * S
        if SEG:
            s_query = qt * QT + ql
            segment = tl.load(seg_q_ptr + b * S + s_query, mask=s_query < S, other=0)
        RI = tl.arange(0, RC)
        start = load_pieces(starts_ptr, rows, RI, QS, R)
        end = load_pieces(ends_ptr, rows, RI, QS, R)
        entry = tl.load(entries + NT - 1)
        for i in range(np - nd):
            first = entry_tile(entry, QT) * BN
            at = first.to(tl.int64)
            k = load_tile(k_base + tl.multiple_of(at * skn, ALIGN) + k_in, n < S_kv - first, dk < DK, True, MASK_K)
            v = k
            if DOUT:
                v = load_tile(v_base + tl.multiple_of(at * svn, ALIGN) + v_in, n < S_kv - first, dv < DV, True, MASK_V)
            words = key_words(starts_ptr, ends_ptr, start, end, rows, QS, first, R, RC, BN)
            if SEG:
                words &= segment_words(seg_k_ptr + b * S_kv, segment, first, S_kv, BN)
            keep = row_keys(to_rows(words, QT, HB), BN)
            ds = _dscores(q, dout, k, v, keep, qk, lse2, delta, DOUT, PREC)
            acc = tl.dot(ds, k, acc, input_precision=PREC)
            entry = tl.load(entries + NT - 2 - i, mask=i + 1 < np, other=0)
        # The product uses the finite keys; the other keys give NaN to the queries that select them.
        for i in tl.range(nd, num_stages=1):
            first = entry_tile(tl.load(entries + NT - 1 - (np - nd + i)), QT) * BN
            at = first.to(tl.int64)
            k_at = k_base + tl.multiple_of(at * skn, ALIGN) + k_in
            k = load_tile(k_at, n < S_kv - first, dk < DK, True, MASK_K)
            v = k
            if DOUT:
                v = load_tile(v_base + tl.multiple_of(at * svn, ALIGN) + v_in, n < S_kv - first, dv < DV, True, MASK_V)
            words = key_words(starts_ptr, ends_ptr, start, end, rows, QS, first, R, RC, BN)
            if SEG:
                words &= segment_words(seg_k_ptr + b * S_kv, segment, first, S_kv, BN)
            keep = row_keys(to_rows(words, QT, HB), BN)
            ds = _dscores(q, dout, k, v, keep, qk, lse2, delta, DOUT, PREC)
            acc = tl.dot(ds, tl.where(finite(k), k, 0.0), acc, input_precision=PREC)
            for j in tl.range(QT, num_stages=1):
                word = tl.sum(tl.where(ql == j, words, 0), axis=0)
                mine = load_tile(k_at, ((word >> n) & 1) != 0, dk < DK, True, MASK_K).to(tl.float32)
                acc = tl.where((query == j)[:, None], acc + tl.sum(mine - mine, axis=0)[None, :], acc)

    dq_row = dq_ptr + line * DK
    tl.store(
        dq_row[:, None] + dk[None, :],
        (acc * scale).to(dq_ptr.dtype.element_ty),
        mask=live[:, None] & (dk < DK)[None, :],
    )
