# SPDX-License-Identifier: Apache-2.0
"""Selection attention on a CPU: C++ for large calls, else the reference's formulas over fewer keys.

Eager calls of more than 2**20 scores run the C++ of :mod:`mhc_inductor.kernels.cpu.selection_core`. Smaller ones, and all
calls where there is no compiler, multiply each chunk of queries with the gathered union of its keys. Under
torch.compile, up to 2**20 scores become one formula, which Inductor fuses; with more scores, or symbolic sizes, the
generated code calls the op. A package without Python has the formula at every size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mhc_inductor import compat
from mhc_inductor.reference import selection as reference
from mhc_inductor.reference.precision import acc_dtype, as_given
from mhc_inductor.reference.selection import Rows, Slices

from . import selection_core as core

# Rows of a product: enough to use the processor, few enough that neighbouring queries share keys.
_ROWS = 128

# Scores up to which the fused formula is faster than the op (measured; with four times as many it loses in training).
_FUSED = 2**20

ALL: Slices = (slice(None),) * 3


def _steps(q: Tensor, k: Tensor) -> int:
    """Returns the number of queries per chunk."""
    h = q.shape[3]
    most = reference.CHUNK // max(1, h * k.shape[2])
    return max(1, min(-(-_ROWS // h), most))


def _union(start: Tensor, end: Tensor, s_kv: int) -> tuple[Any, Tensor]:
    """Returns the keys that any of the queries selects, as an index into k, and a mask of them for each query.

    ``start`` and ``end`` are ``[c, r]``, for c queries.
    """
    used = reference.selected(start.flatten(), end.flatten(), s_kv)
    keys = used.nonzero().squeeze(-1)
    count = keys.shape[0]
    if count == 0:
        return keys, used.new_zeros((start.shape[0], 0))
    first, last = int(keys[0]), int(keys[-1]) + 1
    index: Any = slice(first, last) if last - first == count else keys
    # Rank of each key position among the selected keys.
    rank = torch.cat((used.new_zeros(1, dtype=torch.int64), used.cumsum(0)))
    return index, reference.selected(rank[start], rank[end], count)


def _walk(
    q: Tensor, k: Tensor, ranges: Tensor, bounds: reference.Bounds
) -> Iterator[tuple[Slices, Iterator[tuple[Slices, Any, Tensor]]]]:
    """Yields, for each batch entry and group, its slices and its chunks of queries with their keys' index and mask."""
    lo, hi = bounds
    steps = _steps(q, k)

    def queries(in_b: slice, in_g: slice) -> Iterator[tuple[Slices, Any, Tensor]]:
        start, end = (t[0, 0] for t in reference.clipped(ranges[in_b, :, in_g], (lo, hi)))
        for i in range(0, q.shape[1], steps):
            in_s = slice(i, i + steps)
            index, mask = _union(start[in_s], end[in_s], k.shape[2])
            if mask.shape[1]:
                yield (in_b, in_g, in_s), index, mask[None, None]

    for b in range(q.shape[0]):
        for g in range(q.shape[2]):
            in_b, in_g = slice(b, b + 1), slice(g, g + 1)
            yield (in_b, in_g, slice(None)), queries(in_b, in_g)


