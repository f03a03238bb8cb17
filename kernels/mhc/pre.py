# SPDX-License-Identifier: Apache-2.0
"""The forward of mHC's pre: a split-K projection, then collapse and coefficients in one launch (arXiv 2512.24880).

    h_mix = phi @ (gamma * vec(x[t])),  z = alpha * h_mix * inv_rms + bias
    h_pre = sigmoid(z) + hc_eps,  h_post = post_mult * sigmoid(z) + post_eps,  h_res = sinkhorn(z)
    h_in = sum_i h_pre[i] * x[t, i]

x[T, n, D] and phi[M, n D] are contiguous. A projection program takes BT tokens, BK of K = n D columns a step, and one
of 4 groups of 8 sections of K; up to 512 tokens one section, so that few tokens fill the device too. A collapse
program takes BD columns of one token, a coefficients program BC tokens. Memory bounds both launches: x is read twice,
h_in written once. phi's bf16 terms are split once, by a launch of their own, except for few tokens; the products run
on tensor cores; the coefficients' programs with their Sinkhorn iterations hide behind the collapse, which begins with
the tokens that the projection left in the L2.
"""

import triton
import triton.language as tl

from .common import sinkhorn
from .contracted import add_weighted, logit, norm_factor, product


@triton.jit
def mhc_pre_weights(
    phi_ptr, gamma_ptr, w_ptr,
    K: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, BK: tl.constexpr, HAS_GAMMA: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Writes w[term, :M] = phi * gamma as TERMS bf16 terms, largest first, or fp32 if TERMS = 0; rows M .. MP are 0."""
    m = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    mask = k < K
    w = tl.load(phi_ptr + m * K + k, mask=mask & (m < M), other=0.0).to(tl.float32)
    if HAS_GAMMA:
        w = product(w, tl.load(gamma_ptr + k, mask=mask, other=0.0).to(tl.float32))
    if TERMS == 0:
        tl.store(w_ptr + m * K + k, w, mask=mask)
    for term in tl.static_range(TERMS):
        v = w.to(tl.bfloat16)
        tl.store(w_ptr + (term * MP + m) * K + k, v, mask=mask)
        w = w - v.to(tl.float32)


@triton.jit
def mhc_pre_project(
    x_ptr, w_ptr, gamma_ptr, part_ptr, T, RUN,
    K: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, KS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, HAS_GAMMA: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Writes part[p, t, :M] = x @ w.T and part[p, t, M] = sum(x * x), each over RUN sections of KS columns.

    Part p begins at column p * RUN * KS. Sections are summed one after the other, here or by the reader of part, so the
    bits do not depend on RUN. With SPLIT (if TERMS > 0), w is phi, and the terms of phi * gamma, which
    ``mhc_pre_weights`` would write, are made here.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part = tl.program_id(1)
    m = tl.arange(0, MP)
    tm = t < T
    rows = t.to(tl.int64) * K
    acc = tl.zeros((BT, MP), tl.float32)
    total = tl.zeros((BT, MP), tl.float32)
    ss = tl.zeros((BT,), tl.float32)
    ss_total = tl.zeros((BT,), tl.float32)
    for k0 in range(0, RUN * KS, BK):
        k = part * RUN * KS + k0 + tl.arange(0, BK)
        km = k < K
        if EVEN:
            x = tl.load(x_ptr + rows[:, None] + k[None, :], mask=tm[:, None], other=0.0)  # [BT, BK]
        else:
            x = tl.load(x_ptr + rows[:, None] + k[None, :], mask=tm[:, None] & km[None, :], other=0.0)
        if SPLIT:
            w = tl.load(w_ptr + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & km[:, None], other=0.0)
            w = w.to(tl.float32)
            if HAS_GAMMA:
                w = product(w, tl.load(gamma_ptr + k, mask=km, other=0.0).to(tl.float32)[:, None])
            terms = ()
            for _ in tl.static_range(TERMS):
                v = w.to(tl.bfloat16)
                terms = terms + (v,)
                w = w - v.to(tl.float32)
        if TERMS == 0:
            w = tl.load(w_ptr + m[None, :] * K + k[:, None], mask=km[:, None], other=0.0)
            acc += tl.dot(x.to(tl.float32), w, input_precision=PREC)
        else:
            # Tensor cores round their running sum towards zero: smallest terms first, short chains, then fp32.
            d = tl.zeros((BT, MP), tl.float32)
            for back in tl.static_range(TERMS):
                if SPLIT:
                    v = terms[TERMS - 1 - back]
                else:
                    at = (TERMS - 1 - back) * MP * K + m[None, :] * K + k[:, None]
                    wm = (m < M)[None, :] if EVEN else (m < M)[None, :] & km[:, None]
                    v = tl.load(w_ptr + at, mask=wm, other=0.0)  # [BK, MP]
                d = tl.dot(x, v, d)
            acc += d
        xf = x.to(tl.float32)
        ss += tl.sum(xf * xf, axis=1)
        last = (k0 + BK) % KS == 0
        total = tl.where(last, total + acc, total)
        acc = tl.where(last, 0.0, acc)
        ss_total = tl.where(last, ss_total + ss, ss_total)
        ss = tl.where(last, 0.0, ss)
    out = part_ptr + (tl.cast(part, tl.int64) * T + t)[:, None] * MP + m[None, :]
    tl.store(out, tl.where((m == M)[None, :], ss_total[:, None], total), mask=tm[:, None] & (m <= M)[None, :])


@triton.jit
def _sum_sections(part_ptr, off, mask, stride, RUN, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Sums a projection's parts, in one order for RUN = GROUP (a part per group) and RUN = 1 (a part per section)."""
    acc = tl.load(part_ptr + off, mask=mask, other=0.0)
    if RUN == 1:
        for s in tl.static_range(1, GROUP):
            acc += tl.load(part_ptr + s * stride + off, mask=mask, other=0.0)
        for g in tl.static_range(1, GROUPS):
            group = tl.load(part_ptr + g * GROUP * stride + off, mask=mask, other=0.0)
            for s in tl.static_range(1, GROUP):
                group += tl.load(part_ptr + (g * GROUP + s) * stride + off, mask=mask, other=0.0)
            acc += group
    else:
        for g in tl.static_range(1, GROUPS):
            acc += tl.load(part_ptr + g * stride + off, mask=mask, other=0.0)
    return acc


@triton.jit
def _coefficients(
    t, tm, inv, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr,
    hc_eps, post_mult, post_eps, sinkhorn_eps,
    N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Writes the coefficients of tokens t with mask tm, after this program has written their h_mix; inv is inv_rms."""
    row = t.to(tl.int64)
    tl.debug_barrier()
    i = tl.arange(0, NP)
    ok = (i < N)[None, :]
    nm = tm[:, None] & ok
    h = tl.load(h_mix_ptr + row[:, None] * M + i[None, :], mask=nm, other=0.0)  # [BC, NP]
    bias = tl.load(bias_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    pre = tl.sigmoid(logit(tl.load(alpha_ptr).to(tl.float32), h, inv[:, None], bias[None, :])) + hc_eps
    tl.store(h_pre_ptr + row[:, None] * N + i[None, :], pre, mask=nm)
    if HAS_POST:
        h = tl.load(h_mix_ptr + row[:, None] * M + N + i[None, :], mask=nm, other=0.0)
        bias = tl.load(bias_ptr + N + i, mask=i < N, other=0.0).to(tl.float32)
        z = logit(tl.load(alpha_ptr + 1).to(tl.float32), h, inv[:, None], bias[None, :])
        post = tl.fma(post_mult, tl.sigmoid(z), post_eps)
        tl.store(h_post_ptr + row[:, None] * N + i[None, :], post, mask=nm)
    if HAS_RES:
        ij = i[:, None] * N + i[None, :]  # [NP, NP]
        valid = (i < N)[:, None] & (i < N)[None, :]
        rm = tm[:, None, None] & valid[None, :, :]
        h3 = tl.load(h_mix_ptr + row[:, None, None] * M + 2 * N + ij[None, :, :], mask=rm, other=0.0)
        bias3 = tl.load(bias_ptr + 2 * N + ij, mask=valid, other=0.0).to(tl.float32)
        r = logit(tl.load(alpha_ptr + 2).to(tl.float32), h3, inv[:, None, None], bias3[None, :, :])
        if ITERS > 0:
            r = sinkhorn(r, valid[None, :, :], ok, sinkhorn_eps, ITERS, FORM)
        tl.store(h_res_ptr + row[:, None, None] * (N * N) + ij[None, :, :], r, mask=rm)


@triton.jit
def coefficients(
    pid, part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, RUN,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    K: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr,
    ITERS: tl.constexpr, FORM: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes inv_rms (with OUTSIDE the root), h_mix and the coefficients of BC tokens."""
    t = pid * BC + tl.arange(0, BC)
    tm = t < T
    m = tl.arange(0, MP)
    row = t.to(tl.int64)
    stride = tl.cast(T, tl.int64) * MP
    nm = tm[:, None] & (m <= M)[None, :]
    mix = tl.zeros((BC, MP), tl.float32)
    # As _sum_sections, but in a loop over groups: unrolled, it would take most of the kernel's compile time.
    for g in range(GROUPS):
        at = part_ptr + row[:, None] * MP + m[None, :]
        if RUN == 1:
            at += g * GROUP * stride
            group = tl.load(at, mask=nm, other=0.0)
            for s in tl.static_range(1, GROUP):
                group += tl.load(at + s * stride, mask=nm, other=0.0)
        else:
            group = tl.load(at + g * stride, mask=nm, other=0.0)
        mix += group
    inv, kept = norm_factor(tl.sum(tl.where((m == M)[None, :], mix, 0.0), axis=1), K, norm_eps, OUTSIDE)  # [BC]
    tl.store(inv_ptr + row, kept, mask=tm)
    # The columns are read again below, in the shapes that the coefficients need.
    tl.store(h_mix_ptr + row[:, None] * M + m[None, :], mix, mask=nm & (m < M)[None, :])
    _coefficients(
        t, tm, inv, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr,
        hc_eps, post_mult, post_eps, sinkhorn_eps, N, NP, M, HAS_POST, HAS_RES, ITERS, FORM,
    )  # fmt: skip


@triton.jit
def token_coefficients(
    t, mix, ss, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    K: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, BC: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
    OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes what ``coefficients`` does, of token t from mix [MP] and the sum of squares ss.

    They are computed for BC copies of the token, of which one is stored: in the shapes of ``coefficients``, so that
    sums inside a token have the same order.
    """
    m = tl.arange(0, MP)
    inv, kept = norm_factor(ss, K, norm_eps, OUTSIDE)
    tl.store(inv_ptr + t, kept)
    tl.store(h_mix_ptr + t * M + m, mix, mask=m < M)
    c = tl.arange(0, BC)
    _coefficients(
        t + 0 * c, c == 0, inv + tl.zeros((BC,), tl.float32), alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr,
        h_mix_ptr, hc_eps, post_mult, post_eps, sinkhorn_eps, N, NP, M, HAS_POST, HAS_RES, ITERS, FORM,
    )  # fmt: skip


@triton.jit
def _section_coefficients(
    t, part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, RUN,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    K: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BC: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr,
    FORM: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Does for token t what ``coefficients`` does for BC tokens; loads all parts at once."""
    m = tl.arange(0, MP)
    mix = _sum_sections(part_ptr, t * MP + m, m <= M, tl.cast(T, tl.int64) * MP, RUN, GROUPS, GROUP)
    token_coefficients(
        t, mix, tl.sum(tl.where(m == M, mix, 0.0), axis=0), alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr,
        h_mix_ptr, inv_ptr, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
        K, N, NP, M, MP, BC, HAS_POST, HAS_RES, ITERS, FORM, OUTSIDE,
    )  # fmt: skip


@triton.jit
def as_fp32(a, b, c, d, e):
    """Casts to fp32, because generated code passes Python floats as fp64."""
    return (
        tl.cast(a, tl.float32), tl.cast(b, tl.float32), tl.cast(c, tl.float32), tl.cast(d, tl.float32),
        tl.cast(e, tl.float32),
    )  # fmt: skip


@triton.jit
def collapse_place(pid, T, D: tl.constexpr, BD: tl.constexpr):
    """Returns the token and the columns [BD] of a collapse program."""
    DT: tl.constexpr = (D + BD - 1) // BD
    # Last tokens first, because the projection left them in L2.
    return (T - 1 - pid // DT).to(tl.int64), (pid % DT) * BD + tl.arange(0, BD)


@triton.jit
def load_streams(x_ptr, t, d, D: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr):
    """Loads columns d of token t's streams, N times [BD]. EVEN: no column is beyond D."""
    xs = ()
    for i in tl.static_range(N):
        # post first reads what is read here last, so keep it in L2.
        at = x_ptr + t * (N * D) + i * D + d
        if EVEN:
            xs = xs + (tl.load(at, eviction_policy="evict_last"),)
        else:
            xs = xs + (tl.load(at, mask=d < D, other=0.0, eviction_policy="evict_last"),)
    return xs


@triton.jit
def store_collapsed(h_in_ptr, t, d, xs, pre, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """Stores h_in[t, d] = sum_i pre[i] * xs[i]; pre is [NP]."""
    i = tl.arange(0, pre.shape[0])
    o = tl.zeros((BD,), tl.float32)
    for s in tl.static_range(N):
        o = add_weighted(o, tl.sum(tl.where(i == s, pre, 0.0), axis=0), xs[s].to(tl.float32), s == 0)
    tl.store(h_in_ptr + t * D + d, o.to(h_in_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def mhc_pre_collapse(
    x_ptr, part_ptr, alpha_ptr, bias_ptr, h_in_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, RUN, CP,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, FEW: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes the coefficients of BC tokens (programs below CP) or BD columns of one token's h_in (the others).

    With FEW, a program of coefficients has one token, whose parts it loads all at once.
    """
    pid = tl.program_id(0)
    K: tl.constexpr = N * D
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps = as_fp32(norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    if pid < CP:
        if FEW:
            _section_coefficients(
                pid.to(tl.int64), part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T,
                RUN, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
                K, N, NP, M, MP, GROUPS, GROUP, BC, HAS_POST, HAS_RES, ITERS, FORM, OUTSIDE,
            )  # fmt: skip
        else:
            coefficients(
                pid, part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, RUN,
                norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
                K, N, NP, M, MP, GROUPS, GROUP, BC, HAS_POST, HAS_RES, ITERS, FORM, OUTSIDE,
            )  # fmt: skip
    else:
        t, d = collapse_place(pid - CP, T, D, BD)
        xs = load_streams(x_ptr, t, d, D, N, D % BD == 0)
        i = tl.arange(0, NP)
        stride = tl.cast(T, tl.int64) * MP
        at = tl.where(i < N, i, 0)
        ss = _sum_sections(part_ptr, t * MP + M + 0 * at, i < N, stride, RUN, GROUPS, GROUP)  # [NP], all equal
        inv, _ = norm_factor(ss, K, norm_eps, OUTSIDE)
        h = _sum_sections(part_ptr, t * MP + at, i < N, stride, RUN, GROUPS, GROUP)  # [NP]
        bias = tl.load(bias_ptr + i, mask=i < N, other=0.0).to(tl.float32)
        pre = tl.sigmoid(logit(tl.load(alpha_ptr).to(tl.float32), h, inv, bias)) + hc_eps
        store_collapsed(h_in_ptr, t, d, xs, pre, D, N, BD)
