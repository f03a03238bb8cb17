# SPDX-License-Identifier: Apache-2.0
"""The E79 scan, forward, in Gluon; ``forward.py`` has the same scan in plain Triton, with the same arguments.

A program runs one sequence, with S and M as tiles [NW, RW, R] in registers in fp32. A step's latency bounds it: two
stages, each a sum along the columns, a gate and its way back. One thread a column adds the warps' parts and evaluates
the gate (``gluon_common.py``), the sums along rows fill the time between write and read of an exchange, each vector is
loaded once a block, a step ahead, into shared memory, and up to n = 64 what needs no column gate is computed before it
arrives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_common import add_outer, gated, inverse, part_of, row_sum, sigmoid, thread_barrier, vector, vector_by_rows


@gluon.jit
def _fetch(p, bs, bm, v4, j4, j1, N: gl.constexpr, BS: gl.constexpr, BM: gl.constexpr):
    """Loads a step's k, v, q, m [4, R] and its biases [R], each element once per block."""
    x = gl.load(p + v4 * N + j4, mask=j4 < N, other=0.0).to(gl.float32)
    xs = j1.to(gl.float32)
    xm = xs
    if BS == 2:
        xs = gl.load(bs + j1, mask=j1 < N, other=0.0).to(gl.float32)
    if BM == 2:
        xm = gl.load(bm + j1, mask=j1 < N, other=0.0).to(gl.float32)
    return x, xs, xm


@gluon.jit
def _stage(vec, bias, x, xs, xm, BS: gl.constexpr, BM: gl.constexpr):
    vec.store(x)
    if BS == 2:
        vector(bias, 0).store(xs)
    if BM == 2:
        vector(bias, 1).store(xm)


