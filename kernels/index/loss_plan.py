# SPDX-License-Identifier: Apache-2.0
"""Launch plans of an indexer's training loss. The forward takes symbolic B, S and T, the backward none.

Memory besides inputs and outputs, for lists of n entries: 4 B S (n + 1) bytes for the canonical lists, as much again
for the attention's distribution or for the factors of the gradients, and in the backward what the sums for dk take
(``lists_plan.chunk_of``).
"""

from __future__ import annotations

from typing import Any

from ..gluon import kernels
from ..launch import launch
from ..operands import above, alignment, dot_precision, power_of_two, strides, without_kernel
from ..selection import lists_plan
from ..selection.lists_config import SHARED, TAIL, VALUES, list_config, rows_fit, widths
from . import config, plan
from .backward_plan import gradient_precision
from .loss import index_list_heads, index_loss_factors, index_loss_gradients, index_loss_rows

MAXNREG = 128  # two programs a multiprocessor; without, 169 registers
HEADS = 64  # of a program of index_list_target_wgmma
FIRST_PLACE = -1  # of equal keys the first counts


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    backward = len(b.shape(tensors[0])) == 2  # dloss
    q, k, w, indices, *rest = tensors[backward:]
    reason = without_kernel(b, *tensors[:backward], *rest) or plan.unsupported(b, q, k, w)
    reason = reason or above(b.static(b.shape(indices)[-1]), lists_plan.MAX_KEYS, "n = {} keys a query are")
    if backward:
        return reason
    heads, width = (b.static(x) for x in b.shape(rest[0])[3:])
    reason = reason or above(width, lists_plan.MAX_D, "Dk = {} is")
    return reason or above(heads, lists_plan.MAX_HEADS, "h = {} heads a group are")


def _lists(b: Any, k: Any, indices: Any) -> lists_plan.Lists:
    return lists_plan.plan_keys(b, b.shape(k)[1], indices, repeats=True)


def plan_index_loss(
    b: Any, q: Any, k: Any, w: Any, indices: Any, attention_q: Any, attention_k: Any, lse: Any, scale: float,
    attention_scale: float,
) -> tuple[Any, Any]:  # fmt: skip
    """Launches ``index_loss``; returns (loss, dscores)."""
    B, S, NI = b.shape(indices)
    NI = b.static(NI)
    buffer = b.empty if NI else b.zeros
    loss, dscores = buffer((B, S), b.f32), buffer((B, S, NI), b.f32)
    if NI == 0:
        return loss, dscores
    lists = _lists(b, k, indices)
    target = b.empty(b.shape(lists.keys), b.f32)
    # The scores stand where their gradients will.
    _plan_heads(b, q, k, w, lists, dscores, scale, False)
    _plan_heads(b, attention_q, attention_k, lse, lists, target, attention_scale, True)
    _plan_rows(b, index_loss_rows, lists, target=target, dscores=dscores, loss=loss)
    return loss, dscores


