# SPDX-License-Identifier: Apache-2.0
"""The training loss of an indexer over lists of keys, and its gradients.

    loss = sum_j p_j (log p_j - log r_j),  r = softmax of the index scores,  p = the attention's, summed over its heads
    dscores = r - p,  g = dloss * dscores,  x = scale * q @ k.T,  dx = scale * g * w where x > 0
    dw = sum g * relu(x),  dq = dx @ k,  dk = dx.T @ q

Keys come from canonical lists that repeat keys (``list_keys.py``): of equal keys the first entry counts. Programs: one
query, HB heads x BN listed keys at a time (``index_list_heads``); one query, its whole list in registers (both
softmaxes); one query, all heads, DC columns (the gradients). Rows of keys, gathered from the L2, are most of what
moves: each is read once for all heads of a block, keys are loaded a tile ahead of their rows, and dq and dw stay in
registers.
"""

import triton
import triton.language as tl

from ..selection.row_tiles import block_products, product_of_rows, tiles_at
from ..selection.softmax import online_softmax
from .backward import rounded_product


@triton.jit
def _counted(keys_row, j, n):
    """Returns which of the entries j of a list of n keys count."""
    key = tl.load(keys_row + j, mask=j < n, other=-1)
    return key != tl.load(keys_row + j - 1, mask=(j > 0) & (j < n), other=-1)


@triton.jit
def _finite(top):
    """Returns maxima, 0 in place of infinite ones: what a log-sum-exp subtracts and adds again."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def _log_sum_exp(x):
    """Returns the log-sum-exp of x[M, N] over M: -inf of -inf, inf if any is inf, NaN if any is NaN."""
    top = _finite(tl.max(x, axis=0))
    return tl.log(tl.sum(tl.exp(x - top[None, :]), axis=0)) + top


@triton.jit
def _log_add_exp(x, y):
    """Returns log(exp(x) + exp(y)), with the same values at infinity and NaN."""
    top = _finite(tl.maximum(x, y))
    return tl.log(tl.exp(x - top) + tl.exp(y - top)) + top


@triton.jit
def _list_lse(
    q, q_base, q_at, live, k_base, skn, keys_row, scale, n, HELD: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Returns the log-sum-exp [HB] of the scores over the keys that count, 0 where it is -inf."""
    i = tl.arange(0, BN)
    m = tl.full((HB,), float("-inf"), tl.float32)
    norm = tl.zeros((HB,), tl.float32)
    for start in range(0, n, BN):
        mask = start + i < n
        key = tl.load(keys_row + start + i, mask=mask, other=0)
        counts = _counted(keys_row, start + i, n)
        k_at = key.to(tl.int64) * skn
        x = block_products(q, q_base, q_at, live, k_base, k_at, mask, HELD, HB, BN, D, NM, MC, TC, PREC) * scale
        _, _, m, norm = online_softmax(tl.where(counts[None, :], x, float("-inf")), m, norm, True)
    return tl.where(norm == 0.0, 0.0, m + tl.log(norm))


