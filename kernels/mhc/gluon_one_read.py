# SPDX-License-Identifier: Apache-2.0
"""pre with one read of x (sm_90): sums are exchanged while x stays in shared memory.

``pre.py`` has the formulas; four bf16 streams. A group of G = D / 256 programs of 8 warps takes every NG-th tile of 16
tokens, a program 256 columns of each stream; phi's columns stay in registers for all tiles. A program projects its
part of a tile, publishes five sums a token, goes on with the next tiles, and collapses the tile from shared memory LAG
tiles later, once all parts are there. At the end, the group shares the coefficients' tokens. All programs must be
resident: the launch is cooperative. Bytes would bound it (x once, h_in once); what is left is latency, which two tiles
hide for each other: one is multiplied while another is collapsed, in one block of instructions.

Words of the exchange start as 0, and a sum of 0 is written as -0, so that a word is its own flag.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime.jit import constexpr_function

from ..gluon_language import async_load, reinterpret, thread_barrier
from .gluon_bf16 import rounded, widened

# bf16 terms of an fp32 phi, also where fewer would do: the products are hidden.
TERMS = gl.constexpr(3)
# Tiles in shared memory, and after how many a tile is collapsed: with fewer, programs wait for each other's sums.
RING = gl.constexpr(6)
LAG = gl.constexpr(4)
# Words before the exchange: a counter per group.
COUNTERS = gl.constexpr(256)
# Looks until a missing sum stops the kernel with an error: tens of seconds. Residency makes every sum come.
LOOKS = 1 << 25


@constexpr_function
def _peek_asm(n, parts, stride):
    """Loads n words, ``stride`` bytes apart from the first's address; the last n - parts are 0."""
    lines = [f"ld.relaxed.gpu.global.b32 ${i}, [${n} + {i * stride}];" for i in range(parts)]
    return " ".join(lines + [f"mov.b32 ${i}, 0;" for i in range(parts, n)])


@constexpr_function
def _peek_constraints(n):
    return ",".join(["=&r"] * n + ["l"] * n)


@constexpr_function
def _await_asm(n, parts, stride):
    """Looks again until none of the words, first those of ``_peek_asm``, is 0."""
    lines = ["{ .reg .pred p; .reg .pred q; .reg .b32 m; .reg .b32 c; mov.b32 c, 0;"]
    lines += [f"mov.b32 ${i}, ${n + i};" for i in range(n)] + ["bra LOOK; AGAIN: nanosleep.u32 40;"]
    lines += [f"ld.relaxed.gpu.global.b32 ${i}, [${2 * n} + {i * stride}];" for i in range(parts)]
    lines += ["LOOK: min.u32 m, $0, $1;"] + [f"min.u32 m, m, ${i};" for i in range(2, parts)]
    lines += [f"add.u32 c, c, 1; setp.gt.u32 q, c, {LOOKS}; @q trap; setp.eq.u32 p, m, 0; @p bra AGAIN;"]
    return " ".join(lines) + " }"


@constexpr_function
def _await_constraints(n):
    return ",".join(["=&r"] * n + ["r"] * n + ["l"] * n)


@constexpr_function
def _counter_asm(last):
    return (
        "{ .reg .pred p; .reg .pred q; .reg .b32 c; mov.b32 c, 0; AGAIN: ld.acquire.gpu.global.b32 $0, [$1]; "
        f"add.u32 c, c, 1; setp.gt.u32 q, c, {LOOKS}; @q trap; setp.ne.u32 p, $0, {last}; @p bra AGAIN; }}"
    )