def _plan_rows(b: Any, kernel: Any, lists: lists_plan.Lists, **values: Any) -> None:
    """Launches a kernel of which a program takes a whole list."""
    B, S, N = b.shape(lists.keys)
    NP = power_of_two(lists.given)
    values |= dict(keys=lists.keys, counts=lists.counts, N=N, NI=lists.given, NP=NP)
    launch(b, kernel, B * S, (max(1, min(8, NP // 256)), 1), values)


def _plan_heads(
    b: Any, q: Any, k: Any, factors: Any, lists: lists_plan.Lists, out: Any, scale: float, target: bool
) -> None:
    """Launches ``index_list_heads``, for an index or for an attention with groups.

    Where ``index_list_target_wgmma`` can run, launches that for one block of heads after the other.
    """
    q, k, factors = b.strided(q), b.strided(k), None if factors is None else b.laid_out(factors)
    B, S, *groups, H, D = b.shape(q)
    H, D, G = b.static(H), b.static(D), b.static(groups[0]) if groups else 1
    values = dict(
        q=q, k=k, f=factors, keys=lists.keys, counts=lists.counts, out=out, scale=float(scale), S=S, H=H,
        N=b.shape(lists.keys)[2], so=b.shape(out)[2],
    )  # fmt: skip
    if groups:
        values |= strides(b, q, "sqb sqs sqg sqh") | strides(b, k, "skb skg skn")
    else:
        values |= strides(b, q, "sqb sqs sqh") | strides(b, k, "skb skn") | dict(sqg=0, skg=0)
    values |= dict(sfb=0, sfs=0, sfg=0, sfh=0)
    if factors is not None:
        values |= strides(b, factors, "sfb sfs sfg sfh" if groups else "sfb sfs sfh")
    if target and factors is not None and rows_fit(b, q, k):
        found = kernels(b, SHARED, "the loss of an indexer", "index.gluon_target:index_list_target_wgmma")
        if found is not None:
            blocks = -(-H // HEADS)
            for each in range(G * blocks):
                values |= dict(g=each // blocks, hb=each % blocks, DK=D, DV=VALUES, KT=TAIL if D > VALUES else 0)
                launch(b, found[0], B * S, (4, 1), values, FIRST=each == 0)
            return
    props = b.device_props()
    c = list_config(H, D, D, b.dtype(q).itemsize, props.backend, props.arch, True)
    NM, TC = widths(D, c.MC)
    launch(
        b, index_list_heads, B * S, c, values, G=G, D=D, NM=NM, TC=TC, HELD=c.held, TARGET=target,
        ALIGN=alignment(b, q, k), PREC=dot_precision(b, b.dtype(q)),
    )  # fmt: skip


# --- backward -----------------------------------------------------------------------------------------------


def backward_chunk(b: Any, q: Any, k: Any, n: int) -> int:
    """Returns the number of queries that the backward takes at a time, of lists of n entries."""
    B, S, H, D = b.shape(q)
    c = config.loss_config(H, D, b.dtype(q).itemsize, b.device_props().backend)
    return lists_plan.chunk_of(b, S, B, lists_plan.list_width(n), D, B * b.cdiv(D, c.DC), b.shape(k)[1])


def plan_index_loss_backward(
    b: Any, dloss: Any, q: Any, k: Any, w: Any, indices: Any, dscores: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Launches ``index_loss_backward``; returns (dq, dk, dw)."""
    (B, S, H, D), T, NI = b.shape(q), b.shape(k)[1], b.shape(indices)[2]
    if 0 in (B * S, T, NI):
        dq, dk, dw = (b.zeros(b.shape(t), b.dtype(t)) for t in (q, k, w))
        return dq, dk, dw
    dtype, props = b.dtype(q), b.device_props()
    lists = _lists(b, k, indices)
    N = lists_plan.list_width(NI)
    g = b.empty((B, S, N), b.f32)
    _plan_rows(b, index_loss_factors, lists, dloss=b.contiguous(dloss), dscores=b.contiguous(dscores), g=g)
    dq, dk, dw = (b.empty(b.shape(t), b.dtype(t)) for t in (q, k, w))
    q, k, w = b.strided(q), b.strided(k), b.laid_out(w)
    c = config.loss_config(H, D, dtype.itemsize, props.backend)
    size, NC = backward_chunk(b, q, k, NI), b.cdiv(D, c.DC)
    acc = b.empty(b.shape(dk) if size < S else (0,), b.f32)
    part = b.empty((B * size, N, D), lists_plan.rows_dtype(b, dtype))  # of all chunks, one after the other
    values = dict(
        strides(b, q, "sqb sqs sqh"), **strides(b, k, "skb skn"), **strides(b, w, "swb sws swh"), keys=lists.keys,
        counts=lists.counts, g=g, q=q, k=k, w=w, dq=dq, dw=dw, part=part, scale=float(scale), S=S, N=N, G=1, H=H, D=D, NC=NC,
        ALIGN=alignment(b, q, k), PREC=gradient_precision(b, dtype),
    )  # fmt: skip
    registers = {}
    if c.HB == 64 and dtype.itemsize == 2 and (props.backend, props.arch) == ("cuda", 90):
        registers["maxnreg"] = MAXNREG
    for first in range(0, S, size):
        rows = min(size, S - first)
        values |= dict(first=first, rows=rows)
        launch(b, index_loss_gradients, B * rows * NC, c, values, registers)
        lists_plan.plan_sums(b, FIRST_PLACE, B, T, size, values, [(part, acc, dk, D)])
    return dq, dk, dw
