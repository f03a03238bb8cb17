# SPDX-License-Identifier: Apache-2.0
"""Selection of blocks of keys for each query (arXiv 2502.11089, equations 8 to 10): scores, and the best of them.

score[j] = sum over the heads of a group of exp(scale * q @ compressed k.T - lse), weighed by the strides that a
compressed key shares with block j. A program takes QT queries x HB heads, NT blocks at a time (scores), or ROWS
queries, JB blocks at a time (the best). By count products and exponentials bound the first: the sum over heads stays
in registers, and what a key adds to the next block is stored apart, since an addition between programs would need an
order. In the second a candidate is one integer, score above index, so that ties need no code; blocks that beat nothing
are skipped together.
"""

import triton
import triton.language as tl

from .common import load_queries, load_tile, place


@triton.jit(
    do_not_specialize=[
        "S",
        "N",
        "NB",
        "NQ",
        "G",
        "first",
        "rows",
        "past",
        "sqb",
        "sqs",
        "sqg",
        "sqh",
        "skb",
        "skg",
        "skn",
    ]
)
def selection_block_scores(
    q_ptr, k_ptr, lse_ptr, score_ptr, scale, S, N, NB, NQ, G, first, rows, past, sqb, sqs, sqg, sqh, skb, skg, skn,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QT: tl.constexpr, HB: tl.constexpr, NT: tl.constexpr,
    BK: tl.constexpr, BP: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, SHIFTS: tl.constexpr,
    ALIGN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Computes score[SHIFTS, B, G, rows, NB] of the queries from ``first`` on.

    From q[B, S, G, H, D], compressed k[B, G, N, D] and lse[B, S, G, H]. A compressed key covers LENGTH / STRIDE
    strides, a block BK. ``score[d, ..., j]`` is what the compressed keys that begin in block j contribute to block j +
    d, written up to the query's own block. One program: QT queries x HB >= H heads, NT blocks at a time.
    """
    M: tl.constexpr = QT * HB
    BN: tl.constexpr = NT * BP
    b, g, bg, qt, _ = place(NQ, G, H, HB)
    row = tl.arange(0, M)
    local = qt * QT + row // HB
    s = first + local
    head = row % HB
    live = (local < rows) & (s < S) & (head < H)
    d = tl.arange(0, DP)
    q = load_queries(q_ptr, b, s, g, head, live, sqb, sqs, sqg, sqh, d, D, ALIGN)  # [M, DP]
    line = ((b * S + s) * G + g) * H + head
    # Padding rows get exp2(-inf) = 0.
    lse = tl.load(lse_ptr + line, mask=live, other=float("inf")).to(tl.float32) * 1.4426950408889634
    qk = tl.cast(scale, tl.float32) * 1.4426950408889634
    seen = past + s + 1 - LENGTH
    seen = tl.where(seen >= 0, seen // STRIDE + 1, 0)  # number of complete compressed keys

    k_base = k_ptr + tl.multiple_of(b * skb, ALIGN) + tl.multiple_of(g * skg, ALIGN)
    skn = tl.multiple_of(tl.cast(skn, tl.int64), ALIGN)
    n = tl.arange(0, BN)
    place_in = n % BP  # index of the key in its block
    ql = qt * QT + tl.arange(0, QT)
    out = score_ptr + (bg * rows + ql)[:, None] * NB
    shift = tl.num_programs(0).to(tl.int64) // NQ * rows * NB
    last = past + tl.minimum(tl.minimum(first + qt * QT + QT, first + rows), S) - 1
    for j0 in range(0, last // (BK * STRIDE) + 1, NT):
        i = (j0 + n // BP) * BK + place_in
        there = (place_in < BK) & (i < N)
        k = load_tile(k_base + (i.to(tl.int64) * skn)[:, None] + d[None, :], there, d < D, True, D != DP)  # [BN, DP]
        x = tl.dot(q, tl.trans(k), input_precision=PREC) * qk - lse[:, None]
        p = tl.where(there[None, :] & (i[None, :] < seen[:, None]), tl.exp2(x), 0.0)
        p = tl.sum(tl.reshape(p, (QT, HB, BN)), axis=1)  # [QT, BN]
        j = j0 + tl.arange(0, NT)
        for c in tl.static_range(SHIFTS):
            # Strides that the key shares with the c-th block after the one it begins in.
            w = tl.minimum(place_in + LENGTH // STRIDE, (c + 1) * BK) - tl.maximum(place_in, c * BK)
            part = tl.reshape(p * tl.maximum(w, 0).to(tl.float32)[None, :], (QT, NT, BP))
            tl.store(out + c * shift + j[None, :], tl.sum(part, axis=2), mask=(ql < rows)[:, None] & (j < NB)[None, :])


@triton.jit(do_not_specialize=["S", "NB", "G", "first", "rows", "past"])
def selection_block_top(
    score_ptr, blocks_ptr, S, NB, G, first, rows, past, COUNT: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr,
    SHIFTS: tl.constexpr, ROWS: tl.constexpr, JB: tl.constexpr,
):  # fmt: skip
    """Selects blocks[B, S, G, COUNT] (int32, -1 for none) from score[SHIFTS, B, G, rows, NB].

    Selected are block 0, the query's own block, the one before it and the best of the others. One program: ROWS
    queries, JB blocks at a time. A candidate is an integer with the score in the upper and the index in the lower bits,
    so that ties go to the lower index.
    """
    groups = (rows + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    bg = (pid // groups).to(tl.int64)
    local = pid % groups * ROWS + tl.arange(0, ROWS)
    live = local < rows
    own = (past + first + local) // BLOCK  # [ROWS]
    line = (bg * rows + local)[:, None] * NB
    shift = tl.num_programs(0).to(tl.int64) // groups * rows * NB
    slot = tl.arange(0, CP)[None, :]
    best = tl.full((ROWS, CP), -1, tl.int64)
    for j0 in range(0, tl.max(tl.where(live, own, 0), axis=0) + 1, JB):
        j = (j0 + tl.arange(0, JB))[None, :]
        score = tl.zeros((ROWS, JB), tl.float32)
        for c in tl.static_range(SHIFTS):
            mask = live[:, None] & (j >= c) & (j - c <= own[:, None])
            score += tl.load(score_ptr + c * shift + line + (j - c), mask=mask, other=0.0)
        fixed = (j == 0) | (j == own[:, None]) | (j == own[:, None] - 1)
        score = tl.where(fixed, float("inf"), score)
        # The bits of non-negative floats sort like the floats.
        x = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - j).to(tl.int64)
        x = tl.where(live[:, None] & (j <= own[:, None]), x, -1)
        if tl.max(tl.max(x, axis=1) - tl.min(tl.where(slot < COUNT, best, 9223372036854775807), axis=1), axis=0) > 0:
            merged = tl.full((ROWS, CP), -1, tl.int64)
            for at in range(COUNT):
                top = tl.maximum(tl.max(x, axis=1), tl.max(best, axis=1))[:, None]
                merged = tl.where(slot == at, top, merged)
                x = tl.where(x == top, -1, x)
                best = tl.where(best == top, -1, best)
            best = merged
    index = tl.where(best < 0, -1, 2147483647 - (best & 0xFFFFFFFF)).to(tl.int32)
    row = (bg // G * S + first + local) * G + bg % G
    tl.store(blocks_ptr + row[:, None] * COUNT + slot, index, mask=live[:, None] & (slot < COUNT))
