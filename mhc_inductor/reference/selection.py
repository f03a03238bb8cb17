"""Selection attention (the selected branch of native sparse attention, arXiv 2502.11089) in plain PyTorch: the specification.

Both functions have the name, the arguments and the outputs of the op ``torch.ops.mhc_inductor.<name>``. Tensors:
``q[B, S, G, h, Dk]``, ``k[B, G, S_kv, Dk]``, ``v[B, G, S_kv, Dv]``, ``ranges[B, S, G, r, 2]`` integer ``[start, end)``,
``sink[G, h]``. The arithmetic is fp32 (fp64 when q is fp64); results in an input's dtype are rounded once.

A masked softmax, a chunk of queries at a time: no more than :data:`CHUNK` scores are held at once, unless one query
of one group has more. The mask only selects; it is never a factor, so that NaN and inf stay where they were selected.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mhc_inductor.reference.mhc import acc_dtype, as_given

CHUNK = 2**22
"""Scores (queries x heads x keys) of one chunk; beside inputs and outputs, a chunk takes some ten buffers of so many."""

Bounds = tuple[Tensor, Tensor]
Slices = tuple[slice, slice, slice]


def key_bounds(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Bounds:
    """Each query's keys ``[lo, hi)``, int64 ``[S]``: those of its own sequence, none beyond the last boundary."""
    s, s_kv = q.shape[1], k.shape[2]
    if cu_seqlens_q is None:
        lo = torch.zeros(s, dtype=torch.int64, device=q.device)
        return lo, torch.full_like(lo, s_kv)
    ends = cu_seqlens_q[1:].to(torch.int64)
    n = ends.shape[0]
    sequence = torch.searchsorted(ends, torch.arange(s, device=q.device), right=True)
    # One more boundary, so that queries of no sequence have lo = hi.
    keys = (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).to(torch.int64).clamp(0, s_kv)
    keys = torch.cat((keys, keys[-1:]))
    sequence = sequence.clamp(0, n)
    return keys[sequence], keys[sequence + 1]


def selected(ranges: Tensor, bounds: Bounds, s_kv: int) -> Tensor:
    """Whether each query selects each key: the union of its ranges, ``ranges[b, s, g, r, 2] -> bool [b, g, s, S_kv]``.

    A key at p is selected when some range starts at or before p and the farthest end of those lies beyond p.
    """
    b, s, g, r, _ = ranges.shape
    if r == 0 or s_kv == 0:
        return torch.zeros((b, g, s, s_kv), dtype=torch.bool, device=ranges.device)
    lo, hi = (bound.view(s, 1) for bound in bounds)
    # From the start of the query's own sequence; clipped before the addition, which could overflow.
    start, end = (
        torch.minimum(t.to(torch.int64).clamp(min=0), hi - lo) + lo for t in ranges.transpose(1, 2).unbind(-1)
    )
    start, order = start.contiguous().sort(-1)
    reach = end.gather(-1, order).cummax(-1).values
    position = torch.arange(s_kv, device=ranges.device)
    before = torch.searchsorted(start, position.expand(b, g, s, s_kv).contiguous(), right=True)
    return (before > 0) & (position < reach.gather(-1, (before - 1).clamp(min=0)))


def chunks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, Iterator[slice]]]:
    """Slices of the batch and of the groups, and for each pair the slices of its queries."""
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
    """``t[B, S, G, h, D]`` of a chunk as ``[b, g, s*h, D]`` in the arithmetic's dtype."""
    in_b, in_g, in_s = at
    return t[in_b, in_s, in_g].transpose(1, 2).flatten(2, 3).to(acc_dtype(t.dtype))


def unrows(t: Tensor, h: int) -> Tensor:
    """The way back: ``[b, g, s*h, ...] -> [b, s, g, h, ...]``."""
    return t.unflatten(2, (-1, h)).transpose(1, 2)


def finite(t: Tensor) -> Tensor:
    """``t`` with 0 for NaN and inf."""
    return torch.where(t.isfinite(), t, 0.0)


def poison(mask: Tensor, t: Tensor) -> Tensor:
    """The NaN and inf of the selected rows of ``t[..., m, D]``, added: ``mask[..., n, m]`` to ``[..., n, D]``."""
    mask = mask.to(t.dtype)
    total = torch.zeros((), dtype=t.dtype, device=t.device)
    for value, where in ((torch.inf, t == torch.inf), (-torch.inf, t == -torch.inf), (torch.nan, t != t)):
        total = total + torch.where(torch.matmul(mask, where.to(t.dtype)) > 0, value, 0.0)
    return total


