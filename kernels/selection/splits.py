# SPDX-License-Identifier: Apache-2.0
"""Splits of the keys of one query, each of which a program takes for a block of heads, and what it writes.

Programs [B * G, S, heads / HB, NS]: with few queries, as in decoding, NS programs share the keys of one, in even
parts, so that they fill the device. Each writes its normalised output and log-sum-exp; ``selection_combine`` joins
them. With one split the output is written at once.
"""

import triton
import triton.language as tl

from .row_tiles import store_tiles
from .softmax import with_sink


@triton.jit
def split_place(NS, S, HN: tl.constexpr):
    """Returns bg (int64), s, the block of heads and the split of programs [B * G, S, HN, NS]."""
    pid = tl.program_id(0)
    split = pid % NS
    rest = pid // NS
    hb = rest % HN
    rest = rest // HN
    return (rest // S).to(tl.int64), rest % S, hb, split


@triton.jit
def share(n, split, NS):
    """Returns [from, to), the positions of one split of n."""
    each = n // NS
    rest = n - each * NS
    begin = split * each + tl.minimum(split, rest)
    return begin, begin + each + (split < rest).to(tl.int32)


@triton.jit
def store_output(
    o_ptr, lse_ptr, part_ptr, plse_ptr, sink_ptr, acc, m, norm, row, g, head, live, split, NS, H: tl.constexpr,
    DV: tl.constexpr, NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr, SINK: tl.constexpr, pnorm_ptr=None,
    NATURAL: tl.constexpr = False,
):  # fmt: skip
    """Stores o and the log-sum-exp of the heads [HB] of ``row``, or those of one split, normalised and without the sink.

    acc is the tiles of the sum of the weighted values; m and norm are the largest logit and the sum of the weights, as
    :func:`softmax.online_softmax` returns them. A split's log-sum-exp stays in log2 units.
    NATURAL: logits are in natural units, and a split stores m and norm apart: the lowest number has no room for a logarithm.
    """
    lse = tl.where(norm == 0.0, float("-inf"), m + (tl.log(norm) if NATURAL else tl.log2(norm)))
    if NS == 1:
        factor = tl.full(m.shape, 1.0, tl.float32)
        if SINK:
            factor, norm = with_sink(tl.load(sink_ptr + g * H + head, mask=live, other=0.0), m, norm, NATURAL)
        to = row * H + head
        store_tiles(o_ptr, to * DV, live, acc, factor / tl.where(norm == 0.0, 1.0, norm), DV, NM, MC, TC)
        tl.store(lse_ptr + to, lse if NATURAL else lse * 0.6931471805599453, mask=live)
    else:
        to = (row * NS + split) * H + head
        store_tiles(part_ptr, to * DV, live, acc, 1.0 / tl.where(norm == 0.0, 1.0, norm), DV, NM, MC, TC)
        tl.store(plse_ptr + to, m if NATURAL else lse, mask=live)
        if NATURAL:
            tl.store(pnorm_ptr + to, norm, mask=live)


@triton.jit
def store_dq(
    dq_ptr, part_ptr, acc, scale, row, head, live, split, NS, H: tl.constexpr, HB: tl.constexpr, DK: tl.constexpr,
    NM: tl.constexpr, MC: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Stores scale * acc, tiles of HB rows, as dQ of the heads of ``row``, or as that of one split."""
    factor = tl.full((HB,), 1.0, tl.float32) * scale
    if NS == 1:
        store_tiles(dq_ptr, (row * H + head) * DK, live, acc, factor, DK, NM, MC, TC)
    else:
        store_tiles(part_ptr, ((row * NS + split) * H + head) * DK, live, acc, factor, DK, NM, MC, TC)
