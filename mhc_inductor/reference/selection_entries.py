# SPDX-License-Identifier: Apache-2.0
"""Selection attention over lists of keys with a bias per entry, in plain PyTorch: the specification.

:func:`selection_entry_attention` and :func:`selection_entry_attention_backward` have the name, the arguments and the
outputs of the op ``torch.ops.mhc_inductor.<name>``. They gather the listed keys of a chunk of queries at a time, and then
compute the formulas of :mod:`mhc_inductor.reference.selection`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_inductor.reference.index import chunks
from mhc_inductor.reference.index_loss import add_rows, gathered
from mhc_inductor.reference.precision import acc_dtype, as_given
from mhc_inductor.reference.selection import CHUNK, Rows, attend, attend_backward, backward_rows
from mhc_inductor.reference.selection_lists import values_of


class Entries(NamedTuple):
    """The entries of a chunk of queries, as one batch of groups, BG = b * G.

    Attributes:
        at: Positions of keys ``[BG, s, n]``, 0 where there is no entry.
        mask: Which entries count ``[BG, s, 1, n]``.
        bias: Their biases ``[BG, s, 1, n]`` in the arithmetic's dtype.
    """

    at: Tensor
    mask: Tensor
    bias: Tensor

    def rows(self, t: Tensor) -> Tensor:
        """Returns the keys or values ``t[b, G, S_kv, D]`` of the entries, ``[BG, s, n, D]``; 0 where there is no entry."""
        return torch.where(self.mask.mT, gathered(t.flatten(0, 1), self.at, self.bias.dtype), 0.0)


def entries_of(indices: Tensor, bias: Tensor, keys: int, repeats: bool, dtype: torch.dtype) -> Entries:
    """Returns the entries that count: within ``[0, keys)``, no bias of -inf, and the first of a key unless ``repeats``."""
    at, bias = (t.transpose(1, 2).flatten(0, 1) for t in (indices.long(), bias.to(dtype)))
    seen = (at >= 0) & (at < keys) & (bias != -torch.inf)
    if not repeats:
        ordered, place = torch.where(seen, at, keys).sort(stable=True, dim=-1)
        first = ordered != F.pad(ordered[..., :-1], (1, 0), value=-1)
        seen = seen & first.gather(-1, place.argsort(-1))
    return Entries(torch.where(seen, at, 0), seen.unsqueeze(2), bias.unsqueeze(2))


def heads(t: Tensor) -> Tensor:
    """Returns ``t[b, s, G, h, ...]`` as ``[b*G, s, h, ...]`` in the arithmetic's dtype."""
    return t.transpose(1, 2).flatten(0, 1).to(acc_dtype(t.dtype))


