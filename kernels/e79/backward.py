# SPDX-License-Identifier: Apache-2.0
"""The E79 scan, backward: one program per sequence, from the last segment to the first.

``forward.py`` has the formulas; dS and dM are C tiles [R, CI] each, in fp32. A segment's states are recomputed once
from its checkpoint and the saved gates, which needs no sums, and kept in scratch; then its steps are undone, three
dependent stages of sums each. Their latency bounds it, and at n = 128 the registers: dS and dM alone take half of a
multiprocessor's. So what no later step needs, the gradients of k^, m^, v, q and the biases, is written in parts, along
rows and along columns; ``e79_finish`` adds them in parallel.
"""

import triton
import triton.language as tl

from .common import (
    add,
    column_sums,
    gated,
    load_columns,
    load_rows,
    load_tiles,
    norm_inverse,
    outer,
    product,
    row_sum,
    scale_rows,
    sigmoid,
    store_columns,
    store_four_rows,
    store_rows,
    store_tiles,
)


@triton.jit
def _gates(p, gates, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr):
    """Loads k and m by columns; r, p, delta, g by rows; c, w by columns."""
    k = load_columns(p, N, CI, C)
    m = load_columns(p + 3 * N, N, CI, C)
    r = load_rows(gates, N, R)
    h = load_rows(gates + N, N, R)
    d = load_rows(gates + 2 * N, N, R)
    g = load_rows(gates + 3 * N, N, R)
    c = load_columns(gates + 5 * N, N, CI, C)
    w = load_columns(gates + 6 * N, N, CI, C)
    return k, m, r, h, d, g, c, w


@triton.jit
def _vectors(p, dout, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, DOUT: tl.constexpr):
    """Loads q by columns; k, m and dout by rows."""
    q = load_columns(p + 2 * N, N, CI, C)
    kr = load_rows(p, N, R)
    mr = load_rows(p + 3 * N, N, R)
    do = kr
    if DOUT:
        do = load_rows(dout, N, R)
    return q, kr, mr, do


@triton.jit
def _states(x, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr):
    return load_tiles(x, 1, N, R, CI, C), load_tiles(x + N * N, 1, N, R, CI, C)


