# SPDX-License-Identifier: Apache-2.0
"""Canonical lists of keys: for each query the distinct keys that it selects and sees, in increasing order.

indices[B, S, G, NI] -> keys[B, S, G, N], counts[B, S, G]. One program a row, its list one tile in registers. A sort
would take most of the time: a scan sees whether a list is increasing already, as ``index_topk`` makes them, and only
others are sorted, with their places where a bias goes along.
"""

import triton
import triton.language as tl

from .pieces import query_bounds
from .segments import same_segment


@triton.jit
def _before(p1, m1, p2, m2):
    """Combines running maxima: p of all elements before, m including the element."""
    return tl.maximum(m1, p2), tl.maximum(m1, m2)


@triton.jit
def _fresh(key, NP: tl.constexpr):
    """Returns whether each of key [1, NP] is above all keys before it. A key of -1 never is."""
    none = tl.full((1, NP), -1, tl.int32)
    before, _ = tl.associative_scan((none, key), 1, _before)
    return key > before


@triton.jit
def _store(p, x, keep, NP: tl.constexpr):
    """Stores the values to keep next to each other; returns their number."""
    rank = tl.cumsum(keep.to(tl.int32), axis=1)
    tl.store(p + rank - 1, x, mask=keep)
    return tl.max(tl.max(rank, axis=1), axis=0)


@triton.jit(do_not_specialize=["S", "S_kv", "G", "NSEQ", "NI"])
def selection_list_keys(
    indices_ptr, bias_ptr, cu_q_ptr, cu_k_ptr, seg_q_ptr, seg_k_ptr, keys_ptr, biases_ptr, counts_ptr, S, S_kv, G, NSEQ, NI,
    N, NP: tl.constexpr, VARLEN: tl.constexpr, SEG: tl.constexpr, BIAS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Computes keys[B, S, G, N], of which counts[B, S, G] are written, from indices[B, S, G, NI].

    Dropped are positions outside the query's own sequence, keys of other segments, and all but the first entry of a
    repeated key, unless REPEATS: then they stand next to each other, in their order. BIAS: entries with a bias[B, S, G, NI]
    of -inf are dropped too, and biases[B, S, G, N] are those of the keys. One program: one row.
    """
    row = tl.program_id(0).to(tl.int64)
    s = (row // G % S).to(tl.int32)
    b = row // G // S
    i = tl.arange(0, NP)[None, :]
    lo, hi = query_bounds(tl.zeros((1,), tl.int32) + s, cu_q_ptr, cu_k_ptr, NSEQ, S_kv, VARLEN)
    lo = lo[:, None]
    index = tl.load(indices_ptr + row * NI + i, mask=i < NI, other=-1)
    # Compared in the input's own dtype, because int64 values may not fit into 32 bits.
    seen = (index >= 0) & (index < hi[:, None] - lo)
    key = tl.where(seen, index.to(tl.int32) + lo, -1)
    if SEG:
        mine = tl.load(seg_q_ptr + b * S + s)
        ids = tl.load(seg_k_ptr + b * S_kv + key, mask=seen, other=0)
        key = tl.where(same_segment(mine, ids), key, -1)
    if BIAS:
        bias = tl.load(bias_ptr + row * NI + i, mask=i < NI, other=float("-inf")).to(tl.float32)
        key = tl.where(bias == float("-inf"), -1, key)
    seen = key >= 0
    keys_row = keys_ptr + row * N
    fresh = _fresh(key, NP)
    if tl.max(tl.max((seen & ~fresh).to(tl.int32), axis=1), axis=0) == 0:
        n = _store(keys_row, key, seen, NP)
        if BIAS:
            _store(biases_ptr + row * N, bias, seen, NP)
    elif BIAS:
        # Sorted with their places, which say where a bias stands.
        both = tl.sort(tl.where(seen, key.to(tl.int64) * NP + i, -1))
        seen = both >= 0
        key = tl.where(seen, both // NP, -1).to(tl.int32)
        bias = tl.load(bias_ptr + row * NI + both % NP, mask=seen, other=0.0).to(tl.float32)
        keep = seen if REPEATS else _fresh(key, NP)
        n = _store(keys_row, key, keep, NP)
        _store(biases_ptr + row * N, bias, keep, NP)
    else:
        key = tl.sort(tl.where(seen, key, -1))
        n = _store(keys_row, key, key >= 0 if REPEATS else _fresh(key, NP), NP)
    tl.store(counts_ptr + row, n)
