# SPDX-License-Identifier: Apache-2.0
"""The forward of selection attention, the tile path: o = softmax(scale * q @ k.T over the selected keys) @ v, and lse.

q[B, S, G, h, Dk], k, v[B, G, S_kv, D], any strides but the last. A program takes QT neighbouring queries x HB heads of
a group (64 rows where shared memory has room) over the union of their key tiles, BN keys each. Products bound it:
several queries fill the rows of the tensor cores' tiles. The list of tiles (``tile_lists.py``) puts first those that
every query selects whole or not at all: they need one bit a row and no comparison, and no branch stands around a load,
so that copies run ahead, the next entry one step before its tile. Then come tiles of which a part is selected, at last
those with a NaN or an infinity.
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
def _softmax(s, m, total, qk):
    """Returns the weights p, the new maximum and sum, and the factor of the old sums, from logits s[M, BN].

    -inf means not selected.
    """
    m_new = tl.maximum(m, tl.max(s, axis=1) * qk)
    # A row without keys so far has m_new = -inf: exp2(-inf - 0) = 0.
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * qk - safe[:, None])
    alpha = tl.exp2(m - safe)
    return p, m_new, total * alpha + tl.sum(p, axis=1), alpha


@triton.jit(do_not_specialize=[
    "S", "S_kv", "NT", "NQ", "G", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_forward(
    q_ptr, k_ptr, v_ptr, starts_ptr, ends_ptr, tiles_ptr, counts_ptr, dirty_ptr, sink_ptr, seg_q_ptr, seg_k_ptr, o_ptr, lse_ptr, scale,
    S, S_kv, NT, NQ, G, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, R: tl.constexpr,
    RC: tl.constexpr, QT: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, SINK: tl.constexpr, ALIGN: tl.constexpr,
    PREC: tl.constexpr, POSITIVE: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes o[B, S, G, H, DV] and lse[B, S, G, H] from q[B, S, G, H, DK], k, v[B, G, S_kv, D], pieces and lists.

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
    qk = tl.cast(scale, tl.float32)
    if not POSITIVE:
        # The running maximum needs a positive scale: q takes its sign (or a scale of 0), which is exact.
        q = (q.to(tl.float32) * tl.where(qk < 0, -1.0, tl.where(qk == 0, 0.0, 1.0))).to(q.dtype)
        qk = tl.where(qk == 0, 1.0, tl.abs(qk))
    qk *= 1.4426950408889634

    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    n = tl.arange(0, BN)
    k_in = n.to(tl.int64)[:, None] * skn + dk[None, :]  # [BN, KP]
    v_in = n.to(tl.int64)[:, None] * svn + dv[None, :]  # [BN, VP]
    MASK_K: tl.constexpr = DK != KP
    MASK_V: tl.constexpr = DV != VP

    m = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, VP), tl.float32)

    # Tiles of which each query selects all keys or none. The next entry is loaded one step ahead of its tile.
    entries = tiles_ptr + list_row * NT
    nf = tl.load(counts_ptr + list_row * 2)
    np = tl.load(counts_ptr + list_row * 2 + 1)
    entry = tl.load(entries, mask=nf > 0, other=0)
    for i in range(nf):
        first = entry_tile(entry, QT).to(tl.int64) * BN
        k = load_tile(k_base + tl.multiple_of(first * skn, ALIGN) + k_in, n, dk < DK, False, MASK_K)
        v = load_tile(v_base + tl.multiple_of(first * svn, ALIGN) + v_in, n, dv < DV, False, MASK_V)
        x = tl.dot(q, tl.trans(k), input_precision=PREC)
        if QT > 1:
            x = tl.where((((entry_bits(entry, QT) >> query) & 1) != 0)[:, None], x, float("-inf"))
        p, m, total, alpha = _softmax(x, m, total, qk)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PREC)
        entry = tl.load(entries + i + 1, mask=i + 1 < nf, other=0)

    # Tiles of which some query selects a part.
    if np > 0:
        nd = tl.load(dirty_ptr + list_row)
        ql = tl.arange(0, QT)
        s_query = qt * QT + ql
        rows = bg * S + s_query
        QS = (bg + 1) * S
        if SEG:
            segment = tl.load(seg_q_ptr + b * S + s_query, mask=s_query < S, other=0)
        RI = tl.arange(0, RC)
        start = load_pieces(starts_ptr, rows, RI, QS, R)
        end = load_pieces(ends_ptr, rows, RI, QS, R)
        entry = tl.load(entries + NT - 1)
        for i in range(np - nd):
            first = entry_tile(entry, QT) * BN
            at = first.to(tl.int64)
            k = load_tile(k_base + tl.multiple_of(at * skn, ALIGN) + k_in, n < S_kv - first, dk < DK, True, MASK_K)
            v = load_tile(v_base + tl.multiple_of(at * svn, ALIGN) + v_in, n < S_kv - first, dv < DV, True, MASK_V)
            x = tl.dot(q, tl.trans(k), input_precision=PREC)
            words = key_words(starts_ptr, ends_ptr, start, end, rows, QS, first, R, RC, BN)
            if SEG:
                words &= segment_words(seg_k_ptr + b * S_kv, segment, first, S_kv, BN)
            x = tl.where(row_keys(to_rows(words, QT, HB), BN), x, float("-inf"))
            p, m, total, alpha = _softmax(x, m, total, qk)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PREC)
            entry = tl.load(entries + NT - 2 - i, mask=i + 1 < np, other=0)
        # Tiles with a NaN or an infinity: the product uses the finite values; each query adds the others that it
        # selects.
        for i in tl.range(nd, num_stages=1):
            first = entry_tile(tl.load(entries + NT - 1 - (np - nd + i)), QT) * BN
            at = first.to(tl.int64)
            k = load_tile(k_base + tl.multiple_of(at * skn, ALIGN) + k_in, n < S_kv - first, dk < DK, True, MASK_K)
            v_at = v_base + tl.multiple_of(at * svn, ALIGN) + v_in
            v = load_tile(v_at, n < S_kv - first, dv < DV, True, MASK_V)
            x = tl.dot(q, tl.trans(k), input_precision=PREC)
            words = key_words(starts_ptr, ends_ptr, start, end, rows, QS, first, R, RC, BN)
            if SEG:
                words &= segment_words(seg_k_ptr + b * S_kv, segment, first, S_kv, BN)
            x = tl.where(row_keys(to_rows(words, QT, HB), BN), x, float("-inf"))
            p, m, total, alpha = _softmax(x, m, total, qk)
            acc = tl.dot(p.to(v.dtype), tl.where(finite(v), v, 0.0), acc * alpha[:, None], input_precision=PREC)
            for j in tl.range(QT, num_stages=1):
                word = tl.sum(tl.where(ql == j, words, 0), axis=0)
                v = load_tile(v_at, ((word >> n) & 1) != 0, dv < DV, True, MASK_V)
                wild = tl.sum(tl.where(finite(v), 0.0, v.to(tl.float32)), axis=0)
                acc = tl.where((query == j)[:, None], acc + wild[None, :], acc)

    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    if SINK:
        sink = tl.load(sink_ptr + g * H + head, mask=head < H, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        factor = tl.exp2(m - top)
        acc *= factor[:, None]
        total = total * factor + tl.exp2(sink - top)
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    o_row = (((b * S + s_row) * G + g) * H + head) * DV
    tl.store(
        o_ptr + o_row[:, None] + dv[None, :], acc.to(o_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :]
    )
    tl.store(lse_ptr + ((b * S + s_row) * G + g) * H + head, lse, mask=live)
