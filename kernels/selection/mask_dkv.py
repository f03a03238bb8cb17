# SPDX-License-Identifier: Apache-2.0
"""dK and dV of selection attention under a mask, key by key: a tile of keys over the queries that see it.

``mask_dq.py`` has w, share and delta: dv = (w share).T @ dout, dk = scale * ds.T @ q. Work is shared out as in
:mod:`dkv`: one tile may be seen by all queries, the next by few, and the longest list of queries would set the time.
So the iterations of all tiles of BN keys, QT queries x HB heads each, are cut into P equal runs, one a program, and
tiles that several programs share go through slots that are added in order. By count products bound it; queries that
see a tile whole are walked without the mask.
"""

import triton
import triton.language as tl

from .dkv import add_product, find_unit, product, share, store, tiles, zeros
from .mask_dq import weights
from .mask_tiles import entry, logits, shown


@triton.jit
def _add_to_first(acc, a, b, N: tl.constexpr, M: tl.constexpr, PREC: tl.constexpr):
    """Returns acc_c + a b_c for the first M of N tiles, and the others as they are."""
    out = ()
    for c in tl.static_range(N):
        if c < M:
            out = out + (tl.dot(a, b[c], acc[c], input_precision=PREC),)
        else:
            out = out + (acc[c],)
    return out


@triton.jit(do_not_specialize=[
    "units", "S", "S_kv", "NT", "NQ", "G", "lb", "lg", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
    "smb", "sms", "smg",
])  # fmt: skip
def selection_mask_dkv(
    q_ptr, k_ptr, v_ptr, dout_ptr, mask_ptr, lists_ptr, counts_ptr, prefix_ptr, base_ptr, share_ptr, delta_ptr, dk_ptr,
    dv_ptr, slot_k_ptr, slot_v_ptr, scale,
    units, S, S_kv, NT, NQ, G, lb, lg, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn, smb, sms, smg, smk,
    P: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DC: tl.constexpr, NK: tl.constexpr,
    NV: tl.constexpr, HB: tl.constexpr, QT: tl.constexpr, CHUNKS: tl.constexpr, COST: tl.constexpr, BN: tl.constexpr,
    DOUT: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, ALIGN: tl.constexpr, DOUT_ALIGN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv[B, G, S_kv, D] (zero-initialised) of the units inside a program's run, and slots of the others.

    An iteration takes QT queries x HB heads, of CHUNKS x HB, in the order of the queries. SHARED: v is the first DV columns
    of k, whose gradient has both parts. base, share and delta are those of dQ, prefix and slots those of ``selection_dkv``.
    """
    ROWS: tl.constexpr = QT * HB
    pid = tl.program_id(0).to(tl.int64)
    now, end_of_run = share(prefix_ptr, units, pid, P)
    scale = tl.cast(scale, tl.float32)
    j = tl.arange(0, ROWS)
    while now < end_of_run:
        u = find_unit(prefix_ptr, units, now).to(tl.int64)
        begin = tl.load(prefix_ptr + u)
        stop = tl.minimum(end_of_run, tl.load(prefix_ptr + u + 1))
        t = u % NT
        bg = u // NT
        b = bg // G
        g = bg % G
        keys = t * BN + tl.arange(0, BN)
        keep = keys < S_kv
        qp = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
        kp = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
        vp = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
        mask_at = mask_ptr + b * smb + g * smg + keys * tl.cast(smk, tl.int64)
        k = tiles(kp, tl.multiple_of(keys * skn, ALIGN), keep, DK, DC, NK)
        v = k
        if DOUT and not SHARED:
            v = tiles(vp, tl.multiple_of(keys * svn, ALIGN), keep, DV, DC, NV)
        dk = zeros(BN, DC, NK)
        dv = zeros(BN, DC, 0 if SHARED else NV)
        line = b * lb + g * lg + t
        entries = lists_ptr + line * NQ
        base_at = begin + COST
        for MASKED in tl.static_range(2):
            count = tl.load(counts_ptr + line * 2 + MASKED)
            first = tl.minimum(tl.maximum(now - base_at, 0), count * CHUNKS).to(tl.int32)
            last = tl.maximum(tl.minimum(stop - base_at, count * CHUNKS).to(tl.int32), first)
            base_at += count * CHUNKS
            for i in range(first, last):
                s = entry(entries, i // CHUNKS, count, NQ, MASKED) * QT + j // HB
                head = i % CHUNKS * HB + j % HB
                live = (s < S) & (head < H)
                at = s.to(tl.int64)
                q_row = tl.multiple_of(at * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
                q = tiles(qp, q_row, live, DK, DC, NK)
                row = ((b * S + at) * G + g) * H + head
                base = tl.load(base_ptr + row, mask=live, other=float("inf"))
                delta = tl.load(delta_ptr + row, mask=live, other=0.0)
                weight = tl.full((ROWS,), 1.0, tl.float32)
                if BIAS:
                    weight = tl.load(share_ptr + row, mask=live, other=0.0)
                seen, bias = live, 0.0
                if MASKED:
                    seen, bias = shown(mask_at[:, None] + (at * sms)[None, :], keep[:, None] & live[None, :], BIAS)
                x = product(k, q, tl.zeros((BN, ROWS), tl.float32), NK, PREC)
                w = weights(logits(x, scale, seen, bias, MASKED, BIAS), base[None, :], BIAS)
                y = tl.zeros((BN, ROWS), tl.float32)
                if DOUT:
                    dout = tiles(dout_ptr, tl.multiple_of(row * DV, DOUT_ALIGN), live, DV, DC, NV)
                    p = w * weight[None, :]
                    if MASKED:
                        p = tl.where(seen, p, 0.0)
                    if SHARED:
                        dk = _add_to_first(dk, p.to(dout[0].dtype), dout, NK, NV, PREC)
                    else:
                        dv = add_product(dv, p.to(dout[0].dtype), dout, NV, PREC)
                    y = product(v, dout, y, NV, PREC)
                ds = w * (y * weight[None, :] - delta[None, :]) * scale
                if MASKED:
                    ds = tl.where(seen, ds, 0.0)
                dk = add_product(dk, ds.to(q[0].dtype), q, NK, PREC)
        if (now == begin) & (stop == tl.load(prefix_ptr + u + 1)):
            store(dk_ptr, dk, bg * S_kv + keys, 1.0, keep, DK, DC, NK)
            if not SHARED:
                store(dv_ptr, dv, bg * S_kv + keys, 1.0, keep, DV, DC, NV)
        else:
            at = (2 * pid + (now == begin).to(tl.int64)) * BN + tl.arange(0, BN)
            store(slot_k_ptr, dk, at, 1.0, at >= 0, DK, DC, NK)
            if not SHARED:
                store(slot_v_ptr, dv, at, 1.0, at >= 0, DV, DC, NV)
        now = stop
