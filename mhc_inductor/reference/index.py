# SPDX-License-Identifier: Apache-2.0
"""Index scores and the keys that they choose (the lightning indexer) in plain PyTorch: the specification.

:func:`index_scores`, :func:`index_scores_backward` and :func:`index_topk` have the name, the arguments and the outputs
of the op ``torch.ops.mhc_inductor.<name>``. They run in chunks of queries and never hold all products of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mhc_inductor.reference.precision import acc_dtype, as_given
from mhc_inductor.reference.segments import ANY_SEGMENT

CHUNK = 2**24
"""Products (queries x heads x keys) held at once, unless a single query has more."""


def chunks(batch: int, queries: int, per_query: int, most: int, tile: int = 1) -> Iterator[tuple[slice, slice]]:
    """Yields slices of B and S that cover all queries, in order, each of at most ``most`` numbers.

    Args:
        batch: B.
        queries: S.
        per_query: Numbers that a query holds.
        most: Numbers that a chunk may hold, unless one tile of queries holds more.
        tile: A chunk of a part of S has a multiple of so many queries.
    """
    rows = max(1, most // max(1, per_query))
    if rows >= queries:
        step = max(1, rows // max(1, queries))
        for first in range(0, batch, step):
            yield slice(first, min(first + step, batch)), slice(0, queries)
        return
    step = max(tile, rows // tile * tile)
    for b in range(batch):
        for first in range(0, queries, step):
            yield slice(b, b + 1), slice(first, min(first + step, queries))


def visible(s: slice, b: slice, keys: int, device: torch.device, *hidden: Tensor | None) -> Tensor:
    """Returns which of the keys the queries ``[b, s]`` see, bool, broadcastable to ``[b, s, T]``.

    ``hidden`` are limit, mask, segments_q and segments_k of :func:`index_scores`.
    """
    limit, mask, segments_q, segments_k = hidden
    seen = torch.ones((1, 1, keys), dtype=torch.bool, device=device)
    if limit is not None:
        seen = seen & (torch.arange(keys, device=device) < limit[b, s, None])
    if mask is not None:
        seen = seen & mask[b if mask.shape[0] != 1 else slice(None), s if mask.shape[1] != 1 else slice(None)]
    if segments_q is not None and segments_k is not None:
        ids = segments_k[b, None, :]
        seen = seen & ((ids == segments_q[b, s, None]) | (ids == ANY_SEGMENT))
    return seen


def products(q: Tensor, k: Tensor) -> Tensor:
    """Returns ``<q[b, s, h], k[b, t]>`` as [B, S, H, T] for k[B, T, D] in the arithmetic's dtype."""
    return torch.matmul(q.to(k.dtype).flatten(1, 2), k.mT).unflatten(1, q.shape[1:3])


def score(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    """Returns the scores [B, S, T] of a chunk of queries, k[B, T, D] in the arithmetic's dtype."""
    x = products(q, k).mul_(scale).relu_()
    return torch.matmul(w.to(k.dtype).unsqueeze(2), x).squeeze(2)


@as_given
def index_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    scale: float,
    limit: Tensor | None,
    mask: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
) -> Tensor:
    """Computes the index scores of each query and key.

    ::

        scores[b, s, t] = sum_h w[b, s, h] * relu(scale * <q[b, s, h], k[b, t]>)   where t is visible to s, else -inf

    Key t is visible to query s where all of these hold: ``t < limit[b, s]``; ``mask[b, s, t]``; ``segments_k[b, t]`` is
    ``segments_q[b, s]`` or ANY_SEGMENT. What is None hides nothing.

    Args:
        q: Queries ``[B, S, H, D]``.
        k: Keys ``[B, T, D]``.
        w: Weights ``[B, S, H]``.
        scale: Factor of the products inside the relu, finite and at least 0.
        limit: Number of leading keys that a query sees, ``[B, S]``; below 0 is 0, above T is T. None for T.
        mask: Bool, 3 dimensions of which each is 1 or that of ``[B, S, T]``.
        segments_q: Segment ids ``[B, S]``.
        segments_k: Segment ids ``[B, T]``.

    Returns:
        Scores ``[B, S, T]``, fp32, fp64 if q is fp64.

    Source: the lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, equation 1).
    """
    batch, s, h, _ = q.shape
    t = k.shape[1]
    dtype = acc_dtype(q.dtype)
    out = torch.empty((batch, s, t), dtype=dtype, device=q.device)
    k = k.to(dtype)
    for b, at in chunks(batch, s, h * t, CHUNK):
        seen = visible(at, b, t, q.device, limit, mask, segments_q, segments_k)
        out[b, at] = score(q[b, at], k[b], w[b, at], scale).masked_fill_(~seen, -torch.inf)
    return out