@triton.jit(do_not_specialize=[
    "S", "so", "sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "sfb", "sfs", "sfg", "sfh",
])  # fmt: skip
def index_list_heads(
    q_ptr, k_ptr, f_ptr, keys_ptr, counts_ptr, out_ptr, scale, S, N, so, sqb, sqs, sqg, sqh, skb, skg, skn, sfb, sfs,
    sfg, sfh, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr,
    HELD: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, TARGET: tl.constexpr, ALIGN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Reduces x = scale * q[B, S, G, H, D] @ k[B, G, T, D].T at the keys[B, S, N] over all heads, into out[B, S, so].

    With the weights f[B, S, G, H], the index scores: sum of f * relu(x). TARGET: the logarithm of the attention's
    probabilities, log of sum of exp(x - f), f the log-sum-exp of the attention, or None for that over the list. One
    program: one query.
    """
    HN: tl.constexpr = (H + HB - 1) // HB
    scale = tl.cast(scale, tl.float32)  # generated code passes fp64
    N = tl.multiple_of(tl.cast(N, tl.int64), 16)
    row = tl.program_id(0).to(tl.int64)
    b, s = row // S, row % S
    n = tl.load(counts_ptr + row)
    keys_row, out_row = keys_ptr + row * N, out_ptr + row * so
    sqh = tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    i = tl.arange(0, BN)
    for block in range(G * HN):
        g = tl.cast(block // HN, tl.int64)
        head = block % HN * HB + tl.arange(0, HB)
        live = head < H
        q_base = (
            q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s * sqs, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
        )
        q_at = head.to(tl.int64) * sqh
        k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
        q = ()
        if HELD:
            q = tiles_at(q_base, q_at, live, D, NM, MC, TC)
        if f_ptr is None:
            f = _list_lse(
                q, q_base, q_at, live, k_base, skn, keys_row, scale, n, HELD, HB, BN, D, NM, MC, TC, PREC
            )  # fmt: skip
        else:
            f = tl.load(f_ptr + b * sfb + s * sfs + g * sfg + head.to(tl.int64) * sfh, mask=live, other=0.0).to(
                tl.float32
            )
            if TARGET:  # -inf: a query without keys
                f = tl.where(f == float("-inf"), 0.0, f)
        # Keys are loaded one tile ahead of the rows that they name.
        key = tl.load(keys_row + i, mask=i < n, other=0)
        for start in range(0, n, BN):
            mask = start + i < n
            k_at = key.to(tl.int64) * skn
            key = tl.load(keys_row + start + BN + i, mask=start + BN + i < n, other=0)
            x = block_products(q, q_base, q_at, live, k_base, k_at, mask, HELD, HB, BN, D, NM, MC, TC, PREC) * scale
            # The products of missing heads are 0, or NaN where a key has NaN or inf.
            if TARGET:
                part = _log_sum_exp(tl.where(live[:, None], x - f[:, None], float("-inf")))
            else:
                x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * f[:, None]
                part = tl.sum(tl.where(live[:, None], x, 0.0), axis=0)
            if G * HN > 1:
                old = tl.load(out_row + start + i, mask=mask & (block > 0), other=float("-inf") if TARGET else 0.0)
                part = _log_add_exp(old, part) if TARGET else old + part
            tl.store(out_row + start + i, part, mask=mask)
        if G * HN > 1:
            tl.debug_barrier()  # other threads may read what is stored


@triton.jit
def _log_softmax(p, j, counts):
    """Loads the logits at p + j and returns their log-softmax; only values where ``counts`` mean anything."""
    x = tl.load(p + j, mask=counts, other=float("-inf"))
    x = x - tl.max(x, axis=0)
    return x - tl.log(tl.sum(tl.where(counts, tl.exp(x), 0.0), axis=0))


@triton.jit
def index_loss_rows(target_ptr, keys_ptr, counts_ptr, dscores_ptr, loss_ptr, N, NI, NP: tl.constexpr):
    """Computes loss[B, S], and dscores[B, S, NI] in place of the scores, from the logarithm of target[B, S, N].

    One program: one query.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, NP)
    n = tl.load(counts_ptr + row)
    keys_row, dscores = keys_ptr + row * N, dscores_ptr + row * NI
    counts = _counted(keys_row, j, n)
    log_p = _log_softmax(target_ptr + row * N, j, counts)
    log_r = _log_softmax(dscores, j, counts)
    p = tl.exp(log_p)
    tl.store(loss_ptr + row, tl.sum(tl.where(counts & (p != 0.0), p * (log_p - log_r), 0.0), axis=0))
    tl.store(dscores + j, tl.where(counts, tl.exp(log_r) - p, 0.0), mask=j < NI)


