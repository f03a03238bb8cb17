# SPDX-License-Identifier: Apache-2.0
"""The lists of key tiles that each tile of queries visits.

From bitmaps of 32 queries x key tiles to tiles[B, G, NQ, NT], from the front those that each query selects whole or
not at all, from the back the others (IN_ORDER: all). A program has one tile of QT queries and TB key tiles at a time.
It reads the bitmaps once (twice where a tile holds a NaN) and has no other work to speak of: both counts come from one
scan. Before it, flags[B, G, NT] of key tiles that hold a NaN or an infinity, which a product would spread even with a
probability of 0: a program has one tile of BN keys, DC columns at a time. Bytes bound it: K and V are read once, so
that the attention's main loops need no test.
"""

import triton
import triton.language as tl

from .common import finite, pack_entry


@triton.jit
def _low(word, shift, QT: tl.constexpr):
    """Returns QT bits of a word of 32."""
    return ((word.to(tl.int64) & 0xFFFFFFFF) >> shift) & ((1 << QT) - 1)


@triton.jit(do_not_specialize=["S", "NT", "NQ"])
def selection_lists(
    sel_ptr, full_ptr, flags_ptr, tiles_ptr, counts_ptr, dirty_ptr, S, NT, NQ, QT: tl.constexpr, TB: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Builds tiles[B, G, NQ, NT], counts[B, G, NQ, 2] and dirty[B, G, NQ] from bitmaps and flags.

    sel, full are [B, G, cdiv(S, 32), NT], flags [B, G, NT]. A row of tiles has, from the front, the ``counts[0]`` tiles
    of which each query selects all keys or none; from the back the ``counts[1]`` others, and last of these the
    ``dirty`` ones that hold a NaN or an infinity (flags). Each part is in increasing order. An entry packs the tile and
    a bit for each query (``common.entry_tile``). One program: QT queries.

    With IN_ORDER no tile is in the first part: a query adds its tiles in increasing order, whichever keys of them the
    other queries of its program select, so its bits do not depend on theirs.
    """
    pid = tl.program_id(0).to(tl.int64)
    bg = pid // NQ
    q0 = (pid % NQ) * QT
    words = (bg * ((S + 31) // 32) + q0 // 32) * NT
    shift = q0 % 32
    row = tiles_ptr + pid * NT
    nf = 0
    np = 0
    nd = 0
    for t0 in range(0, NT, TB):
        t = t0 + tl.arange(0, TB)
        bits = _low(tl.load(sel_ptr + words + t, mask=t < NT, other=0), shift, QT)
        whole = _low(tl.load(full_ptr + words + t, mask=t < NT, other=0), shift, QT)
        wild = tl.load(flags_ptr + bg * NT + t, mask=t < NT, other=0) != 0
        full = (bits != 0) & ((bits & ~whole) == 0) & ~wild
        if IN_ORDER:
            full = full & (bits == 0)  # none
        part = (bits != 0) & ~full & ~wild
        # Both counts in one scan.
        at = tl.cumsum(full.to(tl.int32) + (part.to(tl.int32) << 16), axis=0)
        entry = pack_entry(t, bits, QT).to(tiles_ptr.dtype.element_ty)
        tl.store(row + nf + (at & 0xFFFF) - 1, entry, mask=full)
        tl.store(row + NT - np - (at >> 16), entry, mask=part)
        both = tl.max(at, axis=0)
        nf += both & 0xFFFF
        np += both >> 16
        nd += tl.sum(((bits != 0) & wild).to(tl.int32), axis=0)
    if nd > 0:
        back = np
        for t0 in range(0, NT, TB):
            t = t0 + tl.arange(0, TB)
            bits = _low(tl.load(sel_ptr + words + t, mask=t < NT, other=0), shift, QT)
            wild = (bits != 0) & (tl.load(flags_ptr + bg * NT + t, mask=t < NT, other=0) != 0)
            at = tl.cumsum(wild.to(tl.int32), axis=0)
            entry = pack_entry(t, bits, QT).to(tiles_ptr.dtype.element_ty)
            tl.store(row + NT - back - at, entry, mask=wild)
            back += tl.max(at, axis=0)
    tl.store(counts_ptr + pid * 2, nf)
    tl.store(counts_ptr + pid * 2 + 1, np + nd)
    tl.store(dirty_ptr + pid, nd)


@triton.jit
def _any_wild(p, n, keep, stride, ALIGN: tl.constexpr, D: tl.constexpr, DC: tl.constexpr):
    wild = 0
    for c in tl.static_range(0, D, DC):
        d = c + tl.arange(0, DC)
        x = tl.load(
            p + n[:, None] * tl.multiple_of(tl.cast(stride, tl.int64), ALIGN) + d[None, :],
            mask=keep[:, None] & (d < D)[None, :],
            other=0.0,
        )
        wild |= tl.max(tl.max((~finite(x)).to(tl.int32), axis=1), axis=0)
    return wild


@triton.jit(do_not_specialize=["S_kv", "NT", "G", "skb", "skg", "skn", "svb", "svg", "svn"])
def selection_finite(
    k_ptr, v_ptr, flags_ptr, S_kv, NT, G, skb, skg, skn, svb, svg, svn,
    DK: tl.constexpr, DV: tl.constexpr, DC: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Writes flags[B, G, NT] int32: 1 if not all keys and values of the tile are finite. One program: one tile."""
    pid = tl.program_id(0)
    t = pid % NT
    bg = pid // NT
    b = (bg // G).to(tl.int64)
    g = (bg % G).to(tl.int64)
    n = t.to(tl.int64) * BN + tl.arange(0, BN)  # [BN]
    k = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    wild = _any_wild(k, n, n < S_kv, skn, ALIGN, DK, DC) | _any_wild(v, n, n < S_kv, svn, ALIGN, DV, DC)
    tl.store(flags_ptr + pid, wild)