@constexpr_function
def _copy_layout():
    """[4 blocks, 8 (stream, half), 16 tokens, 32 columns] of x: a warp has two tokens."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
        [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0]], [], [4, 8, 16, 32],
    )  # fmt: skip


@constexpr_function
def _token_layout(width, bases):
    """[16 tokens, width values in registers]: a thread has the values of its token in ``_copy_layout``."""
    lanes = [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(bases, lanes, [[2, 0], [4, 0], [8, 0]], [], [16, width])


@gluon.jit
def _streams(x):
    """The 4 streams [4 blocks, 2 halves, 16, 32] of x [4, 8, 16, 32]."""
    x = x.reshape([4, 4, 2, 16, 32]).permute((0, 2, 3, 4, 1)).reshape([4, 2, 16, 32, 2, 2])
    x02, x13 = gl.split(x)
    x0, x2 = gl.split(x02)
    x1, x3 = gl.split(x13)
    return x0, x1, x2, x3


@gluon.jit
def _columns4(v, S: gl.constexpr):
    """The 4 columns of v [16, 4], each in layout S."""
    even, odd = gl.split(v.reshape([16, 2, 2]))
    v0, v2 = gl.split(even)
    v1, v3 = gl.split(odd)
    return (
        gl.convert_layout(v0, S, assert_trivial=True), gl.convert_layout(v1, S, assert_trivial=True),
        gl.convert_layout(v2, S, assert_trivial=True), gl.convert_layout(v3, S, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def _tokens(L: gl.constexpr):
    """The tokens 0 .. 15 of a tile of layout L, [1, 1, 16, 1]."""
    return gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]


@gluon.jit
def _offsets(g, D: gl.constexpr, HALVES: gl.constexpr, L: gl.constexpr):
    """Offsets in a token's row of the columns of program g, [4, HALVES, 1, 32]; HALVES is 8 (streams) or 2 (one)."""
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    h = gl.arange(0, HALVES, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    d = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    return (g * 256 + b * 32 + d) + ((h // 2) * D + (h % 2) * 128)


@gluon.jit
def _fetch(ring, at, x_thread, t0, T, D: gl.constexpr):
    """Starts to copy x of 16 tokens."""
    async_load(ring.index(at), x_thread + t0.to(gl.int64) * (4 * D), mask=t0 + _tokens(_copy_layout()) < T)


@gluon.jit
def _terms(phi_ptr, gamma_ptr, g, D: gl.constexpr, M: gl.constexpr, HAS_GAMMA: gl.constexpr):
    """Phi * gamma as bf16 terms, largest first: right operands [8 warps, 32, 8], by block, 8 rows of phi and term."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8])
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    ws = ()
    for b in gl.static_range(4):
        at = g * 256 + k + b * 32 + (w // 2 * D + w % 2 * 128)
        for j in gl.static_range((M + 7) // 8):
            # The mask has the shape of the pointers.
            v = gl.load(phi_ptr + ((m + j * 8) * (4 * D) + at), mask=(m + j * 8 < M) & (at >= 0), other=0.0)
            v = v.to(gl.float32)
            if HAS_GAMMA:
                v = v * gl.load(gamma_ptr + at).to(gl.float32)
            for _ in gl.static_range(TERMS):
                h = rounded(v)
                v = v - widened(h)
                ws = ws + (h,)
    return ws


@gluon.jit
def _products(blocks, slot, ws, sums, M8: gl.constexpr):
    """Multiplies a tile by phi; stores each warp's sums, and those of squares."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    # Tensor cores round their running sum towards zero: small terms have their own.
    big = ()
    small = ()
    for _ in gl.static_range(M8):
        big = big + (gl.zeros([8, 16, 8], gl.float32, layout=MMA),)
        small = small + (gl.zeros([8, 16, 8], gl.float32, layout=MMA),)
    for b in gl.static_range(4):
        a = blocks.index(slot * 4 + b).load(A)
        new = ()
        rest = ()
        for j in gl.static_range(M8):
            new = new + (mma_v2(a, ws[(b * M8 + j) * TERMS], big[j]),)
            s = mma_v2(a, ws[(b * M8 + j) * TERMS + 1], small[j])
            rest = rest + (mma_v2(a, ws[(b * M8 + j) * TERMS + 2], s),)
        big = new
        small = rest
        lo, hi = gl.split(widened(a).reshape([8, 16, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)))
        y0, y1 = gl.split(lo)
        y2, y3 = gl.split(hi)
        if b == 0:
            qs = y0 * y0
        else:
            qs = gl.fma(y0, y0, qs)
        qs = gl.fma(y3, y3, gl.fma(y2, y2, gl.fma(y1, y1, qs)))
    q = gl.convert_layout(gl.sum(gl.sum(qs, axis=2), axis=2), gl.SliceLayout(2, MMA), assert_trivial=True)
    q = q[:, :, None] + gl.zeros([8, 16, 8], gl.float32, layout=MMA)
    s0 = big[0] + small[0]
    # Rows beyond M are not read.
    s1 = big[1] + small[1] if M8 > 1 else q
    s2 = big[2] + small[2] if M8 > 2 else q
    sums.store(gl.join(gl.join(s0, s2), gl.join(s1, q)).reshape([8, 16, 8, 4]).permute((3, 0, 1, 2)))


@gluon.jit
def _publish(sums, exch, part, M: gl.constexpr):
    """Adds the warps' sums in a fixed order, publishes h_pre's and the sum of squares, stores the others in part."""
    Q: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0], [2, 0, 0, 0]],
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 4, 0], [0, 0, 8, 0], [1, 0, 0, 0]], [], [4, 8, 16, 8],
    )  # fmt: skip
    r = gl.sum(sums.load(Q), axis=1)
    P: gl.constexpr = r.type.layout
    q = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, P)))[:, None, None]
    t = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, P)))[None, :, None]
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, P)))[None, None, :]
    bits = r.to(gl.int32, bitcast=True)
    # -0, since 0 is a word that is not written.
    bits = gl.where(bits == 0, -2147483648, bits)
    word = gl.where(q == 3, 4, i) + t * 5
    yes = ((q == 0) & (i < 4)) | ((q == 3) & (i == 0)) & (t >= 0)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
        [exch + word, bits, yes.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    m = q * 8 + i
    gl.store(part + (t * 20 + m - 4), r, mask=(m >= 4) & (m < M) & (t >= 0))


@gluon.jit
def _exchange_offsets(G: gl.constexpr, GP: gl.constexpr):
    """Offsets of [GP parts, 16 tokens, 8]: five sums per token; beyond the fifth, the fifth again."""
    # Triton 3.6 sums over neighbouring bits of a lane's number only, whatever the layout says: sums, tokens, parts.
    E: gl.constexpr = gl.DistributedLinearLayout(
        [[2, 0, 0], [4, 0, 0], [8, 0, 0]] + ([[16, 0, 0]] if GP == 32 else []),
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [1, 0, 0]], [[0, 2, 0], [0, 4, 0], [0, 8, 0]], [], [GP, 16, 8],
    )  # fmt: skip
    p = gl.arange(0, GP, layout=gl.SliceLayout(1, gl.SliceLayout(2, E)))[:, None, None]
    t = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, E)))[None, :, None]
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, E)))[None, None, :]
    return gl.minimum(p, G - 1) * 80 + (t * 5 + gl.minimum(i, 4))


