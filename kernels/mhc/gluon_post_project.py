# SPDX-License-Identifier: Apache-2.0
"""The fused post and projection of its result, in one pass over x, with wgmma (sm_90).

``post.py`` and ``pre.py`` have the formulas; four bf16 streams. A program has a slice of NB * 32 columns of each
stream, whose phi stays in shared memory, and every G-th tile of NW * 16 tokens; programs [slices, G]. Bytes bound it:
x and f_out are read once, out written once. x and f_out are copied SL steps of 64 columns ahead, in whole lines. A
thread reads 8 neighbouring columns of two tokens, mixes them, stores them and multiplies them without a change of
layout: phi's columns are permuted so that these registers form the left operand of wgmma. Its right operand are three
bf16 terms of phi's 24 rows, as 64 and 8 rows, since no tensor of Triton can have 72 (of 8 rows, as 16 and 8). Few
products are wanted: from Triton 3.8 on each has a copy of the left operand's registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_language import async_load, thread_barrier
from . import contracted
from .gluon_bf16 import rounded, widened

# bf16 terms of an fp32 phi, also where fewer would do: memory hides the products, and with fewer terms ptxas spills.
TERMS = gl.constexpr(3)
mix_stream = gluon.jit(contracted.mix_stream.fn)
add_weighted = gluon.jit(contracted.add_weighted.fn)
product = gluon.jit(contracted.product.fn)


@gluon.jit
def load_mix(h_post_ptr, h_res_ptr, t, HAS_RES: gl.constexpr, TRANSPOSE: gl.constexpr):
    """Loads h_post, then R row by row, of tokens t in fp32."""
    c = ()
    for o in gl.static_range(4):
        c = c + (gl.load(h_post_ptr + t * 4 + o).to(gl.float32),)
    if HAS_RES:
        for o in gl.static_range(4):
            for i in gl.static_range(4):
                at = i * 4 + o if TRANSPOSE else o * 4 + i
                c = c + (gl.load(h_res_ptr + t * 16 + at).to(gl.float32),)
    return c


@gluon.jit
def _fetch(ring, slot, x_ptr, f_ptr, t, d, D: gl.constexpr):
    """Starts to copy f_out, then the streams of x, [2, BT, 32] each, in whole lines of 128 bytes."""
    async_load(ring.index(slot * 5), f_ptr + (t * D + d))
    for i in gl.static_range(4):
        async_load(ring.index(slot * 5 + 1 + i), x_ptr + (t * (4 * D) + (i * D + d)))
    async_copy.commit_group()


@gluon.jit
def _both_halves(ring, slot, L3: gl.constexpr, L: gl.constexpr):
    """Loads f_out and the streams of x, as two blocks of 32 columns."""
    halves = ((), ())
    for i in gl.static_range(5):
        lo, hi = gl.split(ring.index(slot * 5 + i).load(L3).permute((1, 2, 0)))
        halves = (
            halves[0] + (gl.convert_layout(lo, L, assert_trivial=True),),
            halves[1] + (gl.convert_layout(hi, L, assert_trivial=True),),
        )
    return halves


@gluon.jit
def _half(ring, slot, j: gl.constexpr, L1: gl.constexpr, L: gl.constexpr):
    """Loads one of the two blocks."""
    half = ()
    for i in gl.static_range(5):
        v = ring.index(slot * 5 + i).slice(j, 1, 0).load(L1)
        half = half + (gl.convert_layout(v.reshape([v.shape[1], 32]), L, assert_trivial=True),)
    return half


@gluon.jit
def load_phi(
    phi_ptr, gamma_ptr, first, D: gl.constexpr, M: gl.constexpr, NB: gl.constexpr, HAS_GAMMA: gl.constexpr,
    NW: gl.constexpr, START: gl.constexpr, END: gl.constexpr,
):  # fmt: skip
    """Loads blocks START to END of phi * gamma, each in pieces [8, 32].

    They are NB blocks of the first stream, of the second, and so on.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [NW, 1], [1, 0])
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
    # Of a thread's 8 neighbouring columns, wgmma takes two at a time.
    p = (k // 2 % 4) * 8 + (k // 16) * 4 + (k // 8 % 2) * 2 + k % 2
    v = ()
    for i in gl.static_range(START, END):
        d = first + i % NB * 32 + p
        for j in gl.static_range((M + 7) // 8):
            m = j * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, L))[:, None]
            ok = (m < M) & (d < D)
            x = gl.load(phi_ptr + m * (4 * D) + (i // NB * D + d), mask=ok, other=0.0).to(gl.float32)
            if HAS_GAMMA:
                x = product(x, gl.load(gamma_ptr + m * 0 + (i // NB * D + d), mask=ok, other=0.0).to(gl.float32))
            v = v + (x,)
    return v


@gluon.jit
def _below(a, b):
    """Returns the rows of b below those of a, both [R, 32]."""
    return gl.join(a, b).permute((2, 0, 1)).reshape([2 * a.shape[0], 32])


@gluon.jit
def operands(pieces, i: gl.constexpr, N: gl.constexpr):
    """Returns the rows of the largest bf16 terms of fp32 block i, of the second, and of the third.

    Each block has N pieces [8, 32]. All rows but the last 8 are one tensor, those another.
    """
    v = ()
    for j in gl.static_range(N):
        v = v + (pieces[i * N + j],)
    t = ()
    for _ in gl.static_range(TERMS):
        rest = ()
        for j in gl.static_range(len(v)):
            h = rounded(v[j])
            rest = rest + (v[j] - widened(h),)
            t = t + (h,)
        v = rest
    rows = _below(t[0], t[1])
    if len(t) == 9:
        rows = _below(_below(rows, _below(t[2], t[3])), _below(_below(t[4], t[5]), _below(t[6], t[7])))
    return rows, t[len(t) - 1]


@gluon.jit
def _stage_phi(
    rows, last, phi_ptr, gamma_ptr, first, D: gl.constexpr, M: gl.constexpr, NB: gl.constexpr, HAS_GAMMA: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Stores phi * gamma in shared memory: the operands of NB blocks of the first stream, of the second, and so on."""
    # As many loads at once as the registers can hold.
    ROUND: gl.constexpr = NW * 4 // (2 if HAS_GAMMA else 1)
    for start in gl.static_range(0, 4 * NB, ROUND):
        v = load_phi(phi_ptr, gamma_ptr, first, D, M, NB, HAS_GAMMA, NW, start, start + ROUND)
        for i in gl.static_range(ROUND):
            w = operands(v, i, (M + 7) // 8)
            rows.index(start + i).store(w[0])
            last.index(start + i).store(w[1])


@gluon.jit
def _add_squares(q, y, FIRST: gl.constexpr):
    """Adds the squares of a thread's 8 columns of y [BT, 32] to q [BT, 4], one after the other."""
    even, odd = gl.split(y.reshape([y.shape[0], 4, 2, 2, 2]))
    pairs = gl.split(even) + gl.split(odd)
    for i in gl.static_range(4):
        a, b = gl.split(pairs[i])
        q = add_weighted(add_weighted(q, a, a, FIRST and i == 0), b, b, False)
    return q


@gluon.jit
def _halves(x):
    """Returns the first and the second half of the columns of x."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _pieces(x, MMA: gl.constexpr):
    """Returns the columns of x [BT, 16] or [BT, 64], 8 at a time."""
    parts = _halves(x)
    if x.shape[1] == 64:
        parts = _halves(parts[0]) + _halves(parts[1])
        parts = _halves(parts[0]) + _halves(parts[1]) + _halves(parts[2]) + _halves(parts[3])
    pieces = ()
    for i in gl.static_range(len(parts)):
        pieces = pieces + (gl.convert_layout(parts[i], MMA, assert_trivial=True),)
    return pieces


@gluon.jit
def project_block(
    w, b, c, weights, f, xs, out_ptr, h_in_ptr, t, cols, inside, D: gl.constexpr, M: gl.constexpr, NB: gl.constexpr,
    HAS_RES: gl.constexpr, COLLAPSE: gl.constexpr, APART: gl.constexpr, Q: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Mixes 32 columns ``cols`` of tokens t, stores them (and collapsed with COLLAPSE) and projects them.

    Returns the products [BT, 8] with each 8 rows of block b of phi, and four sums of squares [BT, 4]. w is the memory of
    all blocks' operands; with APART it has the operands of each stream. Every number is that of its token alone: bits do
    not depend on other tokens.
    """
    BT: gl.constexpr = f.shape[0]
    N: gl.constexpr = (M + 7) // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 24 * N - 8, 16])
    MMA8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 8, 16])
    q = None
    h_in = None
    mix = ()
    for i in gl.static_range(len(c)):
        mix = mix + (c[i][:, None],)
    # Tensor cores round their running sum towards zero: each term has a sum of its own, and each block.
    d = gl.zeros([BT, 24 * N - 8], gl.float32, layout=MMA)
    last = gl.zeros([BT, 8], gl.float32, layout=MMA8)
    for o in gl.static_range(4):
        h = rounded(mix_stream(mix, f, xs, o, 4, HAS_RES))
        y = widened(h)
        gl.store(out_ptr + ((t * (4 * D) + o * D)[:, None] + cols[None, :]), h, mask=inside)
        if COLLAPSE:
            h_in = add_weighted(h_in, weights[o][:, None], y, o == 0)
        # Of these two orders ptxas spills less with the one or the other.
        if COLLAPSE or o == 0:
            q = _add_squares(q, y, o == 0)
        else:
            q = q + _add_squares(None, y, True)
        h = h.reshape([BT, 4, 2, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([BT, 32])
        h = gl.convert_layout(h, gl.DotOperandLayout(0, MMA, 2))
        p = w[2 * o] if APART else w[0].index(o * NB + b)
        d = warpgroup_mma(h, p.permute((1, 0)), d, use_acc=o > 0, is_async=True)
        h = gl.convert_layout(h, gl.DotOperandLayout(0, MMA8, 2), assert_trivial=True)
        p = w[2 * o + 1] if APART else w[1].index(o * NB + b)
        last = warpgroup_mma(h, p.permute((1, 0)), last, use_acc=o > 0, is_async=True)
    if COLLAPSE:
        gl.store(h_in_ptr + ((t * D)[:, None] + cols[None, :]), rounded(h_in), mask=inside)
    sums = warpgroup_mma_wait(0, deps=(d, last))
    p = _pieces(sums[0], MMA8) + (sums[1],)
    products = ()
    for j in gl.static_range(N):
        products = products + (p[j] + (p[N + j] + p[2 * N + j]),)
    return products, gl.convert_layout(q, Q, assert_trivial=True)


@gluon.jit
def no_products(BT: gl.constexpr, N: gl.constexpr, MMA: gl.constexpr):
    """Returns N zeros [BT, 8]."""
    z = ()
    for _ in gl.static_range(N):
        z = z + (gl.zeros([BT, 8], gl.float32, layout=MMA),)
    return z


@gluon.jit
def store_products(to, products, first, T, M: gl.constexpr, MP: gl.constexpr, MMA: gl.constexpr):
    """Stores the products of tokens from ``first`` on as rows of MP numbers."""
    t = (first + gl.arange(0, products[0].shape[0], layout=gl.SliceLayout(1, MMA)))[:, None]
    for j in gl.static_range(len(products)):
        m = (j * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, MMA)))[None, :]
        gl.store(to + (t * MP + m), products[j], mask=(t < T) & (m < M))


@gluon.jit(do_not_specialize=["T"])
def mhc_post_project(
    x_ptr, f_ptr, h_post_ptr, h_res_ptr, h_pre_ptr, phi_ptr, gamma_ptr, out_ptr, h_in_ptr, part_ptr, T,
    D: gl.constexpr, M: gl.constexpr, MP: gl.constexpr, NB: gl.constexpr, HAS_RES: gl.constexpr,
    TRANSPOSE: gl.constexpr, COLLAPSE: gl.constexpr, HAS_GAMMA: gl.constexpr, SL: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Computes post and its projection over NB blocks of 32 columns of each stream.

    out = post, part[s, t, :M] = out @ phi.T and part[s, t, M] = sum(out * out). With COLLAPSE also
    h_in = sum_o h_pre[o] * out[o].
    """
    BT: gl.constexpr = NW * 16
    N: gl.constexpr = (M + 7) // 8
    WARPS: gl.constexpr = [[16, 0], [32, 0], [64, 0]] if NW == 8 else [[16, 0], [32, 0]]
    WARPS3: gl.constexpr = [[0, 16, 0], [0, 32, 0], [0, 64, 0]] if NW == 8 else [[0, 16, 0], [0, 32, 0]]
    # The rows of wgmma's left operand, with 8 columns per thread.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], WARPS, [], [BT, 32]
    )
    # Two such blocks side by side.
    L3: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0], [1, 0, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]], WARPS3, [], [2, BT, 32],
    )  # fmt: skip
    # One of them.
    L1: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]], WARPS3, [], [1, BT, 32],
    )  # fmt: skip
    Q: gl.constexpr = gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], WARPS, [], [BT, 4])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, 8, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    TILE: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    rows = gl.allocate_shared_memory(gl.bfloat16, [4 * NB, 24 * N - 8, 32], TILE)
    last = gl.allocate_shared_memory(gl.bfloat16, [4 * NB, 8, 32], TILE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [5 * SL, 2, BT, 32], gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0]))
    s = gl.program_id(0)
    first = s * (NB * 32)
    row = gl.arange(0, BT, layout=ROW)
    col = first + gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    # The elements of a fetch: the halves of 64 columns, tokens, columns.
    F: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 4, 4], [1, NW, 1], [2, 0, 1])
    frow = gl.arange(0, BT, layout=gl.SliceLayout(0, gl.SliceLayout(2, F)))[None, :, None]
    fcol = (
        first
        + gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, F)))[:, None, None] * 32
        + gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, F)))[None, None, :]
    )
    G = gl.num_programs(1)
    g = gl.program_id(1)
    tiles = (T + BT - 1) // BT
    steps = gl.minimum(D // 64 - s * (NB // 2), NB // 2)
    # Tile and step of the next fetch.
    ft = g
    fs = 0
    for slot in gl.static_range(SL):
        _fetch(ring, slot, x_ptr, f_ptr, gl.minimum(ft * BT + frow, T - 1).to(gl.int64), fs * 64 + fcol, D)
        fs += 1
        ft = gl.where(fs == steps, ft + G, ft)
        fs = gl.where(fs == steps, 0, fs)
    slot = 0
    _stage_phi(rows, last, phi_ptr, gamma_ptr, first, D, M, NB, HAS_GAMMA, NW)
    fence_async_shared()
    thread_barrier()
    for tile in range(g, tiles, G):
        t = gl.minimum(tile * BT + row, T - 1).to(gl.int64)
        inside = (tile * BT + row < T)[:, None]
        c = load_mix(h_post_ptr, h_res_ptr, t, HAS_RES, TRANSPOSE)
        weights = ()
        if COLLAPSE:
            for o in gl.static_range(4):
                weights = weights + (gl.load(h_pre_ptr + t * 4 + o).to(gl.float32),)
        total = no_products(BT, N, MMA)
        ss = gl.zeros([BT, 4], gl.float32, layout=Q)
        for step in range(steps):
            async_copy.wait_group(SL - 1)
            halves = ()
            if not COLLAPSE:
                halves = _both_halves(ring, slot, L3, L)
                _fetch(ring, slot, x_ptr, f_ptr, gl.minimum(ft * BT + frow, T - 1).to(gl.int64), fs * 64 + fcol, D)
            for j in gl.static_range(2):
                b = step * 2 + j
                # The collapse leaves no registers for the other half.
                half = _half(ring, slot, j, L1, L) if COLLAPSE else halves[j]
                xs = ()
                for i in gl.static_range(5):
                    xs = xs + (widened(half[i]),)
                products, squares = project_block(
                    (rows, last), b, c, weights, xs[0], xs[1:], out_ptr, h_in_ptr, t, b * 32 + col, inside, D, M, NB,
                    HAS_RES, COLLAPSE, False, Q, NW,
                )  # fmt: skip
                sums = ()
                for i in gl.static_range(N):
                    sums = sums + (total[i] + products[i],)
                total = sums
                ss += squares
            if COLLAPSE:
                _fetch(ring, slot, x_ptr, f_ptr, gl.minimum(ft * BT + frow, T - 1).to(gl.int64), fs * 64 + fcol, D)
            fs += 1
            ft = gl.where(fs == steps, ft + G, ft)
            fs = gl.where(fs == steps, 0, fs)
            slot = gl.where(slot == SL - 1, 0, slot + 1)
        out = part_ptr + (s.to(gl.int64) * T) * MP
        store_products(out, total, tile * BT, T, M, MP, MMA)
        tq = tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, Q))
        gl.store(out + tq * MP + M, gl.sum(ss, axis=1), mask=tq < T)
    async_copy.wait_group(0)
