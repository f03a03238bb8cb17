# SPDX-License-Identifier: Apache-2.0
"""The E79 scan, backward, in Gluon; ``backward.py`` has the same in plain Triton, with the same arguments.

A program runs one sequence. dS and dM stay in registers, as C column tiles [NW, RW, CI]. The states of a step are
copied from scratch to shared memory one step ahead. Every element of a state is copied, read and written by one and
the same thread, so that no thread waits for another's copies. The latency of three dependent stages a step bounds it,
and at n = 128 (four tiles, so that registers suffice) also the writes of states to scratch. y was saved by the
forward, and products with S' go through S, so that the reverse pass makes no S'.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..gluon_language import async_load
from .gluon_common import gated, inverse, part_of, sigmoid, thread_barrier, vector, vector_by_rows


@gluon.jit
def _join(s, C: gl.constexpr):
    """Joins C parts [NW, CI] to one [NW, R]."""
    if C == 1:
        y = s[0]
    elif C == 2:
        z = gl.permute(gl.join(s[0], s[1]), (0, 2, 1))
        y = gl.reshape(z, [z.shape[0], 2 * z.shape[2]])
    else:
        z = gl.permute(gl.join(gl.join(s[0], s[2]), gl.join(s[1], s[3])), (0, 2, 3, 1))
        y = gl.reshape(z, [z.shape[0], 4 * z.shape[3]])
    return y


@gluon.jit
def _piece(x, i: gl.constexpr, c: gl.constexpr, CI: gl.constexpr, layout: gl.constexpr):
    """Loads column piece c of vector i of x [V, R]."""
    return vector(x, i).slice(c * CI, CI).load(layout)


@gluon.jit
def _inverse(x, i: gl.constexpr, layout: gl.constexpr):
    """Returns 1 / (|v| + 1e-6) of vector i of x [V, R], summed in the same way as in the forward."""
    v = vector(x, i).load(layout)
    return inverse(gl.sum(v * v, axis=0))


@gluon.jit
def _state_tile(state, c: gl.constexpr, CI: gl.constexpr, layout: gl.constexpr):
    return state.slice(c * CI, CI, 2).load(layout)


@gluon.jit
def _load(p, given, row, col, c: gl.constexpr, CI: gl.constexpr, N: gl.constexpr):
    """Loads column tile c of a state [N, N]; zeros if ``given`` is 0, and beyond N."""
    i = row[:, :, None]
    j = c * CI + col[None, None, :]
    return gl.load(p + i * N + j, mask=(i < N) & (j < N) & (given != 0), other=0.0).to(gl.float32)


@gluon.jit
def _store(p, x, row, col, c: gl.constexpr, CI: gl.constexpr, N: gl.constexpr):
    i = row[:, :, None]
    j = c * CI + col[None, None, :]
    gl.store(p + i * N + j, x.to(p.dtype.element_ty), mask=(i < N) & (j < N))


@gluon.jit
def _save(p, x, row, col, c: gl.constexpr, CI: gl.constexpr, R: gl.constexpr):
    """Stores column tile c of a state [R, R] in scratch."""
    gl.store(p + row[:, :, None] * R + (c * CI + col[None, None, :]), x)


@gluon.jit
def _tile(held, state, c: gl.constexpr, CI: gl.constexpr, layout: gl.constexpr, C: gl.constexpr):
    """Returns column tile c of a state: from registers if there is one tile, else read again."""
    if C == 1:
        x = held
    else:
        x = _state_tile(state, c, CI, layout)
    return x


@gluon.jit
def _fold(x):
    """Sums neighbours inside a thread, [NW, RW, CI] to [NW, RW, CI / 4], which needs a quarter of the registers."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 4, 4]), axis=3)


@gluon.jit
def _rows(folded, layout: gl.constexpr, C: gl.constexpr):
    """Returns the sums along the rows, [NW, RW], of the folded products of C tiles."""
    s = folded[0]
    for c in gl.static_range(1, C):
        s += folded[c]
    return gl.convert_layout(gl.sum(s, axis=2), layout, assert_trivial=True)


@gluon.jit
def _copy(state, p, row, column, R: gl.constexpr):
    """Copies [R, R] from scratch to shared memory, asynchronously."""
    async_load(state, p + row[:, :, None] * R + column[None, None, :])


