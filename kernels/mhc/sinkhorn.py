# SPDX-License-Identifier: Apache-2.0
"""The Sinkhorn iterations of mHC on given logits, and their gradient.

logits[T, n, n] contiguous; ``common.py`` has the steps. A program has BC tokens in one warp (32 of 4 x 4), as one tile
[BC, NP, NP] in registers, so that nothing but logits and result moves through memory forward; the backward also writes
and reads the divisors. The chain of 2 ITERS dependent sums bounds both: one warp has no barriers to wait for.
"""

import triton
import triton.language as tl

from .common import sinkhorn, sinkhorn_grad


@triton.jit
def mhc_sinkhorn(
    logits_ptr, out_ptr, T, eps,
    N: tl.constexpr, NP: tl.constexpr, BC: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    # Generated code passes Python floats as fp64.
    eps = tl.cast(eps, tl.float32)
    t = tl.program_id(0) * BC + tl.arange(0, BC)
    i = tl.arange(0, NP)
    ij = i[:, None] * N + i[None, :]
    valid = ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    off = t.to(tl.int64)[:, None, None] * (N * N) + ij[None, :, :]  # [BC, NP, NP]
    mask = (t < T)[:, None, None] & valid
    c = tl.load(logits_ptr + off, mask=mask, other=0.0).to(tl.float32)
    if ITERS > 0:
        c = sinkhorn(c, valid, (i < N)[None, :], eps, ITERS, FORM)
    tl.store(out_ptr + off, c.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def mhc_sinkhorn_backward(
    grad_ptr, logits_ptr, out_ptr, sums_ptr, T, eps,
    N: tl.constexpr, NP: tl.constexpr, BC: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    # Generated code passes Python floats as fp64.
    eps = tl.cast(eps, tl.float32)
    t = tl.program_id(0) * BC + tl.arange(0, BC)
    i = tl.arange(0, NP)
    ij = i[:, None] * N + i[None, :]
    valid = ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    off = t.to(tl.int64)[:, None, None] * (N * N) + ij[None, :, :]  # [BC, NP, NP]
    mask = (t < T)[:, None, None] & valid
    c = tl.load(logits_ptr + off, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + off, mask=mask, other=0.0).to(tl.float32)
    if ITERS > 0:
        g = sinkhorn_grad(g, c, valid, (i < N)[None, :], sums_ptr, t, t < T, T, eps, N, NP, ITERS, FORM)
    tl.store(out_ptr + off, g.to(out_ptr.dtype.element_ty), mask=mask)
