# SPDX-License-Identifier: Apache-2.0
"""The parallel part of the E79 backward: adds the parts along rows and columns, and applies the norms' gradients.

    du = i * dv - i * i * <dv, u> * u / |u| for v = u / (|u| + 1e-6), i = 1 / (|u| + 1e-6);  i * dv where u is 0

From parts[T, B, P, n] to dkvqm[T, B, 4 n]. A program has BR steps and sequences, whole rows of n. Bytes bound it:
every part is read and every gradient written once, and no row waits for another, which is why the scan leaves this to
it. ``e79_bias_sum`` is one program that adds part[B, 2, n] in a fixed order.
"""

import triton
import triton.language as tl


@triton.jit
def _unnormalised(dv, v):
    """Returns the gradient of v from that of v / (|v| + 1e-6), rows of [BR, NP]; the norm's own gradient at 0 is 0."""
    s = tl.sqrt_rn(tl.sum(v * v, axis=1))
    inv = 1.0 / (s + 1e-6)
    along = tl.sum(v * dv, axis=1) * inv * inv / tl.where(s > 0, s, 1.0)
    return dv * inv[:, None] - v * along[:, None]


@triton.jit
def _store(p, v, mask):
    tl.store(p, v.to(p.dtype.element_ty), mask=mask)


@triton.jit
def e79_finish(
    kvqm_ptr, parts_ptr, dkvqm_ptr, dbs_ptr, dbm_ptr, rows,
    N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Adds the parts of each step and sequence (row): dkvqm[rows, 4 N], and dbs, dbm[rows, N] where BS, BM = 2."""
    P: tl.constexpr = 7 + BS // 2 + 2 * (BM // 2)
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    j = tl.arange(0, NP)[None, :]
    mask = (i < rows) & (j < N)
    part = parts_ptr + i * P * N + j
    p = kvqm_ptr + i * 4 * N + j
    o = dkvqm_ptr + i * 4 * N + j
    dk = tl.load(part, mask=mask, other=0.0) + tl.load(part + 4 * N, mask=mask, other=0.0)
    _store(o, _unnormalised(dk, tl.load(p, mask=mask, other=0.0).to(tl.float32)), mask)
    _store(o + N, tl.load(part + 2 * N, mask=mask, other=0.0), mask)
    _store(o + 2 * N, tl.load(part + 6 * N, mask=mask, other=0.0), mask)
    dm = tl.load(part + N, mask=mask, other=0.0) + tl.load(part + 5 * N, mask=mask, other=0.0)
    _store(o + 3 * N, _unnormalised(dm, tl.load(p + 3 * N, mask=mask, other=0.0).to(tl.float32)), mask)
    if BS == 2:
        v = tl.load(part + 3 * N, mask=mask, other=0.0) + tl.load(part + 7 * N, mask=mask, other=0.0)
        _store(dbs_ptr + i * N + j, v, mask)
    if BM == 2:
        v = tl.load(part + (P - 2) * N, mask=mask, other=0.0) + tl.load(part + (P - 1) * N, mask=mask, other=0.0)
        _store(dbm_ptr + i * N + j, v, mask)


@triton.jit(do_not_specialize=["B"])
def e79_bias_sum(part_ptr, out_ptr, B, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr):
    """Sums part[B, 2, N] to out[N] in a fixed order."""
    j = tl.arange(0, NP)[None, :]
    total = tl.zeros((BR, NP), tl.float32)
    for b in range(0, 2 * B, BR):
        i = b + tl.arange(0, BR)[:, None]
        total += tl.load(part_ptr + i.to(tl.int64) * N + j, mask=(i < 2 * B) & (j < N), other=0.0)
    v = tl.sum(total, axis=0)
    k = tl.arange(0, NP)
    tl.store(out_ptr + k, v.to(out_ptr.dtype.element_ty), mask=k < N)