@gluon.jit
def _peek(at, G: gl.constexpr, GP: gl.constexpr):
    return gl.inline_asm_elementwise(
        _peek_asm(GP // 2, G // 2, 640), _peek_constraints(GP // 2), [at], dtype=gl.int32, is_pure=False, pack=GP // 2
    )


@gluon.jit
def _norm_factor(square, eps, OUTSIDE: gl.constexpr):
    """The factor of ``contracted.norm_factor``, from the mean of squares."""
    if OUTSIDE:
        return 1.0 / (gl.sqrt(square) + eps)
    else:
        return gl.rsqrt(square + eps)


@gluon.jit
def _weights(
    seen, at, alpha, bias, norm_eps, hc_eps, K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, OUTSIDE: gl.constexpr
):
    """h_pre of a tile's 16 tokens, [16, 4], from all parts of its sums."""
    v = gl.inline_asm_elementwise(
        _await_asm(GP // 2, G // 2, 640), _await_constraints(GP // 2), [seen, at], dtype=gl.int32, is_pure=False,
        pack=GP // 2,
    )  # fmt: skip
    h = gl.sum(v.to(gl.float32, bitcast=True), axis=0)  # [16, 8]
    H: gl.constexpr = h.type.layout
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, H))[None, :]
    ss = gl.sum(gl.where(i == 4, h, 0.0), axis=1)
    z = alpha * (h * _norm_factor(ss / K, norm_eps, OUTSIDE)[:, None]) + bias[None, :]
    h_pre = 1.0 / (1.0 + gl.exp(-z)) + hc_eps
    h_pre = gl.convert_layout(h_pre, _token_layout(8, [[0, 1], [0, 2], [0, 4]]))
    low, _ = gl.split(h_pre.reshape([16, 2, 4]).permute((0, 2, 1)))
    return gl.convert_layout(low, _token_layout(4, [[0, 1], [0, 2]]), assert_trivial=True)


