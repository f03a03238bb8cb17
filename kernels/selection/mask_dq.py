# SPDX-License-Identifier: Apache-2.0
"""dQ of selection attention under a mask, and what a row's weights are computed from under a mask of floats.

    ds = w * (share * dout @ v.T - delta),  w = exp(scale * q @ k.T + mask - base),  dq = scale * ds @ k

A program takes QT queries x HB heads of a group over the lists of ``mask_tiles.py``, as the forward. By count products
bound it, three a tile. Rows of q and dO are read again for every tile, which leaves registers for wider tiles of keys;
tiles that are seen whole need no mask. ``selection_mask_shares`` sums the weights of rows of nothing but fills once
more, whose lse is rounded.
"""

import triton
import triton.language as tl

from .common import finite, place
from .mask_forward import mask_rows
from .mask_tiles import any_wild, entry, logits, shown, walk
from .row_tiles import product_of_rows, store_tiles, tile_at, zero_tiles


@triton.jit
def weights(x, base, BIAS: tl.constexpr):
    """Returns exp of the logits x without their row's base; both are in log2 units, or with BIAS in natural units."""
    if BIAS:
        w = tl.exp2((x - base) * 1.4426950408889634)
    else:
        w = tl.exp2(x - base)
    return w


@triton.jit(do_not_specialize=["S", "S_kv", "NT", "NQ", "G", "lb", "lg", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn",
                               "smb", "sms", "smg"])  # fmt: skip
