# SPDX-License-Identifier: Apache-2.0
"""Canonical ranges: for each query sorted, disjoint pieces of absolute key positions, clipped to its own keys.

ranges[B, S, G, R, 2] -> starts, ends[B, G, S, R]. Pieces i of a row are ``[starts[i], ends[i])``. Starts do not
decrease. The part that an earlier piece already covers is cut off, which may leave an empty piece ``[x, x)``. A key x
is selected if and only if the last piece with ``starts[i] <= x`` has ``x < ends[i]``. A program has ROWS neighbouring
queries of one group, as a tile [ROWS, R]. Instructions bound it: up to 32 ranges all pairwise comparisons give the
order, above them a sort, within one warp where there are many rows, so that it exchanges nothing through shared
memory.
"""

import triton
import triton.language as tl

from .segments import tile_has


@triton.jit
def query_bounds(s, cu_q_ptr, cu_k_ptr, N, S_kv, VARLEN: tl.constexpr):
    """Returns lo, hi (int32, shaped like s), the keys of the sequence to which packed query s belongs.

    lo = hi for a query of no sequence.
    """
    lo = s * 0
    hi = s * 0 + S_kv
    if VARLEN:
        # The last boundary n with cu_q[n] <= s. n stays within 0..N for any contents of cu_q.
        n = s * 0
        left = N
        while left > 0:
            half = (left + 1) // 2
            n = tl.where(tl.load(cu_q_ptr + n + half) <= s, n + half, n)
            left -= half
        inside = (n < N) & (tl.load(cu_q_ptr + n) <= s)
        n1 = tl.where(inside, n + 1, n)
        inside = inside & (tl.load(cu_q_ptr + n1) > s)
        lo = tl.minimum(tl.maximum(tl.load(cu_k_ptr + n), 0), S_kv).to(tl.int32)
        hi = tl.minimum(tl.maximum(tl.load(cu_k_ptr + n1), 0), S_kv).to(tl.int32)
        hi = tl.where(inside, tl.maximum(lo, hi), lo)
    return lo, hi


@triton.jit
def load_ranges(p, lo, hi, mask, R: tl.constexpr, RP: tl.constexpr):
    """Loads the ranges at p as absolute start, end [ROWS, RP], clipped; an empty one becomes [hi, hi).

    lo, hi and mask are [ROWS, 1].
    """
    i = tl.arange(0, RP)[None, :]
    mask = mask & (i < R)
    # Clipped in the input's own dtype, because int64 values may not fit into 32 bits.
    start = tl.load(p + 2 * i, mask=mask, other=0)
    end = tl.load(p + 2 * i + 1, mask=mask, other=0)
    start = tl.minimum(tl.maximum(start, 0), hi - lo).to(tl.int32) + lo
    end = tl.minimum(tl.maximum(end, 0), hi - lo).to(tl.int32) + lo
    empty = start >= end
    return tl.where(empty, hi, start), tl.where(empty, hi, end)


@triton.jit
def trim(start, end, lo, RP: tl.constexpr):
    """Makes pieces [ROWS, RP] in any order disjoint.

    Returns start, end, reach (the furthest end of the pieces before) and before[ROWS, RP, RP], the order by starts (j
    before i).
    """
    i = tl.arange(0, RP)[None, :, None]
    j = tl.arange(0, RP)[None, None, :]
    mine = tl.expand_dims(start, 2)
    other = tl.expand_dims(start, 1)
    before = (other < mine) | ((other == mine) & (j < i))
    # The furthest end of the pieces before.
    reach = tl.max(tl.where(before, tl.expand_dims(end, 1), tl.expand_dims(lo, 1)), axis=2)
    start = tl.maximum(start, reach)
    return start, tl.maximum(end, start), reach, before


@triton.jit
def _reach(p1, m1, p2, m2):
    """Combines running maxima: p of all elements before, m including the element."""
    return tl.maximum(m1, p2), tl.maximum(m1, m2)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["G", "S", "S_kv", "N", "NT"])
