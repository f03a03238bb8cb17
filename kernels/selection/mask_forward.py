# SPDX-License-Identifier: Apache-2.0
"""The forward of selection attention under a mask: o = softmax(scale * q @ k.T + mask) @ v, and lse.

A program takes QT neighbouring queries x HB heads of a group, 64 rows or fewer, over the key tiles that one of them
sees, BN keys each. By count products bound it: tiles that no query sees are skipped, those that all see whole are
walked without reading the mask, and V is not read where it is a part of K (SHARED). Where K or V hold a NaN or an
infinity, tiles that are seen in part take another, slower walk, so that the fast ones need no test.
"""

import triton
import triton.language as tl

from .common import finite, place
from .mask_tiles import any_wild, entry, logits, shown, walk
from .row_tiles import column_tile, product_of_rows, store_tiles, tile_at, tiles_at, zero_tiles
from .softmax import online_softmax, with_sink


@triton.jit
def mask_rows(mask_ptr, b, g, s, live, smb, sms, smg):
    """Returns pointers to the mask's rows of queries s [M]; to its first row where there is no query."""
    return mask_ptr + b * smb + g * smg + tl.where(live, s, 0).to(tl.int64) * sms


@triton.jit
def _add_wild(
    acc, v_base, skn, mask_at, smk, live, first, S_kv, BN: tl.constexpr, DV: tl.constexpr, VM: tl.constexpr,
    MC: tl.constexpr, VT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the values of a tile that are NaN or infinite to the queries that see them."""
    for j in tl.range(first, tl.minimum(first + BN, S_kv), num_stages=1):
        key = j + tl.zeros((1,), tl.int64)
        seen, _ = shown(mask_at + j * smk, live, BIAS)
        old = acc
        acc = ()
        for c in tl.static_range(VM + (VT > 0)):
            v = column_tile(v_base, key * skn, key >= 0, c * MC, MC if c < VM else VT, DV)
            wild = tl.where(finite(v), 0.0, v.to(tl.float32))
            acc = acc + (old[c] + tl.where(seen[:, None], wild, 0.0),)
    return acc


@triton.jit(do_not_specialize=[
    "S", "S_kv", "NT", "NQ", "G", "lb", "lg", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn", "smb",
    "sms", "smg",
])  # fmt: skip
def selection_mask_forward(
    q_ptr, k_ptr, v_ptr, mask_ptr, lists_ptr, counts_ptr, flags_ptr, sink_ptr, o_ptr, lse_ptr, scale, S, S_kv, NT, NQ, G,
    lb, lg, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn, smb, sms, smg, smk,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KM: tl.constexpr, VM: tl.constexpr, MC: tl.constexpr,
    KT: tl.constexpr, VT: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr, QT: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, SINK: tl.constexpr, BIAS: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes o[B, S, G, H, DV] and lse[B, S, G, H] from q[B, S, G, H, DK], k, v[B, G, S_kv, D], the mask and lists.

    SHARED: v is the first DV columns of k, which are read once. flags[B, G, NT]: tiles with a NaN or an infinity. The
    lists of b, g start at row b * lb + g * lg. One program: QT queries x HB heads = M rows.
    """
    M: tl.constexpr = QT * HB
    b, g, bg, qt, hb = place(NQ, G, H, HB)
    row = tl.arange(0, M)
    s = qt * QT + row // HB
    head = hb * HB + row % HB
    live = (s < S) & (head < H)
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    q_at = tl.multiple_of(s.to(tl.int64) * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
    if HELD:
        q = tiles_at(q_base, q_at, live, DK, KM, MC, KT)
    mask_at = mask_rows(mask_ptr, b, g, s, live, smb, sms, smg)
    smk = tl.cast(smk, tl.int64)
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    scale = tl.cast(scale, tl.float32)
    n = tl.arange(0, BN)
    m = tl.full((M,), float("-inf"), tl.float32)
    norm = tl.zeros((M,), tl.float32)
    acc = zero_tiles(M, VM, MC, VT)
    line = b * lb + g * lg + qt
    tiles = lists_ptr + line * NT
    wild = any_wild(flags_ptr, bg, NT)
    for KIND in tl.static_range(3):
        count = walk(counts_ptr, line, wild, KIND)
        # The next entry is loaded one step ahead of its tile.
        tile = entry(tiles, 0, count, NT, KIND > 0)
        for i in tl.range(count, num_stages=1 if KIND == 2 else None):
            first = tile.to(tl.int64) * BN
            key = first + n
            tile = entry(tiles, i + 1, count, NT, KIND > 0)
            inside = key < S_kv
            seen, bias = live, 0.0
            if KIND > 0:
                seen, bias = shown(mask_at[:, None] + (key * smk)[None, :], live[:, None] & inside[None, :], BIAS)
            x = tl.zeros((M, BN), tl.float32)
            ks = ()
            if HELD:
                for c in tl.static_range(KM + (KT > 0)):
                    k = tile_at(k_base, key * skn, inside, c, DK, KM, MC, KT)
                    if SHARED and c < VM:
                        ks = ks + (k,)
                    x = tl.dot(q[c], tl.trans(k), x, input_precision=PREC)
            else:
                x = product_of_rows(x, q_base, q_at, live, k_base, key * skn, inside, DK, KM, MC, KT, PREC)
            x = logits(x, scale, seen, bias, KIND > 0, BIAS)
            p, alpha, m, norm = online_softmax(x, m, norm, BIAS)
            old = acc
            acc = ()
            for c in tl.static_range(VM + (VT > 0)):
                v = ks[c] if SHARED and HELD else tile_at(v_base, key * svn, inside, c, DV, VM, MC, VT)
                if KIND == 2:
                    v = tl.where(finite(v), v, 0.0)
                acc = acc + (tl.dot(p.to(v.dtype), v, old[c] * alpha[:, None], input_precision=PREC),)
            if KIND == 2:
                acc = _add_wild(acc, v_base, svn, mask_at, smk, live, first, S_kv, BN, DV, VM, MC, VT, BIAS)

    to = ((b * S + s) * G + g) * H + head
    lse = m + tl.log(norm) if BIAS else (m + tl.log2(norm)) * 0.6931471805599453
    tl.store(lse_ptr + to, tl.where(norm == 0.0, float("-inf"), lse), mask=live)
    factor = tl.full((M,), 1.0, tl.float32)
    if SINK:
        factor, norm = with_sink(tl.load(sink_ptr + g * H + head, mask=head < H, other=0.0), m, norm, BIAS)
    store_tiles(o_ptr, to * DV, live, acc, factor / tl.where(norm == 0.0, 1.0, norm), DV, VM, MC, VT)
