# SPDX-License-Identifier: Apache-2.0
"""Shared functions of the E79 kernels: column tiles of a state, vectors along rows and columns, and their sums.

A state [n, n] of a program is a tuple of C tiles [R, CI] of R rows (n padded to a power of two) and CI columns. In
this form every Triton version gives every tile the same layout: a warp covers 4 rows by 8 lanes of 4 columns, and the
warps split the rows. A sum along a row then needs three shuffles, a sum along a column one exchange between the warps,
which ``column_sums`` makes once for all tiles.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_columns(p, N: tl.constexpr, CI: tl.constexpr, C: tl.constexpr):
    """Loads a vector [N] in fp32 as C pieces [CI], one per column tile; 0 beyond N."""
    v = ()
    for c in tl.static_range(C):
        j = c * CI + tl.arange(0, CI)
        if (c + 1) * CI <= N:
            v = v + (tl.load(p + j).to(tl.float32),)
        else:
            v = v + (tl.load(p + j, mask=j < N, other=0.0).to(tl.float32),)
    return v


@triton.jit
def store_columns(p, v, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr):
    # Stored by the first row of a whole tile: a store of [CI] alone would change the layout through shared memory.
    i = tl.arange(0, R)[:, None]
    for c in tl.static_range(C):
        j = (c * CI + tl.arange(0, CI))[None, :]
        x = tl.broadcast_to(v[c][None, :], (R, CI))
        tl.store(p + i * 0 + j, x.to(p.dtype.element_ty), mask=(i == 0) & (j < N))


@triton.jit
def load_rows(p, N: tl.constexpr, R: tl.constexpr):
    """Loads a vector [N] in fp32 along the rows [R]; 0 beyond N."""
    i = tl.arange(0, R)
    if N == R:
        v = tl.load(p + i)
    else:
        v = tl.load(p + i, mask=i < N, other=0.0)
    return v.to(tl.float32)


@triton.jit
def store_rows(p, v, N: tl.constexpr, R: tl.constexpr):
    i = tl.arange(0, R)
    tl.store(p + i, v.to(p.dtype.element_ty), mask=i < N)


@triton.jit
def store_four_rows(p, v0, v1, v2, v3, N: tl.constexpr, R: tl.constexpr):
    """Stores four vectors as [4, N], with one change of layout for all."""
    v = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (R, 4))
    i = tl.arange(0, R)[:, None]
    j = tl.arange(0, 4)[None, :]
    tl.store(p + i + j * N, v.to(p.dtype.element_ty), mask=i < N)


@triton.jit
def load_tiles(p, given, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr):
    """Loads a state [N, N] in fp32 as C tiles [R, CI]; zeros if ``given`` is 0, and beyond N."""
    i = tl.arange(0, R)[:, None]
    s = ()
    for c in tl.static_range(C):
        j = (c * CI + tl.arange(0, CI))[None, :]
        mask = (i < N) & (j < N) & (given != 0)
        s = s + (tl.load(p + i * N + j, mask=mask, other=0.0).to(tl.float32),)
    return s


@triton.jit
def store_tiles(p, s, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, R)[:, None]
    for c in tl.static_range(C):
        j = (c * CI + tl.arange(0, CI))[None, :]
        if (N == R) & (N == C * CI):
            tl.store(p + i * N + j, s[c].to(p.dtype.element_ty))
        else:
            tl.store(p + i * N + j, s[c].to(p.dtype.element_ty), mask=(i < N) & (j < N))


@triton.jit
def norm_inverse(v, C: tl.constexpr):
    """Returns 1 / (|v| + 1e-6) of a vector in column pieces."""
    # Explicit fma: if the compiler fused a product into the first exchange between lanes, lanes would get different
    # bits.
    s = tl.fma(v[0], v[0], tl.zeros_like(v[0]))
    for c in tl.static_range(1, C):
        s = tl.fma(v[c], v[c], s)
    return 1.0 / (tl.sqrt_rn(tl.sum(s, axis=0)) + 1e-6)


@triton.jit
def row_sum(s, v, C: tl.constexpr):
    """Returns sum_j s[:, j] * v[j], [R]."""
    t = s[0] * v[0][None, :]
    for c in tl.static_range(1, C):
        t += s[c] * v[c][None, :]
    return tl.sum(t, axis=1)


@triton.jit
def scale_rows(s, v, C: tl.constexpr):
    """Returns s[i, j] * v[i]."""
    t = ()
    for c in tl.static_range(C):
        t = t + (s[c] * v[:, None],)
    return t


@triton.jit
def gated(s, row, col, d, v, C: tl.constexpr):
    """Returns row[i] * s[i, j] * col[j] + d[i] * v[j]."""
    t = ()
    for c in tl.static_range(C):
        # Rounded once: forward and backward must compute a state with the same bits.
        g = tl.broadcast_to(col[c][None, :], s[c].shape)
        t = t + (tl.fma(s[c] * row[:, None], g, d[:, None] * v[c][None, :]),)
    return t


@triton.jit
def outer(a, v, C: tl.constexpr):
    """Returns a[i] * v[j]."""
    t = ()
    for c in tl.static_range(C):
        t = t + (a[:, None] * v[c][None, :],)
    return t


@triton.jit
def product(a, b, C: tl.constexpr):
    t = ()
    for c in tl.static_range(C):
        t = t + (a[c] * b[c],)
    return t


@triton.jit
def add(a, b, C: tl.constexpr):
    t = ()
    for c in tl.static_range(C):
        t = t + (a[c] + b[c],)
    return t


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def column_sums(tiles, K: tl.constexpr):
    """Returns the sums over the rows of K tiles [R, CI], K times [CI], with one exchange between the warps for all."""
    tl.static_assert(K == 1 or K == 2 or K == 3 or K == 4 or K == 6 or K == 8)
    if K == 1:
        s = (tl.sum(tiles[0], axis=0),)
    elif K == 2:
        s = tl.reduce(tiles, 0, _add2)
    elif K == 3:
        s = tl.reduce(tiles, 0, _add3)
    elif K == 4:
        s = tl.reduce(tiles, 0, _add4)
    elif K == 6:
        s = tl.reduce(tiles, 0, _add6)
    else:
        s = tl.reduce(tiles, 0, _add8)
    return s


@triton.jit
def gate(sums, bias, SCALE, HAS_BIAS: tl.constexpr, C: tl.constexpr):
    """Returns sigmoid(SCALE * sums + bias) of column pieces."""
    g = ()
    for c in tl.static_range(C):
        z = sums[c] * SCALE
        if HAS_BIAS:
            z += bias[c]
        g = g + (sigmoid(z),)
    return g
