# SPDX-License-Identifier: Apache-2.0
"""The E79 scan, forward: one program per sequence, with S and M in registers in fp32.

    S' = r[:, None] * S * c[None, :] + outer(delta, k^),  r, c = sigmoid(M k^ + b_s), sigmoid(M.T k^ + b_s)
    M' = p[:, None] * M * w[None, :] + outer(g, m^),      p, w = sigmoid(S' m^ + b_m), sigmoid(S'.T m^ + b_m)
    delta = v - S k^,  g = delta - M m^,  out = y * silu(y),  y = S' q;  k^ and m^ have length 1

kvqm[T, B, 4 n] holds k, v, q, m. A state is C tiles [R, CI] of columns (``common.py``). A step waits for the one
before, so that its latency bounds the scan, not bytes nor products: the states never leave the program between steps,
the next step's vectors are loaded a step ahead (up to n = 64), and norms scale the sums afterwards. With SAVE, the
states go to memory every SEG steps and the gates at every step, for the backward.
"""

import triton
import triton.language as tl

from .common import (
    column_sums,
    gate,
    gated,
    load_columns,
    load_rows,
    load_tiles,
    norm_inverse,
    row_sum,
    scale_rows,
    sigmoid,
    store_columns,
    store_four_rows,
    store_rows,
    store_tiles,
)


@triton.jit
def _step_inputs(
    p, bs, bm, N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Loads k, m, q by columns, k, v, m by rows, and the biases both ways.

    Without a bias, k or m is returned in its place and not used.
    """
    k = load_columns(p, N, CI, C)
    m = load_columns(p + 3 * N, N, CI, C)
    q = load_columns(p + 2 * N, N, CI, C)
    kr = load_rows(p, N, R)
    vr = load_rows(p + N, N, R)
    mr = load_rows(p + 3 * N, N, R)
    bsc = k
    bsr = kr
    bmc = m
    bmr = mr
    if BS == 2:
        bsc = load_columns(bs, N, CI, C)
        bsr = load_rows(bs, N, R)
    if BM == 2:
        bmc = load_columns(bm, N, CI, C)
        bmr = load_rows(bm, N, R)
    return k, m, q, kr, vr, mr, bsc, bsr, bmc, bmr


@triton.jit(do_not_specialize=["T", "B", "SEG", "has_s", "has_m"])
def e79_forward(
    kvqm_ptr, bs_ptr, bm_ptr, s0_ptr, m0_ptr, out_ptr, s_ptr, m_ptr, ckpt_ptr, gates_ptr, T, B, SEG, has_s, has_m,
    N: tl.constexpr, R: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
    SAVE: tl.constexpr, PF: tl.constexpr,
):  # fmt: skip
    """Runs the scan of one sequence per program.

    BS, BM: 0 for no bias, 1 for one [N] for all steps, 2 for [T, B, N]. SAVE: store the states every SEG steps, and the
    gates[T, B, 7, N] (r, p, delta, g, y, c, w) of every step. PF: prefetch the next step's vectors into registers.
    """
    b = tl.program_id(0).to(tl.int64)
    B = b * 0 + B  # int64 even if B is passed as a constant
    S = load_tiles(s0_ptr + b * N * N, has_s, N, R, CI, C)
    M = load_tiles(m0_ptr + b * N * N, has_m, N, R, CI, C)
    p = kvqm_ptr + b * 4 * N
    bs = bs_ptr
    bm = bm_ptr
    if BS == 2:
        bs += b * N
    if BM == 2:
        bm += b * N
    if BS == 1:
        fbsc = load_columns(bs_ptr, N, CI, C)
        fbsr = load_rows(bs_ptr, N, R)
    if BM == 1:
        fbmc = load_columns(bm_ptr, N, CI, C)
        fbmr = load_rows(bm_ptr, N, R)
    out = out_ptr + b * N
    gates = gates_ptr + b * 7 * N
    ckpt = ckpt_ptr + b * N * N
    left = 0
    if PF:
        k, m, q, kr, vr, mr, bsc, bsr, bmc, bmr = _step_inputs(p, bs, bm, N, R, CI, C, BS, BM)
    for t in range(T):
        if SAVE:
            if left == 0:
                store_tiles(ckpt, S, N, R, CI, C)
                store_tiles(ckpt + B * N * N, M, N, R, CI, C)
                ckpt += 2 * B * N * N
                left = left * 0 + SEG
            left -= 1
        more = (t + 1 < T).to(tl.int64)
        p += more * B * 4 * N
        if BS == 2:
            bs += more * B * N
        if BM == 2:
            bm += more * B * N
        if PF:
            k1, m1, q1, kr1, vr1, mr1, bsc1, bsr1, bmc1, bmr1 = _step_inputs(p, bs, bm, N, R, CI, C, BS, BM)
        else:
            back = (t + 1 < T).to(tl.int64) * B
            k, m, q, kr, vr, mr, bsc, bsr, bmc, bmr = _step_inputs(
                p - back * 4 * N, bs - back * N * (BS // 2), bm - back * N * (BM // 2), N, R, CI, C, BS, BM
            )
        if BS == 1:
            bsc = fbsc
            bsr = fbsr
        if BM == 1:
            bmc = fbmc
            bmr = fbmr
        # The norms scale the sums afterwards, so that the sums need not wait for them.
        ik = norm_inverse(k, C)
        im = norm_inverse(m, C)
        c = gate(column_sums(scale_rows(M, kr, C), C), bsc, ik, BS > 0, C)
        r = row_sum(M, k, C) * ik
        if BS > 0:
            r += bsr
        r = sigmoid(r)
        d = vr - row_sum(S, k, C) * ik
        g = d - row_sum(M, m, C) * im
        S = gated(S, r, c, d * ik, k, C)
        w = gate(column_sums(scale_rows(S, mr, C), C), bmc, im, BM > 0, C)
        h = row_sum(S, m, C) * im
        if BM > 0:
            h += bmr
        h = sigmoid(h)
        y = row_sum(S, q, C)
        M = gated(M, h, w, g * im, m, C)
        store_rows(out, y * y * sigmoid(y), N, R)
        out += B * N
        if SAVE:
            store_four_rows(gates, r, h, d, g, N, R)
            store_rows(gates + 4 * N, y, N, R)
            store_columns(gates + 5 * N, c, N, R, CI, C)
            store_columns(gates + 6 * N, w, N, R, CI, C)
            gates += B * 7 * N
        if PF:
            k, m, q, kr, vr, mr = k1, m1, q1, kr1, vr1, mr1
            bsc, bsr, bmc, bmr = bsc1, bsr1, bmc1, bmr1
    store_tiles(s_ptr + b * N * N, S, N, R, CI, C)
    store_tiles(m_ptr + b * N * N, M, N, R, CI, C)
