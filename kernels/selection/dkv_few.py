# SPDX-License-Identifier: Apache-2.0
"""dK and dV for few queries, as in decoding.

``dkv.py`` has the formulas. A program has TILES neighbouring tiles of BN keys, and takes one tile, one query and ROWS
of its heads at a time. The zeros bound it: most key tiles are selected by no query, and dk, dv[B, G, S_kv, D] must be
written whole. So one kernel writes the zeros of many tiles at a time and handles the few others on its way; their
queries are the bits of a word, and a query's pieces take one wide load in place of a search, since a chain of loads
costs more than the products.
"""

import triton
import triton.language as tl

from .dkv import add_product, ones, popcount, product, store, tiles, zeros
from .segments import same_segment


@triton.jit
def lowest_bit(x):
    """Returns the index of the lowest set bit of int32 x, which must not be 0."""
    return popcount((x & -x) - 1)


@triton.jit
def _chosen(starts_ptr, ends_ptr, row, key, BN: tl.constexpr, R: tl.constexpr, RC: tl.constexpr):
    """Returns which of the BN <= 32 keys from ``key`` on are in the pieces [R] at ``row``."""
    bits = key * 0
    for c in tl.static_range(0, R, RC):
        j = c + tl.arange(0, RC)
        start = tl.load(starts_ptr + row + j, mask=j < R, other=0)
        end = tl.load(ends_ptr + row + j, mask=j < R, other=0)
        a = tl.minimum(tl.maximum(start - key, 0), BN)
        b = tl.maximum(tl.minimum(tl.maximum(end - key, 0), BN), a)
        # Pieces are disjoint, so their sum is their union.
        bits += tl.sum(ones(a, b), axis=0)
    return ((bits >> tl.arange(0, BN)) & 1) != 0


@triton.jit
def _any(words, t, mask, W: tl.constexpr, NT):
    """Returns the queries that select key tiles t, with all words combined into one."""
    word = t * 0
    for i in tl.static_range(W):
        word |= tl.load(words + i * NT + t, mask=mask, other=0)
    return word


@triton.jit
def _where(chosen, new, old, N: tl.constexpr):
    """Returns ``new`` for chosen keys and ``old`` for the others, whatever the query's rows hold."""
    out = ()
    for c in tl.static_range(N):
        out = out + (tl.where(chosen, new[c], old[c]),)
    return out


@triton.jit(do_not_specialize=[
    "G", "S", "S_kv", "NT", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_dkv_few(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, sel_ptr, starts_ptr, ends_ptr, seg_q_ptr,
    seg_k_ptr, dk_ptr, dv_ptr,
    G, S, S_kv, NT, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn, scale,
    H: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DC: tl.constexpr, NK: tl.constexpr,
    NV: tl.constexpr, R: tl.constexpr, RC: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr, DOUT: tl.constexpr,
    ALIGN: tl.constexpr, DOUT_ALIGN: tl.constexpr, PREC: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Writes all of dk, dv[B, G, S_kv, D] where queries are few.

    sel[B, G, W, NT], W = S / 32, has a bit for each query that selects any key of a tile. Programs [B, G, NT / TILES],
    one tile, one query and ROWS of its heads at a time.
    """
    groups = (NT + TILES - 1) // TILES
    pid = tl.program_id(0)
    bg = (pid // groups).to(tl.int64)
    t0 = pid % groups * TILES
    b = bg // G
    g = bg % G
    scale = tl.cast(scale, tl.float32)  # generated code passes Python floats as fp64
    scale2 = scale * 1.4426950408889634
    qp = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
    kp = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    vp = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
    words = sel_ptr + bg * W * NT
    for x0 in range(t0 * BN, t0 * BN + TILES * BN, 64):
        x = x0 + tl.arange(0, 64)
        nobody = (x < S_kv) & (_any(words, x // BN, x < S_kv, W, NT) == 0)
        store(dk_ptr, zeros(64, DC, NK), bg * S_kv + x, 0.0, nobody, DK, DC, NK)
        store(dv_ptr, zeros(64, DC, NV), bg * S_kv + x, 0.0, nobody, DV, DC, NV)
    j = tl.arange(0, TILES)
    todo = tl.sum(tl.where(_any(words, t0 + j, t0 + j < NT, W, NT) != 0, 1 << j, 0), axis=0)
    for _ in range(popcount(todo)):
        t = t0 + lowest_bit(todo)
        todo = todo & (todo - 1)
        x = t * BN + tl.arange(0, BN)
        keep = x < S_kv
        keys = x.to(tl.int64)
        k = tiles(kp, tl.multiple_of(keys * skn, ALIGN), keep, DK, DC, NK)
        v = tiles(vp, tl.multiple_of(keys * svn, ALIGN), keep, DV, DC, NV)
        dk = zeros(BN, DC, NK)
        dv = zeros(BN, DC, NV)
        if SEG:
            ids = tl.load(seg_k_ptr + b * S_kv + keys, mask=keep, other=0)
        for i in tl.static_range(W):
            word = tl.load(words + i * NT + t)
            for _ in range(popcount(word)):
                s = i * 32 + lowest_bit(word).to(tl.int64)
                word = word & (word - 1)
                chosen = _chosen(starts_ptr, ends_ptr, (bg * S + s) * R, t * BN, BN, R, RC)[:, None]
                if SEG:
                    chosen = chosen & same_segment(tl.load(seg_q_ptr + b * S + s), ids)[:, None]
                for h0 in range(0, H, ROWS):
                    head = h0 + tl.arange(0, ROWS)
                    mask = head < H
                    q_row = tl.multiple_of(s * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
                    q = tiles(qp, q_row, mask, DK, DC, NK)
                    row = ((b * S + s) * G + g) * H + head
                    # Zeros in the padding, also of q and dout, so that a probability of 1 there adds nothing.
                    lse2 = tl.load(lse2_ptr + row, mask=mask, other=0.0)
                    delta = tl.load(delta_ptr + row, mask=mask, other=0.0)
                    scores = product(k, q, tl.zeros((BN, ROWS), tl.float32), NK, PREC)
                    p = tl.where(chosen, tl.exp2(scores * scale2 - lse2[None, :]), 0.0)  # [BN, ROWS]
                    if DOUT:
                        dout = tiles(dout_ptr, tl.multiple_of(row * DV, DOUT_ALIGN), mask, DV, DC, NV)
                        ds = p * (product(v, dout, tl.zeros((BN, ROWS), tl.float32), NV, PREC) - delta[None, :])
                        dv = _where(chosen, add_product(dv, p.to(dout[0].dtype), dout, NV, PREC), dv, NV)
                    else:
                        ds = p * (0.0 - delta[None, :])
                    ds = tl.where(chosen, ds, 0.0)
                    dk = _where(chosen, add_product(dk, ds.to(q[0].dtype), q, NK, PREC), dk, NK)
        store(dk_ptr, dk, bg * S_kv + keys, scale, keep, DK, DC, NK)
        store(dv_ptr, dv, bg * S_kv + keys, 1.0, keep, DV, DC, NV)
