# SPDX-License-Identifier: Apache-2.0
"""dQ of selection attention over lists of keys, and the factors of dK and dV.

    p = exp(score - lse),  ds = p * (dout @ v[keys].T - delta),  dq = scale * ds @ k[keys]

Programs as in the forward: one split of one query's keys, HB heads, tiles of BN keys. p and ds[heads, keys] are also
written, in the dtype of the products, for ``list_dkv.py``, which computes no score again. By count products bound it,
three a tile, and rows gathered from the L2; queries and dO stay on the chip where they fit (HELD).
``selection_list_totals`` sums a row's weights once more where |lse| is so large that its rounding shows.
"""

import triton
import triton.language as tl

from .row_tiles import product_of_rows, tile_at, tiles_at, zero_tiles
from .splits import share, split_place, store_dq


@triton.jit
def _row_sums(
    q_base, q_at, live, k_base, skn, keys_row, bias_row, lse, scale, n, HB: tl.constexpr, BN: tl.constexpr,
    DK: tl.constexpr, KM: tl.constexpr, MC: tl.constexpr, KT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Returns the sum of exp(score - lse) [HB] over a query's n keys, which is 1 but for the rounding of lse.

    It is computed only where that is worse than 2^-17, as next to a bias of -1e9.
    """
    far = tl.max(tl.where((tl.abs(lse) >= 128.0) & (lse != float("inf")), 1, 0), axis=0)
    i = tl.arange(0, BN)
    total = tl.zeros((HB,), tl.float32)
    for start in range(0, n * far, BN):
        mask = start + i < n
        k_at = tl.load(keys_row + start + i, mask=mask, other=0).to(tl.int64) * skn
        x = tl.zeros((HB, BN), tl.float32)
        x = product_of_rows(x, q_base, q_at, live, k_base, k_at, mask, DK, KM, MC, KT, PREC) * scale
        x += tl.load(bias_row + start + i, mask=mask, other=0.0)[None, :]
        total += tl.sum(tl.where(mask[None, :], tl.exp(x - lse[:, None]), 0.0), axis=1)
    return tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["S", "G", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn"])
def selection_list_totals(
    dlse_ptr, q_ptr, k_ptr, keys_ptr, counts_ptr, bias_ptr, sink_ptr, lse_ptr, total_ptr, of_lse_ptr, scale, S, G, N,
    sqb, sqs, sqg, sqh, skb, skg, skn,
    H: tl.constexpr, DK: tl.constexpr, KM: tl.constexpr, MC: tl.constexpr, KT: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, DLSE: tl.constexpr, SINK: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes total[B, S, G, H], the sum of exp(logit - lse) with the sink's, and of_lse, dlse over that of the keys.

    Logits have a bias: bias[B, S, G, N]. One program: one query, HB heads.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    N = tl.multiple_of(tl.cast(N, tl.int64), 16)
    bg, s, hb, _ = split_place(1, S, HN)
    s = s.to(tl.int64)
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g
    head = hb * HB + tl.arange(0, HB)
    live = head < H
    at = row * H + head
    lse = tl.load(lse_ptr + at, mask=live, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s * sqs, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    q_at = head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    total = _row_sums(
        q_base, q_at, live, k_base, tl.multiple_of(tl.cast(skn, tl.int64), ALIGN), keys_ptr + row * N, bias_ptr + row * N,
        lse, tl.cast(scale, tl.float32), tl.load(counts_ptr + row), HB, BN, DK, KM, MC, KT, PREC,
    )  # fmt: skip
    of_lse = tl.zeros((HB,), tl.float32)
    if DLSE:
        of_lse = tl.load(dlse_ptr + at, mask=live, other=0.0).to(tl.float32) / total
    if SINK:
        total += tl.exp(tl.load(sink_ptr + g * H + head, mask=live, other=0.0).to(tl.float32) - lse)
    tl.store(total_ptr + at, total, mask=live)
    tl.store(of_lse_ptr + at, of_lse, mask=live)


@triton.jit(do_not_specialize=[
    "S", "G", "first", "rows", "NS", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_list_dq(
    dout_ptr, q_ptr, k_ptr, v_ptr, keys_ptr, counts_ptr, bias_ptr, lse2_ptr, delta_ptr, total_ptr, of_lse_ptr, dq_ptr,
    part_ptr, p_ptr, ds_ptr, scale, S, G, N, first, rows, NS, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KM: tl.constexpr, VM: tl.constexpr, MC: tl.constexpr,
    KT: tl.constexpr, VT: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, DOUT: tl.constexpr, BIAS: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, G, H, DK] of ``rows`` queries from ``first`` on, from dout[B, S, G, H, DV], lse2 and delta.

    It also writes p[B, G, rows, H, N] (with DOUT) and ds[B, G, rows, H, N], the softmax's weights and the gradients
    of the scores, rounded to the dtype of the products. With several splits it writes part[B, G, rows, NS, H,
    DK] in place of dq. lse2: log2 of the denominator, inf for no keys. BIAS: lse2 is the forward's lse, delta is dout . o,
    and total and of_lse are those of :func:`selection_list_totals`; a bias of NaN gives no ds. One program: as in the forward.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    N = tl.multiple_of(tl.cast(N, tl.int64), 16)
    bg, local, hb, split = split_place(NS, rows, HN)
    local = local.to(tl.int64)
    s = first + local
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g
    head = hb * HB + tl.arange(0, HB)
    live = head < H
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s * sqs, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    q_at = head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    if HELD:
        q = tiles_at(q_base, q_at, live, DK, KM, MC, KT)
    at = row * H + head
    if DOUT and HELD:
        do = tiles_at(dout_ptr, at * DV, live, DV, VM, MC, VT)
    lse2 = tl.load(lse2_ptr + at, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)
    n = tl.load(counts_ptr + row)
    begin, end = share(n, split, NS)
    keys_row = keys_ptr + row * N
    factors = ((bg * rows + local) * H + head) * N
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    scale = tl.cast(scale, tl.float32)
    qk = scale * 1.4426950408889634
    i = tl.arange(0, BN)
    if BIAS:
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
        total = tl.load(total_ptr + at, mask=live, other=1.0)
        of_lse = tl.load(of_lse_ptr + at, mask=live, other=0.0)
    acc = zero_tiles(HB, KM, MC, KT)
    key = tl.load(keys_row + begin + i, mask=begin + i < end, other=0)
    for start in range(begin, end, BN):
        mask = start + i < end
        k_at = key.to(tl.int64) * skn
        v_at = key.to(tl.int64) * svn
        key = tl.load(keys_row + start + BN + i, mask=start + BN + i < end, other=0)
        x = tl.zeros((HB, BN), tl.float32)
        y = tl.zeros((HB, BN), tl.float32)
        ks = ()
        if HELD:
            ks = tiles_at(k_base, k_at, mask, DK, KM, MC, KT)
            for c in tl.static_range(KM + (KT > 0)):
                x = tl.dot(q[c], tl.trans(ks[c]), x, input_precision=PREC)
            if DOUT:
                for c in tl.static_range(VM + (VT > 0)):
                    v = ks[c] if SHARED else tile_at(v_base, v_at, mask, c, DV, VM, MC, VT)
                    y = tl.dot(do[c], tl.trans(v), y, input_precision=PREC)
        else:
            x = product_of_rows(x, q_base, q_at, live, k_base, k_at, mask, DK, KM, MC, KT, PREC)
            if DOUT:
                y = product_of_rows(y, dout_ptr, at * DV, live, v_base, v_at, mask, DV, VM, MC, VT, PREC)
        if BIAS:
            bias = tl.load(bias_ptr + row * N + start + i, mask=mask, other=0.0)
            x = x * scale + bias[None, :]
            own = tl.exp(x - lse2[:, None])
            p = own / total[:, None]
            ds = tl.where((mask & (bias == bias))[None, :], p * (y - delta[:, None]) + own * of_lse[:, None], 0.0)
        else:
            p = tl.exp2(x * qk - lse2[:, None])
            ds = tl.where(mask[None, :], p * (y - delta[:, None]), 0.0)
        to = factors[:, None] + (start + i)[None, :]
        inside = live[:, None] & mask[None, :]
        tl.store(ds_ptr + to, ds.to(ds_ptr.dtype.element_ty), mask=inside)
        if DOUT:
            tl.store(p_ptr + to, p.to(p_ptr.dtype.element_ty), mask=inside)
        old = acc
        acc = ()
        for c in tl.static_range(KM + (KT > 0)):
            k = ks[c] if HELD else tile_at(k_base, k_at, mask, c, DK, KM, MC, KT)
            acc = acc + (tl.dot(ds.to(k.dtype), k, old[c], input_precision=PREC),)

    store_dq(dq_ptr, part_ptr, acc, scale, row, head, live, split, NS, H, HB, DK, KM, MC, KT)
