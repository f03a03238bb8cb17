# SPDX-License-Identifier: Apache-2.0
"""Kernels of single-pass mHC that pre and post do not have: coefficients alone, collapse with given weights.

    h_in = sum_i h_pre[i] * x[i];  dx[i] = h_pre[i] * dh_in,  dh_pre[i] = <dh_in, x[i]>

x[T, n, D] is contiguous, h_pre[T, n] was known before x. A program has BC tokens of the coefficients, BD columns of
one token of the collapse, or one token of its gradient, BD columns a step. Bytes bound the collapse and its gradient:
each vector of D is read or written once, and the dot products stay in registers to the end of the token.
"""

import triton
import triton.language as tl

from .contracted import add_weighted
from .pre import as_fp32, coefficients, collapse_place, load_streams


@triton.jit
def mhc_coefficients(
    part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, RUN,
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    K: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BC: tl.constexpr, HAS_RES: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
    OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Writes the coefficients of BC tokens from the projection's parts."""
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps = as_fp32(norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    coefficients(
        tl.program_id(0), part_ptr, alpha_ptr, bias_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr, T, RUN,
        norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
        K, N, NP, M, MP, GROUPS, GROUP, BC, True, HAS_RES, ITERS, FORM, OUTSIDE,
    )  # fmt: skip


@triton.jit
def mhc_collapse(
    x_ptr, h_pre_ptr, h_in_ptr, T,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Computes h_in = sum_i h_pre[i] * x[i]: BD columns of one token per program."""
    t, d = collapse_place(tl.program_id(0), T, D, BD)
    xs = load_streams(x_ptr, t, d, D, N, D % BD == 0)
    h_in = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(N):
        h_in = add_weighted(h_in, tl.load(h_pre_ptr + t * N + i).to(tl.float32), xs[i].to(tl.float32), i == 0)
    tl.store(h_in_ptr + t * D + d, h_in.to(h_in_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def mhc_collapse_backward(
    dh_in_ptr, x_ptr, h_pre_ptr, dx_ptr, dh_pre_ptr,
    D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Computes dx[i] = h_pre[i] * dh_in and dh_pre[i] = <dh_in, x[i]>, one token per program, in a fixed order."""
    t = tl.program_id(0).to(tl.int64)
    acc = ()
    for _ in tl.static_range(N):
        acc = acc + (tl.zeros((BD,), tl.float32),)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        dm = d < D
        g = tl.load(dh_in_ptr + t * D + d, mask=dm, other=0.0).to(tl.float32)
        xs = ()
        for i in tl.static_range(N):
            xs = xs + (tl.load(x_ptr + (t * N + i) * D + d, mask=dm, other=0.0),)
        new = ()
        for i in tl.static_range(N):
            dx = tl.load(h_pre_ptr + t * N + i).to(tl.float32) * g
            tl.store(dx_ptr + (t * N + i) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=dm)
            new = new + (acc[i] + g * xs[i].to(tl.float32),)
        acc = new
    for i in tl.static_range(N):
        tl.store(dh_pre_ptr + t * N + i, tl.sum(acc[i], axis=0).to(dh_pre_ptr.dtype.element_ty))
