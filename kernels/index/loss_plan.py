# SPDX-License-Identifier: Apache-2.0
"""Launch plans of an indexer's training loss. The forward takes symbolic B, S and T, the backward none.

Memory besides inputs and outputs, for lists of n entries: 4 B S (n + 1) bytes for the canonical lists, as much again
for the attention's distribution or for the factors of the gradients, and in the backward what the sums for dk take
(``lists_plan.chunk_of``).
"""

from __future__ import annotations

from typing import Any

from ..dtypes import without_kernel
from ..gluon import kernels
from ..selection import lists_plan
from ..selection.lists_config import list_config, widths
from ..selection.lists_gluon import SHARED, TAIL, VALUES, rows_fit
from ..selection.pieces_plan import power_of_two
from ..selection.tile_lists_plan import alignment, dot_precision
from . import config, plan
from .backward_plan import gradient_precision
from .loss import index_list_heads, index_loss_factors, index_loss_gradients, index_loss_rows

MAXNREG = 128  # two programs a multiprocessor; without, 169 registers
STRIDES = ("sqb", "sqs", "sqg", "sqh", "skb", "skg", "skn", "sfb", "sfs", "sfg", "sfh")
HEADS = 64  # of a program of index_list_target_wgmma
FIRST_PLACE = -1  # of equal keys the first counts


def unsupported(b: Any, *tensors: Any) -> str | None:
    """Returns why these inputs run the reference instead of the kernels, or None if they run the kernels."""
    backward = len(b.shape(tensors[0])) == 2  # dloss
    q, k, w, indices, *rest = tensors[backward:]
    if reason := without_kernel(b, *tensors[:backward], *rest) or plan.unsupported(b, q, k, w):
        return reason
    if (n := b.static(b.shape(indices)[-1])) > lists_plan.MAX_KEYS:
        return f"n = {n} keys a query are above {lists_plan.MAX_KEYS}"
    if backward:
        return None
    heads, width = (b.static(x) for x in b.shape(rest[0])[3:])
    if width > lists_plan.MAX_D:
        return f"Dk = {width} is above {lists_plan.MAX_D}"
    if heads > lists_plan.MAX_HEADS:
        return f"h = {heads} heads a group are above {lists_plan.MAX_HEADS}"
    return None


def _lists(b: Any, k: Any, indices: Any) -> lists_plan.Lists:
    return lists_plan.plan_keys(b, b.shape(k)[1], indices, repeats=True)


