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
def unmasked(mask_ptr, seg_q_ptr, seg_k_ptr, b, s, t, S, T, smb, sms, smt):
    """Returns which of the keys t the mask and the segment ids let queries s of sequence b see; s < S and t < T."""
    seen = (s >= 0) & (t >= 0)
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
    bits = bits ^ ((bits >> 31) & MOST)
    return tl.where(x != x, MOST, bits)


@triton.jit
def store_scores(
    out, score, mask_ptr, seg_q_ptr, seg_k_ptr, b, s, t, limit, there, S, T, smb, sms, smt, SORTABLE: tl.constexpr
):
    """Stores scores of queries s and keys t: fp32 where ``there``, -inf if hidden; or with SORTABLE their integers.

    Integers are stored everywhere, since a mask costs registers: the workspace has whole tiles. Hidden keys get HIDDEN,
    but those beyond the limit anything.
    """
    value = sortable(score) if SORTABLE else tl.where(t < limit, score, float("-inf"))
    if (mask_ptr is not None) | (seg_q_ptr is not None):
        seen = unmasked(mask_ptr, seg_q_ptr, seg_k_ptr, b, s, tl.minimum(t, T - 1), S, T, smb, sms, smt)
        value = tl.where(seen, value, HIDDEN if SORTABLE else float("-inf"))
    tl.store(out, value, mask=None if SORTABLE else there)
