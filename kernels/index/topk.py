# SPDX-License-Identifier: Apache-2.0
"""The keys of the largest index scores of each query, in increasing order, from sortable integers (see ``common.py``).

keys[rows, T] -> out[rows, topk]; one program a query. A row of up to BLOCK keys is held in registers, as one tile, and
its k-th largest integer is found by counting the keys at or above a guess. Of a longer row, a sample gives a bound
that somewhat more than k keys are above; these are listed and held in place of the row. Bytes should bound it, a row
read once; stores of a few elements each are what takes the time. So a bit a key is stored, and each thread then lists
the lowest bit of its words in turn. Increasing keys cost no sort: they are stored in the order in which they stand.
"""

import triton
import triton.language as tl

from ..selection.common import popcount
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
def _store_chosen(row, places, listed, n, threshold, ties, keys_out, out, scores, STEP: tl.constexpr):
    """Stores the keys above the threshold and the first ``ties`` at it of the n keys of ``row``, in their order.

    Their indices, which are in ``places`` if they are ``listed`` there, else their places in the row, go to ``out``; the
    keys go to ``keys_out`` unless it is None. Both may be what is read. The keys' scores go to ``scores`` unless it is None.
    """
    above_before, tied_before = n * 0, n * 0
    for p in range(0, n, STEP):
        i = p + tl.arange(0, STEP)
        key = tl.load(row + i, mask=i < n, other=HIDDEN)
        index = i
        if places is not None:
            index = tl.where(listed, tl.load(places + i, mask=(i < n) & listed, other=0), i)
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
def _choose(row, places, listed, n, keys_out, out, scores, topk, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Chooses from a row of n <= BLOCK keys as ``_store_chosen`` does; returns how many, and the threshold."""
    i = tl.arange(0, BLOCK)
    key = tl.load(row + i, mask=i < n, other=HIDDEN)
    seen = visible_count(key)
    want = tl.minimum(seen, topk)
    threshold, ties = cut(key, seen, want)
    _store_chosen(row, places, listed, n, threshold, ties, keys_out, out, scores, STEP)
    return want, threshold


@triton.jit
def _floor(row, n, topk, BLOCK: tl.constexpr):
    """Returns a key that more than topk of the row's n > BLOCK keys are likely to be above, and less than BLOCK.

    It is a key of a sample: BLOCK // 2 keys, 32 neighbours at equal distances. HIDDEN if the sample has too few.
    """
    M: tl.constexpr = BLOCK // 2
    i = tl.arange(0, M)
    key = tl.load(row + (i // 32).to(tl.int64) * n // (M // 32) + i % 32)
    part = M / n.to(tl.float32)  # of the row
    share = topk * part
    # Four deviations more than topk, or the mean of topk and BLOCK where these are nearer.
    want = tl.minimum(share + 4.0 * tl.sqrt(share) + 4.0, tl.sqrt(share * (BLOCK * part))).to(tl.int32)
    seen = visible_count(key)
    floor = want * 0 + HIDDEN
    if want < seen:
        floor, _ = cut(key, seen, want)
    return floor


@triton.jit
def _mark(row, n, floor, words, STEP: tl.constexpr):
    """Stores a bit for each of the row's n keys, whether it is above ``floor``: 32 to a word, the first in the lowest."""
    W: tl.constexpr = STEP // 32
    lane = tl.arange(0, 32)[None, :]
    for p in range(0, n, STEP):
        i = p + tl.arange(0, STEP)
        key = tl.load(row + i, mask=i < n, other=HIDDEN)
        bits = tl.reshape((key > floor).to(tl.int32), (W, 32)) << lane
        tl.store(words + p // 32 + tl.arange(0, W), tl.sum(bits, axis=1))


@triton.jit
def _list_marked(words, n, places, BLOCK: tl.constexpr, W: tl.constexpr):
    """Stores the places of the marked keys of n, at most BLOCK of them, in their order; returns how many are marked.

    A thread takes the lowest bit of each of its words in turn: stores of a few elements each are what takes the time.
    """
    count = n * 0
    for p in range(0, tl.cdiv(n, 32), W):
        w = p + tl.arange(0, W)
        word = tl.load(words + w, mask=w * 32 < n, other=0)
        number = popcount(word)
        rank = tl.cumsum(number, axis=0)
        at = count + rank - number
        for _ in range(tl.max(number, axis=0)):
            lowest = word & (0 - word)
            # Its float is a power of two, whose exponent is the place of the bit.
            bit = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(places + at, w * 32 + bit, mask=(word != 0) & (at < BLOCK))
            word = word ^ lowest
            at += 1
        count += tl.max(rank, axis=0)
    return count


@triton.jit
def _list_by_segments(row, n, places, topk, BLOCK: tl.constexpr):
    """Stores at most BLOCK places of keys of which topk are the largest, and the keys over the row; returns how many.

    For rows of which a sample says too little. What is above the topk-th largest so far joins the list, which is cut
    back when full.
    """
    STEP: tl.constexpr = BLOCK // 4
    i = tl.arange(0, STEP)
    count = n * 0
    floor = count + HIDDEN
    for p in range(0, n, STEP):
        if count + STEP > BLOCK:
            tl.debug_barrier()
            count, floor = _choose(row, places, True, count, row, places, None, topk, BLOCK, STEP)
        key = tl.load(row + p + i, mask=p + i < n, other=HIDDEN)
        tl.debug_barrier()  # the segment is loaded before anything is stored over it
        better = key > floor
        place = count + tl.cumsum(better.to(tl.int32), axis=0) - 1
        tl.store(row + place, key, mask=better)
        tl.store(places + place, p + i, mask=better)
        count += tl.sum(better.to(tl.int32), axis=0)
    return count


@triton.jit
def _list_candidates(row, n, places, topk, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Puts candidates for the topk largest of n > BLOCK keys at the start of the row, and their places; returns how many.

    ``places`` has room for BLOCK places and a bit for each key. topk is at most BLOCK // 2.
    """
    words = places + BLOCK
    floor = _floor(row, n, topk, BLOCK)
    _mark(row, n, floor, words, 2 * STEP)
    tl.debug_barrier()
    count = _list_marked(words, n, places, BLOCK, STEP // 4)
    tl.debug_barrier()
    if (count > BLOCK) | ((count < topk) & (floor > HIDDEN)):
        count = _list_by_segments(row, n, places, topk, BLOCK)
    else:
        i = tl.arange(0, BLOCK)
        key = tl.load(row + tl.load(places + i, mask=i < count, other=0), mask=i < count, other=HIDDEN)
        tl.debug_barrier()  # all are loaded before the row is overwritten
        tl.store(row + i, key, mask=i < count)
    tl.debug_barrier()
    return count


@triton.jit
def _fill(out, start, topk, value, BLOCK: tl.constexpr):
    """Stores ``value`` from ``start`` on."""
    for j in range(start, topk, BLOCK):
        i = j + tl.arange(0, BLOCK)
        tl.store(out + i, tl.full((BLOCK,), value, out.dtype.element_ty), mask=i < topk)


@triton.jit(do_not_specialize=["S", "T", "b0", "first", "rows", "stored", "so", "topk", "smb", "sms", "smt", "listed"])
def index_select(
    keys_ptr, limit_ptr, mask_ptr, seg_q_ptr, seg_k_ptr, places_ptr, out_ptr, scores_ptr, S, T, b0, first, rows, stored,
    so, topk, smb, sms, smt, listed, LIMIT: tl.constexpr, MASK: tl.constexpr, SEG: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Writes out[B, S, topk], and scores[B, S, topk] unless it is None, of ``rows`` queries from ``first`` on, of the sequences from ``b0`` on.

    From the sortable integers keys[parts, stored, so]. Rows may be longer than BLOCK if there are places[parts, rows,
    listed]. STEP: keys at a time. One program: one query; the last come first, because they see the most keys of a
    causal model.
    """
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
    elif places_ptr is not None:
        places = places_ptr + tl.multiple_of((part * rows + local).to(tl.int64) * listed, 16)
        many, count = n > BLOCK, n
        if many:
            count = _list_candidates(row, n, places, topk, BLOCK, STEP)
        chosen, _ = _choose(row, places, many, count, None, out, scores, topk, BLOCK, STEP)
    elif n <= BLOCK // 2:
        chosen, _ = _choose(row, None, False, n, None, out, scores, topk, BLOCK // 2, STEP)
    elif n <= BLOCK:  # always so here; with else, some cases take 168 registers in place of 127
        chosen, _ = _choose(row, None, False, n, None, out, scores, topk, BLOCK, STEP)
    _fill(out, chosen, topk, -1, STEP)
    if scores is not None:
        _fill(scores, chosen, topk, float("-inf"), STEP)
