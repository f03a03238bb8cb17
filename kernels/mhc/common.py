# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn steps and partial sums, which the mHC kernels share.

A step divides c[T, N, N] by its row sums, then by its column sums; the forms differ in the start and in where eps
enters. A program holds the matrices of BC tokens as one tile in the registers of one warp, so that no sum waits at a
barrier for other warps. The gradient goes through every iteration: it runs them again, stores each divisor (N floats a
token and half step), and undoes a step by multiplying, so that no matrix is kept. The chain of dependent steps bounds
both, not bytes.
"""

import triton
import triton.language as tl


@triton.jit
def sinkhorn_start(logits, valid, eps, FORM: tl.constexpr):
    """Returns the row softmax + eps, exp(logits - rowmax), or exp(logits), [T, N, N]."""
    if FORM == 2:
        e = tl.where(valid, tl.exp(logits), 0.0)
    else:
        top = tl.max(tl.where(valid, logits, float("-inf")), axis=2)
        top = tl.where(top == float("-inf"), 0.0, top)
        e = tl.where(valid, tl.exp(logits - top[:, :, None]), 0.0)
    if FORM == 0:
        s = tl.sum(e, axis=2)
        s = tl.where(s == 0.0, 1.0, s)
        e = tl.where(valid, tl.fma(e, (1.0 / s)[:, :, None], eps), 0.0)
    return e


@triton.jit
def divisor(s, ok, eps, FORM: tl.constexpr):
    """Returns a normalisation's divisor, [T, N]: max(s, eps) for "exp", else s + eps, and 1 in the padding."""
    v = tl.maximum(s, eps) if FORM == 1 else s + eps
    return tl.where(ok, v, 1.0)


@triton.jit
def sinkhorn(logits, valid, ok, eps, ITERS: tl.constexpr, FORM: tl.constexpr):
    """Applies ITERS iterations to logits [T, N, N].

    valid [1, N, N] and ok [1, N] mask the padding to a power of two.
    """
    c = sinkhorn_start(logits, valid, eps, FORM)
    if FORM > 0:
        c = c / divisor(tl.sum(c, axis=2), ok, eps, FORM)[:, :, None]
    c = c / divisor(tl.sum(c, axis=1), ok, eps, FORM)[:, None, :]
    for _ in range(ITERS - 1):
        c = c / divisor(tl.sum(c, axis=2), ok, eps, FORM)[:, :, None]
        c = c / divisor(tl.sum(c, axis=1), ok, eps, FORM)[:, None, :]
    return c


@triton.jit
def normalised_grad(g, c, s, raw, AXIS: tl.constexpr, FORM: tl.constexpr):
    """Returns the gradient through c = c_prev / divisor(sum(c_prev, AXIS)).

    c is the result, s the divisor, and raw whether the sum, not its bound eps, was the divisor.
    """
    inner = tl.sum(g * c, axis=AXIS)
    if FORM == 1:
        # A divisor that was clamped to eps is a constant.
        inner = tl.where(raw, inner, 0.0)
    if AXIS == 2:
        return (g - inner[:, :, None]) / s[:, :, None]
    else:
        return (g - inner[:, None, :]) / s[:, None, :]


@triton.jit
def sinkhorn_grad(
    g, logits, valid, ok, sums_ptr, t, tm, T, eps,
    N: tl.constexpr, NP: tl.constexpr, ITERS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Returns dlogits [T, NP, NP].

    The iterations run again and store each divisor (sums_ptr [2 * ITERS, T, N]), then backwards. c is not stored, since
    c_prev = c * divisor undoes a step.
    """
    j = tl.arange(0, NP)
    at = sums_ptr + t[:, None].to(tl.int64) * N + j[None, :]
    keep = tm[:, None] & (j < N)[None, :]
    step = tl.cast(T, tl.int64) * N
    start = sinkhorn_start(logits, valid, 0.0, FORM)
    c = start
    if FORM == 0:
        c = tl.where(valid, c + eps, 0.0)
    for it in range(ITERS):
        # The softmax form has a row softmax in place of its first row step.
        s = divisor(tl.sum(c, axis=2), ok, eps, FORM)
        if FORM == 0:
            s = tl.where(it == 0, 1.0, s)
        c = c / s[:, :, None]
        tl.store(at + (2 * it) * step, s, mask=keep)
        s = divisor(tl.sum(c, axis=1), ok, eps, FORM)
        c = c / s[:, None, :]
        tl.store(at + (2 * it + 1) * step, s, mask=keep)
    tl.debug_barrier()
    g = tl.where(valid, g, 0.0)
    for back in range(ITERS):
        it = ITERS - 1 - back
        s = tl.load(at + (2 * it + 1) * step, mask=keep, other=1.0)
        g = normalised_grad(g, c, s, s > eps, 1, FORM)
        c = c * s[:, None, :]
        s = tl.load(at + (2 * it) * step, mask=keep, other=1.0)
        if FORM == 0:
            step_grad = normalised_grad(g, c, s, s > eps, 2, FORM)
            g = tl.where(it == 0, g, step_grad)
        else:
            g = normalised_grad(g, c, s, s > eps, 2, FORM)
        c = c * s[:, :, None]
    if FORM == 0:
        # Not c - eps, whose rounding would be a gradient where the softmax is saturated.
        return start * (g - tl.sum(g * start, axis=2)[:, :, None])
    elif FORM == 2:
        return g * start
    else:
        # rowmax is part of the formula: its gradient goes to the row's largest entry, where it cancels.
        e = start
        ge = g * e
        return exp_grad(ge, logits, valid)


@triton.jit
def exp_grad(ge, logits, valid):
    """Returns the gradient of exp(l - rowmax(l)), [T, N, N], from ge = g * exp(l - rowmax(l)).

    Tied maxima share rowmax's gradient evenly, as in amax.
    """
    masked = tl.where(valid, logits, float("-inf"))
    top = masked == tl.max(masked, axis=2)[:, :, None]
    share = tl.where(top & valid, 1.0, 0.0)
    ties = tl.maximum(tl.sum(share, axis=2), 1.0)
    return ge - share * (tl.sum(ge, axis=2) / ties)[:, :, None]


@triton.jit
def sum_parts(part_ptr, off, mask, stride, PARTS: tl.constexpr):
    """Returns the sum of PARTS partial results, part_ptr[part * stride + off], in a fixed order."""
    acc = tl.load(part_ptr + off, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(part_ptr + part * stride + off, mask=mask, other=0.0)
    return acc


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
