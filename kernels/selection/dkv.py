# SPDX-License-Identifier: Apache-2.0
"""dK and dV, key by key: a key tile gathers the queries that select it; dv = p.T @ dout, dk = scale * ds.T @ q.

A unit is (b, g, key tile). The iterations of all units (ROWS rows of queries x heads each) form one sequence, cut into
P equal runs, one per program, since one tile (block 0) may have as many queries as all others together. A program
writes a unit that lies inside its run at once. If several runs share a unit, each program writes its part to a slot,
and the slots are added in order: no atomics. Products bound it, four an iteration: hardly a row is wasted on a query
that does not select the tile, whole tiles are walked without masks, and a unit costs SETUP iterations in the shares,
since small tiles take longer than their rows.
"""

import triton
import triton.language as tl

from .common import popcount
from .segments import segment_bits


@triton.jit
def find_unit(prefix_ptr, units, x):
    """Returns the unit to which iteration x belongs, for prefix[0] <= x < prefix[units]."""
    u = 0
    left = units - 1
    while left > 0:
        half = (left + 1) // 2
        u = tl.where(tl.load(prefix_ptr + u + half) <= x, u + half, u)
        left -= half
    return u


@triton.jit
def share(prefix_ptr, units, p, P: tl.constexpr):
    """Returns the iterations [first, last) of program p."""
    total = tl.load(prefix_ptr + units)
    each = (total + P - 1) // P
    first = tl.minimum(p * each, total)
    return first, tl.minimum(first + each, total)


@triton.jit(do_not_specialize=["W", "NT"])
def selection_dkv_count(sel_ptr, full_ptr, counts_ptr, W, NT, TB: tl.constexpr, WB: tl.constexpr):
    """Counts the queries of each unit: counts[units, 4].

    They are the number of queries that select all of a key tile, the number that select a part of it, and the first
    words that hold such queries. Bitmaps are [B, G, W, NT]; programs [B G, NT / TB].
    """
    bg = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * TB + tl.arange(0, TB)
    whole = tl.zeros((WB, TB), tl.int32)
    partly = tl.zeros((WB, TB), tl.int32)
    whole_at = tl.zeros((WB, TB), tl.int32) + W
    partly_at = tl.zeros((WB, TB), tl.int32) + W
    for w in range(0, W, WB):
        i = w + tl.arange(0, WB)
        at = (bg * W + i)[:, None] * NT + t[None, :]
        mask = (i < W)[:, None] & (t < NT)[None, :]
        full = tl.load(full_ptr + at, mask=mask, other=0)
        part = tl.load(sel_ptr + at, mask=mask, other=0) & ~full
        whole += popcount(full)
        partly += popcount(part)
        whole_at = tl.minimum(whole_at, tl.where(full != 0, i[:, None], W))
        partly_at = tl.minimum(partly_at, tl.where(part != 0, i[:, None], W))
    u = counts_ptr + 4 * (bg * NT + t)
    tl.store(u, tl.sum(whole, axis=0), mask=t < NT)
    tl.store(u + 1, tl.sum(partly, axis=0), mask=t < NT)
    tl.store(u + 2, tl.min(whole_at, axis=0), mask=t < NT)
    tl.store(u + 3, tl.min(partly_at, axis=0), mask=t < NT)