@as_given
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, sink: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float, segments_q: Tensor | None = None, segments_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`mhc_inductor.reference.selection.selection_attention` with products over selected keys only."""
    bounds = reference.key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if core.usable(q, k):
        selected = core.Selected(ranges, bounds, core.segments(segments_q, segments_k))
        o, lse = core.attention(q, k, v, selected, sink, scale)
        return o.to(q.dtype), lse
    b, s, g, h, _ = q.shape
    acc = acc_dtype(q.dtype)
    o = q.new_zeros((b, s, g, h, v.shape[3]))
    lse = q.new_full((b, s, g, h), -torch.inf, dtype=acc)
    for (in_b, in_g, _all), queries in _walk(q, k, ranges, bounds):
        keys, values = (t[in_b, in_g].to(acc) for t in (k, v))
        odd = core.odd(values)
        for at, index, chosen in queries:
            mask = reference.within(chosen, segments_q, segments_k, at, index)
            logit = None if sink is None else sink[in_g].repeat(1, mask.shape[2])
            query = reference.rows(q, at)
            part = reference.attend(query, keys[:, :, index], values[:, :, index], mask, logit, scale, odd)
            o[at[0], at[2], in_g], lse[at[0], at[2], in_g] = (reference.unrows(t, h) for t in part)
    return o, lse


@as_given
def selection_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, o: Tensor, lse: Tensor, scale: float,
    segments_q: Tensor | None = None, segments_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes :func:`mhc_inductor.reference.selection.selection_attention_backward` over selected keys only."""
    h, acc = q.shape[3], acc_dtype(q.dtype)
    row, dsink = reference.backward_rows(dout, dlse, sink, o, lse)
    bounds = reference.key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if core.usable(q, k):
        selected = core.Selected(ranges, bounds, core.segments(segments_q, segments_k))
        grads = core.backward(row, dlse is not None, q, k, v, selected, scale)
        dq, dk, dv = (t.to(q.dtype) for t in grads)
        return dq, dk, dv, dsink
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for (in_b, in_g, _all), queries in _walk(q, k, ranges, bounds):
        keys, values = (t[in_b, in_g].to(acc) for t in (k, v))
        odd = core.odd(keys, values, q[in_b, :, in_g], *(t[in_b, :, in_g] for t in row))
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for at, index, chosen in queries:
            mask = reference.within(chosen, segments_q, segments_k, at, index)
            part = Rows(*(reference.rows(t, at) for t in row))
            query = reference.rows(q, at)
            grad_q, more_k, more_v = reference.attend_backward(
                part, query, keys[:, :, index], values[:, :, index], mask, scale, odd
            )
            dq[at[0], at[2], in_g] = reference.unrows(grad_q, h).to(q.dtype)
            grad_k[:, :, index] += more_k
            grad_v[:, :, index] += more_v
        dk[in_b, in_g], dv[in_b, in_g] = grad_k.to(k.dtype), grad_v.to(v.dtype)
    return dq, dk, dv, dsink


# --- compiled: one formula ----------------------------------------------------------------------------------


def fits(q: Tensor, k: Tensor) -> bool:
    """Returns whether the fused formula is used: static sizes and at most 2**20 scores (B * S * G * h * S_kv).

    A package, which runs without Python, has no other way than the formula.
    """
    if compat.packaging_formulas():
        return True
    sizes = (*q.shape, *k.shape)
    if q.device.type != "cpu" or not all(isinstance(size, int) for size in sizes):
        return False
    scores = q.shape[:4].numel() * k.shape[2]
    return 0 < scores <= _FUSED


def formula(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns o and lse of queries that see the keys ``seen``."""
    acc, h = acc_dtype(q.dtype), q.shape[3]
    logit = None if sink is None else sink.repeat(1, q.shape[1])
    part = reference.attend(reference.rows(q, ALL), k.to(acc), v.to(acc), seen, logit, scale, bias=bias)
    o, lse = (reference.unrows(t, h) for t in part)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def formula_backward(
    row: Rows, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv of :func:`formula` in the arithmetic's dtype."""
    acc, part = acc_dtype(q.dtype), Rows(*(reference.rows(t, ALL) for t in row))
    query = reference.rows(q, ALL)
    dq, dk, dv = reference.attend_backward(part, query, k.to(acc), v.to(acc), seen, scale, bias=bias)
    return reference.unrows(dq, q.shape[3]), dk, dv


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, sink: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float, segments_q: Tensor | None = None, segments_k: Tensor | None = None,
) -> Any:  # fmt: skip
    """Decomposes the op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not fits(q, k):
        return NotImplemented
    mask = reference.selected(
        *reference.clipped(ranges, reference.key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)), k.shape[2]
    )
    return formula(q, k, v, reference.within(mask, segments_q, segments_k, ALL), sink, scale)


def fused_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, o: Tensor, lse: Tensor, scale: float,
    segments_q: Tensor | None = None, segments_k: Tensor | None = None,
) -> Any:  # fmt: skip
    """Decomposes the backward op for Inductor; returns NotImplemented where the generated code should call the op."""
    if not fits(q, k):
        return NotImplemented
    mask = reference.selected(
        *reference.clipped(ranges, reference.key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)), k.shape[2]
    )
    row, dsink = reference.backward_rows(dout, dlse, sink, o, lse)
    grads = formula_backward(row, q, k, v, reference.within(mask, segments_q, segments_k, ALL), scale)
    return (*(t.to(q.dtype).contiguous() for t in grads), dsink)
