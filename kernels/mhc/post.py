# SPDX-License-Identifier: Apache-2.0
"""mHC's post (adds f_out and mixes the streams) and its gradients.

    out[o] = h_post[o] * f + sum_i R[o, i] * x[i]
    df = sum_o h_post[o] * g[o],  dx[i] = sum_o R[o, i] * g[o],  dh_post[o] = <g[o], f>,  dR[o, i] = <g[o], x[i]>

x and g are [T, n, D], f [T, D], all contiguous. A program of the forward has BD columns of all streams of one token,
one of the backward a token, BD columns a step. Bytes bound both: 2 n + 1 vectors of D a token forward, 3 n + 2
backward, each read or written once. No program of the forward waits for anything but its loads; the backward keeps its
n + n n dot products in registers, after each thread has added 8 neighbours, so that no second pass over x and no
atomics are needed.
"""

import triton
import triton.language as tl

from .contracted import add_weighted, mix_stream


@triton.jit
def load_mix(
    h_post_ptr, h_res_ptr, t, mask, N: tl.constexpr, HAS_RES: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Loads the mixing coefficients of tokens t (of any shape) in fp32: N of h_post, then R row by row with HAS_RES."""
    other = None if mask is None else 0.0
    c = ()
    for o in tl.static_range(N):
        c = c + (tl.load(h_post_ptr + t * N + o, mask=mask, other=other).to(tl.float32),)
    if HAS_RES:
        for o in tl.static_range(N):
            for i in tl.static_range(N):
                at = i * N + o if TRANSPOSE else o * N + i
                c = c + (tl.load(h_res_ptr + t * (N * N) + at, mask=mask, other=other).to(tl.float32),)
    return c


@triton.jit
def mhc_post(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, out_ptr, h_pre_ptr, h_in_ptr,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, HAS_RES: tl.constexpr, TRANSPOSE: tl.constexpr,
    COLLAPSE: tl.constexpr,
):  # fmt: skip
    """Computes out[o] = h_post[o] * f + sum_i R[o, i] * x[i], and with COLLAPSE h_in = sum_o h_pre[o] * out[o]."""
    DT: tl.constexpr = (D + BD - 1) // BD
    t = (tl.program_id(0) // DT).to(tl.int64)
    d = (tl.program_id(0) % DT) * BD + tl.arange(0, BD)
    dm = d < D
    f = tl.load(f_ptr + t * D + d, mask=dm, other=0.0)  # [BD]
    xs = ()
    for i in tl.static_range(N):
        xs = xs + (tl.load(x_ptr + (t * N + i) * D + d, mask=dm, other=0.0),)
    c = load_mix(h_post_ptr, h_res_ptr, t, None, N, HAS_RES, TRANSPOSE)
    f = f.to(tl.float32)
    if COLLAPSE:
        h_in = tl.zeros((BD,), tl.float32)
    for o in tl.static_range(N):
        y = mix_stream(c, f, xs, o, N, HAS_RES).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (t * N + o) * D + d, y, mask=dm)
        if COLLAPSE:
            h_in = add_weighted(h_in, tl.load(h_pre_ptr + t * N + o).to(tl.float32), y.to(tl.float32), o == 0)
    if COLLAPSE:
        tl.store(h_in_ptr + t * D + d, h_in.to(h_in_ptr.dtype.element_ty), mask=dm)


@triton.jit
def _thread_sum(v, B: tl.constexpr, N: tl.constexpr):
    """Sums 8 neighbours inside a thread, one after the other, [B] to [B // 8].

    ``tl.sum`` adds them in pairs from Triton 3.9 on, which takes more registers. With more than four streams the splits
    take more.
    """
    if N > 4:
        return tl.sum(tl.reshape(v, (B // 8, 8)), axis=1)
    even, odd = tl.split(tl.reshape(v, (B // 8, 2, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    a0, a4 = tl.split(v0)
    a1, a5 = tl.split(v1)
    a2, a6 = tl.split(v2)
    a3, a7 = tl.split(v3)
    return ((((((a0 + a1) + a2) + a3) + a4) + a5) + a6) + a7


@triton.jit
def mhc_post_backward(
    g_ptr, x_ptr, f_ptr, h_post_ptr, h_res_ptr, dh_in_ptr, dx_ptr, df_ptr, dh_post_ptr, dh_res_ptr, dh_pre_ptr,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, HAS_RES: tl.constexpr, TRANSPOSE: tl.constexpr,
    COLLAPSE: tl.constexpr,
):  # fmt: skip
    """Computes df, dx (the transposed mix), dh_post[o] = <g[o], f> and dR[o, i] = <g[o], x[i]>, in a fixed order.

    With COLLAPSE also dh_pre[o] = <dh_in, out[o]>; out is computed again, and rounded to g's dtype as the forward did.
    """
    E: tl.constexpr = 8
    t = tl.program_id(0).to(tl.int64)
    c = load_mix(h_post_ptr, h_res_ptr, t, None, N, HAS_RES, TRANSPOSE)
    dp = ()
    dr = ()
    dc = ()
    for _ in tl.static_range(N):
        dp = dp + (tl.zeros((BD // E,), tl.float32),)
        if COLLAPSE:
            dc = dc + (tl.zeros((BD // E,), tl.float32),)
        if HAS_RES:
            for _ in tl.static_range(N):
                dr = dr + (tl.zeros((BD // E,), tl.float32),)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        dm = d < D
        gs = ()
        xs = ()
        f = tl.load(f_ptr + t * D + d, mask=dm, other=0.0)
        for o in tl.static_range(N):
            gs = gs + (tl.load(g_ptr + (t * N + o) * D + d, mask=dm, other=0.0),)
        if HAS_RES or COLLAPSE:
            for i in tl.static_range(N):
                xs = xs + (tl.load(x_ptr + (t * N + i) * D + d, mask=dm, other=0.0),)
        if COLLAPSE:
            dh_in = tl.load(dh_in_ptr + t * D + d, mask=dm, other=0.0)
        f = f.to(tl.float32)
        df = tl.zeros((BD,), tl.float32)
        new_p = ()
        new_r = ()
        new_c = ()
        for o in tl.static_range(N):
            g = gs[o].to(tl.float32)
            df += c[o] * g
            new_p = new_p + (dp[o] + _thread_sum(g * f, BD, N),)
            if HAS_RES:
                for i in tl.static_range(N):
                    new_r = new_r + (dr[o * N + i] + _thread_sum(g * xs[i].to(tl.float32), BD, N),)
            if COLLAPSE:
                y = mix_stream(c, f, xs, o, N, HAS_RES).to(g_ptr.dtype.element_ty).to(tl.float32)
                new_c = new_c + (dc[o] + _thread_sum(dh_in.to(tl.float32) * y, BD, N),)
        dp = new_p
        dr = new_r
        dc = new_c
        tl.store(df_ptr + t * D + d, df.to(df_ptr.dtype.element_ty), mask=dm)
        for i in tl.static_range(N):
            if HAS_RES:
                dx = tl.zeros((BD,), tl.float32)
                for o in tl.static_range(N):
                    dx += c[N + o * N + i] * gs[o].to(tl.float32)
            else:
                dx = gs[i].to(tl.float32)
            tl.store(dx_ptr + (t * N + i) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=dm)
    for o in tl.static_range(N):
        tl.store(dh_post_ptr + t * N + o, tl.sum(dp[o], axis=0).to(dh_post_ptr.dtype.element_ty))
        if COLLAPSE:
            tl.store(dh_pre_ptr + t * N + o, tl.sum(dc[o], axis=0).to(dh_pre_ptr.dtype.element_ty))
        if HAS_RES:
            for i in tl.static_range(N):
                at = i * N + o if TRANSPOSE else o * N + i
                v = tl.sum(dr[o * N + i], axis=0).to(dh_res_ptr.dtype.element_ty)
                tl.store(dh_res_ptr + t * (N * N) + at, v)
