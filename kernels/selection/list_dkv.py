# SPDX-License-Identifier: Apache-2.0
"""dK and dV of selection attention over lists of keys: dk = sum over the queries of ds.T @ q, dv = sum of p.T @ dout.

For a chunk of queries: the rows that each pair of query and key adds to dK and dV, then their sum over the queries of
each key, one after the other in the order of the queries. The sums are therefore the same for any size of the chunks,
without atomics. A program of the rows has a query, all its heads and DC columns, tiles of BN keys; one of the sums a
key and DC columns. Bytes bound both, since rows are written and read once: rows are bf16 for bf16 inputs, four tiles
are in flight, and a table [keys, queries of the chunk] says which rows are a key's, so that 16 of them can be asked
for at a time.
"""

import triton
import triton.language as tl


@triton.jit
def _heads(row_ptr, rows_at, live, d, D: tl.constexpr):
    """Loads row[heads, d]."""
    return tl.load(row_ptr + rows_at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _factor(factor_ptr, head, live, j, N):
    """Loads factor[heads, j], beyond the last key too: columns of no key give rows that are not stored."""
    return tl.load(factor_ptr + (head * N)[:, None] + j[None, :], mask=live[:, None] & (j < N)[None, :], other=0.0)


@triton.jit(do_not_specialize=["S", "G", "first", "rows", "sqb", "sqs", "sqg", "sqh"])
def selection_list_rows(
    dout_ptr, q_ptr, p_ptr, ds_ptr, counts_ptr, part_k_ptr, part_v_ptr, scale, S, G, N, first, rows, sqb, sqs, sqg, sqh,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HB: tl.constexpr, BN: tl.constexpr, DC: tl.constexpr,
    NKC: tl.constexpr, NVC: tl.constexpr, SHARED: tl.constexpr, DOUT: tl.constexpr, ALIGN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Computes part_k[B, G, rows, N, DK] = scale * ds.T @ q and part_v[B, G, rows, N, DV] = p.T @ dout over the heads.

    SHARED: part_v is added to the first DV columns of part_k. Programs [B, G, rows] x [columns of part_k, then of
    part_v].
    """
    COLUMNS: tl.constexpr = NKC + NVC
    scale = tl.cast(scale, tl.float32)
    N = tl.multiple_of(tl.cast(N, tl.int64), 16)
    column = tl.program_id(0) % COLUMNS
    line = (tl.program_id(0) // COLUMNS).to(tl.int64)
    bg = line // rows
    b = bg // G
    g = bg % G
    s = first + line % rows
    row = (b * S + s) * G + g
    n = tl.load(counts_ptr + row)
    head = tl.arange(0, HB)
    live = head < H
    do_at = (row * H + head) * DV
    factors = line * (H * N)
    if column < NKC:
        d = column * DC + tl.arange(0, DC)
        q_base = (
            q_ptr + tl.multiple_of(b * sqb, ALIGN) + tl.multiple_of(s * sqs, ALIGN) + tl.multiple_of(g * sqg, ALIGN)
        )
        q = _heads(q_base, head.to(tl.int64) * tl.multiple_of(tl.cast(sqh, tl.int64), ALIGN), live, d, DK)
        if SHARED and DOUT:
            do = _heads(dout_ptr, do_at, live, d, DV)
        for start in range(0, n, BN):
            j = start + tl.arange(0, BN)
            acc = tl.dot(tl.trans(_factor(ds_ptr + factors, head, live, j, N)), q, input_precision=PREC) * scale
            if SHARED and DOUT:
                acc = tl.dot(tl.trans(_factor(p_ptr + factors, head, live, j, N)), do, acc, input_precision=PREC)
            to = part_k_ptr + ((line * N + j) * DK)[:, None] + d[None, :]
            tl.store(to, acc.to(part_k_ptr.dtype.element_ty), mask=(j < n)[:, None] & (d < DK)[None, :])
    else:
        d = (column - NKC) * DC + tl.arange(0, DC)
        do = _heads(dout_ptr, do_at, live, d, DV)
        for start in range(0, n, BN):
            j = start + tl.arange(0, BN)
            acc = tl.dot(tl.trans(_factor(p_ptr + factors, head, live, j, N)), do, input_precision=PREC)
            to = part_v_ptr + ((line * N + j) * DV)[:, None] + d[None, :]
            tl.store(to, acc.to(part_v_ptr.dtype.element_ty), mask=(j < n)[:, None] & (d < DV)[None, :])


@triton.jit
def _run_sum(k1, x1, k2, x2):
    """Combines sums over equal keys: of the run that ends an ordered part, with its key."""
    return k2, tl.where(k1 == k2, x1 + x2, x2)


@triton.jit(do_not_specialize=["S", "G", "first", "rows"])
def selection_list_fold(
    keys_ptr, counts_ptr, factor_ptr, S, G, N, first, rows, H: tl.constexpr, NP: tl.constexpr
):  # fmt: skip
    """Replaces each of factor[B, G, rows, H, N] by its sum with those of the same key before it, in lists that repeat keys.

    The last entry of a key then has the sum over all of them. Programs [B, G, rows]: where no key repeats, as in most lists
    that a topk makes, one only looks at the keys.
    """
    line = tl.program_id(0).to(tl.int64)
    bg = line // rows
    row = (bg // G * S + first + line % rows) * G + bg % G
    j = tl.arange(0, NP)
    n = tl.load(counts_ptr + row)
    mask = j < n
    key = tl.load(keys_ptr + row * N + j, mask=mask, other=-1)
    after = tl.load(keys_ptr + row * N + j + 1, mask=j + 1 < n, other=-1)
    again = tl.max((mask & (key == after)).to(tl.int32), axis=0)
    for h in range(H * again):
        at = factor_ptr + (line * H + h) * N + j
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        _, total = tl.associative_scan((key, x), 0, _run_sum)
        tl.store(at, total.to(factor_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["S", "S_kv", "G", "first", "rows"])
def selection_list_slots(
    keys_ptr, counts_ptr, slots_ptr, S, S_kv, G, N, CQ, first, rows, NB: tl.constexpr, REPEATS: tl.constexpr
):  # fmt: skip
    """Writes slots[B, G, S_kv, CQ]: for a key and a query of the chunk, 1 + the key's place in the query's list.

    REPEATS: of equal keys the last place (1), or the first (-1); 0 if no keys are. slots must be 0 before. Programs [B, G,
    rows].
    """
    line = tl.program_id(0).to(tl.int64)
    bg = line // rows
    local = line % rows
    row = (bg // G * S + first + local) * G + bg % G
    n = tl.load(counts_ptr + row)
    for start in range(0, n, NB):
        j = start + tl.arange(0, NB)
        key = tl.load(keys_ptr + row * N + j, mask=j < n, other=0)
        kept = j < n
        if REPEATS:
            inside = j + 1 < n if REPEATS > 0 else (j > 0) & (j < n)
            kept &= key != tl.load(keys_ptr + row * N + j + REPEATS, mask=inside, other=-1)
        tl.store(slots_ptr + (bg * S_kv + key) * CQ + local, (j + 1).to(tl.int16), mask=kept)


@triton.jit(do_not_specialize=["units"])
def selection_list_invert(
    slots_ptr, inverse_ptr, sizes_ptr, units, N, CQ, CP: tl.constexpr, KB: tl.constexpr
):  # fmt: skip
    """Computes inverse[B, G, S_kv, CQ] from slots: query * N + place of the pairs of each key, in query order.

    sizes[B, G, S_kv] is their number; units is B * G * S_kv. One program: KB keys.
    """
    CQ = tl.multiple_of(tl.cast(CQ, tl.int64), 16)
    unit = tl.program_id(0).to(tl.int64) * KB + tl.arange(0, KB)
    c = tl.arange(0, CP)
    at = (unit * CQ)[:, None] + c[None, :]
    slot = tl.load(slots_ptr + at, mask=(unit < units)[:, None] & (c < CQ)[None, :], other=0).to(tl.int32)
    some = slot > 0
    rank = tl.cumsum(some.to(tl.int32), axis=1)
    tl.store(inverse_ptr + (unit * CQ)[:, None] + rank - 1, c[None, :] * N + slot - 1, mask=some)
    tl.store(sizes_ptr + unit, tl.max(rank, axis=1), mask=unit < units)


@triton.jit(do_not_specialize=["S_kv", "rows"])
def selection_list_sum(
    part_ptr, inverse_ptr, sizes_ptr, acc_ptr, out_ptr, S_kv, N, CQ, rows,
    D: tl.constexpr, DC: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Adds the rows part[B, G, rows, N, D] of each key to acc[B, G, S_kv, D], which starts at 0 (FIRST).

    LAST: writes out[B, G, S_kv, D] instead. Programs [B, G, S_kv] x blocks of DC columns.
    """
    unit = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * DC + tl.arange(0, DC)
    inside = d < D
    size = tl.load(sizes_ptr + unit)
    base = part_ptr + unit // S_kv * (rows * D) * N + d
    entries = inverse_ptr + unit * CQ
    to = unit * D + d
    if FIRST:
        acc = tl.zeros((DC,), tl.float32)
    else:
        acc = tl.load(acc_ptr + to, mask=inside, other=0.0)
    for start in range(0, size, UNROLL):
        x = ()
        for i in tl.static_range(UNROLL):
            there = start + i < size
            at = tl.load(entries + start + i, mask=there, other=0).to(tl.int64)
            x = x + (tl.load(base + at * D, mask=inside & there, other=0.0),)
        for i in tl.static_range(UNROLL):
            acc += x[i].to(tl.float32)
    if LAST:
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(acc_ptr + to, acc, mask=inside)
