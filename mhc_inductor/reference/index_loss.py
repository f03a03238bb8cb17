# SPDX-License-Identifier: Apache-2.0
"""The training loss of an indexer in plain PyTorch: the specification, and the implementation where no kernel runs.

:func:`index_loss` and :func:`index_loss_backward` have the name, the arguments and the outputs of the op
``torch.ops.mhc_inductor.<name>``. They gather the listed keys of a chunk of queries at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc_inductor.reference.index import chunks
from mhc_inductor.reference.precision import acc_dtype, as_given

CHUNK = 2**22
"""Gathered numbers and products of all heads held at once, unless a single query has more."""


def distinct(indices: Tensor, keys: int) -> Tensor:
    """Returns the listed positions, increasing, int64; ``keys`` in place of those that repeat or are out of range."""
    at = indices.long()
    at = torch.where((at >= 0) & (at < keys), at, keys).sort(-1).values
    again = torch.zeros_like(at, dtype=torch.bool)
    again[..., 1:] = at[..., 1:] == at[..., :-1]
    return at.masked_fill(again, keys)


def gathered(x: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows ``at[B, S, n]`` of ``x[B, T, D]``, ``[B, S, n, D]``."""
    return x[torch.arange(x.shape[0], device=x.device).view(-1, 1, 1), at].to(dtype)


