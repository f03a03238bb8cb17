# SPDX-License-Identifier: Apache-2.0
"""Selection attention (the selected branch of native sparse attention) in plain PyTorch: the specification.

:func:`selection_attention` and :func:`selection_attention_backward` have the name, the arguments and the outputs of the
op ``torch.ops.mhc_inductor.<name>``. Tensors: ``q[B, S, G, h, Dk]``, ``k[B, G, S_kv, Dk]``, ``v[B, G, S_kv, Dv]``,
integer ``ranges[B, S, G, r, 2]`` of ``[start, end)``, ``sink[G, h]``. The arithmetic is fp32 (fp64 if q is fp64), and
results in an input's dtype are rounded once.

It is a masked softmax over one chunk of queries at a time: at most :data:`CHUNK` scores are held at once, unless one
query of one group has more. The mask is applied by selection, never as a factor, so that NaN and inf reach only the
queries that select them.

Source: arXiv 2502.11089, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype, as_given
from mhc_inductor.reference.segments import same_segment

CHUNK = 2**22
"""Scores (queries x heads x keys) of one chunk, which needs about ten buffers of this size of working memory."""

Bounds = tuple[Tensor, Tensor]
Pair = tuple[Tensor | None, Tensor | None]
Slices = tuple[slice, slice, slice]
_EVERY = slice(None)


def key_bounds(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Bounds:
    """Returns the bounds ``[lo, hi)``, int64 ``[S]`` each, of each query's own sequence of keys.

    A query after the last boundary belongs to no sequence and gets lo = hi.
    """
    s, s_kv = q.shape[1], k.shape[2]
    if cu_seqlens_q is None:
        lo = torch.zeros(s, dtype=torch.int64, device=q.device)
        return lo, torch.full_like(lo, s_kv)
    ends = cu_seqlens_q[1:].to(torch.int64)
    n = ends.shape[0]
    sequence = torch.searchsorted(ends, torch.arange(s, device=q.device), right=True)
    # One more boundary gives queries of no sequence lo = hi.
    keys = (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).to(torch.int64).clamp(0, s_kv)
    keys = torch.cat((keys, keys[-1:]))
    sequence = sequence.clamp(0, n)
    return keys[sequence], keys[sequence + 1]


def clipped(ranges: Tensor, bounds: Bounds) -> Bounds:
    """Returns starts and ends of ``ranges[b, s, g, r, 2]`` as positions in k, int64 ``[b, g, s, r]``; start <= end."""
    lo, hi = (bound.view(-1, 1) for bound in bounds)
    # Ranges count from the start of the query's own sequence. Clip before the addition, which could overflow.
    pair = ranges.transpose(1, 2).to(torch.int64).clamp(min=0)
    start, end = (torch.minimum(t, hi - lo) + lo for t in pair.unbind(-1))
    return start, torch.maximum(start, end)


def selected(start: Tensor, end: Tensor, size: int) -> Tensor:
    """Returns whether each query selects each key, the union of its ranges: ``[..., r]`` to bool ``[..., size]``.

    Each start counts 1 up and each end 1 down: a key is selected where the running sum is above 0.
    """
    change = torch.zeros((*start.shape[:-1], size + 1), dtype=torch.int32, device=start.device)
    one = torch.ones_like(start, dtype=torch.int32)
    change = change.scatter_add(-1, start, one).scatter_add(-1, end, -one)
    return change[..., :size].cumsum(-1, dtype=torch.int32) > 0


def within(
    mask: Tensor, segments_q: Tensor | None, segments_k: Tensor | None, at: Slices, keys: Tensor | slice = _EVERY
) -> Tensor:
    """Returns ``mask[b, g, s, m]`` of the chunk ``at`` without keys of other segments; ``keys`` are its m keys."""
    if segments_q is None or segments_k is None:
        return mask
    in_b, _, in_s = at
    return mask & same_segment(segments_q[in_b, in_s], segments_k[in_b][:, keys]).unsqueeze(1)


def chunks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, Iterator[slice]]]:
    """Yields slices of the batch and of the groups, and for each pair an iterator over slices of the queries."""
    b, s, g, h, _ = q.shape
    row = max(1, h * k.shape[2])
    ns = min(s, max(1, CHUNK // row))
    ng = min(g, max(1, CHUNK // max(1, row * ns)))
    nb = min(b, max(1, CHUNK // max(1, row * ns * ng)))

    def split(size: int, step: int) -> Iterator[slice]:
        return (slice(i, min(i + step, size)) for i in range(0, size, max(1, step)))

    for in_b in split(b, nb):
        for in_g in split(g, ng):
            yield in_b, in_g, split(s, ns)


def rows(t: Tensor, at: Slices) -> Tensor:
    """Returns the chunk ``at`` of ``t[B, S, G, h, ...]`` as ``[b, g, s*h, ...]`` in the arithmetic's dtype."""
    in_b, in_g, in_s = at
    return t[in_b, in_s, in_g].transpose(1, 2).flatten(2, 3).to(acc_dtype(t.dtype))


