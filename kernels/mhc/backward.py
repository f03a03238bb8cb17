# SPDX-License-Identifier: Apache-2.0
"""The backward of mHC's pre: <dh_in, x>, the coefficients' gradients, dx, dphi, and the sums of the parameters.

    dx = gamma * (dh_mix @ phi) + h_pre (x) dh_in - cx * x (+ dx_acc),  G = dh_mix.T @ x
    dphi = G * gamma,  dgamma = sum_j phi[j] * G[j]

x[T, n, D] is contiguous. Programs: one token (dots); BC tokens (coefficients, Sinkhorn's gradient); R tokens x BD
columns of one stream (dx); BK columns x every C-th tile of R tokens (dphi). Bytes bound it: x is read three times, dx
written once. That is faster than dx and dphi in one kernel, whose registers spill: so dx has no loop, and dphi
multiplies all bf16 terms of dh_mix, one above the other, in one product. Sums over tokens have two stages over a fixed
partition, the same in every run.
"""

import triton
import triton.language as tl

from .common import sinkhorn_grad, sum_parts


@triton.jit
def mhc_pre_backward_dots(
    dh_in_ptr, x_ptr, dots_ptr,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Computes dots[t, i] = <dh_in[t], x[t, i]>, one token per program."""
    t = tl.program_id(0).to(tl.int64)
    acc = ()
    for _ in tl.static_range(N):
        acc = acc + (tl.zeros((BD,), tl.float32),)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        dm = d < D
        g = tl.load(dh_in_ptr + t * D + d, mask=dm, other=0.0)
        xs = ()
        for i in tl.static_range(N):
            xs = xs + (tl.load(x_ptr + (t * N + i) * D + d, mask=dm, other=0.0),)
        g = g.to(tl.float32)
        new = ()
        for i in tl.static_range(N):
            new = new + (acc[i] + g * xs[i].to(tl.float32),)
        acc = new
    for i in tl.static_range(N):
        tl.store(dots_ptr + t * N + i, tl.sum(acc[i], axis=0))


@triton.jit
def _store_terms(rows_ptr, cols_ptr, row, col, v, mask, T, TP, MP: tl.constexpr, TERMS: tl.constexpr):
    """Stores v[t, m] as bf16 terms, largest first, or as fp32 if TERMS is 0.

    rows_ptr[2, T, MP] is for dx, cols_ptr[TERMS * MP, TP] for dphi.
    """
    if TERMS == 0:
        tl.store(rows_ptr + row * MP + col, v, mask=mask)
        tl.store(cols_ptr + col * TP + row, v, mask=mask)
    else:
        for k in tl.static_range(TERMS):
            term = v.to(tl.bfloat16)
            if k < 2:
                tl.store(rows_ptr + (k * tl.cast(T, tl.int64) + row) * MP + col, term, mask=mask)
            tl.store(cols_ptr + (k * MP + col) * TP + row, term, mask=mask)
            v = v - term.to(tl.float32)


@triton.jit
def mhc_pre_backward_coefficients(
    dots_ptr, dh_post_ptr, dh_res_ptr, alpha_ptr, bias_ptr, h_mix_ptr, inv_ptr, rows_ptr, cols_ptr, cx_ptr,
    sums_ptr, red_ptr, T, TP, post_mult, sinkhorn_eps, norm_eps,
    K: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, RP: tl.constexpr,
    BC: tl.constexpr, HAS_DIN: tl.constexpr, HAS_POST: tl.constexpr, HAS_DPOST: tl.constexpr,
    HAS_RES: tl.constexpr, HAS_DRES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr,
    OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Computes dh_mix[t, :MP], zero from M on (see _store_terms), cx[t] = dinv * inv^3 / K, and parts of dbias, dalpha.

    Each program writes its part: M sums for dbias, then those for dalpha. OUTSIDE: inv_ptr holds the root of the mean
    of squares, to which norm_eps is added; cx is dinv * inv^2 / (K * root), and 0 where the root is 0.
    """
    # Generated code passes Python floats as fp64.
    post_mult = tl.cast(post_mult, tl.float32)
    sinkhorn_eps = tl.cast(sinkhorn_eps, tl.float32)
    pid = tl.program_id(0)
    t = pid * BC + tl.arange(0, BC)
    tm = t < T
    row = t.to(tl.int64)
    i = tl.arange(0, NP)
    m = tl.arange(0, MP)
    ok = (i < N)[None, :]
    nm = tm[:, None] & ok
    if OUTSIDE:
        root = tl.load(inv_ptr + row, mask=tm, other=1.0)  # [BC]
        inv = 1.0 / (root + tl.cast(norm_eps, tl.float32))
    else:
        inv = tl.load(inv_ptr + row, mask=tm, other=0.0)  # [BC]
    pad = tm[:, None] & (m >= M)[None, :]
    _store_terms(rows_ptr, cols_ptr, row[:, None], m[None, :], tl.zeros((BC, MP), tl.float32), pad, T, TP, MP, TERMS)
    red = red_ptr + pid * RP
    off = row[:, None] * M + i[None, :]
    h = tl.load(h_mix_ptr + off, mask=nm, other=0.0)  # [BC, NP]
    z = h * inv[:, None]
    a = tl.load(alpha_ptr).to(tl.float32)
    if HAS_DIN:
        lin = a * z + tl.load(bias_ptr + i, mask=i < N, other=0.0).to(tl.float32)[None, :]
        g = tl.load(dots_ptr + row[:, None] * N + i[None, :], mask=nm, other=0.0).to(tl.float32)
        # sigmoid(-z) keeps the digits that 1 - sigmoid(z) loses in saturation.
        d = g * tl.sigmoid(lin) * tl.sigmoid(-lin)
    else:
        d = tl.zeros((BC, NP), tl.float32)
    _store_terms(rows_ptr, cols_ptr, row[:, None], i[None, :], a * d * inv[:, None], nm, T, TP, MP, TERMS)
    dinv = tl.sum(a * d * h, axis=1)
    tl.store(red + i, tl.sum(d, axis=0), mask=i < N)
    tl.store(red + M, tl.sum(tl.sum(d * z, axis=1), axis=0))
    if HAS_POST:
        a = tl.load(alpha_ptr + 1).to(tl.float32)
        h = tl.load(h_mix_ptr + off + N, mask=nm, other=0.0)
        z = h * inv[:, None]
        if HAS_DPOST:
            lin = a * z + tl.load(bias_ptr + N + i, mask=i < N, other=0.0).to(tl.float32)[None, :]
            g = tl.load(dh_post_ptr + row[:, None] * N + i[None, :], mask=nm, other=0.0).to(tl.float32)
            d = post_mult * g * tl.sigmoid(lin) * tl.sigmoid(-lin)
        else:
            d = tl.zeros((BC, NP), tl.float32)
        _store_terms(rows_ptr, cols_ptr, row[:, None], N + i[None, :], a * d * inv[:, None], nm, T, TP, MP, TERMS)
        dinv += tl.sum(a * d * h, axis=1)
        tl.store(red + N + i, tl.sum(d, axis=0), mask=i < N)
        tl.store(red + M + 1, tl.sum(tl.sum(d * z, axis=1), axis=0))
    if HAS_RES:
        a = tl.load(alpha_ptr + 2).to(tl.float32)
        ij = i[:, None] * N + i[None, :]
        valid = (i < N)[:, None] & (i < N)[None, :]
        rm = tm[:, None, None] & valid[None, :, :]
        h3 = tl.load(h_mix_ptr + row[:, None, None] * M + 2 * N + ij[None, :, :], mask=rm, other=0.0)
        z3 = h3 * inv[:, None, None]
        if HAS_DRES:
            d3 = tl.load(dh_res_ptr + row[:, None, None] * (N * N) + ij[None, :, :], mask=rm, other=0.0).to(tl.float32)
            if ITERS > 0:
                lin3 = a * z3 + tl.load(bias_ptr + 2 * N + ij, mask=valid, other=0.0).to(tl.float32)[None, :, :]
                d3 = sinkhorn_grad(
                    d3, lin3, valid[None, :, :], ok, sums_ptr, t, tm, T, sinkhorn_eps, N, NP, ITERS, FORM
                )
                d3 = tl.where(rm, d3, 0.0)
        else:
            d3 = tl.zeros((BC, NP, NP), tl.float32)
        out3 = a * d3 * inv[:, None, None]
        _store_terms(rows_ptr, cols_ptr, row[:, None, None], 2 * N + ij[None, :, :], out3, rm, T, TP, MP, TERMS)
        dinv += tl.sum(tl.sum(a * d3 * h3, axis=2), axis=1)
        tl.store(red + 2 * N + ij, tl.sum(d3, axis=0), mask=valid)
        tl.store(red + M + 2, tl.sum(tl.sum(tl.sum(d3 * z3, axis=2), axis=1), axis=0))
    if OUTSIDE:
        # Divided by 1 where there is no direction: a vector norm's gradient at 0 is 0.
        cx = tl.where(root > 0.0, dinv * inv * (inv / tl.where(root > 0.0, root, 1.0)) / K, 0.0)
        tl.store(cx_ptr + row, cx, mask=tm)
    else:
        tl.store(cx_ptr + row, dinv * inv * inv * inv / K, mask=tm)


@triton.jit
def mhc_pre_backward_dx(
    x_ptr, dh_in_ptr, h_pre_ptr, rows_ptr, cx_ptr, phi_ptr, gamma_ptr, dx_acc_ptr, dx_ptr, T,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    R: tl.constexpr, BD: tl.constexpr,
    HAS_DIN: tl.constexpr, HAS_ACC: tl.constexpr, HAS_GAMMA: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes dx = gamma * (dh_mix @ phi) + h_pre (x) dh_in - cx * x (+ dx_acc).

    One program: R tokens, BD columns of one stream.
    """
    # Streams vary fastest, so that programs that share columns of dh_in run at the same time.
    DT: tl.constexpr = (D + BD - 1) // BD
    i = tl.program_id(0) % N
    d = (tl.program_id(0) // N % DT) * BD + tl.arange(0, BD)
    # Last tokens first, because the dot products left them in L2.
    tile = (T + R - 1) // R - 1 - tl.program_id(0) // (N * DT)
    m = tl.arange(0, MP)
    K: tl.constexpr = N * D
    dm = d < D
    w = tl.load(phi_ptr + m[:, None] * K + i * D + d[None, :], mask=(m < M)[:, None] & dm[None, :], other=0.0).to(
        tl.float32
    )  # [MP, BD]
    if HAS_GAMMA:
        w = w * tl.load(gamma_ptr + i * D + d, mask=dm, other=0.0).to(tl.float32)[None, :]
    if TERMS > 0:
        w_hi = w.to(tl.bfloat16)
        w_lo = (w - w_hi.to(tl.float32)).to(tl.bfloat16)
    t = tile * R + tl.arange(0, R)
    tm = t < T
    row = t.to(tl.int64)
    if D % BD == 0:
        mask = tm[:, None]
    else:
        mask = tm[:, None] & dm[None, :]
    at = row[:, None] * K + i * D + d[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)  # [R, BD]
    if HAS_DIN:
        din = tl.load(dh_in_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0)  # [R, BD]
    if HAS_ACC:
        prev = tl.load(dx_acc_ptr + at, mask=mask, other=0.0)
    gm = row[:, None] * MP + m[None, :]
    g0 = tl.load(rows_ptr + gm, mask=tm[:, None], other=0.0)  # [R, MP]
    if TERMS == 0:
        dx = tl.dot(g0, w, input_precision=PREC)
    else:
        g1 = tl.load(rows_ptr + tl.cast(T, tl.int64) * MP + gm, mask=tm[:, None], other=0.0)
        dx = tl.dot(g0, w_lo)
        dx = tl.dot(g1, w_hi, dx)
        dx = tl.dot(g0, w_hi, dx)
    dx -= tl.load(cx_ptr + row, mask=tm, other=0.0)[:, None] * x.to(tl.float32)
    if HAS_DIN:
        dx += tl.load(h_pre_ptr + row * N + i, mask=tm, other=0.0)[:, None] * din.to(tl.float32)
    if HAS_ACC:
        dx += prev.to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def mhc_pre_backward_dphi(
    x_ptr, cols_ptr, part_ptr, T, TP, STEPS,
    K: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, FOLD: tl.constexpr, C: tl.constexpr, Z: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes part[c * Z + z] of G [MP, K].

    It is the sum over every C-th tile of R tokens and over the FOLD terms of dh_mix from z * FOLD on.
    """
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    c = tl.program_id(1) // Z
    z = tl.program_id(1) % Z
    km = k < K
    r = z * FOLD * MP + tl.arange(0, FOLD * MP)
    if TERMS == 0:
        rm = r < M
    else:
        rm = (r % MP < M) & (r < TERMS * MP)
    acc = tl.zeros((FOLD * MP, BK), tl.float32)
    for step in range(STEPS):
        t = ((STEPS - 1 - step) * C + c) * R + tl.arange(0, R)
        tm = t < T
        g = tl.load(cols_ptr + r.to(tl.int64)[:, None] * TP + t[None, :], mask=rm[:, None] & tm[None, :], other=0.0)
        at = t.to(tl.int64)[:, None] * K + k[None, :]
        if K % BK == 0:
            x = tl.load(x_ptr + at, mask=tm[:, None], other=0.0)  # [R, BK]
        else:
            x = tl.load(x_ptr + at, mask=tm[:, None] & km[None, :], other=0.0)
        if TERMS == 0:
            acc += tl.dot(g, x.to(tl.float32), input_precision=PREC)
        else:
            acc = tl.dot(g, x, acc)
    m = tl.arange(0, MP)
    total = tl.sum(tl.reshape(acc, (FOLD, MP, BK)), axis=0)  # [MP, BK]
    out = part_ptr + (tl.program_id(1) * MP + m).to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out, total, mask=(m < M)[:, None] & km[None, :])


@triton.jit
def mhc_pre_backward_finish(
    part_ptr, red_ptr, phi_ptr, gamma_ptr, dphi_ptr, dgamma_ptr, dalpha_ptr, dbias_ptr, P,
    K: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, A: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr,
    BK: tl.constexpr, BP: tl.constexpr, HAS_GAMMA: tl.constexpr,
):  # fmt: skip
    """Sums the parts: G, dphi = G * gamma, dgamma = sum_j phi[j] * G[j]; in the last program dbias and dalpha."""
    pid = tl.program_id(0)
    if pid < (K + BK - 1) // BK:
        k = pid * BK + tl.arange(0, BK)
        m = tl.arange(0, MP)
        mask = (m < M)[:, None] & (k < K)[None, :]
        at = m[:, None] * K + k[None, :]
        stride: tl.constexpr = K * MP
        G = sum_parts(part_ptr, at, mask, stride, PARTS)  # [MP, BK]
        if HAS_GAMMA:
            phi = tl.load(phi_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dgamma_ptr + k, tl.sum(phi * G, axis=0).to(dgamma_ptr.dtype.element_ty), mask=k < K)
            G = G * tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        tl.store(dphi_ptr + at, G.to(dphi_ptr.dtype.element_ty), mask=mask)
    else:
        r = tl.arange(0, RP)
        p = tl.arange(0, BP)
        acc = tl.zeros((BP, RP), tl.float32)
        for p0 in range(0, P, BP):
            acc += tl.load(
                red_ptr + (p0 + p)[:, None] * RP + r[None, :],
                mask=(p0 + p < P)[:, None] & (r < M + A)[None, :], other=0.0,
            )  # fmt: skip
        total = tl.sum(acc, axis=0)  # [RP]
        tl.store(dbias_ptr + r, total.to(dbias_ptr.dtype.element_ty), mask=r < M)
        tl.store(dalpha_ptr + (r - M), total.to(dalpha_ptr.dtype.element_ty), mask=(r >= M) & (r < M + A))
