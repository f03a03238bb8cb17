# SPDX-License-Identifier: Apache-2.0
"""The forward of selection attention over lists of keys: o = softmax(scale * q @ k[keys].T + bias) @ v[keys], and lse.

q[B, S, G, h, Dk], k, v[B, G, S_kv, D], any strides but the last; keys[B, S, G, N] are canonical (``list_keys.py``).
One program: one split of one query's keys, HB of its heads, tiles of BN keys. By count rows gathered from the L2 bound
it, and products nearly: the heads of one query fill the rows of a tile, so that a key's row is read once for all of
them, once for K and V where V is a part of K (SHARED), and keys are loaded one tile ahead of the rows that they name.
On sm_90 ``gluon_list_forward.py`` runs in its place for rows of 512 to 576 columns (``lists_gluon.py``).
"""

import triton
import triton.language as tl

from .row_tiles import product_of_rows, tile_at, tiles_at, zero_tiles
from .softmax import online_softmax
from .splits import share, split_place, store_output


@triton.jit(do_not_specialize=["S", "G", "NS", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn"])
def selection_list_forward(
    q_ptr, k_ptr, v_ptr, keys_ptr, counts_ptr, bias_ptr, sink_ptr, o_ptr, lse_ptr, part_ptr, plse_ptr, pnorm_ptr, scale,
    S, G, N, NS,
    sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KM: tl.constexpr, VM: tl.constexpr, MC: tl.constexpr,
    KT: tl.constexpr, VT: tl.constexpr, HELD: tl.constexpr, SHARED: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, SINK: tl.constexpr, BIAS: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes o[B, S, G, H, DV] and lse[B, S, G, H] from q[B, S, G, H, DK], k, v[B, G, S_kv, D] and keys[B, S, G, N].

    SHARED: v is the first DV columns of k, which are read once. With several splits it writes normalised part[B, S, G,
    NS, H, DV] and plse[B, S, G, NS, H] in log2 units instead. BIAS: bias[B, S, G, N] is added to the scores, and a split's
    maximum and sum are written to plse and pnorm. One program: one split of one query's keys, HB heads.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    N = tl.multiple_of(tl.cast(N, tl.int64), 16)
    bg, s, hb, split = split_place(NS, S, HN)
    s = s.to(tl.int64)
    b = bg // G
    g = bg % G
    row = (b * S + s) * G + g
    head = hb * HB + tl.arange(0, HB)
    live = head < H
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s * sqs, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    q_at = head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    if HELD:
        q = tiles_at(q_base, q_at, live, DK, KM, MC, KT)
    n = tl.load(counts_ptr + row)
    begin, end = share(n, split, NS)
    keys_row = keys_ptr + row * N
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    v_base = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    svn = tl.multiple_of(tl.cast(svn, tl.int64), ALIGN)
    qk = tl.cast(scale, tl.float32)
    if not BIAS:
        qk = qk * 1.4426950408889634
    i = tl.arange(0, BN)
    m = tl.full((HB,), float("-inf"), tl.float32)
    norm = tl.zeros((HB,), tl.float32)
    acc = zero_tiles(HB, VM, MC, VT)
    # Keys are loaded one tile ahead of the rows that they name.
    key = tl.load(keys_row + begin + i, mask=begin + i < end, other=0)
    for start in range(begin, end, BN):
        mask = start + i < end
        k_at = key.to(tl.int64) * skn
        v_at = key.to(tl.int64) * svn
        key = tl.load(keys_row + start + BN + i, mask=start + BN + i < end, other=0)
        x = tl.zeros((HB, BN), tl.float32)
        ks = ()
        if HELD:
            for c in tl.static_range(KM + (KT > 0)):
                k = tile_at(k_base, k_at, mask, c, DK, KM, MC, KT)
                if SHARED and c < VM:
                    ks = ks + (k,)
                x = tl.dot(q[c], tl.trans(k), x, input_precision=PREC)
        else:
            x = product_of_rows(x, q_base, q_at, live, k_base, k_at, mask, DK, KM, MC, KT, PREC)
        if BIAS:
            bias = tl.load(bias_ptr + row * N + start + i, mask=mask, other=float("-inf"))
            x = x * qk + bias[None, :]
        else:
            x = tl.where(mask[None, :], x * qk, float("-inf"))
        p, alpha, m, norm = online_softmax(x, m, norm, BIAS)
        old = acc
        acc = ()
        for c in tl.static_range(VM + (VT > 0)):
            v = ks[c] if SHARED and HELD else tile_at(v_base, v_at, mask, c, DV, VM, MC, VT)
            acc = acc + (tl.dot(p.to(v.dtype), v, old[c] * alpha[:, None], input_precision=PREC),)

    store_output(
        o_ptr, lse_ptr, part_ptr, plse_ptr, sink_ptr, acc, m, norm, row, g, head, live, split, NS, H, DV, VM, MC, VT, SINK,
        pnorm_ptr, BIAS,
    )  # fmt: skip
