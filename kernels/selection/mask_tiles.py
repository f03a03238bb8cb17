# SPDX-License-Identifier: Apache-2.0
"""Which key tiles each tile of queries sees under a mask, found in one pass over the mask, and lists of them.

mask[B, S, G, S_kv] of bools or floats, any strides -> codes[B, G, NQ, NT] -> lists, by queries or by keys. A program
of the pass has QT queries and TB tiles of BN keys at a time; of the lists one list. The mask's bytes bound it: they
are read once, with loads as wide as strides allow, and a mask that is broadcast over batch or groups is read once for
all of them.
"""

import triton
import triton.language as tl

# Of a tile of queries and keys: the queries see no key; only keys under a large fill; some keys; all, and nothing is added.
HIDDEN = tl.constexpr(0)
FILLED = tl.constexpr(1)
PART = tl.constexpr(2)
WHOLE = tl.constexpr(3)


@triton.jit
def _any(x):
    """Returns whether any is set of x [QT, TB, BN], for each tile [TB]."""
    return tl.max(tl.max(x.to(tl.int32), axis=2), axis=0) != 0


@triton.jit(do_not_specialize=["S", "S_kv", "NT", "NQ", "G", "smb", "sms", "smg"])
def selection_mask_tiles(
    mask_ptr, codes_ptr, near_ptr, S, S_kv, NT, NQ, G, smb, sms, smg, smk,
    QT: tl.constexpr, BN: tl.constexpr, TB: tl.constexpr, BIAS: tl.constexpr, FILL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Writes codes[B, G, NQ, NT] of mask[B, S, G, S_kv], and near[B, G, NQ]: whether fills hide keys from all queries.

    A fill is a value of at most FILL. It hides a key from a query that sees another key above -1e30: next to that one,
    its weight is exactly 0. One program: QT queries. Strides and S_kv are multiples of ALIGN, for wide loads.
    """
    pid = tl.program_id(0).to(tl.int64)
    s = pid % NQ * QT + tl.arange(0, QT)
    bg = pid // NQ
    live = (s < S)[:, None, None]
    S_kv = tl.multiple_of(tl.cast(S_kv, tl.int32), ALIGN)  # 1 comes as a constexpr
    row = mask_ptr + tl.multiple_of(bg // G * smb, ALIGN) + tl.multiple_of(bg % G * smg, ALIGN)
    row += tl.multiple_of(s * sms, ALIGN)[:, None, None]
    key_in = tl.arange(0, TB)[None, :, None] * BN + tl.arange(0, BN)[None, None, :]
    top = tl.full((QT,), float("-inf"), tl.float32)
    for t0 in range(0, NT, TB):
        key = t0 * BN + key_in
        at = row + key.to(tl.int64) * smk
        if BIAS:
            x = tl.load(at, mask=live & (key < S_kv), other=float("-inf")).to(tl.float32)
            some, above, same = x != float("-inf"), x > FILL, x == 0.0
            above = above | (x != x)
            top = tl.maximum(top, tl.max(tl.max(x, axis=2), axis=1))
        else:
            some = tl.load(at, mask=live & (key < S_kv), other=0).to(tl.int32) != 0
            above, same = some, some
        code = tl.where(_any(above), PART, tl.where(_any(some), FILLED, HIDDEN))
        code = tl.where(_any(live & ~same), code, WHOLE)
        t = t0 + tl.arange(0, TB)
        tl.store(codes_ptr + pid * NT + t, code.to(tl.int16), mask=t < NT)
    far = (s < S) & (top <= -1e30)
    tl.store(near_ptr + pid, 1 - tl.max(far.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["NT", "NQ"])
def selection_mask_lists(
    codes_ptr, near_ptr, lists_ptr, counts_ptr, NT, NQ, BY_KEY: tl.constexpr, TB: tl.constexpr
):  # fmt: skip
    """Builds lists[B, G, NQ, NT] of the key tiles that each tile of queries sees, and counts[B, G, NQ, 2].

    BY_KEY: lists[B, G, NT, NQ] of the query tiles that see each key tile instead. From the front of a list, the
    ``counts[0]`` tiles that are seen whole; from its back, the ``counts[1]`` that are seen in part. Both in increasing
    order. One program: one list.
    """
    pid = tl.program_id(0).to(tl.int64)
    if BY_KEY:
        rows, n, stride = NT, NQ, NT
        codes = codes_ptr + pid // rows * NQ * NT + pid % rows
    else:
        rows, n, stride = NQ, NT, 1
        codes = codes_ptr + pid * NT
    to = lists_ptr + pid * n
    nf = 0
    np = 0
    for i0 in range(0, n, TB):
        i = i0 + tl.arange(0, TB)
        code = tl.load(codes + i.to(tl.int64) * stride, mask=i < n, other=0).to(tl.int32)
        if BY_KEY:
            near = tl.load(near_ptr + pid // rows * NQ + i, mask=i < n, other=1)
        else:
            near = tl.load(near_ptr + pid)
        full = code == WHOLE
        part = (code == PART) | ((code == FILLED) & (near == 0))
        # Both counts in one scan.
        at = tl.cumsum(full.to(tl.int32) + (part.to(tl.int32) << 16), axis=0)
        tl.store(to + nf + (at & 0xFFFF) - 1, i, mask=full)
        tl.store(to + n - np - (at >> 16), i, mask=part)
        both = tl.max(at, axis=0)
        nf += both & 0xFFFF
        np += both >> 16
    tl.store(counts_ptr + pid * 2, nf)
    tl.store(counts_ptr + pid * 2 + 1, np)


@triton.jit
def entry(list_ptr, i, count, n, BACK: tl.constexpr):
    """Returns entry i of ``count`` at the front of a list of n, or at its back; 0 beyond them."""
    if BACK:
        at = n - 1 - i
    else:
        at = i
    return tl.load(list_ptr + at, mask=i < count, other=0)


@triton.jit
def any_wild(flags_ptr, bg, NT):
    """Returns whether any of the key tiles of flags[B, G, NT] holds a NaN or an infinity."""
    wild = 0
    for t0 in range(0, NT, 256):
        t = t0 + tl.arange(0, 256)
        wild |= tl.max(tl.load(flags_ptr + bg * NT + t, mask=t < NT, other=0), axis=0)
    return wild != 0


@triton.jit
def walk(counts_ptr, line, wild, KIND: tl.constexpr):
    """Returns how many tiles a walk takes: 0, those seen whole; 1, those seen in part; 2, these in place of 1 if wild.

    Only the last one pays for keeping what is not finite from queries that do not see it.
    """
    count = tl.load(counts_ptr + line * 2 + (KIND > 0))
    if KIND == 1:
        count = tl.where(wild, 0, count)
    if KIND == 2:
        count = tl.where(wild, count, 0)
    return count


@triton.jit
def shown(at, inside, BIAS: tl.constexpr):
    """Returns which keys the mask at ``at`` shows, and what it adds to their scores."""
    if BIAS:
        x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
        seen = x != float("-inf")
    else:
        seen = tl.load(at, mask=inside, other=0).to(tl.int32) != 0
        x = tl.where(seen, 0.0, float("-inf"))
    return seen, x


@triton.jit
def logits(x, scale, seen, bias, MASKED: tl.constexpr, BIAS: tl.constexpr):
    """Returns the scores x under a part of the mask: in natural units with BIAS, else in log2 units.

    finfo.min is no finite number in log2 units.
    """
    if BIAS:
        x = x * scale
        if MASKED:
            x += bias
    else:
        x *= scale * 1.4426950408889634
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    return x