def unrows(t: Tensor, h: int) -> Tensor:
    """Returns ``t[b, g, s*h, ...]`` as ``[b, s, g, h, ...]``, the inverse of :func:`rows`."""
    return t.unflatten(2, (-1, h)).transpose(1, 2)


def finite(t: Tensor) -> Tensor:
    """Returns ``t`` with 0 in place of NaN and inf."""
    return torch.where(t.isfinite(), t, 0.0)


def poison(mask: Tensor, t: Tensor) -> Tensor:
    """Returns, for each query, the sum of the NaN and inf in the rows of ``t`` that it selects, and 0 elsewhere.

    ``t`` is ``[..., m, D]``, ``mask`` ``[..., n, m]``, the result ``[..., n, D]``.
    """
    mask = mask.to(t.dtype)
    total = torch.zeros((), dtype=t.dtype, device=t.device)
    for value, where in ((torch.inf, t == torch.inf), (-torch.inf, t == -torch.inf), (torch.nan, t != t)):
        total = total + torch.where(torch.matmul(mask, where.to(t.dtype)) > 0, value, 0.0)
    return total


def masked_scores(query: Tensor, keys: Tensor, mask: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Returns ``scale * query @ keys.T``, plus the bias if there is one, with -inf where a key is not selected.

    ``query`` is ``[..., s*h, D]``, ``keys`` ``[..., m, D]``, ``mask`` and ``bias`` ``[..., s, m]``.
    """
    scores = scale * torch.matmul(query, keys.mT)
    if bias is not None:
        scores = (scores.unflatten(-2, (bias.shape[-2], -1)) + bias.unsqueeze(-2)).flatten(-3, -2)
    return only(mask, scores, -torch.inf)


def only(mask: Tensor, scores: Tensor, value: float) -> Tensor:
    """Returns ``scores[..., s*h, m]`` with ``value`` where ``mask[..., s, m]`` is False."""
    if mask.shape[-2] == scores.shape[-2]:
        return torch.where(mask, scores, value)
    apart = scores.unflatten(-2, (mask.shape[-2], -1))
    return torch.where(mask.unsqueeze(-2), apart, value).flatten(-3, -2)


def total_lse(lse: Tensor, sink: Tensor | None) -> Tensor:
    """Returns the logarithm of the softmax's denominator ``[..., G, h]``; 0 for a row without keys, whose o is 0."""
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    return torch.where(lse == -torch.inf, 0.0, total)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sink: Tensor | None, scale: float, odd: bool = True,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o ``[..., s*h, Dv]`` and lse ``[..., s*h]`` of one chunk.

    ``sink`` has one logit per row. ``odd``: whether values may hold NaN or inf. ``bias`` is added to the scores.
    """
    scores = masked_scores(query, keys, mask, scale, bias)
    most = scores.amax(-1)
    most = torch.where(most == -torch.inf, 0.0, most)
    p = torch.exp(scores - most.unsqueeze(-1))
    total = p.sum(-1)
    lse = most + torch.log(total)
    # Not exp(most - lse), which is inexact: a large lse is rounded.
    total = total if sink is None else total + torch.exp(sink.to(total.dtype) - most)
    weight = torch.where(lse == -torch.inf, 0.0, 1 / total).unsqueeze(-1)
    if not odd:
        return torch.matmul(p, values) * weight, lse
    spread = poison(mask, values).repeat_interleave(query.shape[-2] // mask.shape[-2], -2)
    return torch.matmul(p, finite(values)) * weight + spread, lse


class Rows(NamedTuple):
    """Inputs of the backward, one per row, ``[..., h]`` (dout ``[..., h, Dv]``).

    In a row without keys, dlse, lse and total are 0.
    """

    dout: Tensor
    dlse: Tensor
    lse: Tensor
    total: Tensor


def backward_rows(
    dout: Tensor | None, dlse: Tensor | None, sink: Tensor | None, o: Tensor, lse: Tensor
) -> tuple[Rows, Tensor]:
    """Returns :class:`Rows`, and dsink (of shape [0] without a sink). Gradients of None count as zero."""
    acc, empty = lse.dtype, lse == -torch.inf
    total = total_lse(lse, sink)
    dout = torch.zeros_like(o) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else torch.where(empty, 0.0, dlse.to(acc))
    row = Rows(dout, dlse, torch.where(empty, 0.0, lse), total)
    if sink is None:
        return row, lse.new_empty((0,))
    delta = torch.where(empty, 0.0, (dout.to(acc) * o.to(acc)).sum(-1))
    share = torch.where(empty, 0.0, torch.exp(sink.to(acc) - total))
    return row, -(share * delta).sum((0, 1)).to(sink.dtype)


def attend_backward(
    row: Rows, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, odd: bool = True,
    bias: Tensor | None = None, filled: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns one chunk's dquery ``[..., s*h, Dk]`` and its parts of dkeys and dvalues.

    ``row`` holds tensors ``[..., s*h]``. ``odd``: whether any input may hold NaN or inf. ``bias`` is added to the scores.
    ``filled``, of its shape: which scores get no gradient.
    """
    dlse, lse, total = (t.unsqueeze(-1) for t in row[1:])
    scores = masked_scores(query, keys, mask, scale, bias)
    if bias is not None:
        # Relative to the row's maximum: next to a bias of -1e9, lse has no digits left for the sum's logarithm.
        most = scores.amax(-1, keepdim=True)
        scores = scores - torch.where(most == -torch.inf, 0.0, most)
        own = torch.where(most == -torch.inf, 0.0, scores.logsumexp(-1, keepdim=True))
        lse, total = own, own + (total - lse)
    p, share = torch.exp(scores - total), torch.exp(scores - lse)
    dp = torch.matmul(row.dout, values.mT)
    # delta = <dout, o>, but exactly dp where one key has the whole weight: a gradient of 0 then stays exactly 0. A large
    # total is rounded, and all p with it: what they add to is 1 where no sink takes a share.
    whole = (only(mask, p, 0.0) if odd else p).sum(-1, keepdim=True)
    whole = torch.where((total == lse) & (whole > 0), whole, 1.0)
    delta = (only(mask, p * dp, 0.0) if odd else p * dp).sum(-1, keepdim=True) / whole
    grad = p * (dp - delta) + dlse * share
    if filled is not None:
        grad = grad.unflatten(-2, (filled.shape[-2], -1)).masked_fill(filled.unsqueeze(-2), 0.0).flatten(-3, -2)
    if not odd:
        return scale * torch.matmul(grad, keys), scale * torch.matmul(grad.mT, query), torch.matmul(p.mT, row.dout)
    p, grad = only(mask, p, 0.0), only(mask, grad, 0.0)
    # Heads share the mask: if a value is not finite in one head, the sum over heads is not finite.
    spread = torch.where(row.dout.isfinite(), 0.0, row.dout).unflatten(-2, (mask.shape[-2], -1)).sum(-2)
    return (
        scale * torch.matmul(grad, finite(keys)),
        scale * torch.matmul(grad.mT, finite(query)),
        torch.matmul(p.mT, finite(row.dout)) + poison(mask.mT, spread),
    )


Visible = Callable[[Slices], tuple[Tensor, Tensor | None]]
"""Returns which keys a chunk sees, and what is added to their scores or None: ``[b, g, s, S_kv]`` each."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, visible: Visible, odd: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns o and lse of attention over the visible keys, a chunk of queries at a time; ``odd`` as in :func:`attend`."""
    acc, h = acc_dtype(q.dtype), q.shape[3]
    o, lse = q.new_zeros((*q.shape[:4], v.shape[3])), q.new_full(q.shape[:4], -torch.inf, dtype=acc)
    if o.numel() == 0 or k.shape[2] == 0:
        return o, lse
    for in_b, in_g, queries in chunks(q, k):
        keys, values = (t[in_b, in_g].to(acc) for t in (k, v))
        for in_s in queries:
            at = (in_b, in_g, in_s)
            mask, bias = visible(at)
            logit = None if sink is None else sink[in_g].repeat(1, mask.shape[2])
            part = attend(rows(q, at), keys, values, mask, logit, scale, odd, bias)
            o[in_b, in_s, in_g], lse[in_b, in_s, in_g] = (unrows(t, h) for t in part)
    return o, lse


def attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, o: Tensor,
    lse: Tensor, scale: float, visible: Visible, odd: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of :func:`attention`; where v is None, dk holds those of the values, k's first columns, too."""
    acc, h, width = acc_dtype(q.dtype), q.shape[3], o.shape[4]
    values = k[..., :width] if v is None else v
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, values))
    row, dsink = backward_rows(dout, dlse, sink, o, lse)
    for in_b, in_g, queries in chunks(q, k) if q.numel() and k.shape[2] else ():
        keys, mine = (t[in_b, in_g].to(acc) for t in (k, values))
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(mine)
        for in_s in queries:
            at = (in_b, in_g, in_s)
            part = Rows(*(rows(t, at) for t in row))
            mask, bias = visible(at)
            grad_q, more_k, more_v = attend_backward(part, rows(q, at), keys, mine, mask, scale, odd, bias)
            dq[in_b, in_s, in_g] = unrows(grad_q, h).to(q.dtype)
            grad_k += more_k
            grad_v += more_v
        if v is None:
            grad_k += F.pad(grad_v, (0, k.shape[3] - width))
        dk[in_b, in_g], dv[in_b, in_g] = grad_k.to(k.dtype), grad_v.to(dv.dtype)
    return dq, dk, k.new_empty((0,)) if v is None else dv, dsink