def total_lse(lse: Tensor, sink: Tensor | None) -> Tensor:
    """The logarithm of the softmax's denominator ``[..., G, h]``; 0 for a row without keys, whose o is 0."""
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    return torch.where(lse == -torch.inf, 0.0, total)


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
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over the union of its ranges.

    ::

        sel = union of [start, end) in ranges[b, s, g], clipped to [0, S_kv)
        t   = scale * q[b, s, g] @ k[b, g, sel].T                       # [h, keys]
        lse = log(sum exp(t)) ;  o = exp(t - lse_total) @ v[b, g, sel]
        lse_total = lse, or logaddexp(lse, sink[g]) with a sink

    With ``cu_seqlens_q`` and ``cu_seqlens_k`` (``[N+1]``; None: as cu_seqlens_q) B is 1 and sequences stand one after
    the other: ranges count from, and are clipped to, the keys of the query's own sequence. Returns (o, lse): o
    ``[B, S, G, h, Dv]`` in q's dtype, exactly 0 where nothing is selected; lse ``[B, S, G, h]``, -inf there.
    """
    b, s, g, h, _ = q.shape
    acc = acc_dtype(q.dtype)
    o = q.new_zeros((b, s, g, h, v.shape[3]))
    lse = q.new_full((b, s, g, h), -torch.inf, dtype=acc)
    lo, hi = key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if o.numel() == 0 or k.shape[2] == 0:
        return o, lse
    for in_b, in_g, queries in chunks(q, k):
        keys, values = (t[in_b, in_g].to(acc) for t in (k, v))
        clean = finite(values)
        for in_s in queries:
            at = (in_b, in_g, in_s)
            mask = selected(ranges[in_b, in_s, in_g], (lo[in_s], hi[in_s]), k.shape[2])
            scores = scale * torch.matmul(rows(q, at), keys.mT)
            scores = scores.masked_fill_(~mask.repeat_interleave(h, 2), -torch.inf)
            part = torch.logsumexp(scores, -1)
            lse[in_b, in_s, in_g] = unrows(part, h)
            total = total_lse(lse[in_b, in_s, in_g], None if sink is None else sink[in_g])
            p = scores.sub_(total.transpose(1, 2).flatten(2, 3).unsqueeze(-1)).exp_()
            bad = poison(mask, values).repeat_interleave(h, 2)
            o[in_b, in_s, in_g] = unrows(torch.matmul(p, clean) + bad, h).to(o.dtype)
    return o, lse


@as_given
def selection_attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`selection_attention`; a gradient of None counts as zero.

    Over the selected keys, with t the scaled scores::

        p = exp(t - lse_total) ;  delta = <dout, o>
        dv = p.T @ dout ;  dt = p * (dout @ v.T - delta) + dlse * exp(t - lse)
        dq = scale * dt @ k ;  dk = scale * dt.T @ q ;  dsink = -sum exp(sink - lse_total) * delta

    A row without keys takes part in nothing. Returns (dq, dk, dv, dsink), each in its input's shape and dtype, dsink of
    shape [0] without a sink.
    """
    h, acc = q.shape[3], acc_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    empty = lse == -torch.inf
    total = total_lse(lse, sink)
    delta = torch.zeros_like(lse) if dout is None else (dout.to(acc) * o.to(acc)).sum(-1)
    delta = torch.where(empty, 0.0, delta)
    if sink is None:
        dsink = lse.new_empty((0,))
    else:
        share = torch.where(empty, 0.0, torch.exp(sink.to(acc) - total))
        dsink = -(share * delta).sum((0, 1)).to(sink.dtype)
    lo, hi = key_bounds(q, k, cu_seqlens_q, cu_seqlens_k)
    if q.numel() == 0 or k.shape[2] == 0:
        return dq, dk, dv, dsink
    dlse = torch.zeros_like(lse) if dlse is None else dlse.to(acc)
    for in_b, in_g, queries in chunks(q, k):
        keys, values = (t[in_b, in_g].to(acc) for t in (k, v))
        clean = finite(keys)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for in_s in queries:
            at = (in_b, in_g, in_s)
            mask = selected(ranges[in_b, in_s, in_g], (lo[in_s], hi[in_s]), k.shape[2])
            other = ~mask.repeat_interleave(h, 2)
            query = rows(q, at)
            column = lambda t, at=at: rows(t.unsqueeze(-1), at)  # noqa: E731
            scores = (scale * torch.matmul(query, keys.mT)).masked_fill_(other, -torch.inf)
            grad = column(torch.where(empty, 0.0, dlse)) * torch.exp(scores - column(torch.where(empty, 0.0, lse)))
            if dout is not None:
                p = torch.exp(scores - column(total))
                out = rows(dout, at)
                grad_v += torch.matmul(p.mT, finite(out))
                # Heads share the mask: what is not finite in one is so in their sum.
                odd = torch.where(out.isfinite(), 0.0, out).unflatten(2, (-1, h)).sum(3)
                grad_v += poison(mask.mT, odd)
                grad = grad + p * (torch.matmul(out, values.mT) - column(delta))
            grad = grad.masked_fill_(other, 0.0)
            dq[in_b, in_s, in_g] = unrows(scale * torch.matmul(grad, clean), h).to(q.dtype)
            grad_k += scale * torch.matmul(grad.mT, finite(query))
        dk[in_b, in_g], dv[in_b, in_g] = grad_k.to(k.dtype), grad_v.to(v.dtype)
    return dq, dk, dv, dsink
