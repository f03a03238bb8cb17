# SPDX-License-Identifier: Apache-2.0
"""The keys of the largest index scores of each query, in increasing order, from sortable integers (see ``common.py``).

A row is held in registers, and its k-th largest integer is found by counting the keys at or above a guess. Longer rows
are read in segments: what is above the k-th largest so far joins a list of candidates, which is cut back when full.
"""

import triton
import triton.language as tl

from .common import HIDDEN, MOST, hide, row_limit, score_of


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
    above_hi = tl.where(every, want, 0)
    # At least ``want`` keys are at or above lo, and fewer are above hi.
    while lo < hi:
        guess = (lo | hi) - ((lo ^ hi) >> 1)  # the mean, rounded up, without overflow
        count = tl.sum((key >= guess).to(tl.int32), axis=0)
        # An exact count ends the search: the wanted keys are those above guess - 1.
        lo = tl.where(count > want, guess, tl.where(count == want, guess - 1, lo))
        above_hi = tl.where(count > want, above_hi, count)
        hi = tl.where(count > want, hi, guess - 1)
    return lo, want - above_hi


@triton.jit
def visible_count(key):
    """Returns how many keys are not HIDDEN."""
    return tl.sum((key != HIDDEN).to(tl.int32), axis=0)


@triton.jit
def _store_chosen(row, index_row, n, threshold, ties, keys_out, out, scores, STEP: tl.constexpr):
    """Stores the keys above the threshold and the first ``ties`` at it of the n keys of ``row``, in their order.

    Their indices, of ``index_row`` or the places in the row, go to ``out``; the keys go to ``keys_out`` unless it is
    None. Both may be the rows themselves. The keys' scores go to ``scores`` unless it is None.
    """
    above_before, tied_before = n * 0, n * 0
    for p in range(0, n, STEP):
        i = p + tl.arange(0, STEP)
        key = tl.load(row + i, mask=i < n, other=HIDDEN)
        index = i
        if index_row is not None:
            index = tl.load(index_row + i, mask=i < n, other=0)
        above, equal = key > threshold, key == threshold
        # Two sums in one: STEP is below 2**15.
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(both, axis=0) - both
        tied = tied_before + (before >> 16)
        take = above | (equal & (tied < ties))
        rank = above_before + (before & 0xFFFF) + tl.minimum(tied, ties)
        if keys_out is not None:
            tl.debug_barrier()  # the segment is loaded before its start is overwritten
            tl.store(keys_out + rank, key, mask=take)
        if scores is not None:
            tl.store(scores + rank, score_of(key), mask=take)
        tl.store(out + rank, index, mask=take)
        total = tl.sum(both, axis=0)
        above_before += total & 0xFFFF
        tied_before += total >> 16


@triton.jit
def _choose(row, index_row, n, keys_out, out, scores, topk, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Chooses from a row of n <= BLOCK keys as ``_store_chosen`` does; returns how many, and the threshold."""
    i = tl.arange(0, BLOCK)
    key = tl.load(row + i, mask=i < n, other=HIDDEN)
    seen = visible_count(key)
    want = tl.minimum(seen, topk)
    threshold, ties = cut(key, seen, want)
    _store_chosen(row, index_row, n, threshold, ties, keys_out, out, scores, STEP)
    return want, threshold


@triton.jit
def _choose_streaming(row, n, out, scores, topk, BLOCK: tl.constexpr):
    """Chooses from a row of n > BLOCK keys, of which the first BLOCK are overwritten; returns how many are chosen.

    topk is at most STEP. Candidates are stored as keys row[:CAP] and indices row[CAP:BLOCK].
    """
    CAP: tl.constexpr = BLOCK // 2
    STEP: tl.constexpr = BLOCK // 4
    count, floor = _choose(row, None, n * 0 + BLOCK, row, out, None, topk, BLOCK, STEP)
    # Later keys must be above what is already chosen, unless fewer than topk were visible.
    floor = tl.where(count == topk, floor, HIDDEN)
    i = tl.arange(0, STEP)
    tl.debug_barrier()
    tl.store(row + CAP + i, tl.load(out + i, mask=i < count), mask=i < count)
    for p in range(BLOCK, n, STEP):
        if count + STEP > CAP:
            tl.debug_barrier()
            count, floor = _choose(row, row + CAP, count, row, row + CAP, None, topk, CAP, STEP)
        j = p + i
        key = tl.load(row + j, mask=j < n, other=HIDDEN)
        better = key > floor
        place = count + tl.cumsum(better.to(tl.int32), axis=0) - 1
        tl.store(row + place, key, mask=better)
        tl.store(row + CAP + place, j, mask=better)
        count += tl.sum(better.to(tl.int32), axis=0)
    tl.debug_barrier()
    want, _ = _choose(row, row + CAP, count, None, out, scores, topk, CAP, STEP)
    return want


@triton.jit
def _fill(out, start, topk, value, BLOCK: tl.constexpr):
    """Stores ``value`` from ``start`` on."""
    for j in range(start, topk, BLOCK):
        i = j + tl.arange(0, BLOCK)
        tl.store(out + i, tl.full((BLOCK,), value, out.dtype.element_ty), mask=i < topk)


@triton.jit(do_not_specialize=["S", "T", "b0", "first", "rows", "stored", "so", "topk", "smb", "sms", "smt"])
def index_select(
    keys_ptr, limit_ptr, mask_ptr, seg_q_ptr, seg_k_ptr, out_ptr, scores_ptr, S, T, b0, first, rows, stored, so, topk,
    smb, sms, smt, LIMIT: tl.constexpr, MASK: tl.constexpr, SEG: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Writes out[B, S, topk], and scores[B, S, topk] unless it is None, of ``rows`` queries from ``first`` on, of the sequences from ``b0`` on.

    From the sortable integers keys[parts, stored, so]. STREAM: rows may be longer than BLOCK. One program: one query;
    the last come first, because they see the most keys of a causal model.
    """
    STEP: tl.constexpr = BLOCK // 4
    pid = tl.program_id(0)
    part, local = pid // rows, rows - 1 - pid % rows
    b, s = (b0 + part).to(tl.int64), first + local
    at = b * S + s
    n = row_limit(limit_ptr, at, T, LIMIT)
    row = keys_ptr + tl.multiple_of((part * stored + local).to(tl.int64) * so, 16)
    out, scores = out_ptr + at * topk, None
    if scores_ptr is not None:
        scores = scores_ptr + at * topk
    hide(row, HIDDEN, mask_ptr, seg_q_ptr, seg_k_ptr, b, s, n, S, T, smb, sms, smt, MASK, SEG, STEP)
    chosen = tl.minimum(n, topk)
    if (not (MASK or SEG)) & (n <= topk):
        for j in range(0, n, STEP):
            i = j + tl.arange(0, STEP)
            tl.store(out + i, i, mask=i < n)
            if scores is not None:
                tl.store(scores + i, score_of(tl.load(row + i, mask=i < n)), mask=i < n)
    elif n <= BLOCK // 2:
        chosen, _ = _choose(row, None, n, None, out, scores, topk, BLOCK // 2, STEP)
    elif n <= BLOCK:
        chosen, _ = _choose(row, None, n, None, out, scores, topk, BLOCK, STEP)
    elif STREAM:
        chosen = _choose_streaming(row, n, out, scores, topk, BLOCK)
    _fill(out, chosen, topk, -1, STEP)
    if scores is not None:
        _fill(scores, chosen, topk, float("-inf"), STEP)