def selection_mask_shares(
    q_ptr, k_ptr, mask_ptr, lists_ptr, counts_ptr, lse_ptr, sink_ptr, dlse_ptr, delta_ptr, base_ptr, share_ptr, scale, S,
    S_kv, NT, NQ, G, lb, lg, sqb, sqs, sqg, sqh, skb, skg, skn, smb, sms, smg, smk,
    H: tl.constexpr, DK: tl.constexpr, KM: tl.constexpr, MC: tl.constexpr, KT: tl.constexpr, QT: tl.constexpr,
    HB: tl.constexpr, BN: tl.constexpr, SINK: tl.constexpr, DLSE: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes base and share[B, S, G, H], and changes delta.

    They are such that P = w share and dscore = w (share dout . v - delta), with w = exp(score + mask - base). Below a fill lse is rounded by more than 1: the shares of such rows are divided by the sum of all w, which takes one
    walk over the row's tiles. One program: QT queries x HB heads.
    """
    M: tl.constexpr = QT * HB
    b, g, _, qt, hb = place(NQ, G, H, HB)
    row = tl.arange(0, M)
    s = qt * QT + row // HB
    head = hb * HB + row % HB
    live = (s < S) & (head < H)
    at = ((b * S + s) * G + g) * H + head
    lse = tl.load(lse_ptr + at, mask=live, other=float("-inf"))
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)
    some = lse != float("-inf")
    base = tl.where(some, lse, float("inf"))
    share = tl.where(some, 1.0, 0.0)
    if SINK:
        gap = tl.load(sink_ptr + g * H + head, mask=head < H, other=0.0).to(tl.float32) - lse
        share = tl.where(some, 1.0 / (1.0 + tl.exp(tl.minimum(gap, 88.0))), 0.0)
    if SINK and DLSE:
        # Next to such a sink nothing is left of P, but lse keeps its gradient.
        dlse = tl.load(dlse_ptr + at, mask=live, other=0.0)
        delta = tl.where(some & (gap > 80.0), -dlse, delta * share)
    else:
        delta = delta * share
    far = some & (lse < -1e3)
    line = b * lb + g * lg + qt
    tiles = lists_ptr + line * NT
    some_far = tl.max(far.to(tl.int32), axis=0)
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    q_at = tl.multiple_of(s.to(tl.int64) * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
    mask_at = mask_rows(mask_ptr, b, g, s, live, smb, sms, smg)
    smk = tl.cast(smk, tl.int64)
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    scale = tl.cast(scale, tl.float32)
    n = tl.arange(0, BN)
    total = tl.zeros((M,), tl.float32)
    for MASKED in tl.static_range(2):
        count = tl.where(some_far != 0, tl.load(counts_ptr + line * 2 + MASKED), 0)
        for i in range(count):
            key = entry(tiles, i, count, NT, MASKED).to(tl.int64) * BN + n
            inside = key < S_kv
            seen, bias = live, 0.0
            if MASKED:
                seen, bias = shown(mask_at[:, None] + (key * smk)[None, :], live[:, None] & inside[None, :], True)
            x = tl.zeros((M, BN), tl.float32)
            x = product_of_rows(x, q_base, q_at, live, k_base, key * skn, inside, DK, KM, MC, KT, PREC)
            total += tl.sum(weights(logits(x, scale, seen, bias, MASKED, True), base[:, None], True), axis=1)
    total = tl.where(far & (total > 0.0), total, 1.0)
    tl.store(base_ptr + at, base, mask=live)
    tl.store(share_ptr + at, share / total, mask=live)
    tl.store(delta_ptr + at, delta / total, mask=live)


@triton.jit(do_not_specialize=[
    "S", "S_kv", "NT", "NQ", "G", "lb", "lg", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn", "smb",
    "sms", "smg",
])  # fmt: skip
def selection_mask_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, mask_ptr, lists_ptr, counts_ptr, flags_ptr, base_ptr, share_ptr, delta_ptr, dq_ptr, scale,
    S, S_kv, NT, NQ, G, lb, lg, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn, smb, sms, smg, smk,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KM: tl.constexpr, VM: tl.constexpr, MC: tl.constexpr,
    KT: tl.constexpr, VT: tl.constexpr, QT: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, DOUT: tl.constexpr,
    BIAS: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, G, H, DK] from dout[B, S, G, H, DV], base, share and delta[B, S, G, H], the mask and lists.

    Without BIAS, base is log2 of the denominator and share is 1. One program: QT queries x HB heads = M rows.
    """
    M: tl.constexpr = QT * HB
    b, g, bg, qt, hb = place(NQ, G, H, HB)
    row = tl.arange(0, M)
    s = qt * QT + row // HB
    head = hb * HB + row % HB
    live = (s < S) & (head < H)
    at = ((b * S + s) * G + g) * H + head
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    q_at = tl.multiple_of(s.to(tl.int64) * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
    base = tl.load(base_ptr + at, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)
    share = tl.full((M,), 1.0, tl.float32)
    if BIAS:
        share = tl.load(share_ptr + at, mask=live, other=0.0)
    mask_at = mask_rows(mask_ptr, b, g, s, live, smb, sms, smg)
    smk = tl.cast(smk, tl.int64)
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    scale = tl.cast(scale, tl.float32)
    n = tl.arange(0, BN)
    acc = zero_tiles(M, KM, MC, KT)
    line = b * lb + g * lg + qt
    tiles = lists_ptr + line * NT
    wild = any_wild(flags_ptr, bg, NT)
    for KIND in tl.static_range(3):
        count = walk(counts_ptr, line, wild, KIND)
        tile = entry(tiles, 0, count, NT, KIND > 0)
        for i in tl.range(count, num_stages=1 if KIND == 2 else None):
            key = tile.to(tl.int64) * BN + n
            tile = entry(tiles, i + 1, count, NT, KIND > 0)
            inside = key < S_kv
            seen, bias = live, 0.0
            if KIND > 0:
                seen, bias = shown(mask_at[:, None] + (key * smk)[None, :], live[:, None] & inside[None, :], BIAS)
            x = tl.zeros((M, BN), tl.float32)
            y = tl.zeros((M, BN), tl.float32)
            x = product_of_rows(x, q_base, q_at, live, k_base, key * skn, inside, DK, KM, MC, KT, PREC)
            if DOUT:
                y = product_of_rows(y, dout_ptr, at * DV, live, v_base, key * svn, inside, DV, VM, MC, VT, PREC)
            w = weights(logits(x, scale, seen, bias, KIND > 0, BIAS), base[:, None], BIAS)
            ds = w * (y * share[:, None] - delta[:, None])
            if KIND > 0:
                ds = tl.where(seen, ds, 0.0)
            old = acc
            acc = ()
            for c in tl.static_range(KM + (KT > 0)):
                k = tile_at(k_base, key * skn, inside, c, DK, KM, MC, KT)
                if KIND == 2:
                    k = tl.where(finite(k), k, 0.0)
                acc = acc + (tl.dot(ds.to(k.dtype), k, old[c], input_precision=PREC),)
    factor = tl.full((M,), 1.0, tl.float32) * scale
    store_tiles(dq_ptr, at * DK, live, acc, factor, DK, KM, MC, KT)