def selection_pieces(
    ranges_ptr, cu_q_ptr, cu_k_ptr, starts_ptr, ends_ptr, totals_ptr, sel_ptr, full_ptr, seg_q_ptr,
    bounds_ptr, G, S, S_kv, N, NT,
    R: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr, COUNT: tl.constexpr,
    MARK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes starts, ends[B, G, S, R] from ranges[B, S, G, R, 2].

    COUNT: also totals[B, G, S, R], the number of keys up to and including each piece. MARK: also bit s % 32 of sel[B,
    G, cdiv(S, 32), NT] if query s selects any key of a tile of BN, and of full if it selects all. SEG: full only where
    all keys are also of the query's segment seg_q[B, S], and sel only where one may be, by bounds[B, NT, 4] of
    ``selection_segment_tiles``. One program: ROWS neighbouring queries of one group; programs [B, G, cdiv(S, ROWS)].
    """
    blocks = (S + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    bg = (pid // blocks).to(tl.int64)
    s = (pid % blocks) * ROWS + tl.arange(0, ROWS)
    mask = s < S
    lo, hi = query_bounds(tl.where(mask, s, 0), cu_q_ptr, cu_k_ptr, N, S_kv, VARLEN)
    lo = lo[:, None]
    hi = hi[:, None]
    row = ((bg // G) * S + s) * G + bg % G  # [ROWS]
    start, end = load_ranges(ranges_ptr + row[:, None] * (2 * R), lo, hi, mask[:, None], R, RP)
    i = tl.arange(0, RP)[None, :]
    if RP <= 32:
        # Few ranges: all pairwise comparisons give their order, without a sort.
        start, end, reach, before = trim(start, end, lo, RP)
        rank = tl.sum(before.to(tl.int32), axis=2)
        upto = before | (tl.arange(0, RP)[None, :, None] == tl.arange(0, RP)[None, None, :])
        if COUNT:
            total = tl.sum(tl.where(upto, tl.expand_dims(end - start, 1), 0), axis=2)
        if MARK:
            run = tl.where(start > reach, start, lo)
            run = tl.max(tl.where(upto, tl.expand_dims(run, 1), 0), axis=2)
    else:
        key = tl.sort((start.to(tl.int64) << 32) | end.to(tl.int64))
        start = (key >> 32).to(tl.int32)
        end = (key & 0x7FFFFFFF).to(tl.int32)
        low = tl.broadcast_to(lo, (ROWS, RP))
        reach, _ = tl.associative_scan((low, tl.maximum(end, low)), 1, _reach)
        start = tl.maximum(start, reach)
        end = tl.maximum(end, start)
        rank = i + tl.zeros((ROWS, RP), tl.int32)
        if COUNT:
            total = tl.cumsum(end - start, axis=1)
        if MARK:
            run = tl.associative_scan(tl.where(start > reach, start, low), 1, _max)
    out = (bg * S + s)[:, None] * R + rank  # [ROWS, RP]
    keep = mask[:, None] & (rank < R)
    tl.store(starts_ptr + out, start, mask=keep)
    tl.store(ends_ptr + out, end, mask=keep)
    if COUNT:
        tl.store(totals_ptr + out, total, mask=keep)
    if MARK:
        # run: the start of the unbroken stretch of pieces to which this piece belongs.
        bit = tl.full((ROWS, RP), 1, tl.int32) << (s % 32)[:, None]
        words = ((bg * ((S + 31) // 32) + s // 32) * NT)[:, None]
        t = start // BN
        if SEG:
            mine = tl.load(seg_q_ptr + bg // G * S + s, mask=mask, other=0).to(tl.int64)[:, None]
        n = tl.where(mask[:, None] & (end > start), (end - 1) // BN - t + 1, 0)
        for step in range(tl.max(tl.max(n, axis=1), axis=0)):
            some = step < n
            if SEG:
                near, own = tile_has(bounds_ptr + (bg // G * NT + t) * 4, mine, some)
                some = some & near
            tl.atomic_or(sel_ptr + words + t, bit, mask=some, sem="relaxed")
            whole = some & (t * BN >= run) & (t * BN + BN <= end)
            if SEG:
                whole = whole & own
            tl.atomic_or(full_ptr + words + t, bit, mask=whole, sem="relaxed")
            t += 1