@triton.jit(do_not_specialize=["NI"])
def index_loss_factors(dloss_ptr, dscores_ptr, keys_ptr, counts_ptr, g_ptr, N, NI, NP: tl.constexpr):
    """Computes the gradients of the scores, g[B, S, N] = dloss[B, S] * dscores[B, S, NI]. One program: one query."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, NP)
    n = tl.load(counts_ptr + row)
    counts = _counted(keys_ptr + row * N, j, n)
    g = tl.load(dscores_ptr + row * NI + j, mask=counts, other=0.0).to(tl.float32)
    g = g * tl.load(dloss_ptr + row).to(tl.float32)
    tl.store(g_ptr + row * N + j, tl.where(counts, g, 0.0), mask=j < n)


@triton.jit(do_not_specialize=[
    "S", "first", "rows", "sqb", "sqs", "sqh", "skb", "skn", "swb", "sws", "swh",
])  # fmt: skip
def index_loss_gradients(
    g_ptr, q_ptr, k_ptr, w_ptr, keys_ptr, counts_ptr, dq_ptr, dw_ptr, part_ptr, scale, S, N, first, rows, sqb, sqs, sqh,
    skb, skn, swb, sws, swh, H: tl.constexpr, D: tl.constexpr, NC: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr,
    DC: tl.constexpr, ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes dq[B, S, H, D], dw[B, S, H] and the rows part[B, rows, N, D] of dk, of queries from ``first`` on.

    From the gradients g[B, S, N] of the scores. One program: one query, all HB >= H heads, one of NC blocks of DC
    columns.
    """
    scale = tl.cast(scale, tl.float32)  # generated code passes fp64
    N = tl.multiple_of(tl.cast(N, tl.int64), 16)
    column = tl.program_id(0) % NC
    line = (tl.program_id(0) // NC).to(tl.int64)
    b, s = line // rows, first + line % rows
    row = b * S + s
    n = tl.load(counts_ptr + row)
    keys_row, g_row = keys_ptr + row * N, g_ptr + row * N
    head = tl.arange(0, HB)
    live = head < H
    d = column * DC + tl.arange(0, DC)
    inside = (d < D)[None, :]
    q_base = q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s * sqs, ALIGN)
    q_at = head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN)
    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    q = tl.load(q_base + q_at[:, None] + d[None, :], mask=live[:, None] & inside, other=0.0)
    w = tl.load(w_ptr + b * swb + s * sws + head.to(tl.int64) * swh, mask=live, other=0.0).to(tl.float32) * scale
    i = tl.arange(0, BN)
    dq, dw = tl.zeros((HB, DC), tl.float32), tl.zeros((HB,), tl.float32)
    key = tl.load(keys_row + i, mask=i < n, other=0)
    for start in range(0, n, BN):
        j = start + i
        mask = j < n
        k_at = key.to(tl.int64) * skn
        key = tl.load(keys_row + j + BN, mask=j + BN < n, other=0)
        k = tl.load(k_base + k_at[:, None] + d[None, :], mask=mask[:, None] & inside, other=0.0)
        x = tl.zeros((HB, BN), tl.float32)
        if NC == 1:
            x = tl.dot(q, tl.trans(k), x, input_precision=PREC)
        else:
            x = product_of_rows(x, q_base, q_at, live, k_base, k_at, mask, D, NC, DC, 0, PREC)
        x = x * scale
        g = tl.load(g_row + j, mask=mask, other=0.0)[None, :]
        dw += tl.sum(g * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), axis=1)
        dx = tl.where(x <= 0.0, 0.0, g * w[:, None])
        dq += rounded_product(dx, k, PREC)
        part = rounded_product(tl.trans(dx), q, PREC)
        to = part_ptr + ((line * N + j) * D)[:, None] + d[None, :]
        tl.store(to, part.to(part_ptr.dtype.element_ty), mask=mask[:, None] & inside)
    at = row * H + head
    tl.store(dq_ptr + at[:, None] * D + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=live[:, None] & inside)
    tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=live & (column == 0))
