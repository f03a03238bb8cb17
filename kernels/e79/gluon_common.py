# SPDX-License-Identifier: Apache-2.0
"""Shared functions of the Gluon kernels of E79: sums in a warp, exchanges between warps, vectors in shared memory.

A program's state is a tensor [NW, RW, R]: warp, row in the warp, column (n padded to R). A sum along a row stays
inside a warp. A sum along a column is one part per warp, exchanged once through shared memory: one thread per column
adds the parts and evaluates the gate once, whereas in plain Triton every thread evaluates the gates of all the columns
it holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_language import reinterpret
from ..gluon_language import thread_barrier as thread_barrier


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + gl.exp2(x * -1.4426950408889634))


@gluon.jit
def inverse(squares):
    """Returns 1 / (|v| + 1e-6) from the sum of v's squares."""
    return reciprocal(gl.sqrt(squares) + 1e-6)


@gluon.jit
def row_sum(s, v):
    """Returns sum_j s[:, :, j] * v[j], [NW, RW]."""
    return gl.sum(s * v[None, None, :], axis=2)


@gluon.jit
def gated(s, row, col, d, v):
    """Returns row[i] * s[i, j] * col[j] + d[i] * v[j]."""
    return add_outer(s * row[:, :, None], col, d[:, :, None] * v[None, None, :])


@gluon.jit
def add_outer(s, col, dv):
    """Returns s[i, j] * col[j] + dv[i, j], rounded once, because forward and backward must compute the same bits."""
    return gl.fma(s, gl.broadcast(col[None, None, :], s)[0], dv)


@gluon.jit
def vector(x, i: gl.constexpr):
    """Returns vector i of x [V, R] in shared memory."""
    V: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    return reinterpret(x, gl.float32, [V, R], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(i)


@gluon.jit
def vector_by_rows(x, i: gl.constexpr, layout: gl.constexpr, NW: gl.constexpr):
    """Loads vector i of x [V, R] in shared memory in the layout of the rows [NW, RW]."""
    V: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    y = reinterpret(x, gl.float32, [V, NW, R // NW], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return y.index(i).load(layout)


@gluon.jit
def part_of(s):
    """Returns each warp's sums over its rows, [NW, R]."""
    return gl.sum(s, axis=1)
