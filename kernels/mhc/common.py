"""Vocabulary shared by the mHC kernels: sinkhorn steps, partial sums."""

import triton
import triton.language as tl


@triton.jit
def sinkhorn_start(logits, valid, eps, FORM: tl.constexpr):
    """Row softmax + eps, or exp(logits - rowmax).  [T, N, N]"""
    top = tl.max(tl.where(valid, logits, float("-inf")), axis=2)
    top = tl.where(top == float("-inf"), 0.0, top)
    e = tl.where(valid, tl.exp(logits - top[:, :, None]), 0.0)
    if FORM == 0:
        s = tl.sum(e, axis=2)
        s = tl.where(s == 0.0, 1.0, s)
        e = tl.where(valid, e / s[:, :, None] + eps, 0.0)
    return e


@triton.jit
def divisor(s, ok, eps, FORM: tl.constexpr):
    """What a normalisation divides sums by: s + eps ("softmax"), max(s, eps) ("exp"); 1 in the padding, not 0.  [T, N]"""
    v = s + eps if FORM == 0 else tl.maximum(s, eps)
    return tl.where(ok, v, 1.0)


@triton.jit
def sinkhorn(logits, valid, ok, eps, ITERS: tl.constexpr, FORM: tl.constexpr):
    """ITERS iterations on [T, N, N] logits; valid [1, N, N] and ok [1, N] mask the padding to a power of two."""
    c = sinkhorn_start(logits, valid, eps, FORM)
    if FORM == 1:
        c = c / divisor(tl.sum(c, axis=2), ok, eps, FORM)[:, :, None]
    c = c / divisor(tl.sum(c, axis=1), ok, eps, FORM)[:, None, :]
    for _ in range(ITERS - 1):
        c = c / divisor(tl.sum(c, axis=2), ok, eps, FORM)[:, :, None]
        c = c / divisor(tl.sum(c, axis=1), ok, eps, FORM)[:, None, :]
    return c


@triton.jit
def normalised_grad(g, c, s, raw, AXIS: tl.constexpr, FORM: tl.constexpr):
    """Gradient through c = c_prev / divisor(sum(c_prev, AXIS)), given c, the divisor s and whether eps was not its value."""
    inner = tl.sum(g * c, axis=AXIS)
    if FORM == 1:
        # Where the divisor was clamped to eps it is a constant.
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
    """dlogits [T, NP, NP]: the iterations run again keeping each divisor (sums_ptr [2 * ITERS, T, N]), then backwards.

    c itself is not kept: c_prev = c * divisor undoes a step.
    """
    j = tl.arange(0, NP)
    at = sums_ptr + t[:, None].to(tl.int64) * N + j[None, :]
    keep = tm[:, None] & (j < N)[None, :]
    step = tl.cast(T, tl.int64) * N
    start = sinkhorn_start(logits, valid, eps, FORM)
    c = start
    for it in range(ITERS):
        # The softmax form starts with a row softmax in place of its first row step.
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
        p = start - tl.where(valid, eps, 0.0)
        return p * (g - tl.sum(g * p, axis=2)[:, :, None])
    else:
        # Subtracting rowmax is part of the formula: its gradient goes to the row's largest entry, and cancels there.
        e = start
        ge = g * e
        return exp_grad(ge, logits, valid)


@triton.jit
def exp_grad(ge, logits, valid):
    """Gradient of exp(l - rowmax(l)) times g; rowmax's share goes evenly to the tied maxima, as amax does.  [T, N, N]"""
    masked = tl.where(valid, logits, float("-inf"))
    top = masked == tl.max(masked, axis=2)[:, :, None]
    share = tl.where(top & valid, 1.0, 0.0)
    ties = tl.maximum(tl.sum(share, axis=2), 1.0)
    return ge - share * (tl.sum(ge, axis=2) / ties)[:, :, None]


@triton.jit
def sum_parts(part_ptr, off, mask, stride, PARTS: tl.constexpr):
    """Sum of PARTS partial results in a fixed order: part_ptr[part * stride + off]."""
    acc = tl.load(part_ptr + off, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(part_ptr + part * stride + off, mask=mask, other=0.0)
    return acc