def in_ranges(q: Tensor, k: Tensor, ranges: Tensor, boundaries: Pair, segments: Pair) -> Visible:
    """Returns which keys of each chunk are in the ranges of its queries and of the same segment."""
    lo, hi = key_bounds(q, k, *boundaries)

    def visible(at: Slices) -> tuple[Tensor, None]:
        in_b, in_g, in_s = at
        start, end = clipped(ranges[in_b, in_s, in_g], (lo[in_s], hi[in_s]))
        return within(selected(start, end, k.shape[2]), *segments, at), None

    return visible


@as_given
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    segments_q: Tensor | None = None,
    segments_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention of each query over the union of its ranges.

    ::

        sel = union of [start, end) in ranges[b, s, g], clipped to [0, S_kv), without keys of other segments
        t   = scale * q[b, s, g] @ k[b, g, sel].T                       # [h, keys]
        lse = log(sum exp(t)) ;  o = exp(t - lse_total) @ v[b, g, sel]
        lse_total = lse, or logaddexp(lse, sink[g]) with a sink

    Args:
        q: Queries ``[B, S, G, h, Dk]``.
        k: Keys ``[B, G, S_kv, Dk]``.
        v: Values ``[B, G, S_kv, Dv]``.
        ranges: ``[start, end)`` pairs ``[B, S, G, r, 2]``.
        sink: Logits ``[G, h]``, or None.
        cu_seqlens_q: Boundaries ``[N+1]`` of packed sequences in S, or None. B is then 1, and ranges count from the
            start of the query's own sequence of keys and are clipped to it.
        cu_seqlens_k: The same boundaries in S_kv, or None for cu_seqlens_q.
        scale: Factor of the scores.
        segments_q: Segment ids ``[B, S]``, or None for no segments. A key i counts for query s only where
            ``segments_k[b, i]`` is ``segments_q[b, s]`` or :data:`mhc_inductor.ANY_SEGMENT`.
        segments_k: Segment ids ``[B, S_kv]``, or None.

    Returns:
        ``(o, lse)``: o ``[B, S, G, h, Dv]`` in q's dtype, exactly 0 where nothing is selected; lse ``[B, S, G, h]`` in
        the arithmetic's dtype, -inf there.

    Source: arXiv 2502.11089, section 3.3.2.
    """
    visible = in_ranges(q, k, ranges, (cu_seqlens_q, cu_seqlens_k), (segments_q, segments_k))
    return attention(q, k, v, sink, scale, visible)


@as_given
def selection_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_attention`; a gradient of None counts as zero.

    Over the selected keys, with t the scaled scores::

        p = exp(t - lse_total) ;  delta = <dout, o> = sum p * (dout @ v.T)
        dv = p.T @ dout ;  dt = p * (dout @ v.T - delta) + dlse * exp(t - lse)
        dq = scale * dt @ k ;  dk = scale * dt.T @ q ;  dsink = -sum exp(sink - lse_total) * delta

    A row without keys contributes nothing.

    dout ``[B, S, G, h, Dv]`` and dlse ``[B, S, G, h]`` are the gradients of o and lse. The others are the arguments of
    :func:`selection_attention`, with its outputs o and lse before the scale.

    Returns:
        ``(dq, dk, dv, dsink)``, each in its input's shape and dtype; dsink has shape [0] without a sink.

    Source: derived from arXiv 2502.11089, section 3.3.2.
    """
    sink, cu_seqlens_q, cu_seqlens_k, o, lse, scale, segments_q, segments_k = (*rest, None, None)[:8]
    visible = in_ranges(q, k, ranges, (cu_seqlens_q, cu_seqlens_k), (segments_q, segments_k))
    return attention_backward(dout, dlse, q, k, v, sink, o, lse, scale, visible)