@gluon.jit(do_not_specialize=["T", "B", "SEG", "has_s", "has_m"])
def e79_forward_gluon(
    kvqm_ptr, bs_ptr, bm_ptr, s0_ptr, m0_ptr, out_ptr, s_ptr, m_ptr, ckpt_ptr, gates_ptr, T, B, SEG, has_s, has_m,
    N: gl.constexpr, R: gl.constexpr, LC: gl.constexpr, BS: gl.constexpr, BM: gl.constexpr, SAVE: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Runs the scan of one sequence per program. LC: lanes of a warp along a row, with four columns each."""
    RW: gl.constexpr = R // NW
    LR: gl.constexpr = 32 // LC
    # If registers suffice, loads and what needs no column gate are computed before the gates.
    EARLY: gl.constexpr = R <= 64
    W4: gl.constexpr = 4 if NW >= 4 else NW
    L: gl.constexpr = gl.BlockedLayout([1, RW // LR, 4], [1, LR, LC], [NW, 1, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(2, L)
    COL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
    # One column per thread, with the parts of all warps in registers.
    D: gl.constexpr = gl.BlockedLayout([NW, 1], [1, 32], [1, NW], [1, 0])
    ONE: gl.constexpr = gl.SliceLayout(0, D)
    L4: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W4, NW // W4], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    SH1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SH2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vecs = gl.allocate_shared_memory(gl.float32, [2, 4, R], SH2)
    biases = gl.allocate_shared_memory(gl.float32, [2, 2, R], SH2)
    part_c = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    part_w = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    gate_c = gl.allocate_shared_memory(gl.float32, [R], SH1)
    gate_w = gl.allocate_shared_memory(gl.float32, [R], SH1)
    b = gl.program_id(0).to(gl.int64)
    B = b * 0 + B  # int64 even if B is passed as a constant
    row = (
        gl.arange(0, NW, layout=gl.SliceLayout(1, ROW))[:, None] * RW
        + gl.arange(0, RW, layout=gl.SliceLayout(0, ROW))[None, :]
    )
    col = gl.arange(0, R, layout=COL)
    v4 = gl.arange(0, 4, layout=gl.SliceLayout(1, L4))[:, None]
    j4 = gl.arange(0, R, layout=gl.SliceLayout(0, L4))[None, :]
    j1 = gl.arange(0, R, layout=L1)
    one = gl.arange(0, R, layout=ONE)
    rmask = row < N
    state = b * N * N + row[:, :, None] * N + col[None, None, :]
    inside = (row[:, :, None] < N) & (col[None, None, :] < N)
    S = gl.load(s0_ptr + state, mask=inside & (has_s != 0), other=0.0).to(gl.float32)
    M = gl.load(m0_ptr + state, mask=inside & (has_m != 0), other=0.0).to(gl.float32)
    p = kvqm_ptr + b * 4 * N
    bs = bs_ptr
    bm = bm_ptr
    if BS == 2:
        bs += b * N
    if BM == 2:
        bm += b * N
    if BS == 1:
        bsr = gl.load(bs_ptr + row, mask=rmask, other=0.0).to(gl.float32)
        bsc = gl.load(bs_ptr + one, mask=one < N, other=0.0).to(gl.float32)
    if BM == 1:
        bmr = gl.load(bm_ptr + row, mask=rmask, other=0.0).to(gl.float32)
        bmc = gl.load(bm_ptr + one, mask=one < N, other=0.0).to(gl.float32)
    out = out_ptr + b * N + row
    gates = gates_ptr + b * 7 * N
    ckpt = ckpt_ptr
    left = 0
    x, xs, xm = _fetch(p, bs, bm, v4, j4, j1, N, BS, BM)
    _stage(vecs.index(0), biases.index(0), x, xs, xm, BS, BM)
    thread_barrier()  # placed here so that the compiler does not place one in the loop
    for t in range(T):
        if SAVE:
            if left == 0:
                gl.store(ckpt + state, S, mask=inside)
                gl.store(ckpt + B * N * N + state, M, mask=inside)
                ckpt += 2 * B * N * N
                left = left * 0 + SEG
            left -= 1
        more = (t + 1 < T).to(gl.int64) * B
        p += more * 4 * N
        if BS == 2:
            bs += more * N
        if BM == 2:
            bm += more * N
        x, xs, xm = _fetch(p, bs, bm, v4, j4, j1, N, BS, BM)
        vec = vecs.index(t % 2)
        bias = biases.index(t % 2)
        kr = vector_by_rows(vec, 0, ROW, NW)
        part_c.store(part_of(M * kr[:, :, None]))
        k = vector(vec, 0).load(COL)
        m = vector(vec, 3).load(COL)
        if EARLY:
            q = vector(vec, 2).load(COL)
            mr = vector_by_rows(vec, 3, ROW, NW)
        if BM == 2:
            bmc = vector(bias, 1).load(ONE)
            bmr = vector_by_rows(bias, 1, ROW, NW)
        ik = inverse(gl.sum(k * k, axis=0))
        im = inverse(gl.sum(m * m, axis=0))
        # The sums along rows fill the time between the write and the read of an exchange.
        r = row_sum(M, k) * ik
        d = vector_by_rows(vec, 1, ROW, NW) - row_sum(S, k) * ik
        g = d - row_sum(M, m) * im
        z = gl.sum(part_c.load(D), axis=0) * ik
        if BS == 1:
            z += bsc
            r += bsr
        if BS == 2:
            z += vector(bias, 0).load(ONE)
            r += vector_by_rows(bias, 0, ROW, NW)
        z = sigmoid(z)
        gate_c.store(z)
        r = sigmoid(r)
        if EARLY:
            S = S * r[:, :, None]
            dk = (d * ik)[:, :, None] * k[None, None, :]
            c = gate_c.load(COL)
            # Between a barrier and the next read of either buffer: needs no barrier of its own.
            _stage(vecs.index((t + 1) % 2), biases.index((t + 1) % 2), x, xs, xm, BS, BM)
            S = add_outer(S, c, dk)
        else:
            S = gated(S, r, gate_c.load(COL), d * ik, k)
            q = vector(vec, 2).load(COL)
            mr = vector_by_rows(vec, 3, ROW, NW)
        part_w.store(part_of(S * mr[:, :, None]))
        if not EARLY:
            _stage(vecs.index((t + 1) % 2), biases.index((t + 1) % 2), x, xs, xm, BS, BM)
        h = row_sum(S, m) * im
        y = row_sum(S, q)
        zw = gl.sum(part_w.load(D), axis=0) * im
        if BM > 0:
            zw += bmc
            h += bmr
        zw = sigmoid(zw)
        gate_w.store(zw)
        h = sigmoid(h)
        gl.store(out, (y * y * sigmoid(y)).to(out.dtype.element_ty), mask=rmask)
        out += B * N
        if SAVE:
            gl.store(gates + row, r, mask=rmask)
            gl.store(gates + N + row, h, mask=rmask)
            gl.store(gates + 2 * N + row, d, mask=rmask)
            gl.store(gates + 3 * N + row, g, mask=rmask)
            gl.store(gates + 4 * N + row, y, mask=rmask)
            gl.store(gates + 5 * N + one, z, mask=one < N)
            gl.store(gates + 6 * N + one, zw, mask=one < N)
            gates += B * 7 * N
        if EARLY:
            M = M * h[:, :, None]
            gm = (g * im)[:, :, None] * m[None, None, :]
            M = add_outer(M, gate_w.load(COL), gm)
        else:
            M = gated(M, h, gate_w.load(COL), g * im, m)
    gl.store(s_ptr + state, S, mask=inside)
    gl.store(m_ptr + state, M, mask=inside)