@gluon.jit
def _collapse(slot, weights, to, left, D: gl.constexpr):
    """Stores h_in of 16 tokens."""
    x0, x1, x2, x3 = _streams(slot.load(_copy_layout()))
    XL: gl.constexpr = x0.type.layout
    S: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, XL)))
    w0, w1, w2, w3 = _columns4(weights, S)
    o = widened(x0) * w0[None, None, :, None]
    o += widened(x1) * w1[None, None, :, None]
    o += widened(x2) * w2[None, None, :, None]
    o += widened(x3) * w3[None, None, :, None]
    t = _tokens(XL)
    gl.store(to + (t * D + _offsets(t * 0, D, 2, XL)), rounded(o), mask=t < left)


@gluon.jit
def _divide(c, AXIS: gl.constexpr, eps, FORM: gl.constexpr):
    """Divides c [T, 4, 4] by its sums + eps, or by the larger of both for "exp"."""
    s = gl.sum(c, axis=AXIS)
    s = gl.maximum(s, eps) if FORM == 1 else s + eps
    return c / s.expand_dims(AXIS)


@gluon.jit
def _sinkhorn(r, eps, ITERS: gl.constexpr, FORM: gl.constexpr):
    """As ``common.sinkhorn``, for [T, 4, 4]."""
    if FORM == 2:
        c = gl.exp(r)
    else:
        top = gl.max(r, axis=2)
        top = gl.where(top == float("-inf"), 0.0, top)
        c = gl.exp(r - top.expand_dims(2))
    if FORM == 0:
        s = gl.sum(c, axis=2)
        c = c / gl.where(s == 0.0, 1.0, s).expand_dims(2) + eps
    else:
        c = _divide(c, 2, eps, FORM)
    c = _divide(c, 1, eps, FORM)
    for _ in range(ITERS - 1):
        c = _divide(c, 2, eps, FORM)
        c = _divide(c, 1, eps, FORM)
    return c


@gluon.jit
def _scaled(words, row, m, inv, alpha_ptr, which: gl.constexpr, bias_ptr, h_mix_ptr, ok, M: gl.constexpr):
    """Stores sums ``words`` as columns m of h_mix; returns the logits."""
    gl.store(h_mix_ptr + (row * M + m), words, mask=ok & (m >= 0))
    bias = gl.load(bias_ptr + m).to(gl.float32)
    return gl.load(alpha_ptr + which).to(gl.float32) * (words * inv) + bias


