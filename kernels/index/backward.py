# SPDX-License-Identifier: Apache-2.0
"""Gradients of the index scores: query-major for q and w, key-major in parts of the queries for k.

With g[B, S, T] the gradient of a visible score and x = q @ k.T: dw = scale * sum g * relu(x), dx = g where x is above
0, dq = scale * w * dx @ k, dk = scale * (w * dx).T @ q.

A program of dq takes BS queries of one head and all tiles of BT keys that they see; one of dk BT keys and every head
of the queries of one of P parts, which a last kernel adds in order: no atomics. By count products bound both (two a
tile, since the scores are computed again): q or k, and the sums, stay on the chip.
"""

import triton
import triton.language as tl

from .common import row_limit, unmasked


@triton.jit
def _load(p, d, D: tl.constexpr, DP: tl.constexpr):
    """Loads rows [N, DP] at the pointers p [N]; 0 beyond D."""
    if D == DP:
        x = tl.load(p[:, None] + d[None, :])
    else:
        x = tl.load(p[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    return x


@triton.jit
def rounded_product(dx, x, PREC: tl.constexpr):
    """Returns dx @ x, dx rounded to bf16 where x is bf16; fp16, whose range is too small for gradients, as tf32."""
    if x.dtype == tl.bfloat16:
        out = tl.dot(dx.to(tl.bfloat16), x)
    else:
        out = tl.dot(dx, x.to(tl.float32), input_precision=PREC)
    return out


@triton.jit
def _grad_tile(
    g_ptr, limit, live, mask_ptr, seg_q_ptr, seg_k_ptr, b, s, t, S, T, smb, sms, smt, MASK: tl.constexpr,
    SEG: tl.constexpr,
):  # fmt: skip
    """Loads dscores[b, s, t], 0 where the key is hidden. s, limit and live are [M, 1] and t [1, N], or transposed."""
    there = live & (t < limit)
    key = tl.minimum(t, T - 1)
    if MASK | SEG:
        there = there & unmasked(mask_ptr, seg_q_ptr, seg_k_ptr, b, s, key, S, T, smb, sms, smt, MASK, SEG)
    return tl.load(g_ptr + (b * S + s) * T + key, mask=there, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "S", "T", "NS", "sqb", "sqs", "sqh", "skb", "skt", "swb", "sws", "swh", "smb", "sms", "smt",
    ]
)  # fmt: skip
def index_dq(
    g_ptr, q_ptr, k_ptr, w_ptr, limit_ptr, mask_ptr, seg_q_ptr, seg_k_ptr, dq_ptr, dw_ptr, scale, S, T, NS, sqb, sqs, sqh,
    skb, skt, swb, sws, swh, smb, sms, smt, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr, LIMIT: tl.constexpr, MASK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, H, D] and dw[B, S, H] from dscores g[B, S, T]. One program: BS queries of one head."""
    scale = tl.cast(scale, tl.float32)  # generated code passes fp64
    pid = tl.program_id(0)
    h, tile = pid % H, pid // H
    b = (tile // NS).to(tl.int64)
    local = (NS - 1 - tile % NS) * BS + tl.arange(0, BS)
    live = local < S
    s = tl.minimum(local, S - 1)
    limit = tl.where(live, row_limit(limit_ptr, b * S + s, T, LIMIT), 0)
    d = tl.arange(0, DP)
    sqh, swh = tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN), tl.cast(swh, tl.int64)
    q_row = q_ptr + tl.multiple_of(b * sqb, ALIGN) + h * sqh + tl.multiple_of(s.to(tl.int64) * sqs, ALIGN)
    q = _load(q_row, d, D, DP)
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN)
    dq, dw = tl.zeros((BS, DP), tl.float32), tl.zeros((BS,), tl.float32)
    for t0 in range(0, tl.max(limit, axis=0), BT):
        t = t0 + tl.arange(0, BT)
        k = _load(k_base + tl.multiple_of(tl.minimum(t, T - 1).to(tl.int64) * skt, ALIGN), d, D, DP)
        x = tl.dot(q, tl.trans(k), input_precision=PREC)
        g = _grad_tile(
            g_ptr, limit[:, None], live[:, None], mask_ptr, seg_q_ptr, seg_k_ptr, b, s[:, None], t[None, :], S, T, smb,
            sms, smt, MASK, SEG,
        )  # fmt: skip
        dw += tl.sum(g * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), axis=1)
        dq += rounded_product(tl.where(x <= 0.0, 0.0, g), k, PREC)
    w = tl.load(w_ptr + b * swb + s.to(tl.int64) * sws + h * swh).to(tl.float32) * scale
    row = (b * S + s) * H + h
    keep = live[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + row[:, None] * D + d[None, :], (dq * w[:, None]).to(dq_ptr.dtype.element_ty), mask=keep)
    tl.store(dw_ptr + row, (dw * scale).to(dw_ptr.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=[
        "S", "T", "NT", "tiles", "sqb", "sqs", "sqh", "skb", "skt", "swb", "sws", "swh", "smb", "sms", "smt",
    ]
)  # fmt: skip
def index_dk(
    g_ptr, q_ptr, k_ptr, w_ptr, limit_ptr, mask_ptr, seg_q_ptr, seg_k_ptr, dk_ptr, scale, S, T, NT, tiles, sqb, sqs, sqh,
    skb, skt, swb, sws, swh, smb, sms, smt, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr, LIMIT: tl.constexpr, MASK: tl.constexpr, SEG: tl.constexpr,
):  # fmt: skip
    """Computes the parts dk[P, B, T, D] fp32, each of ``tiles`` tiles of BS queries. One program: BT keys of one part."""
    scale = tl.cast(scale, tl.float32)  # generated code passes fp64
    pid = tl.program_id(0)
    part = tl.program_id(1)
    b = (pid // NT).to(tl.int64)
    t = pid % NT * BT + tl.arange(0, BT)
    d = tl.arange(0, DP)
    sqh, swh = tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN), tl.cast(swh, tl.int64)
    key = tl.minimum(t, T - 1).to(tl.int64)
    k = _load(k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(key * skt, ALIGN), d, D, DP)
    dk = tl.zeros((BT, DP), tl.float32)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, (S + BS - 1) // BS)):
        local = tile * BS + tl.arange(0, BS)
        live = local < S
        s = tl.minimum(local, S - 1)
        limit = tl.where(live, row_limit(limit_ptr, b * S + s, T, LIMIT), 0)
        g = _grad_tile(
            g_ptr, limit[None, :], live[None, :], mask_ptr, seg_q_ptr, seg_k_ptr, b, s[None, :], t[:, None], S, T, smb,
            sms, smt, MASK, SEG,
        )  # fmt: skip
        q_row = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s.to(tl.int64) * sqs, ALIGN)
        w_row = w_ptr + b * swb + s.to(tl.int64) * sws
        for h in range(tl.where(pid % NT * BT < tl.max(limit, axis=0), H, 0)):
            q = _load(q_row + h * sqh, d, D, DP)
            w = tl.load(w_row + h * swh).to(tl.float32)
            x = tl.dot(k, tl.trans(q), input_precision=PREC)
            dk += rounded_product(tl.where(x <= 0.0, 0.0, g * w[None, :]), q, PREC)
    row = (part.to(tl.int64) * (tl.num_programs(0) // NT) + b) * T + t
    tl.store(dk_ptr + row[:, None] * D + d[None, :], dk * scale, mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["P", "N"])
def index_dk_sum(parts_ptr, dk_ptr, P, N, BLOCK: tl.constexpr):
    """Sums parts[P, N] over P to dk[N]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(P):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * N + i, mask=i < N, other=0.0)
    tl.store(dk_ptr + i, total.to(dk_ptr.dtype.element_ty), mask=i < N)