@triton.jit
def iterations(n, QB: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the number of iterations over n queries of one kind."""
    return (n + QB - 1) // QB * CHUNKS


@triton.jit(do_not_specialize=["units", "NT", "G", "lb", "lg"])
def selection_dkv_prefix(
    counts_ptr, prefix_ptr, units, NT, G, lb, lg,
    EACH: tl.constexpr, QB: tl.constexpr, CHUNKS: tl.constexpr, COST: tl.constexpr, UB: tl.constexpr,
):  # fmt: skip
    """Computes prefix[units + 1] (int64), the work before each unit: its iterations plus COST for starting on it.

    counts[lines, EACH] begins with the queries of either kind; the line of (b, g, tile) is b * lb + g * lg + tile. A unit
    without queries counts 0. One program.
    """
    total = tl.cast(units * 0, tl.int64)  # units may be a constexpr
    tl.store(prefix_ptr, total)
    for u in range(0, units, UB):
        i = u + tl.arange(0, UB)
        line = EACH * (i // NT // G * lb + i // NT % G * lg + i % NT)
        whole = tl.load(counts_ptr + line, mask=i < units, other=0)
        partly = tl.load(counts_ptr + line + 1, mask=i < units, other=0)
        n = iterations(whole, QB, CHUNKS) + iterations(partly, QB, CHUNKS)
        n = tl.where(n > 0, n + COST, 0).to(tl.int64)
        tl.store(prefix_ptr + 1 + i, total + tl.cumsum(n, axis=0), mask=i < units)
        total += tl.sum(n, axis=0)


@triton.jit
def _compact(sel_ptr, full_ptr, list_ptr, word, rank, first, last, W, NT, WB: tl.constexpr, MASKED: tl.constexpr):
    """Writes the queries of ranks [first, last) of one kind to list[0...].

    word and rank say where to begin; those returned say where to continue.
    """
    more = rank < last
    while more:
        i = word + tl.arange(0, WB)
        at = i.to(tl.int64) * NT
        bits = tl.load(full_ptr + at, mask=i < W, other=0)
        if MASKED:
            bits = tl.load(sel_ptr + at, mask=i < W, other=0) & ~bits
        n = popcount(bits)
        before = rank + tl.cumsum(n, axis=0) - n  # [WB]
        j = tl.arange(0, 32)[None, :]
        below = popcount(bits[:, None] & ((tl.full((1, 32), 1, tl.int32) << j) - 1))  # [WB, 32]
        place = before[:, None] + below
        mask = (((bits[:, None] >> j) & 1) != 0) & (place >= first) & (place < last)
        tl.store(list_ptr + (place - first), i[:, None] * 32 + j, mask=mask)
        after = rank + tl.sum(n, axis=0)
        # The next round reads a block of words again that reaches beyond this round.
        more = after < last
        word = tl.where(after <= last, word + WB, word)
        rank = tl.where(after <= last, after, rank)
    return word, rank


@triton.jit
def ones(a, b):
    """Returns an int32 with the bits [a, b) set, for 0 <= a <= b <= 32."""
    one = tl.full(a.shape, 1, tl.int64)
    return ((one << b.to(tl.int64)) - (one << a.to(tl.int64))).to(tl.int32)


@triton.jit
def _search(
    starts_ptr, ends_ptr, row, mask, key, BN: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, EB: tl.constexpr
):
    """Returns the bits of :func:`_masks` for many pieces: a binary search finds the first one in the tile."""
    piece = tl.zeros((EB,), tl.int32)
    left = tl.full((EB,), R, tl.int32)
    # Count the pieces that start at or before the tile; the last of them may reach into it.
    for _ in range(STEPS):
        half = (left + 1) // 2
        inside = mask & (left > 0)
        up = inside & (tl.load(starts_ptr + row + piece + half - 1, mask=inside, other=0) <= key)
        piece = tl.where(up, piece + half, piece)
        left = tl.where(up, left - half, half - 1)
    piece = tl.maximum(piece - 1, 0)
    low = tl.zeros((EB,), tl.int32)
    high = tl.zeros((EB,), tl.int32)
    todo = 1
    while todo > 0:
        inside = mask & (piece < R)
        start = tl.load(starts_ptr + row + piece, mask=inside, other=2147483647)
        end = tl.load(ends_ptr + row + piece, mask=inside, other=0)
        inside = inside & (start < key + BN)
        a = tl.minimum(tl.maximum(start - key, 0), BN)
        b = tl.maximum(tl.minimum(tl.maximum(end - key, 0), BN), a)
        a = tl.where(inside, a, BN)
        b = tl.where(inside, b, BN)
        low |= ones(tl.minimum(a, 32), tl.minimum(b, 32))
        high |= ones(tl.maximum(a - 32, 0), tl.maximum(b - 32, 0))
        piece += 1
        todo = tl.max(inside.to(tl.int32), axis=0)
    return low, high


@triton.jit
def _masks(
    starts_ptr, ends_ptr, list_ptr, bits_ptr, n, key, seg_q_ptr, seg_k_ptr, batch, S, S_kv, BN: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, STEPS: tl.constexpr, EB: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Writes bits[n, 2]: which of the BN keys from ``key`` on each listed query selects.

    starts, ends [S, R] are those of this unit's batch entry and group.
    """
    for e in range(0, n, EB):
        i = e + tl.arange(0, EB)
        q = tl.load(list_ptr + i, mask=i < n, other=0)
        row = q.to(tl.int64) * R
        if R <= 32:
            j = tl.arange(0, RP)[None, :]
            here = (i < n)[:, None] & (j < R)
            start = tl.load(starts_ptr + row[:, None] + j, mask=here, other=0)
            end = tl.load(ends_ptr + row[:, None] + j, mask=here, other=0)
            a = tl.minimum(tl.maximum(start - key, 0), BN)  # [EB, RP]
            b = tl.maximum(tl.minimum(tl.maximum(end - key, 0), BN), a)
            # Pieces are disjoint, so their sum is their union.
            low = tl.sum(ones(tl.minimum(a, 32), tl.minimum(b, 32)), axis=1)
            high = tl.sum(ones(tl.maximum(a - 32, 0), tl.maximum(b - 32, 0)), axis=1)
        else:
            low, high = _search(starts_ptr, ends_ptr, row, i < n, key, BN, R, STEPS, EB)
        if SEG:
            mine = tl.load(seg_q_ptr + batch * S + q, mask=i < n, other=0)
            ids = seg_k_ptr + batch * S_kv
            low &= segment_bits(ids, mine, key, S_kv, BN if BN < 32 else 32)
            if BN > 32:
                high &= segment_bits(ids, mine, key + 32, S_kv, 32)
        tl.store(bits_ptr + 2 * i, low, mask=i < n)
        tl.store(bits_ptr + 2 * i + 1, high, mask=i < n)


@triton.jit
def tiles(p, row, mask, D: tl.constexpr, DC: tl.constexpr, N: tl.constexpr):
    """Loads the rows at p + row as N tiles [ROWS, DC]; 0 outside mask and beyond D."""
    tiles = ()
    for c in tl.static_range(N):
        d = c * DC + tl.arange(0, DC)
        at = row[:, None] + d[None, :]
        if (c + 1) * DC <= D:
            tiles = tiles + (tl.load(p + at, mask=mask[:, None], other=0.0),)
        else:
            tiles = tiles + (tl.load(p + at, mask=mask[:, None] & (d < D)[None, :], other=0.0),)
    return tiles


@triton.jit
def zeros(ROWS: tl.constexpr, DC: tl.constexpr, N: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(N):
        tiles = tiles + (tl.zeros((ROWS, DC), tl.float32),)
    return tiles


@triton.jit
def store(p, tiles, row, factor, mask, D: tl.constexpr, DC: tl.constexpr, N: tl.constexpr):
    for c in tl.static_range(N):
        d = c * DC + tl.arange(0, DC)
        at = row[:, None] * D + d[None, :]
        tl.store(p + at, (tiles[c] * factor).to(p.dtype.element_ty), mask=mask[:, None] & (d < D)[None, :])


@triton.jit
def product(a, b, s, N: tl.constexpr, PREC: tl.constexpr):
    """Returns s + the sum over the tiles of a_c b_c'."""
    for c in tl.static_range(N):
        s = tl.dot(a[c], tl.trans(b[c]), s, input_precision=PREC)
    return s


@triton.jit
def add_product(acc, a, b, N: tl.constexpr, PREC: tl.constexpr):
    """Returns acc_c + a b_c for each tile c."""
    out = ()
    for c in tl.static_range(N):
        out = out + (tl.dot(a, b[c], acc[c], input_precision=PREC),)
    return out


@triton.jit
def _round(
    dk, dv, k, v, q_ptr, dout_ptr, lse2_ptr, delta_ptr, list_ptr, bits_ptr, sqs, sqh,
    row_stride, group_begin, scale2, begin, end,
    H: tl.constexpr, HB: tl.constexpr, QB: tl.constexpr, CHUNKS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DC: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, BN: tl.constexpr, DOUT: tl.constexpr,
    MASKED: tl.constexpr, ALIGN: tl.constexpr, DOUT_ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Runs the iterations [begin, end) on one list of queries.

    Iteration i takes the QB queries from list[i // CHUNKS * QB - group_begin] on, and the (i % CHUNKS)-th HB of their
    heads.
    """
    ROWS: tl.constexpr = QB * HB
    j = tl.arange(0, ROWS)
    for i in range(begin, end):
        entry = i // CHUNKS * QB - group_begin + j // HB
        s = tl.load(list_ptr + entry)  # [ROWS]
        head = i % CHUNKS * HB + j % HB
        mask = s >= 0
        if HB * CHUNKS != H:
            mask = mask & (head < H)
        at = s.to(tl.int64)
        q_row = tl.multiple_of(at * sqs, ALIGN) + tl.multiple_of(head.to(tl.int64) * sqh, ALIGN)
        q = tiles(q_ptr, q_row, mask, DK, DC, NK)
        row = at * row_stride + head
        # Zeros in the padding, also of q and dout, so that a probability of 1 there adds nothing.
        lse2 = tl.load(lse2_ptr + row, mask=mask, other=0.0)
        delta = tl.load(delta_ptr + row, mask=mask, other=0.0)
        scores = product(k, q, tl.zeros((BN, ROWS), tl.float32), NK, PREC)
        p = tl.exp2(scores * scale2 - lse2[None, :])  # [BN, ROWS]
        if MASKED:
            low = tl.load(bits_ptr + 2 * entry, mask=mask, other=0)
            x = tl.arange(0, BN)[:, None]
            if BN > 32:
                high = tl.load(bits_ptr + 2 * entry + 1, mask=mask, other=0)
                chosen = (tl.where(x < 32, low[None, :], high[None, :]) >> (x % 32)) & 1
            else:
                chosen = (low[None, :] >> x) & 1
            p = tl.where(chosen != 0, p, 0.0)
        if DOUT:
            # Stated explicitly, since triton 3.6 assumes row, a loaded index plus a head, to be a multiple of HB.
            dout = tiles(dout_ptr, tl.multiple_of(row * DV, DOUT_ALIGN), mask, DV, DC, NV)
            dv = add_product(dv, p.to(dout[0].dtype), dout, NV, PREC)
            ds = p * (product(v, dout, tl.zeros((BN, ROWS), tl.float32), NV, PREC) - delta[None, :])
        else:
            ds = p * (0.0 - delta[None, :])
        if MASKED:
            ds = tl.where(chosen != 0, ds, 0.0)
        dk = add_product(dk, ds.to(q[0].dtype), q, NK, PREC)
    return dk, dv


@triton.jit(do_not_specialize=[
    "units", "G", "S", "S_kv", "NT", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "svb", "svg", "svn",
])  # fmt: skip
def selection_dkv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, sel_ptr, full_ptr, starts_ptr, ends_ptr, counts_ptr, prefix_ptr,
    list_ptr, bits_ptr, seg_q_ptr, seg_k_ptr, dk_ptr, dv_ptr, slot_k_ptr, slot_v_ptr,
    units, G, S, S_kv, NT, sqb, sqs, sqg, sqh, skb, skg, skn, svb, svg, svn, scale,
    P: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, QB: tl.constexpr, CHUNKS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DC: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    STEPS: tl.constexpr, COST: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, WB: tl.constexpr, EB: tl.constexpr, DOUT: tl.constexpr,
    ALIGN: tl.constexpr, DOUT_ALIGN: tl.constexpr, PREC: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Writes dk, dv[B, G, S_kv, D] (zero-initialised) of the units inside a program's run, and slots of the others.

    Slots [P, 2, BN, D] fp32: 0 for a unit that began before the run, 1 for one that continues after it. Scratch of a
    program: list[CAP + QB] holds queries of one unit at a time, bits[CAP + QB, 2] their keys.
    """
    pid = tl.program_id(0).to(tl.int64)
    now, last = share(prefix_ptr, units, pid, P)
    list_ptr += pid * (CAP + QB)
    bits_ptr += pid * (2 * (CAP + QB))
    scale = tl.cast(scale, tl.float32)  # generated code passes Python floats as fp64
    W = (S + 31) // 32
    while now < last:
        u = find_unit(prefix_ptr, units, now).to(tl.int64)
        first = tl.load(prefix_ptr + u)
        next = tl.load(prefix_ptr + u + 1)
        stop = tl.minimum(last, next)
        t = (u % NT).to(tl.int32)
        bg = u // NT
        b = bg // G
        g = bg % G
        x = t * BN + tl.arange(0, BN)
        keep = x < S_kv
        keys = x.to(tl.int64)
        qp = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
        kp = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
        vp = v_ptr + tl.multiple_of(b * svb, ALIGN) + tl.multiple_of(g * svg, ALIGN)
        k = tiles(kp, tl.multiple_of(keys * skn, ALIGN), keep, DK, DC, NK)
        v = tiles(vp, tl.multiple_of(keys * svn, ALIGN), keep, DV, DC, NV)
        dk = zeros(BN, DC, NK)
        dv = zeros(BN, DC, NV)
        column = bg * W * NT + t
        rows = (b * S * G + g) * H
        pieces = bg * S * R
        base = (now * 0).to(tl.int32) + COST
        for kind in tl.static_range(2):
            n = tl.load(counts_ptr + 4 * u + kind)
            count = (n + QB - 1) // QB * CHUNKS
            # This kind's iterations in this run, and the ranks of their queries.
            begin = tl.minimum(tl.maximum(now - first - base, 0), count).to(tl.int32)
            end = tl.maximum(tl.minimum(stop - first - base, count).to(tl.int32), begin)
            lowest = begin // CHUNKS * QB
            highest = tl.where(begin < end, tl.minimum((end + CHUNKS - 1) // CHUNKS * QB, n), lowest)
            word = tl.load(counts_ptr + 4 * u + 2 + kind)
            rank = begin * 0
            for r0 in range(lowest, highest, CAP):
                r1 = tl.minimum(r0 + CAP, highest)
                tl.debug_barrier()
                word, rank = _compact(
                    sel_ptr + column, full_ptr + column, list_ptr, word, rank, r0, r1, W, NT, WB, kind == 1
                )
                pad = tl.arange(0, QB)
                tl.store(list_ptr + (r1 - r0) + pad, pad * 0 - 1)
                tl.debug_barrier()
                if kind == 1:
                    _masks(
                        starts_ptr + pieces,
                        ends_ptr + pieces,
                        list_ptr,
                        bits_ptr,
                        r1 - r0,
                        t * BN,
                        seg_q_ptr,
                        seg_k_ptr,
                        b,
                        S,
                        S_kv,
                        BN,
                        R,
                        RP,
                        STEPS,
                        EB,
                        SEG,
                    )
                    tl.debug_barrier()
                dk, dv = _round(
                    dk, dv, k, v, qp, dout_ptr + rows * DV, lse2_ptr + rows,
                    delta_ptr + rows, list_ptr, bits_ptr, sqs, sqh,
                    G * H, r0, scale * 1.4426950408889634, tl.maximum(begin, r0 // QB * CHUNKS),
                    tl.minimum(end, (r1 + QB - 1) // QB * CHUNKS), H, HB, QB, CHUNKS, DK, DV, DC, NK, NV, BN, DOUT,
                    kind == 1, ALIGN, DOUT_ALIGN, PREC,
                )  # fmt: skip
            base += count
        if (now == first) & (stop == next):
            store(dk_ptr, dk, bg * S_kv + keys, scale, keep, DK, DC, NK)
            store(dv_ptr, dv, bg * S_kv + keys, 1.0, keep, DV, DC, NV)
        else:
            at = (2 * pid + (now == first).to(tl.int64)) * BN + tl.arange(0, BN)
            store(slot_k_ptr, dk, at, scale, at >= 0, DK, DC, NK)
            store(slot_v_ptr, dv, at, 1.0, at >= 0, DV, DC, NV)
        now = stop


@triton.jit(do_not_specialize=["units", "S_kv", "NT"])
def selection_dkv_fix(
    slot_ptr, prefix_ptr, out_ptr, units, S_kv, NT,
    P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Adds, in order, the slots of the unit in which program p's run ends, to out[B, G, S_kv, D].

    Programs [P, BN / BR].
    """
    pid = tl.program_id(0).to(tl.int64)
    now, last = share(prefix_ptr, units, pid, P)
    if now < last:
        u = find_unit(prefix_ptr, units, last - 1).to(tl.int64)
        end = tl.load(prefix_ptr + u + 1)
        # The first of the programs that share a unit adds all its parts.
        if (tl.load(prefix_ptr + u) >= now) & (end > last):
            i = tl.program_id(1) * BR + tl.arange(0, BR)
            d = tl.arange(0, DP)[None, :]
            mask = (i >= 0)[:, None] & (d < D)
            acc = tl.load(slot_ptr + ((2 * pid + 1) * BN + i)[:, None] * D + d, mask=mask, other=0.0)
            each = last - now
            for p in range(pid + 1, pid + 1 + (end - last + each - 1) // each):
                acc += tl.load(slot_ptr + (2 * p * BN + i)[:, None] * D + d, mask=mask, other=0.0)
            x = (u % NT) * BN + i
            at = (u // NT) * S_kv + x
            tl.store(out_ptr + at[:, None] * D + d, acc.to(out_ptr.dtype.element_ty), mask=mask & (x < S_kv)[:, None])