@gluon.jit
def _coefficients(
    first, count, group, NG, exch_ptr, part_ptr, alpha_ptr, bias_ptr, out, floats, T,
    D: gl.constexpr, G: gl.constexpr, M: gl.constexpr, HAS_RES: gl.constexpr, ITERS: gl.constexpr, FORM: gl.constexpr,
    OUTSIDE: gl.constexpr,
):  # fmt: skip
    """Writes the coefficients of the group's tokens first .. first + 63."""
    h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr = out
    norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps = floats
    R: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0], [32, 0, 0]], [], [64, 4, 4],
    )  # fmt: skip
    V: gl.constexpr = gl.SliceLayout(2, R)
    at = gl.minimum(first + gl.arange(0, 64, layout=gl.SliceLayout(1, V)), count * 16 - 1)
    tile = (group + at // 16 * NG).to(gl.int64)
    row = tile * 16 + at % 16
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, V))[None, :]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, R)))[None, None, :]
    words = exch_ptr + (tile * (G * 80) + at % 16 * 5)
    rest = (part_ptr + (tile * (G * 320) + at % 16 * 20))[:, None] + i
    ss = gl.load(words + 4, cache_modifier=".cg").to(gl.float32, bitcast=True)
    pre = gl.load(words[:, None] + i, cache_modifier=".cg").to(gl.float32, bitcast=True)
    post = gl.load(rest, cache_modifier=".cg")
    if HAS_RES:
        cells = rest[:, :, None] + (4 + 3 * i[:, :, None] + j)
        res = gl.load(cells, cache_modifier=".cg")
    for p in gl.static_range(1, G):
        ss += gl.load(words + (p * 80 + 4), cache_modifier=".cg").to(gl.float32, bitcast=True)
        pre += gl.load(words[:, None] + (p * 80 + i), cache_modifier=".cg").to(gl.float32, bitcast=True)
        post += gl.load(rest + p * 320, cache_modifier=".cg")
        if HAS_RES:
            res += gl.load(cells + p * 320, cache_modifier=".cg")
    ss = ss / (4 * D)
    inv = _norm_factor(ss, norm_eps, OUTSIDE)
    ok = row < T
    gl.store(inv_ptr + row, gl.sqrt(ss) if OUTSIDE else inv, mask=ok)
    row = row[:, None]
    inv = inv[:, None]
    ok = ok[:, None] & (i >= 0)
    z = _scaled(pre, row, i, inv, alpha_ptr, 0, bias_ptr, h_mix_ptr, ok, M)
    gl.store(h_pre_ptr + (row * 4 + i), 1.0 / (1.0 + gl.exp(-z)) + hc_eps, mask=ok)
    z = _scaled(post, row, 4 + i, inv, alpha_ptr, 1, bias_ptr, h_mix_ptr, ok, M)
    gl.store(h_post_ptr + (row * 4 + i), post_mult / (1.0 + gl.exp(-z)) + post_eps, mask=ok)
    if HAS_RES:
        ok = ok[:, :, None] & (j >= 0)
        ij = i[:, :, None] * 4 + j
        z = _scaled(res, row[:, :, None], 8 + ij, inv[:, :, None], alpha_ptr, 2, bias_ptr, h_mix_ptr, ok, M)
        if ITERS > 0:
            z = _sinkhorn(z, sinkhorn_eps, ITERS, FORM)
        gl.store(h_res_ptr + (row[:, :, None] * 16 + ij), z, mask=ok)