def unheads(t: Tensor, groups: int) -> Tensor:
    """Returns ``t[b*G, s, h, ...]`` as ``[b, s, G, h, ...]``, the inverse of :func:`heads`."""
    return t.unflatten(0, (-1, groups)).transpose(1, 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, bias: Tensor, sink: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Computes :func:`selection_entry_attention` in one step, which gathers the keys of all queries."""
    scale, v_width, repeats = options
    entries = entries_of(indices, bias, k.shape[2], repeats, acc_dtype(q.dtype))
    logit = None if sink is None else sink.repeat(q.shape[0], 1).unsqueeze(1)
    keys, values = entries.rows(k), entries.rows(values_of(k, v, v_width))
    part = attend(heads(q), keys, values, entries.mask, logit, scale, bias=entries.bias)
    o, lse = (unheads(t, q.shape[2]) for t in part)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def _chunks(q: Tensor, indices: Tensor, v_width: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of B and S whose gathered rows and scores are at most CHUNK numbers, unless one query has more."""
    batch, queries, groups, heads, width = q.shape
    return chunks(batch, queries, groups * indices.shape[3] * (2 * (width + v_width) + 4 * heads), CHUNK)


@as_given
def selection_entry_attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, bias: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention of each query over the entries of its list, each with a bias of its own.

    ::

        E   = the entries e with 0 <= indices[b, s, g, e] < S_kv and bias[b, s, g, e] > -inf
              without repeats, of those of one key only the first
        t   = scale * q[b, s, g] @ k[b, g, indices[b, s, g, E]].T + bias[b, s, g, E]     # [h, entries]
        lse = log(sum exp(t)) ;  o = exp(t - lse_total) @ v[b, g, indices[b, s, g, E]]
        lse_total = lse, or logaddexp(lse, sink[g]) with a sink

    The sums t are rounded as written, and the softmax subtracts their maximum: where all biases of a row are the lowest
    finite number, its entries have equal weights.

    Args:
        q: Queries ``[B, S, G, h, Dk]``.
        k: Keys ``[B, G, S_kv, Dk]``.
        v: Values ``[B, G, S_kv, Dv]``, or None for ``k[..., :v_width]``.
        indices: Key positions ``[B, S, G, n]``; others than 0 to S_kv - 1 are no entry.
        bias: Biases ``[B, S, G, n]``; -inf is no entry, NaN and +inf give NaN. NaN gives its score no gradient, as if the
            score were filled with it. They are converted to the arithmetic's dtype first, and have no gradient.
        *rest: sink ``[G, h]`` or None; scale; v_width, which is Dv; and repeats: whether entries that repeat a key count
            each.

    Returns:
        ``(o, lse)``, as :func:`mhc_inductor.reference.selection.selection_attention`.

    Source: DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556), with an additive mask of the listed keys.
    """
    v_width = rest[2]
    o = q.new_zeros((*q.shape[:4], v_width))
    lse = q.new_full(q.shape[:4], -torch.inf, dtype=acc_dtype(q.dtype))
    if 0 in (o.numel(), k.shape[2], indices.shape[3]):
        return o, lse
    for in_b, in_s in _chunks(q, indices, v_width):
        query, listed, biases = (t[in_b, in_s] for t in (q, indices, bias))
        values = None if v is None else v[in_b]
        part = attention(query, k[in_b], values, listed, biases, *rest)
        o[in_b, in_s], lse[in_b, in_s] = part
    return o, lse


@as_given
def selection_entry_attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`selection_entry_attention`; a gradient of None counts as zero.

    The formulas are those of :func:`mhc_inductor.reference.selection.selection_attention_backward`, with each entry's
    gradient added to its key's. With v None, dk holds the gradients of k as keys and as values.

    dout ``[B, S, G, h, Dv]`` and dlse ``[B, S, G, h]`` are the gradients of o and lse. The others are the arguments of
    :func:`selection_entry_attention`, with its outputs o and lse before the scale.

    Returns:
        ``(dq, dk, dv, dsink)``, each in its input's shape and dtype; dv has shape [0] with v None, dsink without a sink.

    Source: derived from arXiv 2512.02556.
    """
    bias, sink, o, lse, scale, v_width, repeats = rest
    row, dsink = backward_rows(dout, dlse, sink, o, lse)
    values, acc = values_of(k, v, v_width), acc_dtype(q.dtype)
    dq = q.new_zeros(q.shape)
    dk, dv = (t.new_zeros(t.shape, dtype=acc) for t in (k, values))
    any_listed = 0 not in (q.numel(), k.shape[2], indices.shape[3])
    for in_b, in_s in _chunks(q, indices, v_width) if any_listed else ():
        entries = entries_of(indices[in_b, in_s], bias[in_b, in_s], k.shape[2], repeats, acc)
        grad_q, *grads = attend_backward(
            Rows(*(heads(t[in_b, in_s]) for t in row)), heads(q[in_b, in_s]), entries.rows(k[in_b]),
            entries.rows(values[in_b]), entries.mask, scale, bias=entries.bias, filled=entries.bias.isnan(),
        )  # fmt: skip
        dq[in_b, in_s] = unheads(grad_q, q.shape[2]).to(q.dtype)
        for out, grad in zip((dk, dv), grads, strict=True):
            add_rows(out[in_b].flatten(0, 1), entries.at, grad)
    if v is None:
        dk, dv = dk + F.pad(dv, (0, k.shape[3] - v_width)), k.new_empty((0,))
    return dq, dk.to(k.dtype), dv.to(k.dtype), dsink