@gluon.jit
def _fetch(p, gates, v4, j4, v8, j8, N: gl.constexpr):
    x = gl.load(p + v4 * N + j4, mask=j4 < N, other=0.0).to(gl.float32)
    y = gl.load(gates + v8 * N + j8, mask=(v8 < 7) & (j8 < N), other=0.0)
    return x, y


@gluon.jit(do_not_specialize=["T", "B", "SEG", "has_ds", "has_dm"])
def e79_backward_gluon(
    dout_ptr, ds_ptr, dm_ptr, kvqm_ptr, gates_ptr, ckpt_ptr, scratch_ptr, parts_ptr, dbs_ptr, dbm_ptr, ds0_ptr, dm0_ptr,
    T, B, SEG, has_ds, has_dm,
    N: gl.constexpr, R: gl.constexpr, LC: gl.constexpr, C: gl.constexpr, BS: gl.constexpr, BM: gl.constexpr,
    DOUT: gl.constexpr, MS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """As ``e79_backward``. MS: buffers for M in shared memory, 2 (one of them prefetched) if they fit, else 1."""
    P: gl.constexpr = 7 + BS // 2 + 2 * (BM // 2)
    CI: gl.constexpr = R // C
    RW: gl.constexpr = R // NW
    LR: gl.constexpr = 32 // LC
    W4: gl.constexpr = 4 if NW >= 4 else NW
    W8: gl.constexpr = 8 if NW >= 8 else NW
    L: gl.constexpr = gl.BlockedLayout([1, RW // LR, 4], [1, LR, LC], [NW, 1, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(2, L)
    COL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, L))
    D: gl.constexpr = gl.BlockedLayout([NW, 1], [1, 32], [1, NW], [1, 0])
    ONE: gl.constexpr = gl.SliceLayout(0, D)
    L4: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W4, NW // W4], [1, 0])
    L8: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W8, NW // W8], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    # Every thread holds all NW elements.
    EACH: gl.constexpr = gl.BlockedLayout([NW], [32], [NW], [0])
    SH1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SH2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SH3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    s_ring = gl.allocate_shared_memory(gl.float32, [2, NW, RW, R], SH3)
    m_ring = gl.allocate_shared_memory(gl.float32, [MS, NW, RW, R], SH3)
    vecs = gl.allocate_shared_memory(gl.float32, [2, 4, R], SH2)
    gts = gl.allocate_shared_memory(gl.float32, [2, 8, R], SH2)
    dos = gl.allocate_shared_memory(gl.float32, [2, 1, R], SH2)
    part_w = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    part_c = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    part_m = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    part_q = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    part_k = gl.allocate_shared_memory(gl.float32, [NW, R], SH2)
    dots_e = gl.allocate_shared_memory(gl.float32, [NW], SH1)
    dots_y = gl.allocate_shared_memory(gl.float32, [NW], SH1)
    gate_f = gl.allocate_shared_memory(gl.float32, [R], SH1)
    gate_b = gl.allocate_shared_memory(gl.float32, [R], SH1)
    b = gl.program_id(0).to(gl.int64)
    B = b * 0 + B  # int64 even if B is passed as a constant
    row = (
        gl.arange(0, NW, layout=gl.SliceLayout(1, ROW))[:, None] * RW
        + gl.arange(0, RW, layout=gl.SliceLayout(0, ROW))[None, :]
    )
    col = gl.arange(0, CI, layout=COL)
    column = gl.arange(0, R, layout=COL)
    v4 = gl.arange(0, 4, layout=gl.SliceLayout(1, L4))[:, None]
    j4 = gl.arange(0, R, layout=gl.SliceLayout(0, L4))[None, :]
    v8 = gl.arange(0, 8, layout=gl.SliceLayout(1, L8))[:, None]
    j8 = gl.arange(0, R, layout=gl.SliceLayout(0, L8))[None, :]
    j1 = gl.arange(0, R, layout=L1)
    one = gl.arange(0, R, layout=ONE)
    rmask = row < N
    omask = one < N
    dS = ()
    dM = ()
    for c in gl.static_range(C):
        dS = dS + (_load(ds_ptr + b * N * N, has_ds, row, col, c, CI, N),)
        dM = dM + (_load(dm_ptr + b * N * N, has_dm, row, col, c, CI, N),)
    scratch = scratch_ptr + b * SEG * (2 * R * R)
    if BS == 1:
        dbs_r = gl.zeros([NW, RW], gl.float32, ROW)
        dbs_c = gl.zeros([R], gl.float32, ONE)
    if BM == 1:
        dbm_r = gl.zeros([NW, RW], gl.float32, ROW)
        dbm_c = gl.zeros([R], gl.float32, ONE)
    segments = (T + SEG - 1) // SEG
    for back in range(segments):
        first = (segments - 1 - back) * SEG
        steps = gl.minimum(SEG, T - first)
        at_row = first.to(gl.int64) * B + b
        p = kvqm_ptr + at_row * 4 * N
        gates = gates_ptr + at_row * 7 * N
        scr = scratch
        # --- recompute the segment's states; dS and dM are parked in shared memory if registers cannot hold all four
        S = ()
        M = ()
        base = ckpt_ptr + ((segments - 1 - back).to(gl.int64) * 2 * B + b) * N * N
        for c in gl.static_range(C):
            if C > 1:
                s_ring.index(0).slice(c * CI, CI, 2).store(dS[c])
                s_ring.index(1).slice(c * CI, CI, 2).store(dM[c])
            S = S + (_load(base, 1, row, col, c, CI, N),)
            M = M + (_load(base + B * N * N, 1, row, col, c, CI, N),)
        x4, x8 = _fetch(p, gates, v4, j4, v8, j8, N)
        vecs.index(0).store(x4)
        gts.index(0).store(x8)
        for i in range(steps):
            more = (i + 1 < steps).to(gl.int64) * B
            p += more * 4 * N
            gates += more * 7 * N
            x4, x8 = _fetch(p, gates, v4, j4, v8, j8, N)
            vec = vecs.index(i % 2)
            gts_i = gts.index(i % 2)
            r = vector_by_rows(gts_i, 0, ROW, NW)
            h = vector_by_rows(gts_i, 1, ROW, NW)
            d = vector_by_rows(gts_i, 2, ROW, NW)
            g = vector_by_rows(gts_i, 3, ROW, NW)
            d = d * _inverse(vec, 0, COL)
            g = g * _inverse(vec, 3, COL)
            Sn = ()
            Mn = ()
            for c in gl.static_range(C):
                _save(scr, S[c], row, col, c, CI, R)
                _save(scr + R * R, M[c], row, col, c, CI, R)
                Sn = Sn + (gated(S[c], r, _piece(gts_i, 5, c, CI, COL), d, _piece(vec, 0, c, CI, COL)),)
                Mn = Mn + (gated(M[c], h, _piece(gts_i, 6, c, CI, COL), g, _piece(vec, 3, c, CI, COL)),)
            S = Sn
            M = Mn
            scr += 2 * R * R
            vecs.index((i + 1) % 2).store(x4)
            gts.index((i + 1) % 2).store(x8)
        scr -= 2 * R * R
        if C > 1:
            dS = ()
            dM = ()
            for c in gl.static_range(C):
                dS = dS + (_state_tile(s_ring.index(0), c, CI, L),)
                dM = dM + (_state_tile(s_ring.index(1), c, CI, L),)
        thread_barrier()
        # --- undo the segment's steps, last first; p, gates and scr point to the last one
        at_row += (steps - 1).to(gl.int64) * B
        dout = dout_ptr + at_row * N
        parts = parts_ptr + at_row * P * N
        x4, x8 = _fetch(p, gates, v4, j4, v8, j8, N)
        vecs.index(0).store(x4)
        gts.index(0).store(x8)
        if DOUT:
            x1 = gl.load(dout + j1, mask=j1 < N, other=0.0).to(gl.float32)
            vector(dos.index(0), 0).store(x1)
        _copy(s_ring.index(0), scr, row, column, R)
        async_copy.commit_group()
        _copy(m_ring.index(0), scr + R * R, row, column, R)
        async_copy.commit_group()
        for i in range(steps):
            # start to fetch what the next step needs
            more = (i + 1 < steps).to(gl.int64) * B
            p -= more * 4 * N
            gates -= more * 7 * N
            x4, x8 = _fetch(p, gates, v4, j4, v8, j8, N)
            if DOUT:
                dout -= more * N
                x1 = gl.load(dout + j1, mask=j1 < N, other=0.0).to(gl.float32)
            vec = vecs.index(i % 2)
            gts_i = gts.index(i % 2)
            s_now = s_ring.index(i % 2)
            m_now = m_ring.index(i % MS)
            scr -= (i + 1 < steps).to(gl.int64) * (2 * R * R)
            if MS == 2:
                async_copy.wait_group(0)
                _copy(m_ring.index((i + 1) % 2), scr + R * R, row, column, R)
            else:
                async_copy.wait_group(1)
            _copy(s_ring.index((i + 1) % 2), scr, row, column, R)
            async_copy.commit_group()
            r = vector_by_rows(gts_i, 0, ROW, NW)
            h = vector_by_rows(gts_i, 1, ROW, NW)
            d = vector_by_rows(gts_i, 2, ROW, NW)
            g = vector_by_rows(gts_i, 3, ROW, NW)
            ik = _inverse(vec, 0, COL)
            im = _inverse(vec, 3, COL)
            # gradients of M's gates
            if MS == 1:
                async_copy.wait_group(1)
            m0 = _state_tile(m_now, 0, CI, L)
            F = ()
            F1 = ()
            Z = ()
            for c in gl.static_range(C):
                if C > 1:
                    thread_barrier()
                X = dM[c] * _tile(m0, m_now, c, CI, L, C)
                Z = Z + (part_of(X * h[:, :, None]),)
                F = F + (_fold(X * _piece(gts_i, 6, c, CI, COL)[None, None, :]),)
                F1 = F1 + (_fold(dM[c] * _piece(vec, 3, c, CI, COL)[None, None, :]),)
            part_w.store(_join(Z, C))
            e = _rows(F, ROW, C) * h * (1.0 - h)
            dg = _rows(F1, ROW, C) * im
            dy = gl.zeros([NW, RW], gl.float32, ROW)
            if DOUT:
                y = vector_by_rows(gts_i, 4, ROW, NW)
                sy = sigmoid(y)
                dy = vector_by_rows(dos.index(i % 2), 0, ROW, NW) * y * sy * (2.0 + y * (1.0 - sy))
            w = vector(gts_i, 6).load(ONE)
            f = gl.sum(part_w.load(D), axis=0) * w * (1.0 - w)
            gate_f.store(f)
            vecs.index((i + 1) % 2).store(x4)
            gts.index((i + 1) % 2).store(x8)
            if DOUT:
                vector(dos.index((i + 1) % 2), 0).store(x1)
            # gradients of S's gates
            s0 = _state_tile(s_now, 0, CI, L)
            mr = vector_by_rows(vec, 3, ROW, NW) * im
            F = ()
            F1 = ()
            Z = ()
            new = ()
            for c in gl.static_range(C):
                if C > 1:
                    thread_barrier()
                fc = gate_f.slice(c * CI, CI).load(COL)
                ds = dS[c] + (e * im)[:, :, None] * _piece(vec, 3, c, CI, COL)[None, None, :]
                ds += mr[:, :, None] * fc[None, None, :]
                ds += dy[:, :, None] * _piece(vec, 2, c, CI, COL)[None, None, :]
                Y = ds * _tile(s0, s_now, c, CI, L, C)
                F = F + (_fold(Y * _piece(gts_i, 5, c, CI, COL)[None, None, :]),)
                F1 = F1 + (_fold(ds * _piece(vec, 0, c, CI, COL)[None, None, :]),)
                Z = Z + (part_of(Y * r[:, :, None]),)
                new = new + (ds,)
            dS = new
            part_c.store(_join(Z, C))
            a = _rows(F, ROW, C) * r * (1.0 - r)
            dd = _rows(F1, ROW, C) * ik + dg
            # m^ and q, while the exchange is in flight. S'.T e = c * (S.T (r e)) + k^ (delta . e), likewise S' f and
            # S'.T dy.
            re = r * e
            ry = r * dy
            dots_e.store(gl.sum(d * e, axis=1))
            dots_y.store(gl.sum(d * dy, axis=1))
            F = ()
            Z = ()
            Z1 = ()
            Z2 = ()
            for c in gl.static_range(C):
                if C > 1:
                    thread_barrier()
                cf = gate_f.slice(c * CI, CI).load(COL) * _piece(gts_i, 5, c, CI, COL)
                S_c = _tile(s0, s_now, c, CI, L, C)
                F = F + (_fold(S_c * cf[None, None, :]),)
                Z = Z + (part_of(dM[c] * g[:, :, None] - _tile(m0, m_now, c, CI, L, C) * dg[:, :, None]),)
                Z1 = Z1 + (part_of(S_c * re[:, :, None]),)
                Z2 = Z2 + (part_of(S_c * ry[:, :, None]),)
            part_m.store(_join(Z, C))
            part_w.store(_join(Z1, C))
            part_q.store(_join(Z2, C))
            kf = gl.sum(vector(vec, 0).load(COL) * gate_f.load(COL), axis=0) * ik
            dm_r = r * _rows(F, ROW, C) + d * kf
            u = vector(gts_i, 5).load(ONE)
            bb = gl.sum(part_c.load(D), axis=0) * u * (1.0 - u)
            gate_b.store(bb)
            de = gl.sum(dots_e.load(EACH), axis=0)
            ddy = gl.sum(dots_y.load(EACH), axis=0)
            k1 = vector(vec, 0).load(ONE) * ik
            dm_c = gl.sum(part_m.load(D), axis=0) + u * gl.sum(part_w.load(D), axis=0) + k1 * de
            gl.store(parts + 5 * N + one, dm_c, mask=omask)
            gl.store(parts + 6 * N + one, u * gl.sum(part_q.load(D), axis=0) + k1 * ddy, mask=omask)
            # gradients of k^ and of the states
            kr = vector_by_rows(vec, 0, ROW, NW) * ik
            F = ()
            Z = ()
            new = ()
            new_m = ()
            for c in gl.static_range(C):
                if C > 1:
                    thread_barrier()
                bc = gate_b.slice(c * CI, CI).load(COL)
                kc = _piece(vec, 0, c, CI, COL)
                M_c = _tile(m0, m_now, c, CI, L, C)
                F = F + (_fold(M_c * bc[None, None, :]),)
                S_c = _tile(s0, s_now, c, CI, L, C)
                Z = Z + (part_of(dS[c] * d[:, :, None] + M_c * a[:, :, None] - S_c * dd[:, :, None]),)
                new = new + (gated(dS[c], r, _piece(gts_i, 5, c, CI, COL), -dd * ik, kc),)
                dm = gated(dM[c], h, _piece(gts_i, 6, c, CI, COL), -dg * im, _piece(vec, 3, c, CI, COL))
                new_m = new_m + (dm + (a * ik)[:, :, None] * kc[None, None, :] + kr[:, :, None] * bc[None, None, :],)
            dS = new
            dM = new_m
            if MS == 1:
                _copy(m_ring.index(0), scr + R * R, row, column, R)
                async_copy.commit_group()
            part_k.store(_join(Z, C))
            gl.store(parts + row, _rows(F, ROW, C), mask=rmask)
            gl.store(parts + N + row, dm_r, mask=rmask)
            gl.store(parts + 2 * N + row, dd, mask=rmask)
            gl.store(parts + 3 * N + row, a, mask=rmask)
            gl.store(parts + 4 * N + one, gl.sum(part_k.load(D), axis=0), mask=omask)
            if BS == 1:
                dbs_r += a
                dbs_c += bb
            if BS == 2:
                gl.store(parts + 7 * N + one, bb, mask=omask)
            if BM == 1:
                dbm_r += e
                dbm_c += f
            if BM == 2:
                gl.store(parts + (P - 2) * N + row, e, mask=rmask)
                gl.store(parts + (P - 1) * N + one, f, mask=omask)
            parts -= B * P * N
        async_copy.wait_group(0)
        thread_barrier()
    for c in gl.static_range(C):
        _store(ds0_ptr + b * N * N, dS[c], row, col, c, CI, N)
        _store(dm0_ptr + b * N * N, dM[c], row, col, c, CI, N)
    if BS == 1:
        gl.store(dbs_ptr + b * 2 * N + row, dbs_r, mask=rmask)
        gl.store(dbs_ptr + b * 2 * N + N + one, dbs_c, mask=omask)
    if BM == 1:
        gl.store(dbm_ptr + b * 2 * N + row, dbm_r, mask=rmask)
        gl.store(dbm_ptr + b * 2 * N + N + one, dbm_c, mask=omask)