@gluon.jit(do_not_specialize=["T", "tiles"])
def mhc_one_read(
    x_ptr, phi_ptr, gamma_ptr, alpha_ptr, bias_ptr, words_ptr, part_ptr, h_in_ptr, h_pre_ptr, h_post_ptr, h_res_ptr,
    h_mix_ptr, inv_ptr, T, tiles, norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps,
    D: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, M: gl.constexpr, HAS_GAMMA: gl.constexpr, HAS_RES: gl.constexpr,
    ITERS: gl.constexpr, FORM: gl.constexpr, OUTSIDE: gl.constexpr,
):  # fmt: skip
    """Computes pre of x; program (group, g) of NG groups."""
    g = gl.program_id(0) % G
    group = gl.program_id(0) // G
    NG = gl.num_programs(0) // G
    counter = words_ptr + group
    exch_ptr = words_ptr + COUNTERS
    F3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    # Swizzled, so that rows of 64 bytes can be read as matrices without conflicts of banks.
    X3: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [3, 2, 1, 0])
    X2: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, 4, 8, 16, 32], X3)
    # The same memory, 32 columns of each warp at a time.
    blocks = reinterpret(ring, gl.bfloat16, [RING * 4, 8, 16, 32], X2)
    sums = gl.allocate_shared_memory(gl.float32, [4, 8, 16, 8], F3)
    C: gl.constexpr = _copy_layout()
    columns = _tokens(C) * (4 * D) + _offsets(g, D, 8, C)
    x_thread = x_ptr + columns
    for n in gl.static_range(RING - LAG):
        t0 = (group + n * NG) * 16
        _fetch(ring, n, x_thread, t0, T, D)
        async_copy.commit_group()
    ws = _terms(phi_ptr, gamma_ptr, g, D, M, HAS_GAMMA)
    offsets = _exchange_offsets(G, GP)
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, offsets.type.layout)))
    bias = gl.load(bias_ptr + gl.minimum(i, 3)).to(gl.float32)
    alpha = gl.load(alpha_ptr).to(gl.float32)
    weights = gl.zeros([16, 4], gl.float32, layout=_token_layout(4, [[0, 1], [0, 2]]))
    count = (tiles - group + NG - 1) // NG
    lag = gl.minimum(count, LAG)
    for n in range(count + lag):
        async_copy.wait_group(RING - LAG - 1)
        thread_barrier()
        if n == count:
            # All of the program's sums are stored.
            gl.atomic_add(counter, 1, sem="release", scope="gpu")
        slot = n % RING
        old = (n + RING - lag) % RING
        done = (group + (n - lag) * NG) * 16
        to = h_in_ptr + done.to(gl.int64) * D + g * 256
        # One block of instructions for both, so that each hides the other's latencies.
        if (n >= lag) & (n < count):
            _collapse(ring.index(old), weights, to, T - done, D)
            _products(blocks, slot, ws, sums, (M + 7) // 8)
        elif n < count:
            _products(blocks, slot, ws, sums, (M + 7) // 8)
        else:
            _collapse(ring.index(old), weights, to, T - done, D)
        soon = gl.minimum(gl.maximum(n + 1 - lag, 0), count - 1)
        at = exch_ptr + ((group + soon * NG).to(gl.int64) * (G * 80) + offsets)
        seen = _peek(at, G, GP)
        thread_barrier()
        ahead = n + RING - LAG
        if ahead < count:
            t0 = (group + ahead * NG) * 16
            _fetch(ring, ahead % RING, x_thread, t0, T, D)
        async_copy.commit_group()
        if n < count:
            place = (group + n * NG).to(gl.int64) * G + g
            _publish(sums, exch_ptr + place * 80, part_ptr + place * 320, M)
        if (n + 1 >= lag) & (n + 1 < count + lag):
            weights = _weights(seen, at, alpha, bias, norm_eps, hc_eps, 4 * D, G, GP, OUTSIDE)
    async_copy.wait_group(0)
    one = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise(_counter_asm(G), "=&r,l", [counter + one * 0], dtype=gl.int32, is_pure=False, pack=1)
    thread_barrier()
    out = (h_pre_ptr, h_post_ptr, h_res_ptr, h_mix_ptr, inv_ptr)
    floats = (norm_eps, hc_eps, post_mult, post_eps, sinkhorn_eps)
    for chunk in range(g, (count * 16 + 63) // 64, G):
        _coefficients(
            chunk * 64, count, group, NG, exch_ptr, part_ptr, alpha_ptr, bias_ptr, out, floats, T,
            D, G, M, HAS_RES, ITERS, FORM, OUTSIDE,
        )  # fmt: skip