def log_target(
    q: Tensor, k: Tensor, at: Tensor, none: Tensor, lse: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """Returns the logarithm of the attention's distribution over the listed keys of a chunk, ``[B, S, n]``.

    Args:
        q: The attention's queries ``[B, S, G, h, Dk]``.
        k: The attention's keys ``[B, G, T, Dk]``.
        at: Positions ``[B, S, n]`` within T.
        none: Which of them do not count, bool.
        lse: Log-sum-exp ``[B, S, G, h]`` of the attention, or None for that over the listed keys.
        scale: Factor of the attention's scores.
        dtype: Dtype of the arithmetic.
    """
    total = None
    for g in range(k.shape[1]):
        rows = gathered(k[:, g], at, dtype)
        scores = torch.matmul(q[:, :, g].to(dtype), rows.mT).mul_(scale).masked_fill_(none.unsqueeze(2), -torch.inf)
        whole = scores.logsumexp(-1) if lse is None else lse[:, :, g].to(dtype)
        # -inf: a query without keys, none of whose scores count.
        part = (scores - torch.where(whole == -torch.inf, 0.0, whole).unsqueeze(-1)).logsumexp(2)
        total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    return total.log_softmax(-1)


@as_given
def index_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    lse: Tensor | None,
    scale: float,
    attention_scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes the divergence of the index scores from an attention's distribution, over listed keys.

    With J = the distinct positions of indices[b, s] in [0, T), and for all j, t in J::

        I[j] = sum_h w[b, s, h] * relu(scale * <q[b, s, h], k[b, j]>) ;  r[j] = exp(I[j]) / sum_t exp(I[t])
        a[j] = sum_{g, h} exp(attention_scale * <attention_q[b, s, g, h], attention_k[b, g, j]> - lse[b, s, g, h])
        p[j] = a[j] / sum_t a[t]
        loss[b, s] = KL(p || r) = sum_j p[j] * (log p[j] - log r[j]) ;  dscores[j] = r[j] - p[j]

    Args:
        q: Queries of the index ``[B, S, H, D]``.
        k: Keys of the index ``[B, T, D]``.
        w: Weights of the heads ``[B, S, H]``.
        indices: Positions of keys ``[B, S, n]``; -1 for none.
        attention_q: Queries of the attention ``[B, S, G, h, Dk]``.
        attention_k: Keys of the attention ``[B, G, T, Dk]``.
        lse: Natural logarithm ``[B, S, G, h]`` of the sum of the attention's exponentials; None for that over J.
        scale: Factor of the products of the index.
        attention_scale: Factor of the attention's scores.

    Returns:
        ``(loss, dscores)`` in fp32, fp64 if q is fp64: loss ``[B, S]``, 0 where J is empty, and dscores ``[B, S, n]``,
        for the positions of :func:`distinct`, 0 for those that do not count.

    Source: DeepSeek-V3.2, arXiv 2512.02556, the loss of the sparse training stage.
    """
    batch, s, heads, width = q.shape
    keys, count = k.shape[1], indices.shape[2]
    dtype = acc_dtype(q.dtype)
    loss = torch.zeros((batch, s), dtype=dtype, device=q.device)
    dscores = torch.zeros((batch, s, count), dtype=dtype, device=q.device)
    if dscores.numel() == 0 or keys == 0:
        return loss, dscores
    # Rows as they are and in the arithmetic's dtype, and four tensors of scores.
    held = count * (2 * max(width, attention_q.shape[4]) + 4 * max(heads, attention_q.shape[3]))
    for b, part in chunks(batch, s, held, CHUNK):
        at = distinct(indices[b, part], keys)
        none = at == keys
        at = at.clamp(max=keys - 1)
        of_chunk = None if lse is None else lse[b, part]
        log_p = log_target(attention_q[b, part], attention_k[b], at, none, of_chunk, attention_scale, dtype)
        x = torch.matmul(q[b, part].to(dtype), gathered(k[b], at, dtype).mT).mul_(scale).relu_()
        scores = torch.matmul(w[b, part].to(dtype).unsqueeze(2), x).squeeze(2)
        log_r = scores.masked_fill_(none, -torch.inf).log_softmax(-1)
        p = log_p.exp()
        loss[b, part] = torch.where(none | (p == 0), 0.0, p * (log_p - log_r)).sum(-1)
        dscores[b, part] = torch.where(none, 0.0, log_r.exp() - p)
    return loss, dscores


@as_given
def index_loss_backward(
    dloss: Tensor, q: Tensor, k: Tensor, w: Tensor, indices: Tensor, dscores: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`index_loss`.

    With g[j] = dloss[b, s] * dscores[b, s, j] and x = <q[b, s, h], k[b, j]> over the distinct positions j::

        dw[b, s, h] = sum_j g[j] * relu(scale * x)
        dx          = g[j] * w[b, s, h] * scale, but 0 where scale * x <= 0
        dq[b, s, h] = sum_j dx * k[b, j] ;  dk[b, j] = sum_{s, h} dx * q[b, s, h]

    The attention's tensors have no gradient: its distribution is the target.

    dloss ``[B, S]`` is the gradient of the loss, dscores the forward's second output; the others are its arguments.

    Returns:
        ``(dq, dk, dw)``, each in its input's shape and dtype.
    """
    batch, s, heads, width = q.shape
    keys, count = k.shape[1], indices.shape[2]
    dtype = acc_dtype(q.dtype)
    dq, dw = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, w))
    # One more key, which positions that do not count read and write.
    padded = torch.cat((k.to(dtype), k.new_zeros((batch, 1, width), dtype=dtype)), 1)
    dk = torch.zeros_like(padded)
    for b, part in chunks(batch, s, count * (2 * width + 4 * heads), CHUNK):
        at = distinct(indices[b, part], keys)
        rows = gathered(padded[b], at, dtype)
        query = q[b, part].to(dtype)
        g = dloss[b, part, None].to(dtype) * dscores[b, part].to(dtype)
        g = torch.where(at == keys, 0.0, g).unsqueeze(2)
        x = torch.matmul(query, rows.mT).mul_(scale)
        dw[b, part] = (x.relu() * g).sum(-1).to(w.dtype)
        dx = torch.where(x <= 0, 0.0, g * (w[b, part].to(dtype) * scale).unsqueeze(-1))
        dq[b, part] = torch.matmul(dx, rows).to(q.dtype)
        add_rows(dk[b], at, torch.matmul(dx.mT, query))
    return dq, dk[:, :keys].to(k.dtype).contiguous(), dw


def add_rows(out: Tensor, at: Tensor, rows: Tensor) -> None:
    """Adds ``rows[B, S, n, D]`` to the rows ``at[B, S, n]`` of ``out[B, T, D]``, with equal bits in every run."""
    flat = (at + torch.arange(out.shape[0], device=at.device).view(-1, 1, 1) * out.shape[1]).flatten()
    out, rows = out.flatten(0, 1), rows.flatten(0, 2)  # out is a view: chunks are slices of the first dimension
    if out.device.type == "cpu":
        out.index_add_(0, flat, rows)
    else:  # on CUDA index_add_ uses atomics; index_put_ sorts
        out.index_put_((flat,), rows, accumulate=True)
