# SPDX-License-Identifier: Apache-2.0
"""Sums of products whose bits no compiler chooses: each product but the first is added by an explicit fma.

``a * b + c * d`` may become an fma of either product, and a product may be fused into a sum that follows it. Kernels
that must give the same bits (few tokens and many, fused and separate ops) therefore share these functions, on tiles of
any shape. They cost what the contracted sums would: one instruction a product.
"""

import triton
import triton.language as tl


@triton.jit
def mix_stream(c, f, xs, o: tl.constexpr, N: tl.constexpr, HAS_RES: tl.constexpr):
    """Returns h_post[o] * f + sum_i R[o, i] * x[i] in fp32, not rounded.

    c holds h_post, then R row by row with HAS_RES, in fp32; without it R is the identity.
    """
    if HAS_RES:
        y = c[o] * f
        for i in tl.static_range(N):
            y = tl.fma(c[N + o * N + i], xs[i].to(tl.float32), y)
    else:
        y = tl.fma(c[o], f, xs[o].to(tl.float32))
    return y


@triton.jit
def add_weighted(acc, w, x, FIRST: tl.constexpr):
    """Returns acc + w * x, rounded once, or w * x with FIRST."""
    if FIRST:
        y = w * x
    else:
        y = tl.fma(w, x, acc)
    return y


@triton.jit
def product(a, b):
    """Returns a * b, rounded; what follows cannot be fused with it."""
    return tl.fma(a, b, 0.0)


@triton.jit
def norm_factor(ss, K: tl.constexpr, eps, OUTSIDE: tl.constexpr):
    """Returns v's factor from the sum of squares ss, and what the backward reads of it.

    That is the factor 1 / sqrt(ss / K + eps), or with OUTSIDE the root, since 1 / (sqrt(ss / K) + eps) would lose the
    digits of a small one.
    """
    if OUTSIDE:
        kept = tl.sqrt(ss / K)
        factor = 1.0 / (kept + eps)
    else:
        kept = tl.rsqrt(tl.fma(ss, 1.0 / K, eps))
        factor = kept
    return factor, kept


@triton.jit
def logit(alpha, h, inv, bias):
    """Returns alpha * (h * inv) + bias."""
    return tl.fma(alpha, h * inv, bias)
