"""Ranges made canonical: for each query sorted, disjoint pieces of absolute key positions, clipped to its own keys.

Pieces i of a row are ``[starts[i], ends[i])``. Starts do not decrease; what an earlier piece already covers is cut off, which
may leave an empty piece ``[x, x)``. A key x is selected if and only if the last piece with ``starts[i] <= x`` has ``x < ends[i]``.
"""

import triton
import triton.language as tl


@triton.jit
def query_bounds(s, cu_q_ptr, cu_k_ptr, N, S_kv, VARLEN: tl.constexpr):
    """lo, hi (int32, like s): the keys of the sequence to which packed query s belongs; lo = hi for a query of none."""
    lo = s * 0
    hi = s * 0 + S_kv
    if VARLEN:
        # The last boundary n with cu_q[n] <= s. Any content of cu_q keeps n within 0..N.
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
    """Ranges at p, lo, hi, mask [ROWS, 1] as absolute start, end [ROWS, RP], clipped; an empty one is [hi, hi)."""
    i = tl.arange(0, RP)[None, :]
    mask = mask & (i < R)
    # Clipped in the input's own width, which int64 beyond 32 bits needs.
    start = tl.load(p + 2 * i, mask=mask, other=0)
    end = tl.load(p + 2 * i + 1, mask=mask, other=0)
    start = tl.minimum(tl.maximum(start, 0), hi - lo).to(tl.int32) + lo
    end = tl.minimum(tl.maximum(end, 0), hi - lo).to(tl.int32) + lo
    empty = start >= end
    return tl.where(empty, hi, start), tl.where(empty, hi, end)


@triton.jit
def trim(start, end, lo, RP: tl.constexpr):
    """Pieces [ROWS, RP] in any order made disjoint: start, end, and before[ROWS, RP, RP], the order by starts (j before i)."""
    i = tl.arange(0, RP)[None, :, None]
    j = tl.arange(0, RP)[None, None, :]
    mine = tl.expand_dims(start, 2)
    other = tl.expand_dims(start, 1)
    before = (other < mine) | ((other == mine) & (j < i))
    # The furthest end of any piece before.
    reach = tl.max(tl.where(before, tl.expand_dims(end, 1), tl.expand_dims(lo, 1)), axis=2)
    start = tl.maximum(start, reach)
    return start, tl.maximum(end, start), reach, before


@triton.jit
def _reach(p1, m1, p2, m2):
    """Running maxima: of all before an element (p), and with it (m)."""
    return tl.maximum(m1, p2), tl.maximum(m1, m2)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["G", "S", "S_kv", "N", "NT"])
def selection_pieces(
    ranges_ptr, cu_q_ptr, cu_k_ptr, starts_ptr, ends_ptr, totals_ptr, sel_ptr, full_ptr, G, S, S_kv, N, NT,
    R: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr, COUNT: tl.constexpr,
    MARK: tl.constexpr,
):  # fmt: skip
    """ranges[B, S, G, R, 2] -> starts, ends[B, G, S, R]. COUNT: totals[B, G, S, R], how many keys up to and with each piece.

    MARK: bit s % 32 of sel[B, G, cdiv(S, 32), NT] where query s selects any key of a tile of BN, of full where all.
    One program: ROWS neighbouring queries of one group; programs [B, G, cdiv(S, ROWS)].
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
        # Few ranges: their order from all comparisons, without a sort.
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
        # run: where the unbroken stretch of pieces begins to which this one belongs.
        bit = tl.full((ROWS, RP), 1, tl.int32) << (s % 32)[:, None]
        words = ((bg * ((S + 31) // 32) + s // 32) * NT)[:, None]
        t = start // BN
        n = tl.where(mask[:, None] & (end > start), (end - 1) // BN - t + 1, 0)
        for step in range(tl.max(tl.max(n, axis=1), axis=0)):
            some = step < n
            tl.atomic_or(sel_ptr + words + t, bit, mask=some, sem="relaxed")
            whole = some & (t * BN >= run) & (t * BN + BN <= end)
            tl.atomic_or(full_ptr + words + t, bit, mask=whole, sem="relaxed")
            t += 1