def _grouped(strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns strides with one for groups, of which there is one, before the last."""
    return (*strides[:-1], 0, strides[-1])


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
    _plan_rows(b, index_loss_rows, lists, dict(target_ptr=target, dscores_ptr=dscores, loss_ptr=loss))
    return loss, dscores


def _plan_rows(b: Any, kernel: Any, lists: lists_plan.Lists, args: dict[str, Any]) -> None:
    """Launches a kernel of which a program takes a whole list."""
    B, S, N = b.shape(lists.keys)
    NP = power_of_two(lists.given)
    args = dict(args, keys_ptr=lists.keys, counts_ptr=lists.counts, N=N, NI=lists.given)
    b.launch(kernel, (B * S, 1, 1), args, dict(NP=NP), max(1, min(8, NP // 256)), 1)


def _plan_heads(
    b: Any, q: Any, k: Any, factors: Any, lists: lists_plan.Lists, out: Any, scale: float, target: bool
) -> None:
    """Launches ``index_list_heads``, for an index or for an attention with groups."""
    q, k, factors = b.strided(q), b.strided(k), None if factors is None else b.laid_out(factors)
    if target and factors is not None and rows_fit(b, q, k):
        found = kernels(b, SHARED, "the loss of an indexer", "index.gluon_target:index_list_target_wgmma")
        if found:
            return _plan_target(b, found[0], q, k, factors, lists, out, scale)
    B, S, *groups, H, D = b.shape(q)
    H, D, G = b.static(H), b.static(D), b.static(groups[0]) if groups else 1
    sq, sk = b.strides(q)[:-1], b.strides(k)[:-1]
    sf = (0,) * (3 + target) if factors is None else b.strides(factors)
    if not groups:
        sq, sk, sf = (_grouped(s) for s in (sq, sk, sf))
    props = b.device_props()
    c = list_config(H, D, D, b.dtype(q).itemsize, props.backend, props.arch, True)
    NM, TC = widths(D, c.MC)
    args = dict(
        q_ptr=q, k_ptr=k, f_ptr=factors, keys_ptr=lists.keys, counts_ptr=lists.counts, out_ptr=out, scale=float(scale),
        S=S, N=b.shape(lists.keys)[2], so=b.shape(out)[2], **dict(zip(STRIDES, (*sq, *sk, *sf), strict=True)),
    )  # fmt: skip
    constexprs = dict(G=G, H=H, D=D, NM=NM, MC=c.MC, TC=TC, HELD=c.held, HB=c.HB, BN=c.BN, TARGET=target,
                      ALIGN=alignment(b, q, k), PREC=dot_precision(b, b.dtype(q)))  # fmt: skip
    b.launch(index_list_heads, (B * S, 1, 1), args, constexprs, c.num_warps, c.num_stages)


def _plan_target(
    b: Any, kernel: Any, q: Any, k: Any, lse: Any, lists: lists_plan.Lists, out: Any, scale: float
) -> None:
    """Launches ``index_list_target_wgmma`` for one block of heads after the other."""
    B, S, G, H, D = b.shape(q)
    H, D = b.static(H), b.static(D)
    strides = (*b.strides(q)[:-1], *b.strides(k)[:-1], *b.strides(lse))
    args = dict(
        q_ptr=q, k_ptr=k, f_ptr=lse, keys_ptr=lists.keys, counts_ptr=lists.counts, out_ptr=out, scale=float(scale), S=S,
        N=b.shape(lists.keys)[2], so=b.shape(out)[2], **dict(zip(STRIDES, strides, strict=True)),
    )  # fmt: skip
    blocks = -(-H // HEADS)
    for each in range(b.static(G) * blocks):
        b.launch(
            kernel, (B * S, 1, 1), dict(args, g=each // blocks, hb=each % blocks),
            dict(H=H, DK=D, DV=VALUES, KT=TAIL if D > VALUES else 0, FIRST=each == 0), 4, 1,
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
    dtype = b.dtype(q)
    lists = _lists(b, k, indices)
    N = lists_plan.list_width(NI)
    g = b.empty((B, S, N), b.f32)
    _plan_rows(
        b, index_loss_factors, lists, dict(dloss_ptr=b.contiguous(dloss), dscores_ptr=b.contiguous(dscores), g_ptr=g)
    )
    dq, dk, dw = (b.empty(b.shape(t), b.dtype(t)) for t in (q, k, w))
    q, k, w = b.strided(q), b.strided(k), b.laid_out(w)
    (sqb, sqs, sqh), (skb, skn), (swb, sws, swh) = b.strides(q)[:3], b.strides(k)[:2], b.strides(w)
    of_lists = dict(keys_ptr=lists.keys, counts_ptr=lists.counts)
    args = dict(
        of_lists, g_ptr=g, q_ptr=q, k_ptr=k, w_ptr=w, dq_ptr=dq, dw_ptr=dw, scale=float(scale), sqb=sqb, sqs=sqs,
        sqh=sqh, skb=skb, skn=skn, swb=swb, sws=sws, swh=swh,
    )  # fmt: skip
    props = b.device_props()
    c = config.loss_config(H, D, dtype.itemsize, props.backend)
    NC = b.cdiv(D, c.DC)
    constexprs = dict(H=H, D=D, NC=NC, HB=c.HB, BN=c.BN, DC=c.DC, ALIGN=alignment(b, q, k),
                      PREC=gradient_precision(b, dtype))  # fmt: skip
    if c.HB == 64 and dtype.itemsize == 2 and (props.backend, props.arch) == ("cuda", 90):
        constexprs["maxnreg"] = MAXNREG
    size = backward_chunk(b, q, k, NI)
    acc = b.empty(b.shape(dk) if size < S else (0,), b.f32)
    part = b.empty((B * size, N, D), lists_plan.rows_dtype(b, dtype))  # of all chunks, one after the other
    for first in range(0, S, size):
        rows = min(size, S - first)
        chunk = dict(S=S, N=N, first=first, rows=rows)
        b.launch(
            index_loss_gradients, (B * rows * NC, 1, 1), dict(args, part_ptr=part, **chunk), constexprs, c.num_warps,
            c.num_stages,
        )  # fmt: skip
        lists_plan.plan_sums(b, of_lists, FIRST_PLACE, B, T, size, dict(chunk, G=1), [(part, acc, dk, D)])
    return dq, dk, dw