@triton.jit(do_not_specialize=["T", "B", "SEG", "has_ds", "has_dm"])
def e79_backward(
    dout_ptr, ds_ptr, dm_ptr, kvqm_ptr, gates_ptr, ckpt_ptr, scratch_ptr, parts_ptr, dbs_ptr, dbm_ptr, ds0_ptr, dm0_ptr,
    T, B, SEG, has_ds, has_dm,
    N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
    DOUT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of the states and the parts of all others.

    parts[T, B, P, N]: gradients of k^, m^, v and b_s along rows, of k^, m^ and q along columns; with BS = 2 of b_s
    along columns; with BM = 2 of b_m along rows and along columns. With one bias for all steps, its gradient is summed
    over T to dbs, dbm[B, 2, N].

    KEEP: the states stay in registers for the whole step, and the next step's are fetched ahead. Otherwise they are
    read again for each of the step's three stages.
    """
    b = tl.program_id(0).to(tl.int64)
    B = b * 0 + B  # int64 even if B is passed as a constant
    P: tl.constexpr = 7 + BS // 2 + 2 * (BM // 2)
    dS = load_tiles(ds_ptr + b * N * N, has_ds, N, R, CI, C)
    dM = load_tiles(dm_ptr + b * N * N, has_dm, N, R, CI, C)
    scratch = scratch_ptr + b * SEG * (2 * N * N)
    if BS == 1:
        dbs_r = tl.zeros((R,), tl.float32)
        dbs_c = ()
        for _ in tl.static_range(C):
            dbs_c = dbs_c + (tl.zeros((CI,), tl.float32),)
    if BM == 1:
        dbm_r = tl.zeros((R,), tl.float32)
        dbm_c = ()
        for _ in tl.static_range(C):
            dbm_c = dbm_c + (tl.zeros((CI,), tl.float32),)
    segments = (T + SEG - 1) // SEG
    for back in range(segments):
        first = (segments - 1 - back) * SEG
        steps = tl.minimum(SEG, T - first)
        # --- recompute the segment's states
        at = ckpt_ptr + ((segments - 1 - back).to(tl.int64) * 2 * B + b) * N * N
        S = load_tiles(at, 1, N, R, CI, C)
        M = load_tiles(at + B * N * N, 1, N, R, CI, C)
        row = first.to(tl.int64) * B + b
        p = kvqm_ptr + row * 4 * N
        gates = gates_ptr + row * 7 * N
        x = scratch
        k, m, r, h, d, g, c, w = _gates(p, gates, N, R, CI, C)
        for i in range(steps):
            more = (i + 1 < steps).to(tl.int64) * B
            p += more * 4 * N
            gates += more * 7 * N
            k1, m1, r1, h1, d1, g1, c1, w1 = _gates(p, gates, N, R, CI, C)
            store_tiles(x, S, N, R, CI, C)
            store_tiles(x + N * N, M, N, R, CI, C)
            x += 2 * N * N
            S = gated(S, r, c, d * norm_inverse(k, C), k, C)
            M = gated(M, h, w, g * norm_inverse(m, C), m, C)
            k, m, r, h, d, g, c, w = k1, m1, r1, h1, d1, g1, c1, w1
        tl.debug_barrier()
        # --- undo the segment's steps, last first; p and gates point to the last one
        row += (steps - 1).to(tl.int64) * B
        dout = dout_ptr + row * N
        parts = parts_ptr + row * P * N
        x -= 2 * N * N
        k, m, r, h, d, g, c, w = _gates(p, gates, N, R, CI, C)
        q, kr, mr, do = _vectors(p, dout, N, R, CI, C, DOUT)
        if KEEP:
            S, M = _states(x, N, R, CI, C)
        for i in range(steps):
            more = (i + 1 < steps).to(tl.int64) * B
            p -= more * 4 * N
            gates -= more * 7 * N
            dout -= more * N
            ik = norm_inverse(k, C)
            im = norm_inverse(m, C)
            if KEEP:
                x -= (i + 1 < steps).to(tl.int64) * 2 * N * N
                S1, M1 = _states(x, N, R, CI, C)
                k1, m1, r1, h1, d1, g1, c1, w1 = _gates(p, gates, N, R, CI, C)
                q1, kr1, mr1, do1 = _vectors(p, dout, N, R, CI, C, DOUT)
            else:
                S, M = _states(x, N, R, CI, C)
            # gradients of M's gates
            Sn = gated(S, r, c, d * ik, k, C)
            if DOUT:
                y = row_sum(Sn, q, C)
                sy = sigmoid(y)
                dy = do * y * sy * (2.0 + y * (1.0 - sy))
            else:
                dy = tl.zeros((R,), tl.float32)
            X = product(dM, M, C)
            e = row_sum(X, w, C) * h * (1.0 - h)
            dg = row_sum(dM, m, C) * im
            sums = column_sums(scale_rows(X, h, C) + scale_rows(Sn, dy, C), 2 * C)
            f = ()
            dq = ()
            for j in tl.static_range(C):
                f = f + (sums[j] * w[j] * (1.0 - w[j]),)
                dq = dq + (sums[C + j],)
            # gradients of S's gates
            dS = add(add(dS, outer(e * im, m, C), C), add(outer(mr * im, f, C), outer(dy, q, C), C), C)
            if not KEEP:
                tl.debug_barrier()
                S, M = _states(x, N, R, CI, C)
                Sn = gated(S, r, c, d * ik, k, C)
            Y = product(dS, S, C)
            a = row_sum(Y, c, C) * r * (1.0 - r)
            dd = row_sum(dS, k, C) * ik + dg
            dm_r = row_sum(Sn, f, C)
            Z = ()
            for j in tl.static_range(C):
                Z = Z + (dM[j] * g[:, None] + Sn[j] * e[:, None] - M[j] * dg[:, None],)
            sums = column_sums(scale_rows(Y, r, C) + Z, 2 * C)
            bc = ()
            dm_c = ()
            for j in tl.static_range(C):
                bc = bc + (sums[j] * c[j] * (1.0 - c[j]),)
                dm_c = dm_c + (sums[C + j],)
            # gradients of k^ and of the states
            if not KEEP:
                tl.debug_barrier()
                S, M = _states(x, N, R, CI, C)
            dk_r = row_sum(M, bc, C)
            Z = ()
            for j in tl.static_range(C):
                Z = Z + (dS[j] * d[:, None] + M[j] * a[:, None] - S[j] * dd[:, None],)
            dk_c = column_sums(Z, C)
            dS = gated(dS, r, c, -dd * ik, k, C)
            dM = add(gated(dM, h, w, -dg * im, m, C), add(outer(a * ik, k, C), outer(kr * ik, bc, C), C), C)
            store_four_rows(parts, dk_r, dm_r, dd, a, N, R)
            store_columns(parts + 4 * N, dk_c, N, R, CI, C)
            store_columns(parts + 5 * N, dm_c, N, R, CI, C)
            store_columns(parts + 6 * N, dq, N, R, CI, C)
            if BS == 1:
                dbs_r += a
                dbs_c = add(dbs_c, bc, C)
            if BS == 2:
                store_columns(parts + 7 * N, bc, N, R, CI, C)
            if BM == 1:
                dbm_r += e
                dbm_c = add(dbm_c, f, C)
            if BM == 2:
                store_rows(parts + (P - 2) * N, e, N, R)
                store_columns(parts + (P - 1) * N, f, N, R, CI, C)
            parts -= B * P * N
            if KEEP:
                k, m, r, h, d, g, c, w = k1, m1, r1, h1, d1, g1, c1, w1
                q, kr, mr, do = q1, kr1, mr1, do1
                S, M = S1, M1
            else:
                x -= 2 * N * N
                k, m, r, h, d, g, c, w = _gates(p, gates, N, R, CI, C)
                q, kr, mr, do = _vectors(p, dout, N, R, CI, C, DOUT)
        tl.debug_barrier()
    store_tiles(ds0_ptr + b * N * N, dS, N, R, CI, C)
    store_tiles(dm0_ptr + b * N * N, dM, N, R, CI, C)
    if BS == 1:
        store_rows(dbs_ptr + b * 2 * N, dbs_r, N, R)
        store_columns(dbs_ptr + b * 2 * N + N, dbs_c, N, R, CI, C)
    if BM == 1:
        store_rows(dbm_ptr + b * 2 * N, dbm_r, N, R)
        store_columns(dbm_ptr + b * 2 * N + N, dbm_c, N, R, CI, C)
