# SPDX-License-Identifier: Apache-2.0
"""``gluon_post_project.py`` for few tokens: a program has one block of 32 columns of each stream, not eight (sm_90).

out = post, part[b, t] = products of out with phi's rows and sums of squares, over block b. Programs [D / 32, T / 64],
64 tokens each. With few tokens nothing but latency counts: D / 32 programs in place of D / 256 share phi, each asks
for all that it reads before it uses any of it, and phi's pieces have allocations of their own, between whose stores
Triton puts no barriers. A block's products and sums of squares are those of the other kernel, bit for bit. It adds the
blocks of a slice one after the other; here each block is a part, and the reader of the parts adds them in that order
(``blocks.py``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..gluon_language import thread_barrier
from .gluon_bf16 import widened
from .gluon_post_project import load_mix, load_phi, operands, project_block, store_products


@gluon.jit(do_not_specialize=["T"])
def mhc_post_project_few(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, h_pre_ptr, phi_ptr, gamma_ptr, out_ptr, h_in_ptr, part_ptr, T,
    D: gl.constexpr, M: gl.constexpr, MP: gl.constexpr, HAS_RES: gl.constexpr, TRANSPOSE: gl.constexpr,
    COLLAPSE: gl.constexpr, HAS_GAMMA: gl.constexpr,
):  # fmt: skip
    """Computes post and its projection over one block of 32 columns of each stream, for 64 tokens.

    out = post, part[b, t, :M] = out @ phi.T, part[b, t, M : M + 4] = sums of squares of out, which four threads have.
    With COLLAPSE also h_in = sum_o h_pre[o] * out[o].
    """
    BT: gl.constexpr = 64
    # The rows of wgmma's left operand, with 8 columns per thread.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [BT, 32]
    )
    Q: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [BT, 4]
    )
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    b = gl.program_id(0)
    row = gl.program_id(1) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    col = b * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    t = gl.minimum(row, T - 1).to(gl.int64)
    f = gl.load(f_ptr + ((t * D)[:, None] + col[None, :]))
    xs = ()
    for i in gl.static_range(4):
        xs = xs + (gl.load(x_ptr + ((t * (4 * D) + i * D)[:, None] + col[None, :])),)
    c = load_mix(h_post_ptr, h_res_ptr, t, HAS_RES, TRANSPOSE)
    weights = ()
    if COLLAPSE:
        for o in gl.static_range(4):
            weights = weights + (gl.load(h_pre_ptr + t * 4 + o).to(gl.float32),)
    # Keeps the loads in this order: the first use of phi must not delay those of x.
    thread_barrier()
    phi = load_phi(phi_ptr, gamma_ptr, b * 32, D, M, 1, HAS_GAMMA, 4, 0, 4)
    thread_barrier()
    w = ()
    for i in gl.static_range(4):
        v = operands(phi, i, len(phi) // 4)
        for k in gl.static_range(len(v)):
            # Memory of its own: between stores to one allocation Triton puts barriers.
            w = w + (gl.allocate_shared_memory(gl.bfloat16, v[k].shape, TILE, v[k]),)
    fence_async_shared()
    thread_barrier()
    wide = ()
    for i in gl.static_range(4):
        wide = wide + (widened(xs[i]),)
    products, squares = project_block(
        w, 0, c, weights, widened(f), wide, out_ptr, h_in_ptr, t, col, (row < T)[:, None], D, M, 1, HAS_RES,
        COLLAPSE, True, Q, 4,
    )  # fmt: skip
    out = part_ptr + (b.to(gl.int64) * T) * MP
    store_products(out, products, gl.program_id(1) * BT, T, M, MP, MMA)
    tq = (gl.program_id(1) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, Q)))[:, None]
    o = gl.arange(0, 4, layout=gl.SliceLayout(0, Q))[None, :]
    gl.store(out + tq * MP + (M + o), squares, mask=tq < T)
