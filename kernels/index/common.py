# SPDX-License-Identifier: Apache-2.0
"""Shared functions of the index kernels: which keys a query sees, and integers that sort as floats.

A program asks per tile of queries and keys: the first ``limit`` keys, a mask, segment ids. Integers that sort as fp32
scores do, NaN last and invisible keys first, let the choice of keys compare and count without cases.
"""

import triton
import triton.language as tl

from ..selection.segments import same_segment

# The sortable integer of an invisible key, below that of every score.
HIDDEN = tl.constexpr(-2147483648)
MOST = tl.constexpr(2147483647)


@triton.jit
def row_limit(limit_ptr, row, T, LIMIT: tl.constexpr):
    """Returns how many of the first keys the queries at ``row`` of limit[B * S] see, from 0 to T, int32."""
    if LIMIT:
        n = tl.minimum(tl.maximum(tl.load(limit_ptr + row), 0), T).to(tl.int32)
    else:
        n = (row * 0).to(tl.int32) + T
    return n


@triton.jit
def unmasked(
    mask_ptr, seg_q_ptr, seg_k_ptr, b, s, t, S, T, smb, sms, smt, MASK: tl.constexpr, SEG: tl.constexpr
):  # fmt: skip
    """Returns which of the keys t the mask and the segment ids let queries s of sequence b see; s < S and t < T."""
    seen = (s >= 0) & (t >= 0)
    if MASK:
        at = mask_ptr + b * smb + s.to(tl.int64) * sms + t.to(tl.int64) * smt
        seen = seen & (tl.load(at) != 0)
    if SEG:
        own = tl.load(seg_q_ptr + b * S + s)
        ids = tl.load(seg_k_ptr + b * T + t)
        seen = seen & same_segment(own, ids)
    return seen


@triton.jit
def sortable(x):
    """Returns int32 that sort as fp32 x do: -0 as 0, every NaN as the largest; none is HIDDEN."""
    x = x + 0.0
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & MOST)
    return tl.where(x != x, MOST, bits)


@triton.jit
def score_of(key):
    """Returns the fp32 score of a sortable integer."""
    return (key ^ ((key >> 31) & MOST)).to(tl.float32, bitcast=True)


@triton.jit
def store_scores(out, score, t, limit, there, SORTABLE: tl.constexpr):
    """Stores scores of keys t: fp32 where ``there``, -inf at or beyond the limit; or with SORTABLE their integers.

    Integers are stored everywhere, since a mask costs registers: the workspace has whole tiles.
    """
    if SORTABLE:
        tl.store(out, sortable(score))
    else:
        tl.store(out, tl.where(t < limit, score, float("-inf")), mask=there)


@triton.jit
def hide(
    row, value, mask_ptr, seg_q_ptr, seg_k_ptr, b, s, n, S, T, smb, sms, smt, MASK: tl.constexpr, SEG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores ``value`` at those of the first n keys of ``row`` that mask and segment ids hide from query s."""
    if MASK | SEG:
        for p in range(0, n, BLOCK):
            t = p + tl.arange(0, BLOCK)
            key = tl.minimum(t, T - 1)
            seen = unmasked(mask_ptr, seg_q_ptr, seg_k_ptr, b, s + key * 0, key, S, T, smb, sms, smt, MASK, SEG)
            tl.store(row + t, value, mask=(t < n) & ~seen)
        tl.debug_barrier()
