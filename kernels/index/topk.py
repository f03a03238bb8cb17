"""The keys of the largest index scores of each query, in increasing order, from sortable integers (see ``common.py``).

A row is held in registers, and its k-th largest integer is found by counting the keys above a guess. Longer rows are
read in segments: what is above the k-th largest so far joins a list of candidates, which is cut back when it is full.
"""

import triton
import triton.language as tl

from .common import HIDDEN, MOST, row_limit, sortable, unsorted


@triton.jit
def _guess(lo, hi, above_lo, above_hi, want, step):
    """Returns a guess in (lo, hi] for the want-th largest: by interpolation of the counts, or halfway.

    ``above_lo`` keys are at least lo, ``above_hi`` are above hi. Every other guess halves the interval of integers, so
    that the search ends.
    """
    low, high = unsorted(lo), unsorted(hi)
    share = (above_lo - want + 0.5) / (above_lo - above_hi)
    guess = sortable(low + (high - low) * share)
    guess = tl.where(step % 2 == 0, guess, (lo | hi) - ((lo ^ hi) >> 1))  # the mean, rounded up, without overflow
    return tl.minimum(tl.maximum(guess, lo + 1), hi)


@triton.jit
def cut(key, seen, want):
    """Returns (threshold, ties): the ``want`` largest keys are those above the threshold and the first ``ties`` at it.

    ``seen`` keys are not HIDDEN, at least ``want``.
    """
    lo = tl.min(tl.where(key == HIDDEN, MOST, key), axis=0)
    # All are wanted: those above lo - 1. With none, lo is MOST.
    every = seen == want
    hi = tl.where(every, lo - 1, tl.max(key, axis=0))
    lo = tl.where(every, lo - 1, lo)
    above_lo, above_hi = seen, tl.where(every, want, 0)
    step = want * 0
    while lo < hi:
        guess = _guess(lo, hi, above_lo, above_hi, want, step)
        count = tl.sum((key >= guess).to(tl.int32), axis=0)
        up = count > want
        # An exact count ends the search: the wanted keys are those above guess - 1.
        lo = tl.where(up, guess, tl.where(count == want, guess - 1, lo))
        hi = tl.where(up, hi, guess - 1)
        above_lo = tl.where(up, count, above_lo)
        above_hi = tl.where(up, above_hi, count)
        step += 1
    return lo, want - above_hi


@triton.jit
def ranks(key, threshold, ties):
    """Returns which keys are taken, and the number of taken keys before each."""
    above, equal = key > threshold, key == threshold
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, axis=0) - both
    tied = before >> 16
    return above | (equal & (tied < ties)), (before & 0xFFFF) + tl.minimum(tied, ties)


@triton.jit
def visible_count(key):
    return tl.sum((key != HIDDEN).to(tl.int32), axis=0)


@triton.jit
def _fill(out, start, topk, BLOCK: tl.constexpr):
    """Stores -1 from ``start`` on."""
    for j in range(start, topk, BLOCK):
        i = j + tl.arange(0, BLOCK)
        tl.store(out + i, tl.full((BLOCK,), -1, tl.int32), mask=i < topk)


@triton.jit
def _choose(row, n, out, topk, BLOCK: tl.constexpr):
    """Chooses from a row of n <= BLOCK keys; returns how many are chosen."""
    i = tl.arange(0, BLOCK)
    key = tl.load(row + i, mask=i < n, other=HIDDEN)
    seen = visible_count(key)
    want = tl.minimum(seen, topk)
    threshold, ties = cut(key, seen, want)
    take, rank = ranks(key, threshold, ties)
    tl.store(out + rank, i, mask=take)
    return want


@triton.jit
def _choose_candidates(row, count, keys_out, out, topk, KEEP: tl.constexpr, CAP: tl.constexpr):
    """Chooses from ``count`` candidates of keys row[:CAP] and indices row[CAP:]; returns how many and the threshold.

    The indices go to ``out``, with KEEP the keys to ``keys_out``.
    """
    tl.debug_barrier()  # candidates were stored by other threads
    j = tl.arange(0, CAP)
    key = tl.load(row + j, mask=j < count, other=HIDDEN)
    index = tl.load(row + CAP + j, mask=j < count, other=0)
    want = tl.minimum(count, topk)
    threshold, ties = cut(key, count, want)
    take, rank = ranks(key, threshold, ties)
    tl.debug_barrier()  # all candidates are loaded before any is overwritten
    tl.store(out + rank, index, mask=take)
    if KEEP:
        tl.store(keys_out + rank, key, mask=take)
        tl.debug_barrier()
    return want, threshold


@triton.jit
def _choose_streaming(row, n, out, topk, BLOCK: tl.constexpr):
    """Chooses from a row of n > BLOCK keys, of which the first BLOCK are overwritten; returns how many are chosen.

    topk is at most BLOCK / 4.
    """
    CAP: tl.constexpr = BLOCK // 2
    SEG: tl.constexpr = BLOCK // 4
    i = tl.arange(0, BLOCK)
    key = tl.load(row + i)
    seen = visible_count(key)
    count = tl.minimum(seen, topk)
    threshold, ties = cut(key, seen, count)
    take, rank = ranks(key, threshold, ties)
    # Later keys must be above what is already chosen, unless fewer than topk were visible.
    floor = tl.where(count == topk, threshold, HIDDEN)
    tl.debug_barrier()  # the row is loaded before its start is overwritten
    tl.store(row + rank, key, mask=take)
    tl.store(row + CAP + rank, i, mask=take)
    for p in range(BLOCK, n, SEG):
        if count + SEG > CAP:
            count, floor = _choose_candidates(row, count, row, row + CAP, topk, True, CAP)
        j = p + tl.arange(0, SEG)
        more = tl.load(row + j, mask=j < n, other=HIDDEN)
        better = more > floor
        place = count + tl.cumsum(better.to(tl.int32), axis=0) - 1
        tl.store(row + place, more, mask=better)
        tl.store(row + CAP + place, j, mask=better)
        count += tl.sum(better.to(tl.int32), axis=0)
    want, _ = _choose_candidates(row, count, row, out, topk, False, CAP)
    return want


@triton.jit(do_not_specialize=["S", "T", "b0", "first", "rows", "so", "topk"])
def index_select(
    keys_ptr, limit_ptr, out_ptr, S, T, b0, first, rows, so, topk, ALL: tl.constexpr, BLOCK: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Writes out[B, S, topk] of ``rows`` queries from ``first`` on, of the sequences from ``b0`` on.

    From the sortable integers keys[parts, rows, so]. ALL: every key within the limit is visible. STREAM: rows may be
    longer than BLOCK. One program: one query; the longest rows come first.
    """
    pid = tl.program_id(0)
    part, local = pid // rows, rows - 1 - pid % rows
    at = (b0 + part).to(tl.int64) * S + first + local
    n = row_limit(limit_ptr, at, T)
    row = keys_ptr + tl.multiple_of((part * rows + local).to(tl.int64) * so, 16)
    out = out_ptr + at * topk
    chosen = tl.minimum(n, topk)
    if ALL & (n <= topk):
        for j in range(0, n, BLOCK):
            i = j + tl.arange(0, BLOCK)
            tl.store(out + i, i, mask=i < n)
    elif n <= BLOCK // 2:
        chosen = _choose(row, n, out, topk, BLOCK // 2)
    elif n <= BLOCK:
        chosen = _choose(row, n, out, topk, BLOCK)
    elif STREAM:
        chosen = _choose_streaming(row, n, out, topk, BLOCK)
    _fill(out, chosen, topk, BLOCK // 4)
