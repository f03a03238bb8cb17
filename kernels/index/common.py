"""Shared functions of the index kernels: which keys a query sees, and integers that sort as floats."""

import triton
import triton.language as tl

# The id of a key that queries of every segment see: ops/segments.py.
ANY = tl.constexpr(-2147483648)
# The sortable integer of an invisible key, below that of every score.
HIDDEN = tl.constexpr(-2147483648)
MOST = tl.constexpr(2147483647)


@triton.jit
def row_limit(limit_ptr, row, T):
    """Returns how many of the first keys the queries at ``row`` of limit[B * S] see, from 0 to T, int32."""
    if limit_ptr is None:
        return (row * 0).to(tl.int32) + T
    return tl.minimum(tl.maximum(tl.load(limit_ptr + row), 0), T).to(tl.int32)


@triton.jit
def visible_keys(limit, mask_ptr, seg_q_ptr, seg_k_ptr, b, s, t, S, T, smb, sms, smt):
    """Returns which of the keys t [1, N] the queries s [M, 1] of sequence b see; s < S and t < T."""
    seen = t < limit
    if mask_ptr is not None:
        at = mask_ptr + b * smb + s.to(tl.int64) * sms + t.to(tl.int64) * smt
        seen = seen & (tl.load(at) != 0)
    if seg_q_ptr is not None:
        own = tl.load(seg_q_ptr + b * S + s)
        ids = tl.load(seg_k_ptr + b * T + t)
        seen = seen & ((ids == own) | (ids == ANY))
    return seen


@triton.jit
def sortable(x):
    """Returns int32 that sort as fp32 x do: -0 as 0, every NaN as the largest; none is HIDDEN."""
    x = x + 0.0
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ MOST, bits)
    return tl.where(x != x, MOST, bits)


@triton.jit
def unsorted(bits):
    """Returns the fp32 of which :func:`sortable` returns ``bits``."""
    return tl.where(bits < 0, bits ^ MOST, bits).to(tl.float32, bitcast=True)


@triton.jit
def store_scores(out, score, seen, there, SORTABLE: tl.constexpr):
    """Stores scores where ``there``: fp32 with -inf for hidden keys, or their sortable integers with HIDDEN."""
    if SORTABLE:
        tl.store(out, tl.where(seen, sortable(score), HIDDEN), mask=there)
    else:
        tl.store(out, tl.where(seen, score, float("-inf")), mask=there)
