# SPDX-License-Identifier: Apache-2.0
"""Per-row inputs of the backward (the softmax's normaliser in log2 units, and delta), and the gradient of the sinks.

    delta = <dout, o> - dlse (with a sink, * exp(lse_total - lse))
    dsink = -sum over tokens of exp(sink - lse_total) <dout, o>

o and dout are [B, S, G, h, Dv]. A program has ROWS of these rows, whole; of the sinks' gradient one of PARTS equal
runs of tokens x COLS heads, which a last kernel adds in order. Bytes bound it: o and dout are read once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def selection_delta(
    dout_ptr, dlse_ptr, o_ptr, lse_ptr, sink_ptr, lse2_ptr, delta_ptr, dot_ptr, rows,
    GH: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr, DOUT: tl.constexpr, DLSE: tl.constexpr,
    SINK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Computes lse2, delta and dot of rows [B, S, G, h].

    lse2 is log2 of the softmax's denominator, dot = dout . o, and delta is such that dscore = P (dout . v - delta). dot
    is written separately from delta only if both DLSE and SINK are set. A row without keys has lse2 = inf and delta =
    0. BIAS: lse may be so low that lse2 would overflow, and is then kept finite.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = i < rows
    lse = tl.load(lse_ptr + i, mask=mask, other=float("-inf"))
    some = lse != float("-inf")
    total = lse
    if SINK:
        sink = tl.load(sink_ptr + i % GH, mask=mask, other=0.0).to(tl.float32)
        top = tl.maximum(lse, sink)
        # If the sink is infinite, so is total: the exp2 below is then 0, not NaN.
        rest = tl.where(some & (top != float("inf")), tl.exp(tl.minimum(lse, sink) - top), 0.0)
        total = top + tl.log(1.0 + rest)
    dot = tl.zeros((ROWS,), tl.float32)
    if DOUT:
        d = tl.arange(0, VP)[None, :]
        at = i[:, None] * DV + d
        dout = tl.load(dout_ptr + at, mask=mask[:, None] & (d < DV), other=0.0).to(tl.float32)
        o = tl.load(o_ptr + at, mask=mask[:, None] & (d < DV), other=0.0).to(tl.float32)
        dot = tl.where(some, tl.sum(dout * o, axis=1), 0.0)
    delta = dot
    if DLSE:
        dlse = tl.where(some, tl.load(dlse_ptr + i, mask=mask, other=0.0), 0.0)
        if SINK:
            tl.store(dot_ptr + i, dot, mask=mask)
            # Kept finite: beyond e^80, the probabilities that it multiplies are 0 in fp32.
            dlse *= tl.exp(tl.minimum(tl.where(some, total - lse, 0.0), 80.0))
        delta -= dlse
    if BIAS:
        total = tl.maximum(total, -2.3e38)
    tl.store(lse2_ptr + i, tl.where(some, total * 1.4426950408889634, float("inf")), mask=mask)
    tl.store(delta_ptr + i, delta, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def selection_dsink_parts(
    dot_ptr, lse2_ptr, sink_ptr, part_ptr, tokens,
    GH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Computes part[PARTS, GH] of dsink[GH] = -sum over tokens of exp(sink - lse_total) dot.

    The tokens are cut into PARTS equal runs.
    """
    p = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    sink = tl.load(sink_ptr + c, mask=c < GH, other=0.0).to(tl.float32) * 1.4426950408889634
    run = (tokens + PARTS - 1) // PARTS
    last = tl.minimum((p + 1) * run, tokens)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for t in range(p * run, last, ROWS):
        i = t + tl.arange(0, ROWS)
        mask = (i < last)[:, None] & (c < GH)[None, :]
        at = i[:, None] * GH + c[None, :]
        lse2 = tl.load(lse2_ptr + at, mask=mask, other=float("inf"))
        dot = tl.load(dot_ptr + at, mask=mask, other=0.0)
        # Where the denominator of a row of fills is no number in log2 units, neither is a sink of -inf next to it.
        none = (lse2 == float("inf")) | (sink == float("-inf"))[None, :]
        acc += tl.where(none, 0.0, tl.exp2(sink[None, :] - lse2) * dot)
    tl.store(part_ptr + p * GH + c, -tl.sum(acc, axis=0), mask=c < GH)


@triton.jit
def selection_dsink(part_ptr, out_ptr, GH: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr):
    """Sums part[PARTS, GH] to dsink[GH]."""
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    p = tl.arange(0, PARTS)
    part = tl.load(part_ptr + p[:, None] * GH + c[None, :], mask=(c < GH)[None, :], other=0.0)
    tl.store(out_ptr + c, tl.sum(part, axis=0).to(out_ptr.dtype.element_ty), mask=c < GH)
