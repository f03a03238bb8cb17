# SPDX-License-Identifier: Apache-2.0
"""Attention over one part of the keys after the other: joining two parts' results, and splitting their gradients.

    o = sum_p exp(lse_p - total) o_p,  lse = log(sum_p exp(lse_p)),  total = lse with the sink
    do_p = exp(lse_p - total) dout,  dlse_p = exp(lse_p - total) <dout, o_p - o> + exp(lse_p - lse) dlse

o is [rows, Dv], lse [rows]. A program has ROWS whole rows, a tile [ROWS, Dv]. Bytes bound it: each element is read and
written once, where torch's operators pass over the rows several times.
"""

import triton
import triton.language as tl


@triton.jit
def _kept(weight):
    """Returns weights that are no 0: what is not finite stays what it is, and all else vanishes in the sum."""
    return tl.maximum(weight, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["rows"])
def selection_join(
    sums_ptr, most_ptr, total_ptr, o_ptr, lse_ptr, sink_ptr, out_ptr, top_ptr, norm_ptr, rows,
    GH: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    """Adds a part's o[rows, DV] and lse[rows] to the sums so far, relative to the largest lse so far.

    FIRST: the sums are the first part's o, ``most`` is its lse, and ``total`` is not read. LAST: o and lse of all parts
    are stored to ``out`` and ``top``, the sink in the denominator of o. out may be sums.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = i < rows
    most = tl.load(most_ptr + i, mask=mask, other=float("-inf"))
    lse = tl.load(lse_ptr + i, mask=mask, other=float("-inf"))
    top = tl.maximum(most, lse, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == float("-inf"), 0.0, top)
    before, now = tl.exp(most - base), tl.exp(lse - base)
    if FIRST:
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    else:
        total = tl.load(total_ptr + i, mask=mask, other=0.0)
    total = total * before + now
    d = tl.arange(0, VP)[None, :]
    at, inside = i[:, None] * DV + d, mask[:, None] & (d < DV)
    sums = tl.load(sums_ptr + at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sums = sums * _kept(before)[:, None] + o * _kept(now)[:, None]
    if LAST:
        norm = total
        if SINK:
            norm += tl.exp(tl.load(sink_ptr + i % GH, mask=mask, other=0.0).to(tl.float32) - base)
        sums *= _kept(tl.where(top == float("-inf"), 0.0, 1.0 / norm))[:, None]
        top = base + tl.log(total)
    else:
        tl.store(norm_ptr + i, total, mask=mask)
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(top_ptr + i, top, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def selection_part_gradients(
    dout_ptr, dlse_ptr, o_ptr, lse_ptr, total_ptr, part_ptr, plse_ptr, share_ptr, grad_ptr, rows,
    DV: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a part's o[rows, DV] and lse[rows] from those of the joined ones.

    total is the logarithm of the whole denominator, lse that without the sink. Both gradients are 0 in rows that select
    nothing in the part.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = i < rows
    plse = tl.load(plse_ptr + i, mask=mask, other=float("-inf"))
    some = plse != float("-inf")
    weight = tl.where(some, tl.exp(plse - tl.load(total_ptr + i, mask=mask, other=0.0)), 0.0)
    of_lse = tl.where(some, tl.exp(plse - tl.load(lse_ptr + i, mask=mask, other=0.0)), 0.0)
    d = tl.arange(0, VP)[None, :]
    at, inside = i[:, None] * DV + d, mask[:, None] & (d < DV)
    dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = weight * tl.sum(dout * (part - o), axis=1) + tl.load(dlse_ptr + i, mask=mask, other=0.0) * of_lse
    share = tl.where(some[:, None], dout * weight[:, None], 0.0)
    tl.store(share_ptr + at, share.to(share_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_ptr + i, tl.where(some, grad, 0.0), mask=mask)
