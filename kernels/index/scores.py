# SPDX-License-Identifier: Apache-2.0
"""Index scores: sum over heads of w * relu(scale * q @ k.T), for tiles of queries and for single queries.

From q[B, S, H, D], k[B, T, D] and w[B, S, H], any strides but the last. A program of the tiles takes BS queries x BT
keys and all heads; of the single queries (few, as in decoding) one query, its heads as the rows of a product, and BT
keys. Products bound the first: its keys stay in place for all heads, nothing but q is read a head, tiles that no query
sees are skipped, and whole tiles are stored without a mask, which saves registers. Of the second each visible key is
read once, for all heads.
"""

import triton
import triton.language as tl

from ..selection.common import load_tile
from .common import hide, row_limit, store_scores, unmasked


@triton.jit(
    do_not_specialize=[
        "S", "T", "NS", "NT", "b0", "first", "rows", "stored", "so", "sqb", "sqs", "sqh", "skb", "skt", "swb", "sws", "swh",
        "smb", "sms", "smt",
    ]
)  # fmt: skip
def index_tile_scores(
    q_ptr, k_ptr, w_ptr, limit_ptr, mask_ptr, seg_q_ptr, seg_k_ptr, out_ptr, scale, S, T, NS, NT, b0, first, rows, stored,
    so, sqb, sqs, sqh, skb, skt, swb, sws, swh, smb, sms, smt, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr, SORTABLE: tl.constexpr,
    LIMIT: tl.constexpr, MASK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes out[parts, stored, so] of ``rows`` queries from ``first`` on, of the sequences from ``b0`` on.

    From q[B, S, H, D], k[B, T, D] and w[B, S, H]. One program: BS queries x BT keys, all heads. Mask and
    segment ids only decide which tiles are needed: :func:`hide` follows. With SORTABLE, stored and so are padded to
    whole tiles, and tiles that are not needed are not written.
    """
    scale = tl.cast(scale, tl.float32)  # generated code passes fp64
    pid = tl.program_id(0)
    tile = pid // NT
    part = tile // NS
    b = (b0 + part).to(tl.int64)
    local = (NS - 1 - tile % NS) * BS + tl.arange(0, BS)
    # Rows and keys past the end repeat the last one and are not stored.
    s = first + tl.minimum(local, rows - 1)
    t = pid % NT * BT + tl.arange(0, BT)
    key = tl.minimum(t, T - 1)
    limit = tl.where(local < rows, row_limit(limit_ptr, b * S + s, T, LIMIT), 0)
    needed = pid % NT * BT < tl.max(limit, axis=0)
    if MASK | SEG:
        seen = unmasked(mask_ptr, seg_q_ptr, seg_k_ptr, b, s[:, None], key[None, :], S, T, smb, sms, smt, MASK, SEG)
        seen = seen & (t[None, :] < limit[:, None])
        needed = tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0) > 0
    if SORTABLE & (needed == 0):
        return
    d = tl.arange(0, DP)
    k_row = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(key.to(tl.int64) * skt, ALIGN)
    q_row = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s.to(tl.int64) * sqs, ALIGN)
    w_row = w_ptr + b * swb + s.to(tl.int64) * sws
    q_at, k_at = q_row[:, None] + d[None, :], k_row[None, :] + d[:, None]
    k = load_tile(k_at, d < D, d, D != DP, False)  # [DP, BT]
    sqh = tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    swh = tl.cast(swh, tl.int64)
    acc = tl.zeros((BS, BT), tl.float32)
    for h in range(tl.where(needed, H, 0)):
        q = load_tile(q_at + h * sqh, d, d < D, False, D != DP)
        w = tl.load(w_row + h * swh).to(tl.float32)
        x = tl.dot(q, k, input_precision=PREC)
        acc += tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[:, None]
    row = (part * stored + local).to(tl.int64) * so
    there = (local < rows)[:, None] & (t < T)[None, :]
    store_scores(out_ptr + row[:, None] + t[None, :], acc * scale, t[None, :], limit[:, None], there, SORTABLE)


@triton.jit(
    do_not_specialize=[
        "S", "T", "NT", "b0", "first", "rows", "stored", "so", "sqb", "sqs", "sqh", "skb", "skt", "swb", "sws", "swh",
    ]
)  # fmt: skip
def index_row_scores(
    q_ptr, k_ptr, w_ptr, limit_ptr, out_ptr, scale, S, T, NT, b0, first, rows, stored, so, sqb, sqs, sqh, skb, skt, swb,
    sws, swh, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DC: tl.constexpr, BT: tl.constexpr,
    ALIGN: tl.constexpr, PREC: tl.constexpr, SORTABLE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Computes what ``index_tile_scores`` does. One program: one query, HP >= H heads as rows of a product, BT keys."""
    scale = tl.cast(scale, tl.float32)  # generated code passes fp64
    pid = tl.program_id(0)
    row = pid // NT
    b = (b0 + row // rows).to(tl.int64)
    s = first + row % rows
    t = pid % NT * BT + tl.arange(0, BT)
    key = tl.minimum(t, T - 1)
    limit = row_limit(limit_ptr, b * S + s, T, LIMIT)
    if SORTABLE & (pid % NT * BT >= limit):
        return
    h = tl.arange(0, HP)
    k_row = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(key.to(tl.int64) * skt, ALIGN)
    q_row = (
        q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s.to(tl.int64) * sqs, ALIGN)
        + tl.multiple_of(h.to(tl.int64) * sqh, ALIGN)
    )  # fmt: skip
    w = tl.load(w_ptr + b * swb + s.to(tl.int64) * sws + h.to(tl.int64) * swh, mask=h < H, other=0.0)
    x = tl.zeros((HP, BT), tl.float32)
    for first_d in tl.static_range(0, DP, DC):
        d = first_d + tl.arange(0, DC)
        q = tl.load(q_row[:, None] + d[None, :], mask=(h < H)[:, None] & (d < D)[None, :], other=0.0)
        k = tl.load(k_row[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)  # [DC, BT]
        # Tensor cores round their running sum towards zero: short chains, summed in fp32.
        x += tl.dot(q, k, input_precision=PREC)
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # A missing head has a product of 0 unless the key holds NaN or inf.
    part = tl.where((h < H)[:, None], x * w.to(tl.float32)[:, None], 0.0)
    out = out_ptr + (row // rows * stored + row % rows).to(tl.int64) * so + t
    store_scores(out, tl.sum(part, axis=0) * scale, t, limit, t < T, SORTABLE)


@triton.jit(do_not_specialize=["S", "T", "smb", "sms", "smt"])
def index_hide(
    out_ptr, mask_ptr, seg_q_ptr, seg_k_ptr, S, T, smb, sms, smt, MASK: tl.constexpr, SEG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores -inf in out[B, S, T] where mask or segment ids hide a key. One program: one query."""
    pid = tl.program_id(0)
    row = out_ptr + pid.to(tl.int64) * T
    b, none = (pid // S).to(tl.int64), float("-inf")
    hide(row, none, mask_ptr, seg_q_ptr, seg_k_ptr, b, pid % S, T, S, T, smb, sms, smt, MASK, SEG, BLOCK)