@as_given
def index_scores_backward(
    dscores: Tensor, q: Tensor, k: Tensor, w: Tensor, scale: float, *hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`index_scores`.

    With g = dscores where the key is visible, else 0, and x = <q[b, s, h], k[b, t]>::

        dw[b, s, h] = sum_t g * relu(scale * x)
        dx          = g * w[b, s, h] * scale, but 0 where scale * x <= 0
        dq[b, s, h] = sum_t dx * k[b, t] ;  dk[b, t] = sum_{s, h} dx * q[b, s, h]

    dscores ``[B, S, T]`` is the gradient of the scores; what stands at invisible keys is never used. The others are the
    arguments of :func:`index_scores`.

    Returns:
        ``(dq, dk, dw)``, each in its input's shape and dtype.
    """
    batch, s, h, _ = q.shape
    t = k.shape[1]
    dtype = acc_dtype(q.dtype)
    keys = k.to(dtype)
    dq, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
    dk = torch.zeros(k.shape, dtype=dtype, device=k.device)
    for b, at in chunks(batch, s, h * t, CHUNK):
        seen = visible(at, b, t, q.device, *hidden)
        g = torch.where(seen, dscores[b, at].to(dtype), 0.0)
        x = products(q[b, at], keys[b]).mul_(scale)
        dw[b, at] = torch.matmul(x.relu(), g.unsqueeze(-1)).squeeze(-1).to(w.dtype)
        dx = torch.where(x <= 0, 0.0, g.unsqueeze(2) * (w[b, at].to(dtype) * scale).unsqueeze(-1)).flatten(1, 2)
        dq[b, at] = torch.matmul(dx, keys[b]).unflatten(1, (-1, h)).to(q.dtype)
        dk[b] += torch.matmul(dx.mT, q[b, at].to(dtype).flatten(1, 2))
    return dq, dk.to(k.dtype), dw


def sortable(scores: Tensor) -> Tensor:
    """Returns integers that sort as the scores do: -0 as 0, every NaN above inf; the least integer is no score's."""
    kind = torch.int64 if scores.dtype is torch.float64 else torch.int32
    bits = (scores + 0.0).view(kind)
    bits = torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)
    return torch.where(scores.isnan(), torch.iinfo(kind).max, bits)


def largest(bits: Tensor, topk: int) -> Tensor:
    """Returns the indices of the ``topk`` largest integers, in any order, T in place of those of the least integer.

    Ties go to the lower index.
    """
    t = bits.shape[-1]
    none = torch.iinfo(bits.dtype).min
    if bits.dtype is torch.int64:
        best, index = bits.sort(dim=-1, descending=True, stable=True)
        return torch.where(best[..., :topk] == none, t, index[..., :topk])
    # One number that sorts by both: much faster than a stable sort.
    last = 2**31 - 1
    both = (bits.to(torch.int64) << 32) | (last - torch.arange(t, device=bits.device))
    best = both.topk(topk, -1, sorted=False).values
    return torch.where(best >> 32 == none, t, last - (best & 0xFFFFFFFF))


def chosen(scores: Tensor, seen: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of the ``topk`` largest ``scores`` [..., T] that are ``seen``, int32, and these scores.

    Indices increase; then come -1, and scores of -inf, where fewer are seen.
    """
    bits, t = sortable(scores), scores.shape[-1]
    at = largest(torch.where(seen, bits, torch.iinfo(bits.dtype).min), topk).sort(-1).values
    values = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).gather(-1, at)
    return torch.where(at == t, -1, at).to(torch.int32), values


def index_topk(q: Tensor, k: Tensor, w: Tensor, topk: int, scale: float, *hidden: Tensor | None) -> Tensor:
    """Returns the visible keys of the ``topk`` largest :func:`index_scores` of each query.

    Equal scores go to the lower index. A visible key is chosen before any other whatever its score, -inf included. A
    score of NaN counts as larger than inf, as in ``torch.topk``.

    ``topk`` is the number of keys, at most T. The others are the arguments of :func:`index_scores`.

    Returns:
        Indices ``[B, S, topk]``, int32, increasing; then -1 where fewer keys are visible.

    Source: DeepSeek-V3.2, arXiv 2512.02556, the token selection after equation 1.
    """
    return index_topk_scores(q, k, w, topk, scale, *hidden)[0]


@as_given
def index_topk_scores(
    q: Tensor, k: Tensor, w: Tensor, topk: int, scale: float, *hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the keys of :func:`index_topk`, which has the arguments, and their scores.

    Returns:
        ``(indices, scores)``, ``[B, S, topk]`` each; scores in fp32, fp64 if q is fp64, -inf where an index is -1.
    """
    batch, s, h, _ = q.shape
    t = k.shape[1]
    k = k.to(acc_dtype(q.dtype))
    out = torch.empty((batch, s, topk), dtype=torch.int32, device=q.device)
    values = torch.empty(out.shape, dtype=k.dtype, device=q.device)
    # A sort holds the scores, their bits and 64-bit indices twice: eight heads' products.
    for b, at in chunks(batch, s, max(h, 8) * t, CHUNK):
        seen = visible(at, b, t, q.device, *hidden)
        out[b, at], values[b, at] = chosen(score(q[b, at], k[b], w[b, at], scale), seen, topk)
    return out, values
