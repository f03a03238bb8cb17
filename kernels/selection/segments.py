# SPDX-License-Identifier: Apache-2.0
"""Segment ids of keys and queries: which keys of a tile count for a query (``reference/segments.py``).

A key counts where its id is the query's, or the wildcard. One program a tile of BN keys writes the bounds of its ids,
bounds[B, NT, 4], so that others skip the tiles of other segments and compare ids only in those that a query sees in
part; there they are the bits of a word, like the keys of pieces.
"""

import triton
import triton.language as tl

# The id of a key that counts for the queries of every segment: reference/segments.py.
ANY = tl.constexpr(-2147483648)
_LEAST = tl.constexpr(-9223372036854775807 - 1)
_MOST = tl.constexpr(9223372036854775807)


@triton.jit
def same_segment(mine, ids):
    """Returns whether keys with ``ids`` count for queries with the ids ``mine``, in the wider of both dtypes."""
    return (ids == mine) | (ids == ANY)


@triton.jit
def segment_bits(ids_ptr, mine, first, S_kv, BN: tl.constexpr):
    """Returns int32[N], in which bit j < BN <= 32 says whether key ``first`` + j counts for the query of id mine[N].

    ``ids_ptr`` points to the ids of one batch entry's keys.
    """
    j = tl.arange(0, BN)
    ids = tl.load(ids_ptr + first + j, mask=first + j < S_kv, other=0)
    bit = tl.full((1, BN), 1, tl.int32) << j[None, :]
    return tl.sum(tl.where(same_segment(mine[:, None], ids[None, :]), bit, 0), axis=1)


@triton.jit
def segment_words(ids_ptr, mine, first, S_kv, BN: tl.constexpr):
    """Returns the bits of :func:`segment_bits` for BN <= 64 keys, int64[N]."""
    low: tl.constexpr = BN if BN < 32 else 32
    words = segment_bits(ids_ptr, mine, first, S_kv, low).to(tl.int64)
    if BN > 32:
        high = segment_bits(ids_ptr, mine, first + 32, S_kv, 32).to(tl.int64)
        words = (words & 0xFFFFFFFF) | (high << 32)
    return words


@triton.jit
def tile_has(bounds_ptr, mine, mask):
    """Returns whether a tile may hold a key, and whether all its keys, count for the ids ``mine``; int64, like mask."""
    some = (tl.load(bounds_ptr, mask=mask, other=0) <= mine) & (tl.load(bounds_ptr + 1, mask=mask, other=0) >= mine)
    every = (tl.load(bounds_ptr + 2, mask=mask, other=0) <= mine) & (
        tl.load(bounds_ptr + 3, mask=mask, other=0) >= mine
    )
    return some, every


@triton.jit(do_not_specialize=["S_kv", "NT"])
def selection_segment_tiles(seg_k_ptr, bounds_ptr, S_kv, NT, BN: tl.constexpr):
    """Writes bounds[B, NT, 4] int64 of the ids of each tile of BN keys. One program: one tile.

    Only queries with an id in [bounds[0], bounds[1]] can see a key of the tile; those in [bounds[2], bounds[3]] see
    all of them.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = pid % NT * BN + tl.arange(0, BN)
    inside = n < S_kv
    ids = tl.load(seg_k_ptr + pid // NT * S_kv + n, mask=inside, other=0).to(tl.int64)
    own = inside & (ids != ANY)
    least = tl.full((BN,), _LEAST, tl.int64)
    most = tl.full((BN,), _MOST, tl.int64)
    low = tl.min(tl.where(own, ids, most), axis=0)
    high = tl.max(tl.where(own, ids, least), axis=0)
    wild = tl.max((inside & (ids == ANY)).to(tl.int32), axis=0) != 0
    lowest = tl.min(least, axis=0)
    highest = tl.max(most, axis=0)
    at = bounds_ptr + pid * 4
    tl.store(at, tl.where(wild, lowest, low))
    tl.store(at + 1, tl.where(wild, highest, high))
    # low > high: every key counts for all; low < high: no query sees all.
    tl.store(at + 2, tl.where(low == high, low, tl.where(low > high, lowest, highest)))
    tl.store(at + 3, tl.where(low == high, high, tl.where(low > high, highest, lowest)))
